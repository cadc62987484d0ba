"""Build a manager from a Hugging Face model in one call, with the model sharded and loaded.

[Note: process group of a call] `from_pretrained` and `from_config` run on every rank. They use `world` if it is given,
and otherwise the existing process group. If there is none, they create one: from torchrun's environment variables, or
for this process alone. `manager.mesh.world.close()` or the end of the process destroys it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..base.errors import MeshError, MeshwrightError, ModelError
from ..base.validation import validate_config
from ..files.terminal import warn
from ..launch.open_world import open_world
from ..mesh.mesh import Mesh, from_device_mesh, infer_degrees
from ..mesh.sizes import Degrees, MeshSizes
from ..mesh.world import World
from ..model.adapter import BaseModelRef, compute_fingerprint
from ..model.adapter_options import AdapterOptions, ExternalAdapterInjection, apply_adapter, parse_adapter_options
from ..model.configuration import (
    PARALLEL_INIT,
    config_from_directory,
    config_from_mapping,
    is_commit,
    register_trusted_code,
)
from ..model.pretrained import (
    PretrainedWeights,
    find_model_directory_on_all_ranks,
    get_hub_commit,
    init_model_on_meta,
    open_pretrained,
    to_dtype,
)
from ..model.weights import Weights
from ..strategy.contract import StrategyManager
from ..strategy.registry import get_strategy
from ..strategy.stack import find_strategy_name, resolve


class MeshSizeKwargs(TypedDict, total=False):
    """The fields of `MeshSizes`, as keyword arguments."""

    dp_size: int | None
    dp_replicate_size: int | None
    tp_size: int | None
    pp_size: int | None
    cp_size: int | None
    ep_size: int


def from_pretrained(
    path: str | Path,
    strategy: str | None = None,
    *,
    config: Mapping[str, Any] | BaseModel | None = None,
    wrapper_config: Mapping[str, Mapping[str, Any]] | None = None,
    hf_config: Any = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    world: World | None = None,
    device_mesh: Mesh | DeviceMesh | None = None,
    moe_mesh: DeviceMesh | None = None,
    seed: int = 0,
    revision: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: str | None = None,
    peft: Any = None,
    **sizes: Unpack[MeshSizeKwargs],
) -> StrategyManager:
    """Load a Hugging Face model under a strategy. Each rank reads only its own shards from the files.

    Collective; see [Note: process group of a call].

    Args:
        path: a directory that `save_pretrained` wrote, or a Hub id. It must be the same on all ranks.
        strategy: name of the strategy, see `resolve`. None: the strategy of `config`'s class, or fsdp2 without one.
        config: options of the strategy; see `resolve`.
        wrapper_config: options of wrapping strategies, by name.
        hf_config: a Hugging Face configuration that replaces the directory's, or a mapping of fields to change.
        dtype: dtype of the parameters, such as "bfloat16". None: the dtype of the configuration.
        device: see `open_world`. Not used with `world`.
        device_mesh: replaces `device`, `world` and `sizes`; see `from_device_mesh`.
        moe_mesh: mesh of the experts, with `device_mesh`.
        seed: seed for weights that the directory lacks.
        revision: branch, tag or commit on the Hub.
        allow_pickle: read `.bin` files if there are no safetensors.
        trust_remote_code: the Hub commit whose code may run, or the digest of a directory's code. None: run none.
        peft: adapters to train instead of the model: a peft configuration, or a mapping such as
            `{"type": "lora", "r": 16, "target_modules": "all-linear"}`; see docs/guides/fine-tune.md. Checkpoints then
            contain only the adapters.
        sizes: `dp_size=..., dp_replicate_size=..., tp_size=..., pp_size=..., cp_size=..., ep_size=...`.

    Returns:
        The manager. Call `build_optimizer` next.

    Warns:
        UserWarning: weights are missing from the directory or unknown to the model (on rank 0).

    Raises:
        MeshwrightError: sizes, config, directory or files are invalid, or the strategy cannot train the model (on all
            ranks).
    """
    with _close_on_error():
        manager = _build_manager(strategy, sizes, config, wrapper_config, device, world, device_mesh, moe_mesh)
        wanted = PretrainedRequest(path, hf_config, dtype, seed, revision, allow_pickle, trust_remote_code, peft)
        manager.parallelize(*open_pretrained_model(manager.mesh.world, wanted))
    return manager


def from_config(
    hf_config: Any,
    strategy: str | None = None,
    *,
    config: Mapping[str, Any] | BaseModel | None = None,
    wrapper_config: Mapping[str, Mapping[str, Any]] | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    world: World | None = None,
    device_mesh: Mesh | DeviceMesh | None = None,
    moe_mesh: DeviceMesh | None = None,
    seed: int = 0,
    init: str = PARALLEL_INIT,
    peft: Any = None,
    **sizes: Unpack[MeshSizeKwargs],
) -> StrategyManager:
    """Initialize a Hugging Face model with new weights under a strategy. The weights depend on `seed` alone, not on the
    strategy, the device or the number of ranks.

    Collective; see [Note: process group of a call]. Arguments are those of `from_pretrained`, except:

    Args:
        hf_config: a Hugging Face configuration, or a mapping of its fields including `model_type`.
        init: "parallel": each rank samples only its own shards. "transformers": each rank samples all weights, bitwise
            identical to those of transformers after `torch.manual_seed(seed)`.
        peft: see `from_pretrained`. Checkpoints contain the full model, since its base weights exist nowhere else.

    Raises:
        MeshwrightError: see `from_pretrained`.
    """

    def build() -> tuple[nn.Module, Weights | None]:
        hf_cfg = config_from_mapping(hf_config, where="hf_config") if isinstance(hf_config, Mapping) else hf_config
        init_dtype = to_dtype(dtype) or getattr(hf_cfg, "dtype", None) or torch.float32
        init_dtype = (adapters and adapters.base_dtype) or init_dtype
        model, weights = init_model_on_meta(hf_cfg, init_dtype, seed, init=init)
        return (
            (model, weights)
            if adapters is None
            else apply_adapter(model, weights, adapters, None, seed=seed, where="peft")
        )

    with _close_on_error():
        manager = _build_manager(strategy, sizes, config, wrapper_config, device, world, device_mesh, moe_mesh)
        call_world = manager.mesh.world
        adapters = call_world.run_on_all_ranks(
            lambda: None if peft is None else parse_adapter_options(peft, where="peft")
        )
        manager.parallelize(*call_world.run_on_all_ranks(build))
    return manager


@contextmanager
def _close_on_error() -> Iterator[None]:
    """Destroy the process group that the call has started if it fails with the same error on all ranks."""
    had_group = dist.is_initialized()
    try:
        yield
    except MeshwrightError:
        if not had_group and dist.is_initialized():
            dist.destroy_process_group()
        raise


@dataclass(frozen=True)
class PretrainedRequest:
    """Arguments of `from_pretrained` that select the model."""

    path: str | Path
    hf_config: Any = None
    dtype: torch.dtype | str | None = None
    seed: int = 0
    revision: str | None = None
    allow_pickle: bool = False
    trust_remote_code: str | None = None
    peft: Any = None


def open_pretrained_model(world: World, request: PretrainedRequest) -> tuple[nn.Module, Weights]:
    """Return a model on the meta device and its weights, for `StrategyManager.parallelize`. Collective."""
    model, weights, base, options = _open_base(world, request, where="peft")
    if options is None:
        return model, weights
    adapted, values = world.run_on_all_ranks(
        lambda: apply_adapter(model, weights, options, base, seed=request.seed, where="peft")
    )
    return adapted, values or weights


def open_for_injection(
    world: World, request: PretrainedRequest, *, where: str
) -> tuple[nn.Module, ExternalAdapterInjection]:
    """Return the base model, and what other code needs to inject `request`'s adapter into it. Collective."""
    model, weights, base, options = _open_base(world, request, where=where)
    if options is None:
        raise ModelError(f"{where} gives no adapter.")
    return model, world.run_on_all_ranks(lambda: ExternalAdapterInjection(model, weights, options, base, where=where))


