"""Pipelines over every inner strategy, on real ranks: parity with one process, what travels, what is held, refusals."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.measures import measure_memory
from support.training import training_step
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from meshwright import (
    BatchError,
    ConfigError,
    Mesh,
    MeshSizes,
    MeshwrightError,
    ModelError,
    count_tokens,
    get_strategy,
    open_world,
    optimizer_factory,
    resolve,
)
from meshwright.step.forward_options import forward_options
from meshwright.step.tokens import Outputs, Tokens
from meshwright.strategy.registry import model_layout
from meshwright.testing import Case, assert_parity, pool
from meshwright.testing.case import share
from meshwright.testing.models import ROUTED_VOCAB, TINY, RoutedModel, case_model, tiny_model
from meshwright.testing.parity import build_manager, difference, full_weights, reference, train_part, train_steps
from meshwright.tracing.collectives import Traffic, measure_collectives
from meshwright_pipeline.cut.stage_model import enter_stage, take_stage
from meshwright_pipeline.cut.trial_runs import Study
from meshwright_pipeline.run.users_loss import LossOfLogits, objective_of
from meshwright_pipeline.schedule.order import Kind, Schedule
from meshwright_pipeline.schedule.rules import SCHEDULES, build_schedule
from meshwright_pipeline.schedule.timeline import peak_live
from meshwright_pipeline.state.carry import broadcast, gathered

PP2 = {"pp_size": 2}
DEEP = Case(layers=5, tied=True)
OVERLAP: dict[str, Any] = {"engine": "bucketed", "overlap_grad_reduce": True}
WIDTH = 8
"""Bytes of an element: cases are in float64."""


def _over(strategy: str, case: Case, ranks: int, options: Mapping[str, Any] = {}, **sizes: int) -> None:
    """Parity of a pipeline around a strategy; options of the pipeline begin with pp_."""
    own = {name: value for name, value in options.items() if name in get_strategy("pipeline").config_cls.model_fields}
    inner = {name: value for name, value in options.items() if name not in own}
    assert_parity(
        strategy, case, world_size=ranks, config=inner, sizes={"pp_size": 2, **sizes}, wrapper_config={"pipeline": own}
    )


# -- parity


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_over_fsdp2(schedule: str) -> None:
    # Tied, so that V schedules have both copies on one rank; accumulating, so that lengths add up.
    case = Case(layers=5, tied=True, microbatches=2)
    _over("fsdp2", case, 4, {"pp_schedule": schedule}, dp_size=2)


@pytest.mark.zoo
@pytest.mark.parametrize("options", [{}, {"engine": "bucketed"}, {**OVERLAP, "bucket_size": 3000}], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_over_ddp(schedule: str, options: dict[str, Any]) -> None:
    case = Case(layers=5, tied=True, microbatches=2)
    _over("ddp", case, 4, {**options, "pp_schedule": schedule}, dp_size=2)


@pytest.mark.parametrize(
    ("strategy", "options", "sizes"),
    [
        ("ddp", {}, {"dp_size": 2}),
        ("ddp", {"reduce_dtype": "float64", "pp_schedule": "zbv"}, {"dp_size": 2}),
        ("ddp", {"engine": "bucketed", "pp_schedule": "zbv"}, {"dp_size": 2}),
        ("ddp", {"engine": "bucketed", "overlap_grad_reduce": True, "bucket_size": 3000}, {"dp_size": 2}),
        ("fsdp2", {"activation_checkpointing": "full", "pp_schedule": "interleaved_zero_bubble"}, {"dp_size": 2}),
        ("fsdp2", {"pp_schedule": "dualpipev"}, {"dp_replicate_size": 2}),
        ("fsdp2", {"reshard_after_forward": False}, {"dp_size": 2}),
        ("fsdp2", {"reshard_after_forward": False, "pp_schedule": "zbv"}, {"dp_size": 2}),
        ("fsdp2", {"pp_schedule": "zbv"}, {"tp_size": 2}),
        ("fsdp2", {"sequence_parallel": True}, {"tp_size": 2}),
        ("fsdp2", {}, {"cp_size": 2}),
        (
            "fsdp2",
            {"cp_attention": "ulysses", "activation_checkpointing": "full", "pp_schedule": "zbv"},
            {"cp_size": 2},
        ),
        ("fsdp2", {"pp_batch_size": 4, "pp_microbatch_size": 2}, {"dp_size": 2}),
    ],
    ids=str,
)
def test_over_other_strategies_and_axes(strategy: str, options: dict[str, Any], sizes: dict[str, int]) -> None:
    _over(strategy, Case(layers=5, tied=True, sequences=16), 4, options, **sizes)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param({"model.layers.1.mlp.gate_proj": "colwise_gather_output"}, id="named"),
        pytest.param({"model.layers.4.mlp.up_proj": ColwiseParallel(output_layouts=Replicate())}, id="torch"),
        pytest.param("meshwright_fsdp2.get_hf_tp_shard_plan", id="models-own"),
    ],
)
def test_plans_of_layers_that_one_stage_has(plan: Any) -> None:
    _over("fsdp2", Case(layers=5, tied=True, sequences=16), 4, {"tp_plan": plan}, tp_size=2)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_schedule_that_runs_twice_in_a_step_and_is_filled_up(strategy: str) -> None:
    # Two microbatches on one data rank and six on the other, in runs of two.
    case = Case(layers=5, tied=True, sequences=16, shares=(4, 12))
    _over(strategy, case, 4, {"pp_batch_size": 4, "pp_microbatch_size": 2}, dp_size=2)


FIRST_BLOCK_ALONE = [
    ["model.embed_tokens", "model.layers.0"],
    [*(f"model.layers.{index}" for index in (1, 2, 3)), "model.norm", "lm_head"],
]


@pytest.mark.parametrize(
    ("model_type", "options", "sizes"),
    [
        ("mixtral", {}, {"dp_size": 2, "ep_size": 2}),
        ("mixtral", {"pp_schedule": "gpipe", "activation_checkpointing": "full"}, {"dp_size": 2, "ep_size": 2}),
        ("mixtral", {}, {"tp_size": 2, "ep_size": 2}),
        # Its first block has no experts, and its first stage no other block.
        ("deepseek_v3", {"module_fqns_per_model_part": FIRST_BLOCK_ALONE}, {"dp_size": 2, "ep_size": 2}),
    ],
    ids=str,
)
def test_experts_of_a_stage_are_divided(model_type: str, options: dict[str, Any], sizes: dict[str, int]) -> None:
    case = Case(model_type=model_type, tied=True, microbatches=2, sequences=16, eval_after=True, unshard_after=True)
    _over("fsdp2", case, 4, options, **sizes)


def _sensed(model_type: str) -> str:
    case = Case(model_type=model_type, tied=None)
    try:
        manager = build_manager("fsdp2", {}, {**PP2, "cp_size": 2}, case)
        train_steps(manager, case, range(1))
    except ModelError as error:
        return str(error)
    return "accepted"


def test_what_context_parallelism_cannot_divide_is_found_in_any_stage() -> None:
    """Linear attention in the second block of two, gradients of which no other stage sees."""
    (text,) = set(pool(4).run(_sensed, "minimax"))
    assert "mixes positions outside of attention" in text


DISTRIBUTED: dict[str, Any] = {
    "engine": "bucketed",
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "bucket_size": 3000,
}


@pytest.mark.parametrize(
    ("options", "case"),
    [
        ({"pp_schedule": "interleaved1f1b"}, Case(layers=5)),
        ({}, Case(layers=5, tied=True, microbatches=2, eval_after=True)),
        # Both copies on one rank.
        ({"pp_schedule": "zbv", "overlap_param_gather": True}, Case(layers=5, tied=True, unshard_after=True)),
        ({}, Case(layers=5, tied=True, norm_type=1.0, max_norm=5.0)),
        ({"num_distributed_optimizer_instances": 2}, Case(layers=5, tied=True)),
    ],
    ids=str,
)
def test_the_distributed_optimizer_divides_each_stages_copy_in_its_own_way(options: dict[str, Any], case: Case) -> None:
    _over("ddp", case, 4, {**DISTRIBUTED, **options}, dp_size=2)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_state_of_copies_under_the_distributed_optimizer_is_stored_once_and_resumes(dtype: str) -> None:
    case = Case(layers=5, tied=True, steps=4, dtype=dtype)
    run = ("ddp", DISTRIBUTED, {**PP2, "dp_size": 2}, case)
    _, state = pool(4).run(_gathered, *run, range(2))[0]
    names = [name for name in state["optimizer"]["state"] if "embed" in name or "head" in name]
    assert names == ["model.embed_tokens.weight"]
    assert ("masters" in state["optimizer"]) == (dtype == "bfloat16")
    gone_on = [outcome for outcome, _ in pool(4).run(_gathered, *run, range(2, 4), state)]
    whole = [outcome for outcome, _ in pool(4).run(_gathered, *run, range(4))]
    for outcome, expected in zip(gone_on, whole, strict=True):
        assert outcome.losses == expected.losses[2:]
        assert outcome.norms == expected.norms[2:]
        assert all(torch.equal(outcome.weights[name], weight) for name, weight in expected.weights.items())


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(shares=(4, 8), microbatches=2, eval_after=True, unshard_after=True), id="uneven-shares"),
        pytest.param(Case(empty=6), id="a-rank-without-tokens"),
        pytest.param(Case(norm_type=math.inf, max_norm=0.05, tied=True), id="norm-inf"),
        pytest.param(Case(norm_type=1.0, max_norm=5.0, tied=True), id="norm-1"),
        pytest.param(Case(frozen=("*embed_tokens*", "*layers.0.*")), id="frozen-first-stage"),
        pytest.param(Case(frozen=("*layers.[12].*", "model.norm*", "lm_head*")), id="frozen-last-stage"),
        pytest.param(Case(frozen=("[!l]*",)), id="only-the-head-trains"),
        pytest.param(Case(model_type="routed", route="ranks"), id="ranks-use-different-parameters"),
        pytest.param(Case(model_type="routed", route="steps"), id="no-gradient-in-a-step"),
    ],
)
def test_cases_over_two_stages_and_two_data_ranks(case: Case) -> None:
    _over("fsdp2", case, 4, dp_size=2)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tied", [True, False])
def test_four_ranks_and_nine_blocks(schedule: str, tied: bool) -> None:
    _over("single", Case(layers=9, tied=tied), 4, {"pp_schedule": schedule}, pp_size=4)


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True, "pp_schedule": "zbv"}], ids=str)
def test_eight_ranks_on_three_axes(options: dict[str, Any]) -> None:
    _over("fsdp2", DEEP, 8, options, dp_size=2, tp_size=2)


def _to_file(schedule: Schedule, path: Path) -> str:
    path.write_text("\n".join(",".join(map(str, order)) for order in schedule.orders), encoding="utf-8")
    return str(path)


def test_a_schedule_from_a_file(tmp_path: Path) -> None:
    schedule = build_schedule("zbv", ranks=2, stages=4, microbatches=6)
    _over("single", DEEP, 2, {"pp_schedule_csv": _to_file(schedule, tmp_path / "own.csv")})


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


def _summed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


def _smoothed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    options = {"ignore_index": -100, "reduction": "sum", "label_smoothing": 0.5}
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)


def _short(value: object) -> str:
    """An id without addresses of functions, which differ between processes."""
    return re.sub(r" at 0x\w+", "", str(value))[:60]


def _mean(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return _summed(logits, targets) / (targets != -100).sum().clamp(min=1)


def _unmasked(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return logits.logsumexp(-1).sum()


class SummedLoss:
    """The token loss as a class."""

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return _summed(logits, targets)


def test_a_loss_that_is_the_token_loss_trains_as_it_does() -> None:
    _over("fsdp2", Case(layers=5, tied=True, microbatches=2, eval_after=True), 4, {"loss_fn": _summed}, dp_size=2)


def _smoothed_gradients(ranks: int) -> dict[str, torch.Tensor]:
    """Of a step with ragged masks, by a whole model and its own backward, or by a pipeline."""
    model, case = tiny_model(layers=3), Case()
    batch = share(case, 0, 0, 1)[0]
    if ranks == 1:
        count = (batch["labels"][:, 1:] != -100).sum()
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        (_smoothed(logits[:, :-1], batch["labels"][:, 1:]) / count).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    manager = _manager_of("single", {"pp_schedule": "gpipe", "loss_fn": _smoothed})
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


def test_a_loss_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_ALLOWED_IMPORTS", __name__)
    logits_BSV, targets_BS = torch.randn(2, 3, 7), torch.tensor([[1, 2, -100], [3, 4, -100]])
    expected = _summed(logits_BSV, targets_BS)
    for named in ("_summed", "SummedLoss"):
        objective = objective_of(f"{__name__}.{named}")
        assert isinstance(objective, LossOfLogits)
        assert torch.equal(objective(Outputs(targets_BS, logits_BSV), {}), expected)
    assert objective_of(None) is None


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


def _minus_log_probs(tokens: Tokens, batch: Any) -> torch.Tensor:
    return -tokens.log_probs.sum()


def _given_stages(strategy: str, ranks: int, objective: Any = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of three steps."""
    torch.manual_seed(5)
    whole = RoutedModel(torch.float64)
    if ranks == 1:
        stages = [_Stage(whole, is_first=True), _Stage(whole, is_first=False)]
        optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    else:
        manager = _manager_of(strategy, GIVEN)
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


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 2), ("fsdp2", 4), ("ddp", 4)])
def test_stages_that_are_given_train_as_they_are(strategy: str, ranks: int) -> None:
    _check_given_stages(strategy, ranks)


