"""Pipelines over every inner strategy, on real ranks: parity with one process, given stages, state, refusals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pipelines import PP2, build_pipeline_manager
from torch import nn
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutput

from meshwright import BatchError, MeshwrightError, ModelError, count_tokens, get_strategy
from meshwright.step.tokens import Outputs, Tokens
from meshwright.testing import Case, assert_parity
from meshwright_pipeline.runtime.custom_loss import LogitsObjective, build_loss_objective
from meshwright_pipeline.schedule.specs import SCHEDULES, build_schedule
from meshwright_testing import pool
from meshwright_testing.case import rank_microbatches
from meshwright_testing.models import ROUTED_VOCAB, RoutedModel, build_tiny_model
from meshwright_testing.parity import (
    build_manager,
    find_max_difference,
    full_weights,
    run_reference,
    train_part,
    train_steps,
)

DEEP = Case(layers=5, tied=True)
WIDE = Case(layers=5, tied=True, sequences=16)
# Tied, so that V schedules have both copies on one rank; accumulating, so that lengths add up.
ACCUMULATING = Case(layers=5, tied=True, microbatches=2)
# A schedule that runs twice in a step and is filled up: two microbatches on one data rank and six on the other.
UNEVEN, RUNS_OF_TWO = replace(WIDE, shares=(4, 12)), {"pp_batch_size": 4, "pp_microbatch_size": 2}
EXPERTS = Case(model_type="mixtral", tied=True, microbatches=2, sequences=16, eval_after=True, unshard_after=True)
OVERLAP: dict[str, Any] = {"engine": "bucketed", "overlap_grad_reduce": True, "bucket_size": 3000}
DISTRIBUTED: dict[str, Any] = {**OVERLAP, "use_distributed_optimizer": True}
GATHERING = {"overlap_param_gather": True}
DP2, TP2, CP2, EP2 = {"dp_size": 2}, {"tp_size": 2}, {"cp_size": 2}, {"dp_size": 2, "ep_size": 2}
SLOW = pytest.mark.slow

FIRST_BLOCK_ALONE = [
    ["model.embed_tokens", "model.layers.0"],
    [*(f"model.layers.{index}" for index in (1, 2, 3)), "model.norm", "lm_head"],
]


def _summed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


def _smoothed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    options = {"ignore_index": -100, "reduction": "sum", "label_smoothing": 0.5}
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)


# -- parity


def _over(strategy: str, case: Case, ranks: int, options: Mapping[str, Any] = {}, **sizes: int) -> None:
    """Parity of a pipeline around a strategy; options of the pipeline begin with pp_."""
    own = {name: value for name, value in options.items() if name in get_strategy("pipeline").config_cls.model_fields}
    inner = {name: value for name, value in options.items() if name not in own}
    assert_parity(
        strategy, case, world_size=ranks, config=inner, sizes={"pp_size": 2, **sizes}, wrapper_config={"pipeline": own}
    )


OTHERS = [name for name in SCHEDULES if name not in ("1F1B", "ZBVZeroBubble")]
Layout = tuple[str, Case, dict[str, Any], dict[str, int]]

EARLY: list[Layout] = [
    ("fsdp2", ACCUMULATING, {"pp_schedule": "1f1b"}, DP2),
    ("fsdp2", ACCUMULATING, {"pp_schedule": "zbv"}, DP2),
    ("fsdp2", UNEVEN, RUNS_OF_TWO, DP2),
    ("fsdp2", WIDE, {"pp_schedule": "zbv"}, TP2),
    ("fsdp2", WIDE, {}, CP2),
    ("fsdp2", EXPERTS, {}, EP2),
    ("fsdp2", Case(shares=(4, 8), microbatches=2, eval_after=True, unshard_after=True), {}, DP2),
    # The first stage is frozen.
    ("fsdp2", Case(frozen=("*embed_tokens*", "*layers.0.*")), {}, DP2),
    # Ranks use different parameters.
    ("fsdp2", Case(model_type="routed", route="ranks"), {}, DP2),
    ("ddp", WIDE, {"engine": "bucketed", "pp_schedule": "zbv"}, DP2),
    ("ddp", replace(ACCUMULATING, eval_after=True), DISTRIBUTED, DP2),
]
LATE: list[Layout] = [
    *(("fsdp2", ACCUMULATING, {"pp_schedule": name}, DP2) for name in OTHERS),
    ("fsdp2", WIDE, {"activation_checkpointing": "full", "pp_schedule": "interleaved_zero_bubble"}, DP2),
    ("fsdp2", WIDE, {"pp_schedule": "dualpipev"}, {"dp_replicate_size": 2}),
    ("fsdp2", WIDE, {"reshard_after_forward": False, "pp_schedule": "zbv"}, DP2),
    ("fsdp2", replace(ACCUMULATING, eval_after=True), {"loss_fn": _summed}, DP2),
    ("fsdp2", WIDE, {"sequence_parallel": True}, TP2),
    # Plans of layers that one stage has.
    ("fsdp2", WIDE, {"tp_plan": {"model.layers.1.mlp.gate_proj": "colwise_gather_output"}}, TP2),
    ("fsdp2", WIDE, {"tp_plan": "meshwright_fsdp2.get_hf_tp_shard_plan"}, TP2),
    ("fsdp2", WIDE, {"cp_attention": "ulysses", "activation_checkpointing": "full", "pp_schedule": "zbv"}, CP2),
    ("fsdp2", EXPERTS, {}, {"tp_size": 2, "ep_size": 2}),
    # Its first block has no experts, and its first stage no other block.
    ("fsdp2", replace(EXPERTS, model_type="deepseek_v3"), {"module_fqns_per_model_part": FIRST_BLOCK_ALONE}, EP2),
    # A rank has no tokens.
    ("fsdp2", Case(num_masked_sequences=6), {}, DP2),
    ("fsdp2", Case(norm_type=math.inf, max_norm=0.05, tied=True), {}, DP2),
    # All but the head is frozen.
    ("fsdp2", Case(frozen=("[!l]*",)), {}, DP2),
    # Nobody uses some parameters in a step.
    ("fsdp2", Case(model_type="routed", route="steps"), {}, DP2),
    ("ddp", WIDE, {"reduce_dtype": "float64", "pp_schedule": "zbv"}, DP2),
    ("ddp", WIDE, OVERLAP, DP2),
    ("ddp", UNEVEN, RUNS_OF_TWO, DP2),
    # Both copies on one rank.
    ("ddp", replace(DEEP, unshard_after=True), {**DISTRIBUTED, "pp_schedule": "zbv", **GATHERING}, DP2),
    ("ddp", DEEP, {**DISTRIBUTED, "num_distributed_optimizer_instances": 2}, DP2),
]


@pytest.mark.parametrize(
    ("strategy", "case", "options", "sizes"),
    [
        pytest.param(*layout, id=f"{layout[0]}-{'-'.join(layout[3])}-{number}", marks=marks)
        for layouts, marks in ((EARLY, ()), (LATE, SLOW))
        for number, layout in enumerate(layouts)
    ],
)
def test_two_stages_over_two_ranks_train_as_one_process(
    strategy: str, case: Case, options: dict[str, Any], sizes: dict[str, int]
) -> None:
    _over(strategy, case, 4, options, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_ranks_and_nine_blocks(schedule: str) -> None:
    _over("single", Case(layers=9, tied=True), 4, {"pp_schedule": schedule}, pp_size=4)


@pytest.mark.slow
def test_eight_ranks_on_three_axes() -> None:
    _over("fsdp2", DEEP, 8, {"sequence_parallel": True, "pp_schedule": "zbv"}, dp_size=2, tp_size=2)


def _sensed(model_type: str) -> str:
    case = Case(model_type=model_type, tied=None)
    try:
        manager = build_manager("fsdp2", {}, {**PP2, "cp_size": 2}, case)
        train_steps(manager, case, range(1))
    except ModelError as error:
        return str(error)
    return "accepted"


@pytest.mark.slow
def test_what_context_parallelism_cannot_divide_is_found_in_any_stage() -> None:
    """Linear attention in the second block of two, gradients of which no other stage sees."""
    (text,) = set(pool(4).run(_sensed, "minimax"))
    assert "mixes positions outside of attention" in text


def test_a_schedule_from_a_file(tmp_path: Path) -> None:
    schedule, path = build_schedule("zbv", num_ranks=2, num_stages=4, num_microbatches=6), tmp_path / "own.csv"
    path.write_text("\n".join(",".join(map(str, order)) for order in schedule.actions_by_rank), encoding="utf-8")
    _over("single", DEEP, 2, {"pp_schedule_csv": str(path)})


def test_stages_by_number_and_by_name() -> None:
    case = Case(layers=5)
    _over("single", case, 2, {"layers_per_stage": 2, "round_virtual_stages_to_pp_multiple": "down"})
    named = [
        ["model.embed_tokens", *(f"model.layers.{index}" for index in range(4))],
        ["model.layers.4", "model.norm", "lm_head"],
    ]
    _over("single", case, 2, {"module_fqns_per_model_part": named})
    found = pool(2).run(_blocks_held, case, {"module_fqns_per_model_part": named})
    assert found == [["0", "1", "2", "3"], ["4"]]


def _blocks_held(case: Case, options: Mapping[str, Any]) -> list[str]:
    manager = build_manager("pipeline", options, PP2, case)
    names = (name for part in manager.model_parts for name, _ in part.named_parameters())
    return sorted({name.split(".")[2] for name in names if ".layers." in name})


# -- losses


def _mean(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return _summed(logits, targets) / (targets != -100).sum().clamp(min=1)


def _unmasked(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return logits.logsumexp(-1).sum()


def _smoothed_gradients(ranks: int) -> dict[str, torch.Tensor]:
    """Of a step with ragged masks, by a whole model and its own backward, or by a pipeline."""
    model, case = build_tiny_model(layers=3), Case()
    batch = rank_microbatches(case, 0, 0, 1)[0]
    if ranks == 1:
        count = (batch["labels"][:, 1:] != -100).sum()
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        (_smoothed(logits[:, :-1], batch["labels"][:, 1:]) / count).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    manager = build_pipeline_manager("single", {"pp_schedule": "gpipe", "loss_fn": _smoothed})
    manager.parallelize(model)
    manager.forward_backward([batch], num_tokens=count_tokens([batch], manager.mesh))
    parts = manager.model_parts
    return {name: p.grad for part in parts for name, p in part.named_parameters() if p.grad is not None}


def test_a_loss_of_another_kind_is_summed_over_tokens_and_divided_by_their_global_number() -> None:
    expected = _smoothed_gradients(1)
    found = {name: grad for part in pool(2).run(_smoothed_gradients, 2) for name, grad in part.items()}
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=0, atol=1e-12)


# -- stages that are given

GIVEN = {"patch_inner_model": False, "patch_causal_lm_model": False}


class _Stage(nn.Module):
    """One of two stages of `RoutedModel`, with its names."""

    def __init__(self, whole: RoutedModel, *, is_first: bool) -> None:
        super().__init__()
        if is_first:
            self.embed = whole.embed
            self.blocks = nn.ModuleDict({"0": whole.blocks[0]})
        else:
            self.blocks = nn.ModuleDict({str(index): whole.blocks[index] for index in (1, 2)})
            self.head = whole.head

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, attention_mask: Any = None) -> Any:
        hidden = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        for block in self.blocks.values():
            hidden = block(hidden, None)
        return CausalLMOutput(logits=self.head(hidden)) if hasattr(self, "head") else hidden


def _given_stages(strategy: str, ranks: int, objective: Any = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of three steps."""
    torch.manual_seed(5)
    whole = RoutedModel(torch.float64)
    if ranks == 1:
        stages = [_Stage(whole, is_first=True), _Stage(whole, is_first=False)]
        optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    else:
        manager = build_pipeline_manager(strategy, GIVEN)
        rank = manager.mesh.axis_rank("pp")
        manager.parallelize(_Stage(whole, is_first=rank == 0))
        manager.build_optimizer(lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2))
    losses = []
    for step in range(3):
        ids = (torch.arange(4 * 7).view(4, 7) * 5 + step) % ROUTED_VOCAB
        if ranks == 1:
            logits = stages[1](inputs_embeds=stages[0](input_ids=ids)).logits
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        else:
            mine = ids.tensor_split(manager.mesh.data_size)[manager.mesh.data_rank]
            batch = [{"input_ids": mine, "labels": mine}]
            num_tokens = count_tokens(batch, manager.mesh)
            loss = manager.forward_backward(batch, num_tokens=num_tokens, objective=objective)
            manager.clip_grad_norm(0.5)
            manager.optimizer_step()
        losses.append(float(loss))
    if ranks == 1:
        return losses, {name: p.detach() for name, p in whole.named_parameters()}
    state = manager.state_dict(full=True)
    manager.load_state_dict(state, full=True)
    again = manager.state_dict(full=True)
    assert all(torch.equal(tensor, again["model"][name]) for name, tensor in state["model"].items())
    return losses, state["model"]


