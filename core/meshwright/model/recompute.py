"""Recompute the activations of blocks in backward instead of holding them.

[Note: instance forwards] A block keeps its class, its name and its hooks: only `block.forward`, as an attribute of the
instance, is replaced. So no parameter gets another name, hooks of sharding run around the recomputation and not in it,
and what wraps later (compile, then sharding) wraps this.

[Note: no cache] A block that fills a key-value cache fills it again when it is recomputed. transformers fills one by
default, also in training, where nobody reads it. So a checkpointed block gets None in its place, as under
transformers' own checkpointing; a cache that holds tokens already is refused.

"full" holds a block's inputs only. "selective" holds, besides, the results that cost most for their size: every second
matrix product, all of attention, and what came over the network, so that nothing is communicated twice. What is held
under a budget is chosen in `budget`; what lies in host memory, in `offload`.
Source: Chen et al. 2016, arXiv:1604.06174; torch.utils.checkpoint; the policy of torchtitan's selective per-op mode.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import zip_longest
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .._compat.torch import (
    TorchDispatchMode,
    draws_random_numbers,
    is_attention,
    is_choice,
    is_communication,
    is_matrix_product,
)
from ..base.errors import ConfigError, ModelError
from .activation_options import ActivationCheckpointing, ActivationOptions, told
from .budget import BudgetedBlocks
from .forward_order import Layer, put_around
from .layout import ModelLayout
from .offload import OffloadedBlocks

Mode = Literal["full", "selective"]
Contexts: TypeAlias = "Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]"
"""What a forward of a block runs in, and what its recomputation does."""


def checkpoint_blocks(
    model: nn.Module, layout: ModelLayout, mode: ActivationCheckpointing, *, keep_choices: bool = False
) -> BudgetedBlocks | OffloadedBlocks | None:
    """Let every block recompute its activations in backward, or hold them in host memory; in place.

    Acts while a block trains and gradients are on; evaluation and generation run as before. Random numbers (dropout)
    are drawn again as they were.

    Args:
        model: before compile and before sharding.
        layout: of the model.
        mode: "full" or True, "selective", options with a budget or a place, or False for nothing.
        keep_choices: hold what routers choose, too, so that no token is routed anew by numbers that a kernel computes a
            little differently the second time; and how many tokens go where, which the host need not read again.

    Returns:
        With a budget, the blocks, for which `choose` must be called; with a place, what counts the bytes that go there.

    Raises:
        ConfigError: no such mode.
        ModelError: the model has no blocks.
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
            f"activation_checkpointing={told(mode)!r} acts on blocks, but {type(model).__name__} has no stack of "
            f"blocks. Set activation_checkpointing=false, or describe the model through the hook model_layout."
        )
    held = None
    if isinstance(mode, ActivationOptions):
        held = OffloadedBlocks() if mode.budget_gb is None else BudgetedBlocks(mode.budget_gb)
    keeping: list[Contexts] = [_keeping_contexts] * keep_choices
    # One block may stand in several places.
    for block in dict.fromkeys(model.get_submodule(name) for name in layout.blocks):
        if held is None:
            contexts = [_selective_contexts] * (mode == "selective") + keeping
            put_around(block, Layer.RECOMPUTED, functools.partial(_recomputed, block, contexts))
        elif isinstance(held, BudgetedBlocks):
            again = functools.partial(_again, keeping)
            put_around(block, Layer.RECOMPUTED, functools.partial(held.put_around, block, again))
        else:
            put_around(block, Layer.RECOMPUTED, functools.partial(held.put_around, block))
        put_around(block, Layer.RECOMPUTED, functools.partial(_without_cache, block))
    _refuse_filled_caches(model, layout.blocks)
    return held