def _open_base(
    world: World, wanted: PretrainedRequest, *, where: str
) -> tuple[nn.Module, PretrainedWeights, BaseModelRef | None, AdapterOptions | None]:
    """Return the base model, its weights, a reference to the base, and the adapter's options. Collective."""
    adapters = world.run_on_all_ranks(
        lambda: None if wanted.peft is None else parse_adapter_options(wanted.peft, where=where)
    )
    trusted, allow_pickle, code = wanted.trust_remote_code, wanted.allow_pickle, wanted.trust_remote_code is not None
    revision = wanted.revision or (trusted if is_commit(trusted) else None)
    directory = find_model_directory_on_all_ranks(
        wanted.path, world, revision=revision, allow_pickle=allow_pickle, include_code=code
    )

    def load() -> tuple[nn.Module, PretrainedWeights, BaseModelRef | None]:
        if trusted is not None:
            register_trusted_code(
                directory, trusted, commit=get_hub_commit(wanted.path, directory), where="trust_remote_code"
            )
        hf_config = wanted.hf_config
        if hf_config is None or isinstance(hf_config, Mapping):
            hf_config = config_from_directory(directory, hf_config or {}, where="hf_config")
        dtype = (adapters and adapters.base_dtype) or to_dtype(wanted.dtype)
        model, weights = open_pretrained(directory, hf_config, dtype=dtype, allow_pickle=allow_pickle, seed=wanted.seed)
        base = None if adapters is None else identify_base(wanted.path, directory, allow_pickle=allow_pickle)
        return model, weights, base

    model, weights, base = world.run_on_all_ranks(load)
    check_same_weights(weights, world, base)
    warn_about_weights(weights, world, stacklevel=5)
    return model, weights, base, adapters