def _minus_log_probs(tokens: Tokens, batch: Any) -> torch.Tensor:
    return -tokens.log_probs.sum()


@pytest.mark.parametrize(
    ("strategy", "ranks", "objective"),
    [
        ("single", 2, None),
        ("single", 2, _minus_log_probs),
        pytest.param("fsdp2", 4, None, marks=SLOW),
        pytest.param("ddp", 4, None, marks=SLOW),
    ],
    ids=["single", "objective", "fsdp2", "ddp"],
)
def test_stages_that_are_given_train_as_they_are(strategy: str, ranks: int, objective: Any) -> None:
    losses, weights = pool(1).run(_given_stages, strategy, 1)[0]
    found = pool(ranks).run(_given_stages, strategy, ranks, objective)
    for mine, _ in found:
        assert mine == pytest.approx(losses, abs=1e-12)
    assert found[0][1].keys() == weights.keys()
    for name, expected in weights.items():
        torch.testing.assert_close(found[0][1][name], expected, rtol=0, atol=1e-9)


class _Wrong(_Stage):
    """A stage whose forward answers with something else."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None) -> Any:
        hidden = super().forward(input_ids, inputs_embeds)
        return (hidden, None) if inputs_embeds is None else hidden.logits


def _wrong_stage(wrong: int) -> str:
    whole = RoutedModel(torch.float64)
    manager = build_pipeline_manager("single", GIVEN)
    rank = manager.mesh.axis_rank("pp")
    with pytest.raises(ModelError) as caught:
        manager.parallelize((_Wrong if rank == wrong else _Stage)(whole, is_first=rank == 0))
    return str(caught.value)


@pytest.mark.parametrize(("wrong", "text"), [(0, "it must return hidden states"), (1, "an object with logits")])
def test_given_stages_are_tried_before_they_train(wrong: int, text: str) -> None:
    for found in pool(2).run(_wrong_stage, wrong):
        assert f"stage {wrong}" in found
        assert text in found


# -- state


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=SLOW)])
def test_state_moves_to_single_and_back(tied: bool) -> None:
    case = Case(layers=5, tied=tied, steps=6)
    pipeline = ("pipeline", {"pp_schedule": "zbv"}, PP2, case)
    _, state = pool(2).run(train_part, *pipeline, range(2))[0]
    _, state = pool(1).run(train_part, "single", {}, {}, case, range(2, 4), state)[0]
    found = [outcome for outcome, _ in pool(2).run(train_part, *pipeline, range(4, 6), state)]
    expected = run_reference(case)
    last = type(expected)(expected.losses[4:], expected.norms[4:], [], expected.weights)
    assert find_max_difference(found, last).worst <= 1e-9


@pytest.mark.parametrize("dtype", [pytest.param("float64", marks=SLOW), "bfloat16"])
def test_state_of_copies_under_the_distributed_optimizer_is_stored_once_and_resumes(dtype: str) -> None:
    case = Case(layers=5, tied=True, steps=4, dtype=dtype)
    run = ("ddp", DISTRIBUTED, {**PP2, "dp_size": 2}, case)
    _, state = pool(4).run(train_part, *run, range(2))[0]
    names = [name for name in state["optimizer"]["state"] if "embed" in name or "head" in name]
    assert names == ["model.embed_tokens.weight"]
    assert ("masters" in state["optimizer"]) == (dtype == "bfloat16")
    continued = [outcome for outcome, _ in pool(4).run(train_part, *run, range(2, 4), state)]
    whole = [outcome for outcome, _ in pool(4).run(train_part, *run, range(4))]
    for outcome, expected in zip(continued, whole, strict=True):
        assert outcome.losses == expected.losses[2:]
        assert outcome.norms == expected.norms[2:]
        assert all(torch.equal(outcome.weights[name], weight) for name, weight in expected.weights.items())


# -- refusals


def _refusal(strategy: str, config: Any, wrapper: Any, case: Case, sizes: Any) -> str:
    try:
        manager = build_manager(strategy, config, sizes, case, wrapper_config={"pipeline": wrapper})
        train_steps(manager, case, range(1))
    except MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _wrapped(options: dict[str, Any], texts: list[str]) -> tuple[str, dict[str, Any], dict[str, Any], list[str]]:
    return "single", {}, options, texts


WITHOUT_SYNC = {"patch_stage_backward_maybe_with_nosync": True}


@pytest.mark.parametrize(
    ("strategy", "config", "wrapper", "texts"),
    [
        _wrapped({"pp_microbatch_size": 5}, ["BatchError", "12 sequences", "pp_microbatch_size=5"]),
        _wrapped({"pp_batch_size": 5}, ["BatchError", "12 sequences", "pp_batch_size=5"]),
        _wrapped({"pp_seq_len": 8}, ["BatchError", "16 tokens", "pp_seq_len=8"]),
        _wrapped({"pp_schedule": "zbv"}, ["ConfigError", "4 stages", "3 blocks"]),
        _wrapped({"patch_inner_model": False}, ["ConfigError", "Make them equal"]),
        _wrapped({"patch_causal_lm_model": False}, ["ConfigError", "Make them equal"]),
        _wrapped({**GIVEN, "layers_per_stage": 2}, ["ConfigError", "layers_per_stage splits a model"]),
        _wrapped({**GIVEN, "pp_schedule": "zbv"}, ["ConfigError", "Use 1f1b or gpipe"]),
        # Both ranks give the whole model.
        _wrapped(GIVEN, ["ModelError", "stage 1", "both have a parameter"]),
        _wrapped({"scale_grads_in_schedule": True}, ["ConfigError", "Set it to false"]),
        _wrapped({"loss_fn": "torch.nn.CrossEntropyLoss"}, ["ConfigError", "'loss_fn' fails: "]),
        _wrapped({"loss_fn": _mean}, ["ConfigError", "loss_fn", "no sum over sequences"]),
        _wrapped({"loss_fn": _unmasked}, ["ConfigError", "although all targets are masked"]),
        _wrapped({"module_fqns_per_model_part": [["model.embed_tokens"], ["lm_head"]]}, ["ConfigError"]),
        ("fsdp2", {"defer_fsdp_grad_sync": False}, WITHOUT_SYNC, ["StrategyError", "maybe_with_nosync=true", "defer"]),
        ("ddp", {"static_graph": True}, {}, ["StrategyError", "static_graph=True", "engine=bucketed"]),
        ("megatron_fsdp", {}, {}, ["StrategyError", "megatron_fsdp cannot train one stage"]),
    ],
)
def test_options_that_cannot_act_are_refused_on_all_ranks(
    strategy: str, config: dict[str, Any], wrapper: dict[str, Any], texts: list[str]
) -> None:
    found = pool(2).run(_refusal, strategy, config, wrapper, Case(), PP2)
    assert len(set(found)) == 1
    assert all(text in found[0] for text in texts), found[0]


def _after_refusal() -> tuple[str, dict[str, torch.Tensor]]:
    """The refusal of a bad batch, and the weights of training that continues after it."""
    case = Case()
    manager = build_manager("pipeline", {"pp_microbatch_size": 2}, PP2, case)
    batch = rank_microbatches(case, 0, 0, 1)[0]
    odd = [{key: value[:5] for key, value in batch.items()}]
    with pytest.raises(BatchError) as caught:
        manager.forward_backward(odd, num_tokens=count_tokens(odd, manager.mesh))
    train_steps(manager, case, range(case.steps))
    return str(caught.value), full_weights(manager)


def test_a_loss_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_ALLOWED_IMPORTS", __name__)
    logits_BSV, targets_BS = torch.randn(2, 3, 7), torch.tensor([[1, 2, -100], [3, 4, -100]])
    expected = _summed(logits_BSV, targets_BS)
    objective = build_loss_objective(f"{__name__}._summed")
    assert isinstance(objective, LogitsObjective)
    assert torch.equal(objective(Outputs(targets_BS, logits_BSV), {}), expected)
    assert build_loss_objective(None) is None


def test_training_continues_after_a_refused_batch() -> None:
    (first, weights), (second, _) = pool(2).run(_after_refusal)
    assert first == second
    for name, expected in run_reference(Case()).weights.items():
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=1e-9)
