"""Trace training steps of one rank: memory, collectives and operators, in a fake world or in a real one."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from meshwright.plugin import (
    CONTROL_TAG,
    EMA,
    ROOT_AXES,
    VIEWS,
    Batch,
    Collective,
    CollectiveRecorder,
    Degrees,
    EMAConfig,
    MemoryMeter,
    Mesh,
    OptimizerFactory,
    Stack,
    StrategyManager,
    bind_arguments,
    count_flops,
    get_mutated_arguments,
    get_operation_name,
    get_storage,
    has_meta_tensors,
    is_on_meta,
    list_tensors,
    real_compute,
)

from .meter import MemorySnapshot, StepMeter

BlockBytes: TypeAlias = tuple[tuple[int, int], ...]  # pairs (block, bytes), each block once


@dataclass(frozen=True)
class TrainingJob:
    """A training job to trace: model, strategies, optimizer and batch."""

    stack: Stack
    degrees: Degrees
    build_model: Callable[[], nn.Module]
    optimizer_factory: OptimizerFactory
    num_microbatches: int = 1  # per rank and step
    micro_batch_size: int = 1  # sequences per microbatch
    seq_len: int = 16  # tokens per sequence
    max_grad_norm: float | None = 1.0
    grad_norm_type: float = 2.0
    num_layers: int = 0  # number of blocks of the model; 0: unknown
    build_with_layers: Callable[[int], nn.Module] | None = None
    expert_imbalance: float = 1.0  # load of the busiest experts relative to the mean
    is_compiled: bool = False  # whether blocks are compiled: traced as eager, timed as fused operators
    chunked_groups: tuple[str, ...] = ()  # groups whose collectives overlap with computing; see `timeline`
    ema: EMAConfig | None = None  # moving average of the weights

    def with_num_layers(self, layers: int) -> TrainingJob:
        if self.build_with_layers is None or layers == self.num_layers:
            return self
        return replace(self, build_model=functools.partial(self.build_with_layers, layers), num_layers=layers)

    def build(self, mesh: Mesh) -> tuple[nn.Module, StrategyManager]:
        """Build the model and the manager. Values that determine behaviour are real even in a fake world."""
        with real_compute():
            return self.build_model(), self.stack.build(mesh)

    def make_batch(self, model: nn.Module) -> Batch:
        """Return a microbatch whose token ids are in the vocabulary of the model."""
        vocabulary = getattr(getattr(model, "config", None), "vocab_size", None) or 2
        with real_compute():
            ids = (
                torch.arange(self.micro_batch_size * self.seq_len).view(self.micro_batch_size, self.seq_len)
                % vocabulary
            )
            return {"input_ids": ids, "labels": ids.clone()}


@dataclass(frozen=True)
class Operation:
    """One operator of a step, such as "aten.mm.default"."""

    name: str
    flops: int
    bytes: int  # sum over input and output tensors
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype | None  # of the first input tensor; None: no tensor
    collective_index: int | None  # index in `StepTrace.collectives`; None: no collective
    reads: BlockBytes = ()
    writes: BlockBytes = ()
    peer: int | None = None  # sender or receiver of a message, as rank in its group
    log_length: int = 0  # length of `StepTrace.memory_log` at its end
    phase: str = ""  # "forward", "backward" or "optimizer", clipping included


@dataclass(frozen=True)
class StepTrace:
    """A traced step of one rank, after the steps that create persistent state."""

    rank: int
    peak: MemorySnapshot
    between_steps: MemorySnapshot  # at the end of the step
    collectives: tuple[Collective, ...]  # in order of issue, without messages of the control plane
    operations: tuple[Operation, ...]  # in order of issue, including collectives
    memory_log: tuple[tuple[int, int], ...]  # pairs (block, change of its bytes)
    owners_by_block: Mapping[int, str] = field(
        default_factory=dict
    )  # of the blocks in `memory_log`; see [Note: owners] in `meter`


class NoWeights:
    """Placeholder for the weights of a model on the meta device; see `meshwright.model.weights.Weights`."""

    def __contains__(self, name: object) -> bool:
        return False

    def read(self, *_: Any) -> Tensor:
        raise AssertionError("a plan reads no weights.")


class _OperationRecorder(CollectiveRecorder):
    def __init__(self, groups: Mapping[str, dist.ProcessGroup], meter: StepMeter) -> None:
        super().__init__(groups, ignored_tags=[CONTROL_TAG])
        self._meter = meter
        self.operations: list[Operation] = []

    def observe(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        known = len(self.calls)
        super().observe(operation, args, kwargs, result)
        call = known if len(self.calls) > known else None
        given = list(list_tensors((args, kwargs)))
        flops = count_flops(operation, args, kwargs, result)
        size = sum(each.numel() * each.element_size() for each in (*given, *list_tensors(result)))
        shapes = tuple(tuple(each.shape) for each in given) if flops else ()
        dtype = given[0].dtype if given else None
        reads, writes = memory_access(self._meter, operation, args, kwargs, result)
        named = bind_arguments(operation, args, kwargs) if call is not None and operation.namespace == "c10d" else {}
        peer = next((named[name] for name in ("dst", "src") if name in named), None)
        more = peer, self._meter.log_length, self._meter.step_phase
        self.operations.append(
            Operation(get_operation_name(operation), flops, size, shapes, dtype, call, reads, writes, *more)
        )


def trace_job(job: TrainingJob, mesh: Mesh) -> StepTrace:
    """Build the job on this rank of a mesh and trace a step. Collective on a real world."""
    return trace_job_steps(job, mesh, [job.num_microbatches])[0]


def trace_job_steps(job: TrainingJob, mesh: Mesh, microbatch_counts: Sequence[int]) -> list[StepTrace]:
    """Trace one step for each number of microbatches, which must be ascending; see `trace_job`."""
    model, manager = job.build(mesh)
    make_batch = functools.partial(job.make_batch, model)
    batches = [make_batch() for _ in range(microbatch_counts[0])]
    meter = StepMeter(is_real=not mesh.world.is_fake)
    meter.track(list_tensors(batches))
    with meter:
        manager.parallelize(model, NoWeights() if mesh.world.is_fake and has_meta_tensors(model) else None)
        del model
        meter.set_owner((p for part in manager.model_parts for p in part.parameters()), "parameters")
        optimizer = manager.build_optimizer(job.optimizer_factory)
        if job.ema is not None:
            EMA(manager, job.ema)  # the optimizer keeps it

    def step(microbatches: list[Batch]) -> _OperationRecorder:
        meter.begin_step()
        timeline = _OperationRecorder(get_process_groups(manager.mesh), meter)
        meter.next_observer = timeline
        with meter, _track_modules(manager.model_parts, meter):
            _run_step(manager, job, microbatches, meter)
        meter.next_observer = None
        meter.set_owner(list_tensors([*optimizer.state.values()]), "optimizer")
        return timeline

    # The first steps create persistent state, such as that of the optimizer; one microbatch is enough.
    for _ in range(manager.steady_after_steps):
        step(batches[:1])
    found = []
    for count in microbatch_counts:
        more = [make_batch() for _ in range(count - len(batches))]
        meter.track(list_tensors(more))
        batches += more
        line = step(batches)
        calls, operations = tuple(line.calls), tuple(line.operations)
        held = meter.snapshot_peak(), meter.snapshot_now()
        found.append(StepTrace(mesh.rank, *held, calls, operations, tuple(meter.log), meter.owners_by_block()))
    return found


@contextmanager
def _track_modules(parts: Sequence[nn.Module], meter: StepMeter) -> Iterator[None]:
    names = {module: mask_layer_numbers(name) for part in parts for name, module in part.named_modules()}
    outer: list[str] = []

    def enter(module: nn.Module, _: Any) -> None:
        outer.append(meter.module)
        meter.module = names.get(module, meter.module)

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        meter.module = outer.pop()

    handles = (register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def mask_layer_numbers(name: str) -> str:
    """Return the name of a module or parameter with each layer number replaced by "*"."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def get_process_groups(mesh: Mesh) -> dict[str, dist.ProcessGroup]:
    named = {name: mesh.group(name) for name in (*ROOT_AXES, *VIEWS)}
    if mesh.degrees.ep > 1:
        named |= {name: mesh.expert_mesh.get_group(name) for name in ("ep_shard", "ep")}
    return named