def test_stages_that_are_given_take_an_objective() -> None:
    _check_given_stages("single", 2, _minus_log_probs)


def _check_given_stages(strategy: str, ranks: int, objective: Any = None) -> None:
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
    manager = _manager_of("single", GIVEN)
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


def _gathered(strategy: str, config: Any, sizes: Any, case: Case, steps: range, state: Any = None) -> Any:
    return train_part(strategy, config, sizes, case, steps, state)


@pytest.mark.parametrize("tied", [True, False])
def test_state_moves_to_single_and_back(tied: bool) -> None:
    case = Case(layers=5, tied=tied, steps=6)
    pipeline = ("pipeline", {"pp_schedule": "zbv"}, PP2, case)
    _, state = pool(2).run(_gathered, *pipeline, range(2))[0]
    _, state = pool(1).run(_gathered, "single", {}, {}, case, range(2, 4), state)[0]
    found = [outcome for outcome, _ in pool(2).run(_gathered, *pipeline, range(4, 6), state)]
    expected = reference(case)
    last = type(expected)(expected.losses[4:], expected.norms[4:], [], expected.weights)
    assert difference(found, last).worst <= 1e-9


def _carried_states(device: str) -> tuple[list[Any], Any]:
    """A state for each rank, gathered on the first; and the first rank's, of which others keep a part."""
    with open_world(device) as world:
        state = {"model": {"a": torch.full((3,), float(world.rank)), "b": torch.tensor(world.rank)}, "lr": world.rank}
        state["groups"] = [{"params": ["a"]}]
        found = gathered(state, world.group, world.device)
        kept = broadcast(state if world.rank == 0 else {}, world.group, world.device, wanted=lambda path: "a" in path)
    return found, kept


