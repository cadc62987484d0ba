"""The only place in this plugin that touches private or version-dependent names of megatron-fsdp and torch.

Each function says why it is needed; all were tried with megatron-fsdp 0.6.1 on torch 2.13, and
tests/test_megatron_fsdp_compat.py holds a canary for each, which fails when upstream changes what it is for.

[Note: two states] A wrapped model holds either its raw parameters, which modules compute with (freed where they are
sharded), or its sharded ones: DTensors that the optimizer trains. Forward brings the raw state, the end of a step the
sharded one.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import types
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _coalescing_manager as torch_coalescing_manager
from torch.utils._pytree import tree_iter

from meshwright.base.errors import StrategyError

TESTED = ((0, 6, 1), (0, 7))
"""The first version that works and the first that is not known to."""

_PATCHED = ("megatron_fsdp", "param_and_grad_buffer", "uneven_dtensor", "utils")
_BUCKET_ELEMENTS = 40_000_000
"""Megatron-Core's default size of a bucket; the package leaves it open, which would make disable_bucketing idle."""

_log = logging.getLogger(__name__)


# -- the package


def check_version(version: str) -> None:
    """Raise StrategyError unless megatron-fsdp of this version is known to work."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    if not TESTED[0] <= numbers < TESTED[1]:
        raise StrategyError(
            f"megatron-fsdp {version} is installed, but megatron_fsdp relies on internals that were tried with 0.6.1 "
            f"up to, not including, 0.7. Install one of these: pip install 'megatron-fsdp>=0.6.1,<0.7'."
        )


@functools.cache
def package() -> Any:
    """The module `megatron_fsdp`.

    Raises:
        StrategyError: it is not installed, or in a version that is not known to work.
    """
    try:
        check_version(importlib.metadata.version("megatron-fsdp"))
        with warnings.catch_warnings():
            # That TransformerEngine and Apex are missing is no news on a CPU.
            warnings.simplefilter("ignore")
            return importlib.import_module("megatron_fsdp")
    except ImportError as error:
        raise StrategyError(
            f"megatron_fsdp needs the package megatron-fsdp, which cannot be imported ({error}). "
            f"Install it: pip install 'megatron-fsdp>=0.6.1,<0.7'."
        ) from None


def _modules() -> list[types.ModuleType]:
    package()
    return [importlib.import_module(f"megatron_fsdp.{name}") for name in _PATCHED]


# -- [Note: torch on a CPU]
#
# The package calls torch.cuda for streams and events and to name its device. On a CPU mesh the name `torch` inside
# four of its modules stands for an object that answers these from torch.cpu and hands everything else on to torch.
# torch itself, and everyone else's view of it, stays as it is, and the name is put back when the last manager goes.
#
# There, collectives that the package does not wait for at once are done when they return. It drops the tensors that it
# gives them while they run, which streams of a GPU allow for; gloo works in a thread of its own, and torch knows of a
# race between that and Python's deallocation (pytorch/pytorch#75529).


class _CpuStream(torch.cpu.Stream):
    """torch.cpu's stream, whose `record_event` returns None where the package waits for an event."""

    def record_event(self, event: Any = None) -> Any:
        return torch.cpu.Event()


class _CpuAsCuda:
    """What the package calls of torch.cuda, on a CPU. Other names are missing, so that a new call shows.

    Args:
        device: what `current_device` answers; the package uses it as a device in one module, and to format one in
            the others.
    """

    Stream = _CpuStream
    stream = staticmethod(torch.cpu.stream)

    def __init__(self, device: str | int) -> None:
        self._device = device

    def current_device(self) -> str | int:
        return self._device

    def current_stream(self) -> _CpuStream:
        return _CpuStream()

    def is_available(self) -> bool:
        return False

    def empty_cache(self) -> None:
        """There is no cache on a CPU."""


class _Torch(types.ModuleType):
    """`torch`, or a part of it, with some names replaced."""

    def __init__(self, inner: Any, **replaced: Any) -> None:
        super().__init__(inner.__name__)
        self.__dict__.update(replaced)
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)


class _Done:
    """The handle of a collective that is done."""

    def wait(self) -> bool:
        return True


def _waited_for(collective: Callable[..., Any]) -> Callable[..., _Done | None]:
    """A collective of torch.distributed that is done when it returns; `async_op` chooses what it returns alone."""

    @functools.wraps(collective)
    def call(*args: Any, async_op: bool = False, **options: Any) -> _Done | None:
        collective(*args, **options)
        return _Done() if async_op else None

    return call


