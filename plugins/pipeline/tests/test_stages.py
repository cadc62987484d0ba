"""What travels between the stages of a pipeline, what ranks hold, and how models are cut, on real ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.measurements import measure_memory
from support.pipelines import PP2, build_pipeline_manager
from support.training import prepare_training_step
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from meshwright import Mesh, MeshSizes, ModelError, count_tokens, open_world, optimizer_factory, resolve
from meshwright.step.forward_options import get_forward_options
from meshwright.strategy.registry import model_layout
from meshwright.testing import Case
from meshwright.tracing.collectives import CollectiveTrace, record_collectives
from meshwright_pipeline.partition.analyzer import PartitionAnalyzer
from meshwright_pipeline.partition.stage_model import reduce_to_stage, register_input_hook
from meshwright_pipeline.runtime.executor import ScheduleRun
from meshwright_pipeline.schedule.actions import P2PBatch, add_communication, count_peak_live_microbatches
from meshwright_pipeline.schedule.specs import SCHEDULES, build_schedule
from meshwright_testing import pool
from meshwright_testing.case import rank_microbatches
from meshwright_testing.models import ROUTED_VOCAB, TINY, build_case_model
from meshwright_testing.parity import build_manager, full_weights, train_steps

OVERLAP: dict[str, Any] = {"engine": "bucketed", "overlap_grad_reduce": True, "bucket_size": 40000}
SLOW = pytest.mark.slow
WIDTH = 8
"""Bytes of an element: cases are in float64."""
NAMES = [pytest.param(name, marks=() if name in ("1F1B", "ZBVZeroBubble") else SLOW) for name in SCHEDULES]


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


def _traffic(options: Mapping[str, Any], case: Case) -> tuple[CollectiveTrace, list[tuple[int, int]], set[int]]:
    """The collectives of a step, how much each of its batches sends and receives, and the sizes of these tensors."""
    manager = build_manager("pipeline", options, PP2, case)
    train_steps(manager, case, range(1))
    batches: list[tuple[int, int]] = []
    sizes: set[int] = set()

    def counting(sends: list[torch.Tensor], receives: list[torch.Tensor]) -> None:
        batches.append((len(sends), len(receives)))
        sizes.update(tensor.numel() * tensor.element_size() for tensor in (*sends, *receives))

    with _exchanges(counting):
        traffic = record_collectives(prepare_training_step(manager, case, 1), {"pp": manager.mesh.group("pp")})
    return traffic, batches, sizes


@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_cross_each_boundary_once_and_nothing_else_does(name: str) -> None:
    schedule = build_schedule(name, num_ranks=2, num_stages=2 * SCHEDULES[name].min_chunks, num_microbatches=12)
    hidden = 1 * 16 * 36 * WIDTH  # one sequence of 16 tokens, 36 wide
    # The turn of a V is on one rank.
    boundaries = sum(one != other for one, other in zip(schedule.placement, schedule.placement[1:], strict=False))
    ranks = pool(2).run(_traffic, {"pp_schedule": name}, Case(layers=4))
    for order, (traffic, found, sizes) in zip(add_communication(schedule), ranks, strict=True):
        assert len(found) == sum(isinstance(each, P2PBatch) for each in order)
        # Forward on one rank, backward on the other: as many on each for two ranks in a ring.
        assert [sum(each) for each in zip(*found, strict=True)] == [12 * boundaries] * 2
        assert sizes == {hidden}
        # What is left: agreements of a few numbers, and the loss.
        assert all(each.nbytes <= 64 for each in traffic if each.kind == "all_reduce")


def _what_goes_out(strategy: str, config: Mapping[str, Any], schedule: str) -> str:
    """In order, a letter for each: s, a tensor is sent to another stage, G, gradients are reduced over `dp`."""
    case = Case(layers=4, sequences=8)
    wrapper = {"pipeline": {"pp_schedule": schedule, "patch_stage_backward_maybe_with_nosync": strategy == "fsdp2"}}
    manager = build_manager(strategy, config, {**PP2, "dp_size": 2}, case, wrapper_config=wrapper)
    train_steps(manager, case, range(1))
    calls = record_collectives(prepare_training_step(manager, case, 1))
    letters = {"send": "s", "reduce_scatter": "G", "all_reduce": "G"}
    # Without agreements (integers), the norm, and the last all-reduce, of the loss and of what ranks have found.
    large = [each for each in calls if each.nbytes > 64 and each.dtype.is_floating_point]
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
        ("ddp", OVERLAP, "1f1b", ("ssss G", "sss G s")),
    ],
    ids=str,
)
def test_a_stage_that_is_done_reduces_while_those_before_it_still_compute(
    strategy: str, config: dict[str, Any], schedule: str, expected: tuple[str, str]
) -> None:
    first, _, second, _ = pool(4).run(_what_goes_out, strategy, config, schedule)
    assert (first, second) == tuple(each.replace(" ", "") for each in expected)


# -- models on the meta device


def _built(device: str, config: Any, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    return model


def _config(**changes: Any) -> Any:
    return build_case_model("llama", tied=True, seed=0, dtype=torch.float64, layers=5).config.__class__(
        **{**TINY["llama"], "num_hidden_layers": 5, "tie_word_embeddings": True, **changes}
    )


def _trained_from(
    device: str, strategy: str, options: Mapping[str, Any], changes: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Full weights before and after two steps, of a model that was built on a device."""
    manager = build_pipeline_manager(strategy, options)
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
        pytest.param(2, "single", {}, {"tie_word_embeddings": False}, marks=SLOW),
        pytest.param(4, "fsdp2", {}, {}, marks=SLOW),
        pytest.param(4, "ddp", {"engine": "bucketed"}, {}, marks=SLOW),
    ],
    ids=["zbv", "untied", "fsdp2", "ddp"],
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
    weights, manager = _Values(model), build_pipeline_manager("single", {"pp_schedule": schedule})
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

    batches = rank_microbatches(case, 0, 0, 1)
    num_tokens = count_tokens(batches, manager.mesh)
    with _exchanges(counting):
        manager.forward_backward(batches, num_tokens=num_tokens)
        training, most = most, 0
        manager.eval_loss(batches, num_tokens=num_tokens)
    return training, most


