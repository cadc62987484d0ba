"""Compile a model block by block.

Blocks of one stack are alike, so one compilation serves many, and sharding gathers and frees between them as without
compile. See [Note: instance forwards] in `meshwright.model.recompute`: no name of a parameter changes.

A block that holds modules which cannot be traced (experts, to which tokens are sent by counts that only their values
tell) is compiled in parts: each of its modules that holds none of them, as large as can be, by itself.
Source: torch.compile, "regional compilation".
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .._compat.torch import compiled
from .._compat.torch_versions import compiles_attention_in_float64
from ..base.errors import ModelError, StrategyError
from .forward_order import Layer, put_around
from .layout import ModelLayout


def compile_blocks(
    model: nn.Module,
    layout: ModelLayout,
    *,
    device: torch.device | str = "cpu",
    backend: str = "inductor",
    leave: Collection[str] = (),
) -> None:
    """Compile the forward of every block; in place, after activation checkpointing and before sharding.

    Args:
        model: to train.
        layout: of the model.
        device: where the model will run.
        backend: of `torch.compile`.
        leave: names of modules that run as they are.

    Raises:
        ModelError: the model has no blocks.
        StrategyError: the backend does not work on this device, for want of a C++ compiler, say.
    """
    if not layout.blocks:
        raise ModelError(
            f"enable_compile=true compiles blocks, but {type(model).__name__} has no stack of blocks. "
            f"Set enable_compile=false, or describe the model through the hook model_layout."
        )
    check_compiler(str(device), backend)
    left = {model.get_submodule(name) for name in leave}
    blocks = list(dict.fromkeys(model.get_submodule(name) for name in layout.blocks))
    parts = [part for block in blocks for part in _parts(block, left)]
    # Where blocks differ in what compile takes for constants (their index, a window), each is compiled anew.
    compile_one = functools.partial(compiled, backend=backend, versions=_VERSIONS_PER_BLOCK * len(parts))
    for part in dict.fromkeys(parts):
        is_float64 = torch.device(device).type == "cpu" and any(p.dtype == torch.float64 for p in part.parameters())
        # Within what is compiled: around it, torch 2.11 does not heed the choice.
        if is_float64 and not compiles_attention_in_float64():
            put_around(part, Layer.COMPILED, lambda forward: compile_one(_with_plain_attention(forward)))
        else:
            put_around(part, Layer.COMPILED, compile_one)


def _with_plain_attention(function: Callable[..., Any]) -> Callable[..., Any]:
    """A forward in which attention is matrix products and a softmax; see `compiles_attention_in_float64`."""

    @functools.wraps(function)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return function(*args, **kwargs)

    return forward


def _parts(module: nn.Module, left: set[nn.Module]) -> Iterator[nn.Module]:
    """The largest modules within one that hold none of those which are left, and are called."""
    if module in left:
        return
    # A list of modules is not called itself.
    is_called = type(module).forward is not nn.Module.forward
    if is_called and left.isdisjoint(module.modules()):
        yield module
    else:
        for child in module.children():
            yield from _parts(child, left)


# Training and evaluation, two lengths each, and shapes that have become symbolic.
_VERSIONS_PER_BLOCK = 8


@functools.cache
def check_compiler(device: str, backend: str) -> None:
    """Compile a small function.

    Raises:
        StrategyError: it does not work, with the reason.
    """

    def small(x: Any) -> Any:
        return (x.sin() + 1).sum()

    try:
        compiled(small, backend=backend, versions=1)(torch.ones(3, device=device))
    except Exception as error:
        # Anything from a missing compiler to a broken installation.
        reason = str(error).strip().split("\n")[0]
        raise StrategyError(
            f"enable_compile=true, but torch.compile (backend {backend}) of torch {torch.__version__} does not work on "
            f"{device}: {type(error).__name__}: {reason} {_compiler_remedy(device)} or set enable_compile=false."
        ) from error


def _compiler_remedy(device: str) -> str:
    """What to install, where something is missing; a compiler that is there and fails is another matter."""
    if torch.device(device).type != "cpu":
        has_triton = importlib.util.find_spec("triton") is not None
        return "See the error above," if has_triton else "Install Triton (it comes with torch's CUDA builds),"
    has_compiler = any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++", "c++")))
    return "See the error above," if has_compiler else "Install a C++ compiler such as g++,"
