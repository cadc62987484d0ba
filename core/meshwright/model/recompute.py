"""Recompute activations of blocks in backward (activation checkpointing), and compile blocks.

[Note: instance forwards] A block keeps its class, name and hooks: only `block.forward`, as an attribute of the
instance, is replaced. So no parameter is renamed, hooks of sharding run around the recomputation and not within it, and
later wrappers (compile, then sharding) wrap this one.

[Note: no cache] A recomputed block would fill a key-value cache twice. transformers creates a cache by default, also in
training, where nothing reads it. So a checkpointed block gets None instead, as with transformers' own checkpointing. A
cache that already holds tokens is rejected.

"full" saves only a block's inputs. "selective" also saves the results that are most expensive for their size: every
second matrix product, all attention, and results of collectives. Source: Chen et al. 2016, arXiv:1604.06174;
torch.utils.checkpoint; the policy of torchtitan's selective per-op mode.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import zip_longest
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .._compat.torch import (
    TorchDispatchMode,
    compile_function,
    compiles_attention_in_float64,
    draws_random_numbers,
    is_attention,
    is_collective,
    is_matmul,
    is_topk,
)
from ..base.errors import ConfigError, ModelError, StrategyError
from .activation_budget import BudgetedBlocks
from .activation_options import ActivationCheckpointing, ActivationOptions, format_activation_option
from .forward_order import ForwardMethod, WrapOrder, wrap_forward
from .layout import ModelLayout
from .offload import OffloadedBlocks

CheckpointMode = Literal["full", "selective"]
"""What backward recomputes: full blocks, or all but the expensive operators."""
MakeContexts: TypeAlias = "Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]"
"""Creates the context of a block's forward and that of its recomputation."""