@contextmanager
def _coalesced(*args: Any, async_ops: bool = False, **options: Any) -> Iterator[_Done]:
    """In place of torch's `_coalescing_manager`: on a CPU each collective is done when it returns.

    gloo takes tensors of one dtype together, where NCCL takes those of any.
    """
    yield _Done()


_ASYNCHRONOUS = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
_COALESCING = "_coalescing_manager"
"""The name under which a module of the package has torch's."""


def _cpu_torch(module: str) -> _Torch:
    def device(name: Any) -> torch.device:
        return torch.device("cpu" if str(name).startswith("cuda") else name)

    def tensor(*args: Any, **options: Any) -> Tensor:
        made = torch.tensor(*args, **options)
        made.cuda = lambda: made
        return made

    if module == "megatron_fsdp.utils":
        return _Torch(torch, cuda=_CpuAsCuda("cpu"))
    distributed = _Torch(dist, **{name: _waited_for(getattr(dist, name)) for name in _ASYNCHRONOUS})
    return _Torch(torch, cuda=_CpuAsCuda(0), device=device, tensor=tensor, distributed=distributed)


_cpu_users = 0


def hold_cpu_torch(owner: object) -> weakref.finalize[..., Any]:
    """Keep [Note: torch on a CPU] in place as long as `owner` lives, or until what is returned is called."""
    global _cpu_users
    if _cpu_users == 0:
        _log.info("Megatron-FSDP runs on the CPU: what its modules call of torch.cuda is answered by torch.cpu.")
        for module in _modules():
            _replace(module, _cpu_torch(module.__name__), _coalesced)
    _cpu_users += 1
    return weakref.finalize(owner, _release_cpu_torch)


def _release_cpu_torch() -> None:
    global _cpu_users
    _cpu_users -= 1
    if _cpu_users == 0:
        for module in _modules():
            _replace(module, torch, torch_coalescing_manager)


def _replace(module: Any, torch_: Any, coalescing_manager: Any) -> None:
    module.torch = torch_
    if hasattr(module, _COALESCING):
        setattr(module, _COALESCING, coalescing_manager)


@contextmanager
def _float64_buffers() -> Iterator[None]:
    """While a model is wrapped: buffers of gradients for float64, too.

    The package counts their sizes in a table of float32, float16 and bfloat16 and fails with a KeyError for others, so
    float16 stands for float64 there. Such a model has no parameters in float16; see `wrap`.
    """
    module = importlib.import_module("megatron_fsdp.param_and_grad_buffer")
    before = module.torch
    module.torch = _Torch(before, float16=torch.float64)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.torch = before  # type: ignore[attr-defined]


# -- the wrapped model


class _Chosen(type):
    """A class whose instances are the modules that were chosen: the package takes units as classes only."""

    modules: Sequence[nn.Module]

    def __instancecheck__(cls, module: Any) -> bool:
        return any(module is each for each in cls.modules)


@dataclass(frozen=True)
class Dtypes:
    """What megatron-fsdp's MixedPrecisionPolicy takes; None: that of the parameters (comm: of main_grads)."""

    main_params: torch.dtype | None = None
    main_grads: torch.dtype | None = None
    grad_comm: torch.dtype | None = None