def _run_step(manager: StrategyManager, job: TrainingJob, batches: list[Batch], meter: StepMeter) -> None:
    meter.phase = "activations"
    loss = manager.forward_backward(batches, num_tokens=manager.begin_step_sync(batches))
    parameters = [p for part in manager.model_parts for p in part.parameters()]
    meter.set_owner(parameters, "parameters")
    meter.set_owner((p.grad for p in parameters if p.grad is not None), "gradients")
    meter.phase = "temporary"
    manager.read_scalars(loss, manager.clip_grad_norm(job.max_grad_norm, job.grad_norm_type))
    manager.optimizer_step()
    meter.phase = "other"


# -- memory access of operators; blocks are numbered by `meshwright.tracing.observers`


def memory_access(
    meter: MemoryMeter, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> tuple[BlockBytes, BlockBytes]:
    """Return the blocks that an operator has read, and those that it has written; views write none."""
    read: list[Tensor] = []
    written: list[Tensor] = []
    changes = _written_positions(operation)
    for key, value in (*enumerate(args), *kwargs.items()):
        tensors = list(list_tensors(value))
        if key in changes:
            written += tensors
        if key not in changes or key != "out":
            read += tensors
    if operation.namespace in ("c10d", "fsdp"):
        given = bind_arguments(operation, args, kwargs)
        written += list_tensors([value for name, value in given.items() if _is_output_argument(operation, name)])
    reads, changed = _sum_block_bytes(meter, read), _sum_block_bytes(meter, written)
    # The result of a view is in the memory of its input.
    known = {block for block, _ in (*reads, *changed)}
    made = tuple(each for each in _sum_block_bytes(meter, list_tensors(result)) if each[0] not in known)
    return reads, (*changed, *made)


@functools.cache
def _written_positions(operation: Any) -> frozenset[int | str]:
    return frozenset(get_mutated_arguments(operation))


def _is_output_argument(operation: Any, argument: str) -> bool:
    """Return whether an operator writes an argument that its schema does not mark as mutable, as collectives do."""
    name = operation.overloadpacket.__name__
    if operation.namespace == "c10d":
        return not argument.startswith("input") and name != "send"
    return name == "all_gather_copy_in" and argument == "all_gather_output"


def _sum_block_bytes(meter: MemoryMeter, tensors: Iterable[Tensor]) -> BlockBytes:
    found: dict[int, int] = {}
    for tensor in tensors:
        block = None if is_on_meta(tensor) else meter.live_storages.get(id(get_storage(tensor)))
        if block is not None:
            # Views of one block are summed, such as the parts of a split that are concatenated.
            size = found.get(block.index, 0) + tensor.numel() * tensor.element_size()
            found[block.index] = min(size, block.nbytes)
    return tuple(found.items())