def checkpoint_blocks(
    model: nn.Module, layout: ModelLayout, mode: ActivationCheckpointing, *, save_routing: bool = False
) -> BudgetedBlocks | OffloadedBlocks | None:
    """Let every block recompute its activations in backward, or offload them to host memory; in place.

    Takes effect while a block is in training mode and gradients are enabled. The recomputation samples the same random
    numbers (dropout).

    Args:
        model: model before compilation and sharding.
        mode: "full" or True, "selective", options with a budget or offloading, or False for nothing.
        save_routing: also save the choices of routers, so that no token is routed differently because a kernel's
            results vary slightly. The token counts of the experts are saved too, so the host does not read them again.

    Returns:
        With a budget, the blocks, for which `choose_saved_activations` must be called; with offloading, the counters of
        moved bytes; otherwise None.
    """
    if mode is False:
        return None
    if mode not in (True, "full", "selective") and not isinstance(mode, ActivationOptions):
        raise ConfigError(
            f"activation_checkpointing={mode!r} is not one of false, true, 'full', 'selective', "
            f"{{budget_gb: ...}}, {{offload: cpu}}."
        )
    if not layout.blocks:
        raise ModelError(
            f"activation_checkpointing={format_activation_option(mode)!r} acts on blocks, but {type(model).__name__} "
            "has no stack of blocks. Set activation_checkpointing=false, or describe the model through the hook "
            "model_layout."
        )
    managed: BudgetedBlocks | OffloadedBlocks | None = None
    if isinstance(mode, ActivationOptions):
        managed = OffloadedBlocks() if mode.budget_gb is None else BudgetedBlocks(mode.budget_gb)
    routing_contexts: list[MakeContexts] = [_make_routing_contexts] * save_routing

    def recompute(
        original: ForwardMethod, contexts: MakeContexts, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        return _run_checkpointed([contexts, *routing_contexts], original, args, kwargs)

    # A block may occur several times.
    for block in dict.fromkeys(map(model.get_submodule, layout.blocks)):
        if managed is None:
            contexts = [_make_selective_contexts] * (mode == "selective") + routing_contexts
            wrap = functools.partial(_wrap_recompute, block, contexts)
        elif isinstance(managed, BudgetedBlocks):
            wrap = functools.partial(managed.wrap_block, block, recompute)
        else:
            wrap = functools.partial(managed.wrap_block, block)
        wrap_forward(block, WrapOrder.RECOMPUTED, wrap)
        wrap_forward(block, WrapOrder.RECOMPUTED, functools.partial(_drop_cache, block))
    # Filled caches are rejected where they enter the model; see [Note: no cache].
    parents = {name[:index] for name in layout.blocks for index, letter in enumerate(name) if letter == "."} | {""}
    for module in map(model.get_submodule, parents):
        if _is_transformers_instance(module, "PreTrainedModel"):
            module.register_forward_pre_hook(_reject_filled_cache, with_kwargs=True)
    return managed


def _reject_filled_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if module.training and torch.is_grad_enabled():
        for value in filter(_is_cache, (*args, *kwargs.values())):
            # A cache that holds only states has no length.
            with suppress(ValueError):
                if value.get_seq_length():
                    raise ModelError(
                        f"activation checkpointing recomputes blocks without a key-value cache, but the "
                        f"{type(value).__name__} that {type(module).__name__} got holds tokens already. Leave "
                        f"past_key_values out, or set activation_checkpointing=false."
                    )


def _drop_cache(block: nn.Module, original: ForwardMethod) -> ForwardMethod:
    """Let a block ignore key-value caches during training; see [Note: no cache]."""
    names = list(inspect.signature(original).parameters)

    def drop(name: str | None, value: Any) -> Any:
        return False if name == "use_cache" else None if _is_cache(value) else value

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if block.training and torch.is_grad_enabled():
            args = tuple(drop(name, value) for name, value in zip_longest(names[: len(args)], args))
            kwargs = {name: drop(name, value) for name, value in kwargs.items()}
        return original(*args, **kwargs)

    return forward


def _is_cache(value: Any) -> bool:
    return _is_transformers_instance(value, "Cache")


def _is_transformers_instance(value: Any, name: str) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(value, getattr(transformers, name))


def _wrap_recompute(block: nn.Module, contexts: Sequence[MakeContexts], original: ForwardMethod) -> ForwardMethod:
    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return original(*args, **kwargs)
        return _run_checkpointed(contexts, original, args, kwargs)

    return forward


def _run_checkpointed(
    contexts: Sequence[MakeContexts], original: ForwardMethod, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    # torch.compile supports the modes themselves, but no wrapper around them.
    function = functools.partial(_combine_contexts, contexts) if len(contexts) > 1 else next(iter(contexts), None)
    options = {} if function is None else {"context_fn": function}
    return checkpoint(original, *args, use_reentrant=False, preserve_rng_state=True, **options, **kwargs)


def _combine_contexts(
    contexts: Sequence[MakeContexts],
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    forwards, recomputations = zip(*(each() for each in contexts), strict=True)
    return _nest_contexts(forwards), _nest_contexts(recomputations)


@contextmanager
def _nest_contexts(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


def _make_selective_contexts() -> Any:
    """Create the two contexts of one forward of one block, which counts its own matrix products."""
    counts: Counter[bool] = Counter()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_saved = is_collective(op)
        if is_attention(op):
            # If its dropout were not recomputed, later dropout would get its random numbers.
            is_saved = not draws_random_numbers(op, args, kwargs)
        elif is_matmul(op):
            # Forward and recomputation count separately.
            counts[context.is_recompute] += 1
            is_saved = counts[context.is_recompute] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _make_routing_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    results: list[Any] = []
    return _SavedRouting(results, is_recompute=False), _SavedRouting(results, is_recompute=True)


class _SavedRouting(TorchDispatchMode):
    """Save the results of data-dependent operators and replay them; as copies, since models modify them in place."""

    def __init__(self, results: list[Any], *, is_recompute: bool) -> None:
        super().__init__()
        self._results, self._is_recompute = results, is_recompute

    def __enter__(self) -> _SavedRouting:
        self._remaining = iter(self._results)
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_data_dependent = _is_data_dependent(func)
        if is_data_dependent and self._is_recompute:
            return _clone(next(self._remaining))
        result = func(*args, **(kwargs or {}))
        if is_data_dependent:
            self._results.append(_clone(result))
        return result


def _is_data_dependent(op: Any) -> bool:
    return is_topk(op) or str(op) == "meshwright.on_host.default"


def _clone(result: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    return result.clone() if isinstance(result, Tensor) else tuple(each.clone() for each in result)


# -- compilation

# Training and evaluation, two lengths each, and symbolic shapes.
_MAX_COMPILATIONS_PER_BLOCK = 8


def compile_blocks(
    model: nn.Module,
    layout: ModelLayout,
    *,
    device: torch.device | str = "cpu",
    backend: str = "inductor",
    excluded: Collection[str] = (),
) -> None:
    """Compile the forward of every block; in place, after activation checkpointing and before sharding.

    Blocks of one stack usually share one compilation.

    Args:
        device: device on which the model will run.
        excluded: names of modules that cannot be traced (experts, whose token counts depend on values). A block that
            contains one is compiled in parts: its largest modules that contain none.
    """
    if not layout.blocks:
        raise ModelError(
            f"enable_compile=true compiles blocks, but {type(model).__name__} has no stack of blocks. "
            f"Set enable_compile=false, or describe the model through the hook model_layout."
        )
    check_compiler(str(device), backend)
    excluded_modules = set(map(model.get_submodule, excluded))
    blocks = dict.fromkeys(map(model.get_submodule, layout.blocks))
    parts = [part for block in blocks for part in _iter_compilable(block, excluded_modules)]
    # Blocks that differ in what compile treats as constants (index, attention window) are compiled separately.
    compile_one = functools.partial(
        compile_function, backend=backend, max_versions=_MAX_COMPILATIONS_PER_BLOCK * len(parts)
    )
    for part in dict.fromkeys(parts):
        is_float64 = torch.device(device).type == "cpu" and any(p.dtype == torch.float64 for p in part.parameters())
        # Inside the compiled function: around it, torch 2.11 ignores the choice.
        if is_float64 and not compiles_attention_in_float64():
            wrap_forward(part, WrapOrder.COMPILED, lambda forward: compile_one(_use_math_attention(forward)))
        else:
            wrap_forward(part, WrapOrder.COMPILED, compile_one)


def _use_math_attention(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compute attention by matrix products and a softmax; see `compiles_attention_in_float64`."""

    @functools.wraps(function)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return function(*args, **kwargs)

    return forward


def _iter_compilable(module: nn.Module, excluded: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield the largest callable modules that contain no excluded one."""
    if module in excluded:
        return
    # A list of modules is not called itself.
    if type(module).forward is not nn.Module.forward and excluded.isdisjoint(module.modules()):
        yield module
    else:
        for child in module.children():
            yield from _iter_compilable(child, excluded)


@functools.cache
def check_compiler(device: str, backend: str) -> None:
    """Compile a small function; raise StrategyError with the reason if that fails."""

    try:
        compile_function(lambda x: (x.sin() + 1).sum(), backend=backend, max_versions=1)(torch.ones(3, device=device))
    except Exception as error:
        # Causes range from a missing compiler to a broken installation.
        reason = str(error).strip().split("\n")[0]
        if torch.device(device).type != "cpu":
            is_installed = importlib.util.find_spec("triton") is not None
            remedy = "Install Triton (it comes with torch's CUDA builds),"
        else:
            is_installed = any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++", "c++")))
            remedy = "Install a C++ compiler such as g++,"
        raise StrategyError(
            f"enable_compile=true, but torch.compile (backend {backend}) of torch {torch.__version__} does not work on "
            f"{device}: {type(error).__name__}: {reason} {'See the error above,' if is_installed else remedy} or set "
            f"enable_compile=false."
        ) from error