def test_states_go_along_the_pipeline_tensor_by_tensor() -> None:
    (found, kept), (nothing, part) = pool(2).run(_carried_states, "cpu")
    assert [(state["model"]["a"].tolist(), int(state["model"]["b"]), state["lr"]) for state in found] == [
        ([0.0] * 3, 0, 0),
        ([1.0] * 3, 1, 1),
    ]
    assert nothing == []
    assert part["model"]["a"].tolist() == [0.0] * 3
    assert part["model"]["b"] is None
    assert part["groups"] == kept["groups"] == [{"params": ["a"]}]
    assert int(kept["model"]["b"]) == 0


# -- what travels, what is held


@contextmanager
def _exchanges(note: Callable[[list[torch.Tensor], list[torch.Tensor]], None]) -> Iterator[None]:
    """Have `note` see what each batch sends and receives, before it is issued."""
    issue = torch.distributed.batch_isend_irecv

    def noting(operations: list[Any]) -> Any:
        sends = [each.tensor for each in operations if each.op is torch.distributed.isend]
        note(sends, [each.tensor for each in operations if each.op is torch.distributed.irecv])
        return issue(operations)

    torch.distributed.batch_isend_irecv = noting
    try:
        yield
    finally:
        torch.distributed.batch_isend_irecv = issue