def wrap(
    model: nn.Module,
    mesh: DeviceMesh,
    dp_group: dist.ProcessGroup,
    *,
    units: Sequence[nn.Module],
    dtypes: Dtypes,
    device: torch.device,
    shards_outer: bool,
    bucketing: bool,
    options: Mapping[str, Any],
) -> Any:
    """Shard a model in place and return the MegatronFSDP around it, in the sharded state; see [Note: two states].

    `fully_shard_model` is passed over, since it has no argument for suggested_communication_unit_size, nor for the size
    of a bucket, and divides by the number of units, which may be 0.

    Args:
        model: on its device; parameters are plain tensors.
        mesh: the root mesh, with the axes dp_replicate and pp, and the view dp_shard_cp; along others, models are
            other ones.
        dp_group: the ranks of dp_replicate x dp_shard x cp.
        units: what is gathered and reduced as one.
        options: fields of megatron-fsdp's DistributedDataParallelConfig.
    """
    inner = importlib.import_module("megatron_fsdp.megatron_fsdp")
    hybrid = mesh["dp_replicate"].size() > 1
    index = package().FSDPDistributedIndex(
        mesh,
        dp_shard_dim="dp_shard_cp" if mesh["cp"].size() > 1 else "dp_shard",
        dp_outer_dim="dp_replicate" if hybrid else None,
        # Must be given. Tensor parallelism is ours: the package sees each rank's part as a whole model, and an axis of
        # one rank, which pp is for all strategies that do not claim it.
        tp_dim="pp",
        hybrid_fsdp_group=dp_group if hybrid else None,
        # Parameters whose names contain ".experts." go by a mesh of their own; without one, by the whole world.
        expt_device_mesh=mesh,
        hybrid_fsdp_expt_group=dp_group if hybrid else None,
        hsdp_outer_dp_shard=shards_outer,
    )
    policy = package().MixedPrecisionPolicy(dtypes.main_params, dtypes.main_grads, dtypes.grad_comm)
    # Whether Megatron-Core's class or the package's own: it depends on what is installed.
    config = inner.DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=_BUCKET_ELEMENTS, **options)
    used = {parameter.dtype for parameter in model.parameters()} | {dtypes.main_params, dtypes.main_grads}
    with _float64_buffers() if torch.float64 in used else nullcontext():
        fsdp = _wrapper()(
            model,
            index,
            config,
            policy,
            fsdp_unit_modules=[_Chosen("Unit", (), {"modules": tuple(units)})],
            disable_bucketing=not bucketing,
            device=device,
            # No factor on gradients but for averages, where its value is not used.
            calculate_per_token_loss=not config.average_in_collective,
            sync_model_each_microbatch=False,
            nccl_ub=config.nccl_ub,
            fsdp_double_buffer=config.fsdp_double_buffer,
            disable_symmetric_registration=config.disable_symmetric_registration,
        )
    for group in fsdp.param_and_grad_buffer.parameter_groups:
        # Forgotten by the package: without it, the ranks of dp_shard sum where those of dp_replicate average.
        if group.hfsdp_helper_gbuf is not None:
            group.hfsdp_helper_gbuf.gradient_scaling_factor = group.main_grad_buffer.gradient_scaling_factor
    return fsdp


@functools.cache
def _wrapper() -> Any:
    """The package's MegatronFSDP, for models in which any number of modules share a parameter."""
    inner: Any = importlib.import_module("megatron_fsdp.megatron_fsdp")

    class MegatronFSDP(inner.MegatronFSDP):
        def _reestablish_shared_weights(self, old_params: dict[str, Any], new_params: dict[str, Any]) -> None:
            # The package gives the new parameter to one more module each time, and stops after the first.
            stale = {id(p) for p in old_params.values()} - {id(p) for p in new_params.values()}
            while any(id(parameter) in stale for parameter in self.module.parameters()):
                super()._reestablish_shared_weights(old_params, new_params)

    return MegatronFSDP


def has_nccl_allocator() -> bool:
    """Whether megatron-fsdp has found an allocator for nccl_ub; it fails by an assertion without one."""
    return getattr(importlib.import_module("megatron_fsdp.param_and_grad_buffer"), "nccl_allocator", None) is not None


def use_raw(fsdp: Any) -> None:
    """Bring the raw state; see [Note: two states]. No public call does just this."""
    fsdp._replace_param_with_raw_if_needed()


def use_sharded(fsdp: Any) -> None:
    """Bring the sharded state; see [Note: two states]. No public call does just this."""
    fsdp._replace_param_with_distributed_if_needed()


def wait_for_gathers(fsdp: Any) -> None:
    """Wait for what was gathered ahead and not used; the package does, too, but warns of it."""
    pipeline = fsdp.all_gather_pipeline
    for bucket, bwd in list(pipeline.param_gather_event_map):
        pipeline.wait_bucket_ready(bucket, bwd)