def identify_base(path: str | Path, directory: Path, *, allow_pickle: bool = False) -> BaseModelRef:
    """Return the reference to the base model that was loaded from `directory` for a path or Hub id."""
    commit = get_hub_commit(path, directory)
    name = str(path) if commit is not None else str(directory.resolve())
    return BaseModelRef(name, commit, compute_fingerprint(directory, allow_pickle=allow_pickle))


def _build_manager(
    strategy: str | None,
    sizes: MeshSizeKwargs,
    config: Mapping[str, Any] | BaseModel | None,
    wrapper_config: Mapping[str, Mapping[str, Any]] | None,
    device: str | torch.device | None,
    world: World | None,
    device_mesh: Mesh | DeviceMesh | None,
    moe_mesh: DeviceMesh | None,
) -> StrategyManager:
    """Build the manager on the given mesh or world, or else on the existing or a new process group. Collective."""
    known: Degrees | None = None
    if device_mesh is None:
        if moe_mesh is not None:
            raise MeshError("moe_mesh is the mesh of the experts and needs device_mesh, which is missing. Give both.")
        call_world = world or open_world(device)
    else:
        if world is not None or device is not None:
            name = "device" if world is None else "world"
            raise MeshError(f"device_mesh and {name} both say where the model is to be. Leave {name} out.")
        known = infer_degrees(device_mesh, moe_mesh)
        call_world = device_mesh.world if isinstance(device_mesh, Mesh) else open_world(device_mesh.device_type)

    def resolved() -> Any:
        name = strategy or (find_strategy_name(config) if isinstance(config, BaseModel) else "fsdp2")
        claims, wanted = get_strategy(name).axes, validate_config(MeshSizes, sizes, where="the call")
        if known is not None:
            wanted = _sizes_from_degrees(known, sizes, claims)
        return resolve(name, wanted, call_world.size, config=config, wrapper_config=wrapper_config)

    stack, degrees = call_world.run_on_all_ranks(resolved)
    return stack.build(
        Mesh(degrees, call_world)
        if device_mesh is None
        else from_device_mesh(device_mesh, stack.claimed_axes, moe_mesh)
    )


def _sizes_from_degrees(degrees: Degrees, sizes: MeshSizeKwargs, claims: Collection[str]) -> MeshSizes:
    """Return the sizes of a mesh with these degrees; reject conflicting `sizes`."""
    known = {f"{axis}_size": getattr(degrees, axis) for axis in ("dp", "dp_replicate", "tp", "pp", "cp", "ep")}
    for name, size in sizes.items():
        if size not in (None, known[name]):
            raise MeshError(f"{name}={size}, but device_mesh has {known[name]}. Leave {name} out.")
    if "dp_shard" not in claims or (sizes.get("dp_replicate_size") is None and degrees.dp_replicate == 1):
        del known["dp_replicate_size"]
    return MeshSizes(**known)


def check_same_weights(weights: PretrainedWeights, world: World, base: BaseModelRef | None = None) -> None:
    """Reject weights that differ between ranks: names, shapes, dtypes or the base's fingerprint. Collective."""
    mine = [weights.compute_fingerprint(), 0 if base is None else int(base.fingerprint[:15], 16)]
    if world.reduce_ints(mine, dist.ReduceOp.MIN) != world.reduce_ints(mine, dist.ReduceOp.MAX):
        raise ModelError(
            "ranks find different weights under the same path: names, shapes, dtypes or values differ. Copy the same "
            "directory to every node, or put it on a file system that they share."
        )


def warn_about_weights(weights: PretrainedWeights, world: World, *, stacklevel: int) -> None:
    """Warn about missing or unexpected weights on rank 0."""
    if world.rank == 0:
        for remark in weights.warnings:
            warn(remark, stacklevel=stacklevel)
