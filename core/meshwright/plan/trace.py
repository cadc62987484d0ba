"""One rank's steps, with what they hold, send and compute: on a planned world, or as they happen on a real one."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .._compat.arithmetic import arithmetic
from ..mesh.mesh import Mesh
from ..mesh.sizes import ROOT_AXES, VIEWS, Degrees
from ..mesh.world import CONTROL_TAG
from ..model.weights import is_meta
from ..strategy.contract import Batch, OptimizerFactory, StrategyManager
from ..strategy.stack import Stack
from ..tensors.ops import tensors_in, with_values
from ..testing.collectives import Collective, Recorder
from ..testing.observe import name_of
from ..train.ema import EMA
from ..train.optimizer_config import EMAConfig
from .meter import Held, StepMeter
from .touched import Touched, peer_of, touched


@dataclass(frozen=True)
class Job:
    """What is to be planned.

    Attributes:
        model: makes it, on the meta device.
        microbatches: of each rank in a step.
        rows, length: of a microbatch: sequences, and tokens of each.
        max_grad_norm, grad_norm_type: as in a run file.
        layers: blocks of the model; 0: not known.
        with_layers: makes the model with so many blocks instead; None: it cannot be made.
        expert_imbalance: how much more often than on average routers choose the busiest experts.
        is_compiled: whether blocks are; they are traced as they are written, and their time is that of fused operators.
        chunked: groups that are communicated with while the parts that have come are computed; see `time.play`.
        ema: of an average of the weights.
    """

    stack: Stack
    degrees: Degrees
    model: Callable[[], nn.Module]
    optimizer: OptimizerFactory
    microbatches: int = 1
    rows: int = 1
    length: int = 16
    max_grad_norm: float | None = 1.0
    grad_norm_type: float = 2.0
    layers: int = 0
    with_layers: Callable[[int], nn.Module] | None = None
    expert_imbalance: float = 1.0
    is_compiled: bool = False
    chunked: tuple[str, ...] = ()
    ema: EMAConfig | None = None


@dataclass(frozen=True)
class Operation:
    """One operator of a step.

    Attributes:
        name: such as "aten.mm.default".
        flops: of matrix products and attentions, see [Note: causal attention] in `kernels`; 0 for others.
        bytes: that it reads and writes.
        shapes: of the tensors that it is given, where it has flops.
        dtype: of the first of them; None: it is given none.
        call: the number of the collective that it is, in `Trace.collectives`; None: it is none.
        reads, writes: see `touched`.
        peer: the place in its group of whom a message is for, or from.
        logged: how much of `Trace.log` there was when it ended.
        phase: "forward", "backward" or "optimizer", clipping included.
    """

    name: str
    flops: int
    bytes: int
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype | None
    call: int | None
    reads: Touched = ()
    writes: Touched = ()
    peer: int | None = None
    logged: int = 0
    phase: str = ""


@dataclass(frozen=True)
class Trace:
    """A step of one rank, that after the first.

    Attributes:
        peak, after: what was held when it was most, and between steps.
        collectives: in the order in which they were issued; without messages of the control plane.
        operations: likewise, collectives included.
        log: (block, change in bytes) of all memory, what was held before the step first.
        owners: of the blocks in `log`; see [Note: owners] in `meter`.
    """

    rank: int
    peak: Held
    after: Held
    collectives: tuple[Collective, ...]
    operations: tuple[Operation, ...]
    log: tuple[tuple[int, int], ...]
    owners: Mapping[int, str] = field(default_factory=dict)


class NoValues:
    """Weights of a model that is never computed; see `meshwright.model.weights.Weights`."""

    def __contains__(self, name: object) -> bool:
        return False

    def read(self, *_: Any) -> Tensor:
        raise AssertionError("a plan reads no weights.")


class _Timeline(Recorder):
    def __init__(self, groups: Mapping[str, dist.ProcessGroup], meter: StepMeter) -> None:
        super().__init__(groups, tags=[CONTROL_TAG])
        self._meter = meter
        self.operations: list[Operation] = []

    def observe(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        known = len(self.calls)
        super().observe(operation, args, kwargs, result)
        call = known if len(self.calls) > known else None
        given = list(tensors_in((args, kwargs)))
        flops = arithmetic(operation, args, kwargs, result)
        size = sum(each.numel() * each.element_size() for each in (*given, *tensors_in(result)))
        shapes = tuple(tuple(each.shape) for each in given) if flops else ()
        dtype = given[0].dtype if given else None
        reads, writes = touched(self._meter, operation, args, kwargs, result)
        peer = peer_of(operation, args, kwargs) if call is not None else None
        now, phase = self._meter.logged, self._meter.step_phase
        self.operations.append(
            Operation(name_of(operation), flops, size, shapes, dtype, call, reads, writes, peer, now, phase)
        )


def trace(job: Job, mesh: Mesh) -> Trace:
    """Build the job on this rank and run its steps. Collective where the world is a real one.

    Args:
        mesh: of the job's degrees; one can be used for several jobs.

    Raises:
        MeshwrightError: as training does.
    """
    return traces(job, mesh, [job.microbatches])[0]


def traces(job: Job, mesh: Mesh, counts: Sequence[int]) -> list[Trace]:
    """As `trace`, of a step with each number of microbatches.

    Args:
        counts: of microbatches, ascending; those of the job do not matter.
    """
    with with_values():
        model = job.model()
        make_batch = functools.partial(batch_of, job, model)
        batches = [make_batch() for _ in range(counts[0])]
        manager = job.stack.build(mesh)
    meter = StepMeter(is_real=not mesh.world.is_planned)
    meter.see(tensors_in(batches))
    with meter:
        manager.parallelize(model, NoValues() if mesh.world.is_planned and is_meta(model) else None)
        del model
        meter.own((p for part in manager.model_parts for p in part.parameters()), "parameters")
        optimizer = manager.build_optimizer(job.optimizer)
        if job.ema is not None:
            # Its optimizer keeps it.
            EMA(manager, job.ema)

    def step(given: list[Batch]) -> _Timeline:
        meter.begin()
        timeline = _Timeline(groups(manager.mesh), meter)
        meter.after = timeline
        with meter, _told_modules(manager.model_parts, meter):
            _step(manager, job, given, meter)
        meter.after = None
        meter.own(tensors_in([*optimizer.state.values()]), "optimizer")
        return timeline

    # The first make what is kept, such as the state of the optimizer, from few tokens; further ones are as all others.
    for _ in range(manager.settles_after):
        step(batches[:1])
    found = []
    for count in counts:
        with with_values():
            more = [make_batch() for _ in range(count - len(batches))]
        meter.see(tensors_in(more))
        batches += more
        line = step(batches)
        calls, operations = tuple(line.calls), tuple(line.operations)
        held = meter.at_peak(), meter.now()
        found.append(Trace(mesh.rank, *held, calls, operations, tuple(meter.log), meter.owners()))
    return found


@contextmanager
def _told_modules(parts: Sequence[nn.Module], meter: StepMeter) -> Iterator[None]:
    """While forwards tell the meter whose they are, numbers of blocks left out."""
    names = {module: re.sub(r"\.\d+(?=\.|$)", ".*", name) for part in parts for name, module in part.named_modules()}
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


def groups(mesh: Mesh) -> dict[str, dist.ProcessGroup]:
    """The groups of a mesh by the names of their axes and views."""
    named = {name: mesh.group(name) for name in (*ROOT_AXES, *VIEWS)}
    if mesh.degrees.ep > 1:
        named |= {name: mesh.expert_mesh.get_group(name) for name in ("ep_shard", "ep")}
    return named


def _step(manager: StrategyManager, job: Job, batches: list[Batch], meter: StepMeter) -> None:
    """As `train.loop.train_step`."""
    meter.phase = "activations"
    num_tokens = manager.announce(batches)
    loss = manager.forward_backward(batches, num_tokens=num_tokens)
    parameters = [p for part in manager.model_parts for p in part.parameters()]
    meter.own(parameters, "parameters")
    meter.own((p.grad for p in parameters if p.grad is not None), "gradients")
    meter.phase = "temporary"
    norm = manager.clip_grad_norm(job.max_grad_norm, job.grad_norm_type)
    manager.read(loss, norm)
    manager.optimizer_step()
    meter.phase = "other"


def batch_of(job: Job, model: nn.Module) -> Batch:
    """A microbatch of a job; its numbers are in its vocabulary."""
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None) or 2
    ids = torch.arange(job.rows * job.length).view(job.rows, job.length) % vocabulary
    return {"input_ids": ids, "labels": ids.clone()}