def _traffic(options: Mapping[str, Any], case: Case) -> tuple[Traffic, list[tuple[int, int]], set[int]]:
    """The collectives of a step, how much each of its batches sends and receives, and the sizes of these tensors."""
    manager = build_manager("pipeline", options, PP2, case)
    train_steps(manager, case, range(1))
    batches: list[tuple[int, int]] = []
    sizes: set[int] = set()

    def counting(sends: list[torch.Tensor], receives: list[torch.Tensor]) -> None:
        batches.append((len(sends), len(receives)))
        sizes.update(tensor.numel() * tensor.element_size() for tensor in (*sends, *receives))

    with _exchanges(counting):
        traffic = measure_collectives(training_step(manager, case, 1), {"pp": manager.mesh.group("pp")})
    return traffic, batches, sizes


@pytest.mark.parametrize("name", SCHEDULES)
def test_hidden_states_cross_each_boundary_once_and_nothing_else_does(name: str) -> None:
    boundaries, batches = {
        "GPipe": (1, 24),
        "1F1B": (1, 14),
        "Interleaved1F1B": (3, 50),
        "LoopedBFS": (3, 48),
        "InterleavedZeroBubble": (3, 65),
        # The turn of the V is on one rank.
        "ZBVZeroBubble": (2, 46),
        "DualPipeV": (2, 44),
    }[name]
    hidden = 1 * 16 * 36 * WIDTH  # one sequence of 16 tokens, 36 wide
    for traffic, found, sizes in pool(2).run(_traffic, {"pp_schedule": name}, Case(layers=4)):
        assert len(found) == batches
        # Forward on one rank, backward on the other: as many on each for two ranks in a ring.
        assert [sum(each) for each in zip(*found, strict=True)] == [12 * boundaries] * 2
        assert sizes == {hidden}
        # What is left: agreements of a few numbers, and the loss.
        assert all(each.bytes <= 64 for each in traffic if each.kind == "all_reduce")


def _reductions(options: Mapping[str, Any]) -> int:
    """Reduce-scatters of a step of twelve microbatches."""
    case = Case(layers=4)
    manager = build_manager("fsdp2", {}, {**PP2, "dp_size": 2}, case, wrapper_config={"pipeline": options})
    train_steps(manager, case, range(1))
    return len(measure_collectives(training_step(manager, case, 1)).of("reduce_scatter"))


def _what_goes_out(strategy: str, config: Mapping[str, Any], schedule: str) -> str:
    """In order, a letter for each: s, a tensor is sent to another stage, G, gradients are reduced over `dp`."""
    case = Case(layers=4, sequences=8)
    wrapper = {"pipeline": {"pp_schedule": schedule}}
    manager = build_manager(strategy, config, {**PP2, "dp_size": 2}, case, wrapper_config=wrapper)
    train_steps(manager, case, range(1))
    calls = measure_collectives(training_step(manager, case, 1))
    letters = {"send": "s", "reduce_scatter": "G", "all_reduce": "G"}
    # Without agreements (integers), the norm, and the last all-reduce, of the loss and of what ranks have found.
    large = [each for each in calls if each.bytes > 64 and each.dtype.is_floating_point]
    found = "".join(letters.get(each.kind, "") for each in large)
    return found[:-1]


@pytest.mark.parametrize(
    ("strategy", "config", "schedule", "expected"),
    [
        # Two blocks, and what is left at each end of the model.
        ("fsdp2", {}, "1f1b", ("ssss GGG", "ssss GGG")),
        # A stage that is not its rank's last reduces within its last backward, which overlaps with it.
        ("fsdp2", {}, "interleaved1f1b", ("sssssssssss G s GG", "sssssssss GG sss G")),
        # The weights come last.
        ("fsdp2", {}, "zbv", ("ssssssss GGGG", "ssssssss GG")),
        ("ddp", {}, "1f1b", ("ssss G", "ssss G")),
        # What overlaps with backward and is not waited for there begins before the gradient is sent.
        (
            "ddp",
            {**OVERLAP, "bucket_size": 40000},
            "1f1b",
            ("ssss G", "sss G s"),
        ),
    ],
    ids=str,
)
def test_a_stage_that_is_done_reduces_while_those_before_it_still_compute(
    strategy: str, config: dict[str, Any], schedule: str, expected: tuple[str, str]
) -> None:
    first, _, second, _ = pool(4).run(_what_goes_out, strategy, config, schedule)
    assert (first, second) == tuple(each.replace(" ", "") for each in expected)