@pytest.mark.parametrize("name", NAMES)
def test_sent_tensors_that_a_rank_holds_do_not_grow_with_the_microbatches(name: str) -> None:
    # Two on their way, and the one that is about to go; the last stage sends nothing in evaluation.
    evaluated = 0 if name in ("GPipe", "1F1B") else 3
    assert pool(2).run(_most_sent_memory_held, name, 24) == [(3, 3), (3, evaluated)]


def _dtypes() -> set[torch.dtype]:
    case = Case(dtype="float32")
    manager = build_manager("pipeline", {"dtype": "bfloat16"}, PP2, case)
    seen = set()
    with _exchanges(lambda sends, receives: seen.update(each.dtype for each in (*sends, *receives))):
        train_steps(manager, case, range(1))
    return seen


def test_hidden_states_cross_in_the_chosen_dtype() -> None:
    assert pool(2).run(_dtypes) == [{torch.bfloat16}] * 2


# -- one model, cut


def _chained(model: nn.Module, parts: list[nn.Module], ids: torch.Tensor) -> torch.Tensor:
    """Logits of a chain of stages, one for each block, made of `parts`, copies of the model."""
    layout, options = model_layout(model), get_forward_options(model)
    study = PartitionAnalyzer(model, layout, options)
    count = len(study.partition.blocks)
    cut = study.partition_at(range(1, count))
    assert len(parts) == count
    passed: Any = ()
    for index, part in enumerate(parts):
        stage = range(index, index + 1)
        boundary = cut.build_boundary(stage)
        reduce_to_stage(part, cut, stage, boundary)
        if index:
            register_input_hook(part, cut, stage, boundary)
        boundary.begin_forward({"input_ids": ids}, passed)
        passed = part(input_ids=ids, **options)
    logits: torch.Tensor = passed.logits
    return logits


@pytest.mark.parametrize(
    "model_type",
    [
        *("gpt2", "gemma3n_text"),
        *(pytest.param(each, marks=SLOW) for each in ("bloom", "mamba2", "zamba2", "gemma4", "mllama")),
    ],
)
def test_stages_run_one_after_the_other_give_the_logits_of_the_whole(model_type: str) -> None:
    def model() -> nn.Module:
        return build_case_model(model_type, tied=None, seed=0, dtype=torch.float64).eval()

    whole = model()
    # A size that no trial run has.
    ids = torch.arange(4 * 10).view(4, 10) % 100 + 1
    with torch.no_grad():
        expected = whole(input_ids=ids, **get_forward_options(whole)).logits
        blocks = len(PartitionAnalyzer(whole, model_layout(whole), get_forward_options(whole)).partition.blocks)
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


@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("zbv", marks=SLOW)])
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
    with pytest.raises(ModelError, match=r"its logits change when cut before blocks.1.*Set pp_size=1"):
        PartitionAnalyzer(model, model_layout(model), {}).partition_at([1, 2])
    # Nothing is lost.
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def _lengths() -> list[float]:
    """Losses with 16 tokens, 12, and 16 again."""
    manager = build_manager("pipeline", {}, PP2, Case())
    losses = []
    for length in (16, 12, 16):
        batches = [
            {key: value[:, :length] for key, value in batch.items()} for batch in rank_microbatches(Case(), 0, 0, 1)
        ]
        tokens = count_tokens(batches, manager.mesh)
        losses.append(float(manager.eval_loss(batches, num_tokens=tokens)))
        losses.append(float(manager.forward_backward(batches, num_tokens=tokens)))
        for part in manager.model_parts:
            part.zero_grad()
    return losses


def _alive(name: str) -> list[int]:
    """The most microbatches between forward and backward, on each rank."""
    manager = build_manager("pipeline", {"pp_schedule": name}, PP2, Case(layers=5))
    most = 0
    forward = ScheduleRun._forward

    def counting(run: Any, action: Any) -> None:
        nonlocal most
        forward(run, action)
        # Weights that are put off keep their inputs.
        most = max(most, len(run._in_flight) + len(run._weight_backwards))

    ScheduleRun._forward = counting  # type: ignore[method-assign]
    try:
        train_steps(manager, Case(layers=5), range(1))
    finally:
        ScheduleRun._forward = forward  # type: ignore[method-assign]
    return [most]


@pytest.mark.parametrize("name", NAMES)
def test_live_microbatches_are_those_of_the_schedule(name: str) -> None:
    stages = 2 * SCHEDULES[name].min_chunks
    peaks = count_peak_live_microbatches(build_schedule(name, num_ranks=2, num_stages=stages, num_microbatches=12))
    assert pool(2).run(_alive, name) == [[peak] for peak in peaks]
    assert {"gpipe": (12, 12), "1f1b": (2, 1)}.get(name, peaks) == peaks


def test_lengths_may_change_from_step_to_step() -> None:
    for first, one, second, two, third, three in pool(2).run(_lengths):
        assert (first, second, third) == pytest.approx((one, two, three), rel=1e-12)
        assert first == third != second
