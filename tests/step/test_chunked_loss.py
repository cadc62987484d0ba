"""Losses that are computed by rows are those of whole logits, in every layout, and no logits are held but a chunk's."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.measurements import measure_memory
from support.tensor_only import register_strategy_and_models
from support.tiers import mark_mostly_slow
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from meshwright import ModelError, open_world
from meshwright.manager.chunked_cross_entropy import ChunkedCrossEntropy
from meshwright.parallel.tensor.collectives import chunk_sizes
from meshwright.step.lm_head import DeferredHead
from meshwright.tensors.ops import list_tensors
from meshwright.testing import Case, Outcome
from meshwright.tracing.observers import OperationObserver
from meshwright_testing import pool
from meshwright_testing.models import case_vocab_size
from meshwright_testing.parity import (
    build_manager,
    find_max_difference,
    full_weights,
    run_reference,
    train_case,
    train_steps,
)

CHUNK = 5
FEW = 8
"""Positions on which a model is tried."""
_TURNED = ("aten.t.default", "aten.transpose.int")


class _Logits(OperationObserver):
    """The most logits that are held at once, of the whole vocabulary or the half of a rank, as rows of the whole."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.rows = 0
        self._vocabulary, self._sizes = vocabulary, {vocabulary, *chunk_sizes(vocabulary, 2)}

    def observe(self, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        # A weight's transpose ends with the vocabulary, too, and logits that are deferred are nowhere.
        for each in list_tensors(result) if str(operation) not in _TURNED else ():
            if each.dim() > 1 and each.shape[-1] in self._sizes and not each.is_meta:
                self.rows = max(self.rows, round(each.numel() / self._vocabulary))


def _train(
    strategy: str, config: Mapping[str, Any], sizes: Mapping[str, Any], case: Case, wrapper: Mapping[str, Any] | None
) -> tuple[Outcome, int]:
    register_strategy_and_models()
    manager = build_manager(strategy, config, sizes, case, wrapper_config=wrapper)
    # Not before: models are cut by what a few more positions show.
    with _Logits(case_vocab_size(case.model_type)) as seen:
        losses = train_steps(manager, case, range(case.steps))
    return Outcome(*losses, full_weights(manager)), seen.rows


BUDGET = {"activation_checkpointing": {"budget_gb": 1.0}}
"""Before the first step, the model is rehearsed with a whole microbatch."""
ZERO1 = {"engine": "bucketed", "use_distributed_optimizer": True, "delay_wgrad_compute": True}
LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, int], dict[str, Any], bool]] = {
    "ddp": ("ddp", BUDGET, {}, {}, True),
    "ddp-zero1": ("ddp", ZERO1, {}, {}, False),
    "fsdp2": ("fsdp2", {"reshard_after_forward": True, "activation_checkpointing": "full"}, {}, {}, True),
    "megatron_fsdp": ("megatron_fsdp", {}, {}, {}, True),
    "tp": ("fsdp2", BUDGET, {"tp_size": 2}, {}, True),
    "tp-plain-sequence-parallel": ("megatron_fsdp", {"sequence_parallel": True}, {"tp_size": 2}, {}, False),
    "cp": ("fsdp2", {}, {"cp_size": 2}, {}, False),
    "pp-1f1b": ("fsdp2", BUDGET, {"pp_size": 2}, {}, True),
    "pp-zbv": ("single", {}, {"pp_size": 2}, {"pp_schedule": "zbv"}, True),
}
"""Strategy, options, sizes, options of the pipeline, and whether the head is tied."""


@pytest.mark.parametrize("name", mark_mostly_slow(LAYOUTS, "tp"))
def test_every_layout_trains_and_evaluates_by_rows_and_holds_logits_of_no_more(name: str) -> None:
    strategy, config, sizes, wrapper, tied = LAYOUTS[name]
    case = Case(tied=tied, microbatches=2, num_masked_sequences=3, eval_after=True, layers=4)
    task = (strategy, {**config, "loss_chunk_rows": CHUNK}, sizes, case, {"pipeline": wrapper} if wrapper else None)
    answers = pool(2).run(_train, *task)
    assert find_max_difference([outcome for outcome, _ in answers], run_reference(case)).worst <= 1e-12
    # Whole logits would be 32 rows at least; a stage of a pipeline that has no head sees none. A rank of cp tries half.
    assert max(rows for _, rows in answers) == (CHUNK if "cp_size" in sizes else FEW)


# -- what a model does behind its head


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["soft_capped", "gpt2", "phi", "routed"])
def test_models_by_rows_and_those_that_need_whole_logits(model_type: str) -> None:
    """The first have a cap behind the head, tied weights, and a bias; what is the head of the last is not known."""
    case = Case(model_type=model_type, tied=None, microbatches=2)
    expected, whole = pool(1).run(_train, "single", {"loss_chunk_rows": 0}, {}, case, None)[0]
    found, rows = pool(1).run(_train, "single", {"loss_chunk_rows": CHUNK}, {}, case, None)[0]
    assert find_max_difference([found], expected).worst <= 1e-12
    assert (rows, whole) == (96 if model_type == "routed" else FEW, 96)


class _Bag(nn.Module):
    """A model without blocks; what it does to hidden states before the head, or to logits behind, is given."""

    def __init__(self, head: nn.Module, behind: Any = lambda logits: logits, vocabulary: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 4, dtype=torch.float64)
        self.head, self.behind = head.double(), behind

    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        return CausalLMOutput(logits=self.behind(self.head(self.embed(input_ids))))