@contextmanager
def gathered(fsdp: Any) -> Iterator[None]:
    """All parameters whole, in the raw state; forwards inside the context gather and free nothing. Collective.

    `start_param_sync`, which is public, leaves out the gathering over dp_replicate that outer sharding needs, and what
    it has gathered goes with the first forward. Double buffers hold two units, so others take their place. Its hooks
    look up every parameter that they meet; inside, other ones may stand in the modules.
    """
    use_raw(fsdp)
    pipeline, buffer = fsdp.all_gather_pipeline, fsdp.param_and_grad_buffer
    with _unlimited_buffers(fsdp):
        fsdp.all_gather_and_wait_parameters_ready(list(fsdp.raw_param.values()), prefetch=False)
        numbers = buffer.param_to_param_group
        pipeline.release_bucket = lambda *args, **options: None
        fsdp.all_gather_and_wait_parameters_ready = lambda *args, **options: None
        buffer.param_to_param_group = defaultdict(int)
        try:
            yield
        finally:
            buffer.param_to_param_group = numbers
            del pipeline.release_bucket, fsdp.all_gather_and_wait_parameters_ready
            wait_for_gathers(fsdp)
            pipeline.reset()
            use_sharded(fsdp)


@contextmanager
def _unlimited_buffers(fsdp: Any) -> Iterator[None]:
    config = fsdp.ddp_config
    if not config.fsdp_double_buffer:
        yield
        return
    module = importlib.import_module("megatron_fsdp.param_and_grad_buffer")
    groups = fsdp.param_and_grad_buffer.parameter_groups
    buffers = [b for g in groups for b in (g.model_weight_buffer, g.hfsdp_helper_wbuf) if b is not None]
    before = [buffer.temporary_bucket_allocator for buffer in buffers]
    config.fsdp_double_buffer = False
    unlimited = module.StorageResizeBasedBucketAllocator()
    for buffer in buffers:
        buffer.temporary_bucket_allocator = unlimited
    try:
        yield
    finally:
        config.fsdp_double_buffer = True
        for buffer, allocator in zip(buffers, before, strict=True):
            buffer.temporary_bucket_allocator = allocator


def in_backward(fsdp: Any) -> bool:
    """Whether a backward has begun and not ended; the package tells nobody."""
    return bool(fsdp._root_pre_backward_hook_issued)


def begin_backward(fsdp: Any) -> None:
    """What must run before the first gradient of a backward, and lets the package end it; again: nothing.

    The package finds this moment by the output of the model, if that is a tensor or tuple, which those of Hugging Face
    models are not, or else of the last submodule, which may not run. `pre_backward`, which is public, has the function.
    """
    fsdp.pre_backward.func(None)


def take_gradient_hooks(fsdp: Any) -> dict[nn.Parameter, Callable[[nn.Parameter], None]]:
    """Remove the hooks by which the package accumulates and reduces each raw parameter's gradient, and return them.

    It reduces a unit as soon as its last gradient has come, so ranks that use different parameters would reduce, and
    gather, in different orders. The package keeps handles, under names that tied weights share, and no functions.
    """
    hooks: dict[nn.Parameter, Callable[[nn.Parameter], None]] = {}
    for parameter in fsdp.raw_param.values():
        registered = parameter._post_accumulate_grad_hooks
        if registered:
            hooks[parameter] = next(iter(registered.values()))
            registered.clear()
    return hooks


@dataclass(frozen=True)
class Slot:
    """What a rank holds of a parameter: its elements from `start` to `end`, counted flat.

    `group` has the ranks that share the parameter; None: each has all of it.
    """

    start: int
    end: int
    group: dist.ProcessGroup | None


def slots(fsdp: Any) -> dict[nn.Parameter, Slot]:
    """The slot of each sharded parameter.

    DTensor's own `full_tensor` takes shards for even ones, and fails; the package's function for it gathers tensors of
    unequal sizes, which gloo refuses.
    """
    buffer = fsdp.param_and_grad_buffer
    sharded = dict(buffer.optimizer_named_parameters)
    found = {}
    for group in buffer.parameter_groups:
        weights = group.main_weight_buffer if group.main_weight_buffer is not None else group.model_weight_buffer
        for item, raw in enumerate(group.params):
            if fsdp.data_parallel_sharding_strategy == "no_shard":
                slot = Slot(0, raw.numel(), None)
            else:
                start, end = weights._get_item_slice_in_shard(item)
                slot = Slot(start, end, weights.data_parallel_group)
            found[sharded[buffer.param_to_name[raw]]] = slot
    return found


def awaited(fsdp: Any) -> set[nn.Parameter]:
    """The raw parameters whose gradients this backward has not dealt with yet; the package tells nobody."""
    waiting: set[nn.Parameter] = fsdp._params_require_handle_grad
    return waiting


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested containers, those of transformers included, which register with this private module."""
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor)]