def _refuse_filled_caches(model: nn.Module, blocks: Iterable[str]) -> None:
    """Refuse a cache that holds tokens, where it enters the model; see [Note: no cache]."""
    transformers = sys.modules.get("transformers")
    parents = {name[:index] for name in blocks for index, letter in enumerate(name) if letter == "."} | {""}
    for module in map(model.get_submodule, parents):
        if transformers is not None and isinstance(module, transformers.PreTrainedModel):
            module.register_forward_pre_hook(_refuse_filled, with_kwargs=True)


def _refuse_filled(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if module.training and torch.is_grad_enabled():
        for value in filter(_is_cache, (*args, *kwargs.values())):
            # A cache that holds states alone has no length.
            with suppress(ValueError):
                if value.get_seq_length():
                    raise ModelError(
                        f"activation checkpointing recomputes blocks without a key-value cache, but the "
                        f"{type(value).__name__} that {type(module).__name__} got holds tokens already. Leave "
                        f"past_key_values out, or set activation_checkpointing=false."
                    )


def _without_cache(block: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a block take no key-value cache while it trains; see [Note: no cache]."""
    names = list(inspect.signature(original).parameters)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if block.training and torch.is_grad_enabled():
            args = tuple(_cache_dropped(name, value) for name, value in zip_longest(names[: len(args)], args))
            kwargs = {name: _cache_dropped(name, value) for name, value in kwargs.items()}
        return original(*args, **kwargs)

    return forward


def _cache_dropped(name: str | None, value: Any) -> Any:
    """An argument of a block; None in the place of a cache."""
    return False if name == "use_cache" else None if _is_cache(value) else value


def _is_cache(value: Any) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(value, transformers.Cache)


def _recomputed(block: nn.Module, contexts: Sequence[Contexts], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return original(*args, **kwargs)
        return _checkpointed(contexts, original, args, kwargs)

    return forward


def _again(
    keeping: Sequence[Contexts],
    original: Callable[..., Any],
    contexts: Contexts,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    return _checkpointed([contexts, *keeping], original, args, kwargs)


def _checkpointed(
    contexts: Sequence[Contexts], original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    # torch.compile takes the modes themselves and nothing around them.
    function = functools.partial(_combined, contexts) if len(contexts) > 1 else next(iter(contexts), None)
    options = {} if function is None else {"context_fn": function}
    return checkpoint(original, *args, use_reentrant=False, preserve_rng_state=True, **options, **kwargs)


def _combined(contexts: Sequence[Contexts]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    forwards, again = zip(*(each() for each in contexts), strict=True)
    return _within(forwards), _within(again)


@contextmanager
def _within(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


def _selective_contexts() -> Any:
    """The two contexts of one forward of one block, which counts its own matrix products."""
    counts: Counter[bool] = Counter()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if is_communication(op):
            return CheckpointPolicy.MUST_SAVE
        if is_attention(op):
            # Were its dropout not drawn again, that behind it would get its random numbers.
            draws = draws_random_numbers(op, args, kwargs)
            return CheckpointPolicy.PREFER_RECOMPUTE if draws else CheckpointPolicy.MUST_SAVE
        if is_matrix_product(op):
            # Forward and recomputation count alike, each on its own.
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _keeping_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    kept: list[Tensor | tuple[Tensor, ...]] = []
    return _Keep(kept), _Reuse(kept)


class _Keep(TorchDispatchMode):
    """Keeps what operators chose, as copies: models write into what they get (the weights of experts, to norm them)."""

    def __init__(self, kept: list[Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _depends_on_data(func):
            self._kept.append(_copied(result))
        return result


class _Reuse(TorchDispatchMode):
    """Gives what was kept, in the same order."""

    def __init__(self, kept: Sequence[Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self._kept = kept

    def __enter__(self) -> _Reuse:
        self._rest = iter(self._kept)
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _depends_on_data(func):
            return _copied(next(self._rest))
        return func(*args, **(kwargs or {}))


def _depends_on_data(op: Any) -> bool:
    """Whether an operator tells where tokens go."""
    return is_choice(op) or str(op) == "meshwright.on_host.default"


def _copied(result: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    return result.clone() if isinstance(result, Tensor) else tuple(each.clone() for each in result)