class _Mixing(nn.Linear):
    """A head in which a position sees all others."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden - hidden.mean(-2, keepdim=True))


class _Doubling(nn.Linear):
    """A head of its own code, in which rows are alone."""

    def forward(self, hidden: Tensor) -> Tensor:
        return 2.0 * super().forward(hidden).tanh()


def _chosen(model: _Bag, given: int | None = CHUNK) -> tuple[ChunkedCrossEntropy, list[str]]:
    """How the loss of a model is computed, and what is said of it."""
    loss = ChunkedCrossEntropy(DeferredHead(model, "head"), given, is_sharded=False, model_name="Bag")
    with warnings.catch_warnings(record=True) as reported, open_world("cpu") as world:
        warnings.simplefilter("always")
        loss.probe(lambda: model(torch.arange(8)[None]), world)
    return loss, [str(each.message) for each in reported]


def _losses(head: nn.Module, behind: Any) -> tuple[list[str], float, float]:
    """What is said; and how far the loss, and all gradients, are from those of whole logits."""
    model, ids_BS = _Bag(head, behind), torch.arange(22).view(2, 11) % 11
    loss, reported = _chosen(model)
    found, outputs = loss.compute_token_loss(lambda: model(ids_BS), ids_BS, torch.tensor(7), lambda *_: None)
    found.backward()
    assert (outputs.logits.dim() == 0) == (not reported)
    mine = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    whole = nn.functional.cross_entropy(model(ids_BS).logits.flatten(0, 1), ids_BS.flatten(), reduction="sum") / 7
    whole.backward()
    pairs = zip(mine, model.parameters(), strict=True)
    return reported, abs((found - whole).item()), max(float((one - p.grad).abs().max()) for one, p in pairs)


TAILS: dict[str, tuple[Any, Any, str | None]] = {
    "nothing": (nn.Linear, lambda logits: logits, None),
    "cap": (nn.Linear, lambda logits: (logits.float().double() / 3.0).tanh() * torch.tensor(3.0), None),
    "scale": (nn.Linear, lambda logits: -logits.contiguous().to(torch.float64) / 2, None),
    "own-head": (_Doubling, lambda logits: logits.float(), None),
    "mixing-head": (_Mixing, lambda logits: logits, "row by row, they differ by"),
    "mean": (nn.Linear, lambda logits: logits - logits.mean(-1, keepdim=True), "what mean makes of its logits"),
    "in-place": (nn.Linear, lambda logits: logits.mul_(2.0), "what mul_ makes of its logits"),
    "turned": (nn.Linear, lambda logits: logits[..., torch.arange(10, -1, -1)], "what __getitem__ makes of its logits"),
    "bias": (nn.Linear, lambda logits: logits + torch.arange(11.0), "what add makes of its logits"),
}
"""A head, what the model does behind it, and why it needs whole logits, if it does."""


@pytest.mark.parametrize("name", TAILS)
def test_what_is_done_to_logits_is_done_to_rows_or_reported(name: str) -> None:
    head, behind, reason = TAILS[name]
    torch.manual_seed(0)
    reported, of_loss, of_gradients = _losses(head(4, 11), behind)
    # What the model itself rounds to float32 is rounded in another order.
    tolerance = 1e-12 if name != "own-head" else 1e-5
    assert (of_loss <= tolerance, of_gradients <= tolerance) == (True, True)
    expected = [] if reason is None else [f"the loss of Bag needs whole logits, rows x vocabulary ({reason}"]
    assert [text[: len(start)] for text, start in zip(reported, expected, strict=True)] == expected


def test_a_model_that_changes_its_ways_is_refused() -> None:
    model = _Bag(nn.Linear(4, 11))
    loss, _ = _chosen(model)
    model.behind = lambda logits: logits.softmax(-1)
    ids_BS = torch.arange(11)[None]
    text = r"but what softmax makes of its logits is not known.* Set loss_chunk_rows=0\."
    with pytest.raises(ModelError, match=text):
        loss.compute_token_loss(lambda: model(ids_BS), ids_BS, torch.tensor(7), lambda *_: None)
    # The model is what it was for whoever calls it.
    assert model(ids_BS).logits.shape == (1, 11, 11)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "held"), [(2048, 512), (1024, 1024)])
def test_logits_are_held_for_a_chunk_where_they_are_large(rows: int, held: int) -> None:
    vocabulary = 2**14
    model = _Bag(nn.Linear(4, vocabulary), vocabulary=vocabulary)
    loss = _chosen(model, None)[0]
    ids_BS = torch.arange(rows)[None]
    work = lambda: loss.compute_token_loss(lambda: model(ids_BS), ids_BS, torch.tensor(7), lambda *_: None)  # noqa: E731
    with torch.no_grad():
        peak = measure_memory(work, [model]).peak.other
    assert held <= peak / (8 * vocabulary) < (2 * held if held == 512 else 4 * held)


# -- dtypes


def _rounded(config: Mapping[str, Any], chunk: int, dtype: str) -> Outcome:
    case = Case(dtype=dtype, microbatches=2, max_norm=None, ragged=False)
    return train_case("fsdp2", {**config, "loss_chunk_rows": chunk}, {}, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "tolerance"),
    [
        # Of whole logits, too, every one is rounded to the dtype of the model's outputs, and the loss is not.
        pytest.param({"mp_policy": {"output_dtype": "bfloat16"}}, 1e-6, id="rounded-outputs"),
        pytest.param({"autocast_dtype": "bfloat16"}, 1e-3, id="autocast"),
    ],
)
def test_loss_and_gradients_pass_by_the_dtype_of_a_models_outputs(config: dict[str, Any], tolerance: float) -> None:
    (whole,), (found,) = (pool(1).run(_rounded, config, chunk, "float32") for chunk in (0, CHUNK))
    assert found.losses[0] == pytest.approx(whole.losses[0], rel=1e-6)
    assert found.norms[0] == pytest.approx(whole.norms[0], rel=tolerance)