@pytest.mark.parametrize("schedule", ["1f1b", "loopedbfs", "zbv"])
def test_gradients_are_reduced_after_the_last_backward_only(schedule: str) -> None:
    options = {"pp_schedule": schedule, "patch_stage_backward_maybe_with_nosync": True}
    # Four blocks, and the roots of the first and the last stage, on two pipeline ranks.
    first, _, last, _ = pool(4).run(_reductions, options)
    assert first + last == 4 + 2


def _held() -> tuple[int, int]:
    manager = build_manager("pipeline", {}, PP2, Case(layers=5))
    parameters = [p for part in manager.model_parts for p in part.parameters()]
    return sum(p.numel() for p in parameters), sum(p.untyped_storage().nbytes() for p in parameters)


def test_a_rank_holds_the_parameters_of_its_stage() -> None:
    whole = sum(p.numel() for p in tiny_model(layers=5).parameters())
    (first, first_bytes), (last, last_bytes) = pool(2).run(_held)
    assert first + last == whole
    assert (first_bytes, last_bytes) == (first * WIDTH, last * WIDTH)
    assert max(first, last) < 0.7 * whole


# -- models on the meta device


def _built(device: str, config: Any, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    return model


def _config(**changes: Any) -> Any:
    return case_model("llama", tied=True, seed=0, dtype=torch.float64, layers=5).config.__class__(
        **{**TINY["llama"], "num_hidden_layers": 5, "tie_word_embeddings": True, **changes}
    )


def _manager_of(strategy: str, options: Mapping[str, Any]) -> Any:
    own = {name: value for name, value in options.items() if name.startswith(("pp_", "loss_", "patch_"))}
    inner = {name: value for name, value in options.items() if name not in own}
    with open_world() as world:
        sizes = MeshSizes(pp_size=2)
        stack, degrees = resolve(strategy, sizes, world.size, config=inner, wrapper_config={"pipeline": own})
        return stack.build(Mesh(degrees, world))


def _trained_from(
    device: str, strategy: str, options: Mapping[str, Any], changes: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Full weights before and after two steps, of a model that was built on a device."""
    manager = _manager_of(strategy, options)
    # Only the first rank's seed counts.
    manager.parallelize(_built(device, _config(**changes), 3 + manager.mesh.rank * (device == "meta")))
    before = {name: tensor.clone() for name, tensor in full_weights(manager).items()}
    manager.build_optimizer(optimizer_factory(Case().optimizer))
    train_steps(manager, Case(), range(2))
    return before, full_weights(manager)


@pytest.mark.parametrize(
    ("ranks", "strategy", "options", "changes"),
    [
        (2, "single", {"pp_schedule": "zbv"}, {}),
        (2, "single", {}, {"tie_word_embeddings": False}),
        (4, "fsdp2", {}, {}),
        (4, "ddp", {"engine": "bucketed"}, {}),
    ],
    ids=str,
)
def test_a_model_without_memory_trains_as_one_with_memory(
    ranks: int, strategy: str, options: dict[str, Any], changes: dict[str, Any]
) -> None:
    arguments = (strategy, options, changes)
    expected, found = (pool(ranks).run(_trained_from, device, *arguments) for device in ("cpu", "meta"))
    for mine, theirs in zip(found, expected, strict=True):
        for weights, others in zip(mine, theirs, strict=True):
            assert weights.keys() == others.keys()
            assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert not torch.equal(found[0][0]["lm_head.weight"], found[0][1]["lm_head.weight"])


class _Values:
    """Weights that are computed when they are read, by name; notes which were."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self.read_names: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def read(self, name: str, offsets: Any, sizes: Any) -> torch.Tensor:
        self.read_names.add(name)
        return torch.full(tuple(sizes), len(name) / 100, dtype=torch.float64)


def _taken(schedule: str) -> tuple[int, int, int, bool]:
    """Bytes of this rank's stages, of the largest parameter, and at the peak; and whether it read its own only."""
    config = _config(hidden_size=192, intermediate_size=512, num_hidden_layers=8, tie_word_embeddings=False)
    model = _built("meta", config)
    largest = max(p.numel() for p in model.parameters()) * WIDTH
    weights, manager = _Values(model), _manager_of("single", {"pp_schedule": schedule})
    memory = measure_memory(lambda: manager.parallelize(model, weights), [])
    held = {name: p for part in manager.model_parts for name, p in part.named_parameters()}
    assert all(torch.equal(p, torch.full_like(p, len(name) / 100)) for name, p in held.items())
    mine = sum(p.untyped_storage().nbytes() for p in held.values())
    return mine, largest, memory.peak.total, weights.read_names == held.keys()


def test_a_rank_never_holds_more_than_its_stages() -> None:
    for schedule in ("1f1b", "zbv"):
        for mine, largest, peak, is_own in pool(2).run(_taken, schedule):
            # While it is read, a parameter is there twice; and a batch of some tokens runs through the model.
            assert mine <= peak <= mine + 3 * largest
            assert 8 * largest < mine
            assert is_own


def _alive(name: str) -> list[int]:
    """The most microbatches between forward and backward, on each rank."""
    from meshwright_pipeline.run import actions as runtime

    manager = build_manager("pipeline", {"pp_schedule": name}, PP2, Case(layers=5))
    most = 0
    forward = runtime.Run._forward

    def counting(run: Any, action: Any) -> None:
        nonlocal most
        forward(run, action)
        # Weights that are put off keep their inputs.
        most = max(most, len(run._flying) + len(run._rest))

    runtime.Run._forward = counting  # type: ignore[method-assign]
    try:
        train_steps(manager, Case(layers=5), range(1))
    finally:
        runtime.Run._forward = forward  # type: ignore[method-assign]
    return [most]


@pytest.mark.parametrize("name", SCHEDULES)
def test_live_microbatches_are_those_of_the_schedule(name: str) -> None:
    stages = 2 * SCHEDULES[name].min_chunks
    peaks = peak_live(build_schedule(name, ranks=2, stages=stages, microbatches=12))
    assert pool(2).run(_alive, name) == [[peak] for peak in peaks]
    assert {"gpipe": (12, 12), "1f1b": (2, 1)}.get(name, peaks) == peaks


def _most_sent_memory_held(name: str, microbatches: int) -> tuple[int, int]:
    """The most of what this rank has sent whose memory it still holds, in training and in evaluation."""
    case = Case(layers=5, sequences=microbatches)
    manager = build_manager("pipeline", {"pp_schedule": name}, PP2, case)
    sent: list[weakref.ref[torch.UntypedStorage]] = []
    most = 0

    def counting(sends: list[torch.Tensor], receives: list[torch.Tensor]) -> None:
        nonlocal most
        sent.extend(weakref.ref(tensor.untyped_storage()) for tensor in sends)
        most = max(most, sum(each() is not None for each in sent))

    batches = share(case, 0, 0, 1)
    num_tokens = count_tokens(batches, manager.mesh)
    with _exchanges(counting):
        manager.forward_backward(batches, num_tokens=num_tokens)
        training, most = most, 0
        manager.eval_loss(batches, num_tokens=num_tokens)
    return training, most


@pytest.mark.parametrize("name", SCHEDULES)
def test_sent_tensors_that_a_rank_holds_do_not_grow_with_the_microbatches(name: str) -> None:
    # Two on their way, and the one that is about to go; the last stage sends nothing in evaluation.
    evaluated = 0 if name in ("GPipe", "1F1B") else 3
    assert pool(2).run(_most_sent_memory_held, name, 24) == [(3, 3), (3, evaluated)]


def _weights_come_later() -> list[str]:
    """The order of a stage's gradients under a schedule that splits its backward."""
    manager = build_manager("pipeline", {"pp_schedule": "zbv"}, PP2, Case(layers=5))
    seen: list[str] = []
    part = manager.model_parts[0]
    block = next(m for m in part.model.layers if any(True for _ in m.parameters()))
    for name, weight in (("weight", block.mlp.down_proj.weight), ("input", block.input_layernorm.weight)):
        # torch also calls it where there is no gradient.
        weight.register_hook(lambda grad, name=name: seen.append(name) if grad is not None else None)
    train_steps(manager, Case(layers=5), range(1))
    return seen


def test_weights_of_linear_layers_wait_for_their_own_action() -> None:
    for seen in pool(2).run(_weights_come_later):
        assert seen.count("weight") == seen.count("input") == 12
        assert seen[0] == "input"


def _dtypes() -> set[torch.dtype]:
    case = Case(dtype="float32")
    manager = build_manager("pipeline", {"dtype": "bfloat16"}, PP2, case)
    seen = set()
    with _exchanges(lambda sends, receives: seen.update(each.dtype for each in (*sends, *receives))):
        train_steps(manager, case, range(1))
    return seen


def test_hidden_states_cross_in_the_chosen_dtype() -> None:
    assert pool(2).run(_dtypes) == [{torch.bfloat16}] * 2


def _lengths() -> list[float]:
    """Losses with 16 tokens, 12, and 16 again."""
    manager = build_manager("pipeline", {}, PP2, Case())
    losses = []
    for length in (16, 12, 16):
        batches = [{key: value[:, :length] for key, value in batch.items()} for batch in share(Case(), 0, 0, 1)]
        tokens = count_tokens(batches, manager.mesh)
        losses.append(float(manager.eval_loss(batches, num_tokens=tokens)))
        losses.append(float(manager.forward_backward(batches, num_tokens=tokens)))
        for part in manager.model_parts:
            part.zero_grad()
    return losses


def test_lengths_may_change_from_step_to_step() -> None:
    for first, one, second, two, third, three in pool(2).run(_lengths):
        assert (first, second, third) == pytest.approx((one, two, three), rel=1e-12)
        assert first == third != second


# -- one model, cut


def _chained(model: nn.Module, parts: list[nn.Module], ids: torch.Tensor) -> torch.Tensor:
    """Logits of a chain of stages, one for each block, made of `parts`, copies of the model."""
    layout, options = model_layout(model), forward_options(model)
    study = Study(model, layout, options)
    count = len(study.cut.blocks)
    cut = study.cut_at(range(1, count))
    assert len(parts) == count
    passed: Any = ()
    for index, part in enumerate(parts):
        stage = range(index, index + 1)
        boundary = cut.boundary(stage)
        take_stage(part, cut, stage, boundary)
        if index:
            enter_stage(part, cut, stage, boundary)
        boundary.start({"input_ids": ids}, passed)
        passed = part(input_ids=ids, **options)
    logits: torch.Tensor = passed.logits
    return logits


@pytest.mark.parametrize(
    "model_type",
    # The second line passes on more than hidden states.
    [
        *("gpt2", "gemma3_text", "bloom", "opt", "mamba2", "qwen3_moe", "phi3"),
        *("zamba2", "zaya", "inkling2_text", "gemma3n_text", "gemma4", "hy_v4", "xlm", "mllama"),
    ],
)
def test_stages_run_one_after_the_other_give_the_logits_of_the_whole(model_type: str) -> None:
    def model() -> nn.Module:
        return case_model(model_type, tied=None, seed=0, dtype=torch.float64).eval()

    whole = model()
    # A size that no trial run has.
    ids = torch.arange(4 * 10).view(4, 10) % 100 + 1
    with torch.no_grad():
        expected = whole(input_ids=ids, **forward_options(whole)).logits
        blocks = len(Study(whole, model_layout(whole), forward_options(whole)).cut.blocks)
        assert torch.equal(_chained(whole, [model() for _ in range(blocks)], ids), expected)


class Carrying(nn.Module):
    """A causal LM whose blocks pass on more than their output.

    Args:
        way: "model": the model adds the embedding behind each block; "given": each block is given the sum of all
            before; "written": each block reads from and writes to a mapping; "kept": the model keeps what each block
            has returned, and adds it later.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.embed = nn.Embedding(ROUTED_VOCAB, 8, dtype=torch.float64)
        self.blocks = nn.ModuleList(_Carrier() for _ in range(4))
        self.head = nn.Linear(8, ROUTED_VOCAB, dtype=torch.float64)

    def forward(self, input_ids: torch.Tensor) -> CausalLMOutput:
        first = self.embed(input_ids)
        hidden, total, shared = first, first, {}
        kept = []
        for block in self.blocks:
            if self.way == "model":
                hidden = block(hidden) + first
            elif self.way == "given":
                hidden, total = block(hidden, total), total + hidden
            elif self.way == "written":
                hidden = block(hidden, shared=shared)
            else:
                hidden = block(hidden)
                kept.append(hidden)
        return CausalLMOutput(logits=self.head(hidden + sum(kept)))


class _Carrier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.gate = nn.Linear(8, 8, dtype=torch.float64)

    def forward(
        self, hidden: torch.Tensor, total: torch.Tensor | None = None, shared: dict[str, Any] | None = None
    ) -> torch.Tensor:
        out = hidden + self.linear(hidden).tanh()
        if total is not None:
            out = out + self.gate(total).tanh()
        if shared is not None:
            out = out + sum(self.gate(each).tanh() for each in shared.get("all", ()))
            shared["all"] = (*shared.get("all", ())[-1:], out)
        return out


def _gradients_of_carrying(
    way: str, schedule: str, rank_count: int
) -> tuple[dict[str, torch.Tensor], list[tuple[int, int]]]:
    """Of a step over stages, of which the middle ones pass on what they do not use; and how much each batch has."""
    torch.manual_seed(3)
    model = Carrying(way)
    name = "pipeline" if rank_count > 1 else "single"
    with open_world() as world:
        sizes = MeshSizes(pp_size=rank_count) if rank_count > 1 else MeshSizes()
        stack, degrees = resolve(name, sizes, world.size, config={"pp_schedule": schedule} if rank_count > 1 else {})
        manager = stack.build(Mesh(degrees, world))
        manager.parallelize(model)
        ids = torch.arange(6 * 7).view(6, 7) * 5 % ROUTED_VOCAB
        batch = [{"input_ids": ids, "labels": ids}]
        batches: list[tuple[int, int]] = []
        with _exchanges(lambda sends, receives: batches.append((len(sends), len(receives)))):
            manager.forward_backward(batch, num_tokens=count_tokens(batch, manager.mesh))
        gradients = {
            parameter: tensor.grad.clone()
            for part in manager.model_parts
            for parameter, tensor in part.named_parameters()
            if tensor.grad is not None
        }
        return gradients, batches


@pytest.mark.parametrize("schedule", ["gpipe", "zbv"])
@pytest.mark.parametrize("way", ["model", "given", "written"])
def test_what_is_carried_beside_the_hidden_states_crosses_with_its_gradient(way: str, schedule: str) -> None:
    expected, _ = pool(1).run(_gradients_of_carrying, way, schedule, 1)[0]
    parts = pool(2).run(_gradients_of_carrying, way, schedule, 2)
    found = {name: grad for part, _ in parts for name, grad in part.items()}
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=0, atol=1e-12)
    if schedule == "gpipe":
        # All that crosses the boundary for a microbatch goes together.
        out, back = [(3 if way == "written" else 2, 0)] * 6, [(0, 3 if way == "written" else 2)] * 6
        assert [batches for _, batches in parts] == [out + back, back + out]


def test_a_model_that_keeps_what_cannot_be_sent_is_refused() -> None:
    model = Carrying("kept")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(ModelError, match=r"cut before blocks.1.*its logits change.*Set pp_size=1"):
        Study(model, model_layout(model), {}).cut_at([1, 2])
    # Nothing is lost.
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


# -- refusals


def _refusal(strategy: str, config: Any, wrapper: Any, case: Case, sizes: Any) -> str:
    try:
        manager = build_manager(strategy, config, sizes, case, wrapper_config={"pipeline": wrapper})
        train_steps(manager, case, range(1))
    except MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("strategy", "config", "wrapper", "case", "texts"),
    [
        ("single", {}, {"pp_microbatch_size": 5}, Case(), ["BatchError", "12 sequences", "pp_microbatch_size=5"]),
        ("single", {}, {"pp_batch_size": 5}, Case(), ["BatchError", "12 sequences", "pp_batch_size=5"]),
        ("single", {}, {"pp_seq_len": 8}, Case(), ["BatchError", "16 tokens", "pp_seq_len=8"]),
        ("single", {}, {"pp_schedule": "zbv"}, Case(), ["ConfigError", "4 stages", "3 blocks"]),
        ("single", {}, {"patch_inner_model": False}, Case(), ["ConfigError", "Make them equal"]),
        ("single", {}, {"patch_causal_lm_model": False}, Case(), ["ConfigError", "Make them equal"]),
        ("single", {}, {**GIVEN, "layers_per_stage": 2}, Case(), ["ConfigError", "layers_per_stage divides a model"]),
        ("single", {}, {**GIVEN, "pp_schedule": "zbv"}, Case(), ["ConfigError", "Use 1f1b or gpipe"]),
        # Both ranks give the whole model.
        ("single", {}, GIVEN, Case(), ["ModelError", "stage 1", "both have a parameter"]),
        ("single", {}, {"scale_grads_in_schedule": True}, Case(), ["ConfigError", "Set it to false"]),
        (
            "single",
            {},
            {"loss_fn": "torch.nn.CrossEntropyLoss"},
            Case(),
            ["ConfigError", "'loss_fn' fails: "],
        ),
        ("single", {}, {"loss_fn": _mean}, Case(), ["ConfigError", "loss_fn", "no sum over sequences"]),
        ("single", {}, {"loss_fn": _unmasked}, Case(), ["ConfigError", "where all targets are masked"]),
        (
            "single",
            {},
            {"module_fqns_per_model_part": [["model.embed_tokens", "model.layers"], ["lm_head"]]},
            Case(),
            ["ConfigError"],
        ),
        (
            "fsdp2",
            {"defer_fsdp_grad_sync": False},
            {"patch_stage_backward_maybe_with_nosync": True},
            Case(),
            ["StrategyError", "patch_stage_backward_maybe_with_nosync=true", "defer"],
        ),
        ("ddp", {"static_graph": True}, {}, Case(), ["StrategyError", "static_graph=True", "engine=bucketed"]),
        ("megatron_fsdp", {}, {}, Case(), ["StrategyError", "MegatronFSDPManager cannot train one stage"]),
    ],
    ids=_short,
)
def test_what_cannot_be_done_is_refused_on_all_ranks(
    strategy: str, config: dict[str, Any], wrapper: dict[str, Any], case: Case, texts: list[str]
) -> None:
    found = pool(2).run(_refusal, strategy, config, wrapper, case, PP2)
    assert len(set(found)) == 1
    assert all(text in found[0] for text in texts), found[0]


def _after_refusal() -> tuple[str, dict[str, torch.Tensor]]:
    """The refusal of a bad batch, and the weights of training that goes on after it."""
    case = Case()
    manager = build_manager("pipeline", {"pp_microbatch_size": 2}, PP2, case)
    batch = share(case, 0, 0, 1)[0]
    odd = [{key: value[:5] for key, value in batch.items()}]
    with pytest.raises(BatchError) as caught:
        manager.forward_backward(odd, num_tokens=count_tokens(odd, manager.mesh))
    train_steps(manager, case, range(case.steps))
    return str(caught.value), full_weights(manager)


def test_training_goes_on_after_a_refused_batch() -> None:
    (first, weights), (second, _) = pool(2).run(_after_refusal)
    assert first == second
    for name, expected in reference(Case()).weights.items():
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=1e-9)


def test_the_last_actions_of_a_stage_reduce() -> None:
    # Each schedule ends each stage's gradients with one backward, which the runtime tells the inner strategy.
    for name in SCHEDULES:
        stages = 4 if SCHEDULES[name].min_chunks == 2 else 2
        schedule = build_schedule(name, ranks=2, stages=stages, microbatches=6)
        ends = {a.stage: a.kind for order in schedule.orders for a in order if a.kind is not Kind.FORWARD}
        assert set(ends) == set(range(stages))
        assert set(ends.values()) <= {Kind.BACKWARD, Kind.BACKWARD_WEIGHT}


def test_options_are_those_of_the_reference() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'pp_schedule'"):
        resolve("pipeline", MeshSizes(), 1, config={"pp_shedule": "1f1b"})
