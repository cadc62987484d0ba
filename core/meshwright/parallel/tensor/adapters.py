"""Adapters of peft under tensor parallelism.

The style of a layer is put around its wrapper, so that it and its low-rank matrices A and B share communication. Of a
column-parallel layer, B is divided along the output, and A is replicated; of a row-parallel one, A is divided along the
input, and B is replicated. Replicated matrices meet divided activations, so their gradients are summed. Dropout
before a divided A is drawn for the full input on every rank, so that masks are those of one process.
Source: Hu et al. 2021, arXiv:2106.09685; Shoeybi et al. 2019, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..._compat.peft import LowRank, low_rank, saved_copies, sum_norms, wrapped, wrappers
from ..._compat.torch import all_reduce, own_parameters
from ...model.forward_order import Layer
from .. import wrap_forward
from .collectives import chunk_sizes
from .local_parameters import Division
from .styles import Around

PARTIAL = "replicated_with_grad_allreduce"
OUT = ("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise", "embedding_colwise")
"""Styles that divide a layer's output."""
IN = ("rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise", "embedding_rowwise")
"""Styles that divide a layer's input."""


def spread(model: nn.Module, module: str, style: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the modules that a style is put around, each with the styles of its parameters.

    That is one module, unless there is a trained copy of it.
    """
    for name in saved_copies(model, module):
        outer = model.get_submodule(name)
        around = low_rank(outer)
        path = _path(outer, name) if around is not None else name
        styles = {f"{path}.{each}": style for each, _ in model.get_submodule(path).named_parameters(recurse=False)}
        if around is not None and around.parameter is None:
            styles |= {f"{name}.{each}": own for each, own in _of_adapter(around, style)}
        yield name, styles


def of_parameters(model: nn.Module, parameters: Mapping[str, str], leave: Iterable[str]) -> dict[str, str]:
    """Return the styles of adapters of single parameters, from the parameters' own styles.

    `leave` names modules that are divided otherwise, whose inputs the ranks share.
    """
    found: dict[str, str] = {}
    left = set(leave)
    for name, module in model.named_modules():
        around = low_rank(module)
        if around is not None and around.parameter is not None:
            path = _path(module, name)
            style = PARTIAL if path in left else parameters.get(f"{path}.{around.parameter}")
            found |= {f"{name}.{each}": s for each, s in _of_adapter(around, style)} if style is not None else {}
    return found


def has_other_wrappers(model: nn.Module) -> bool:
    """Return whether a layer is wrapped by something that is no low-rank adapter."""
    return any(low_rank(layer) is None for _, layer in wrappers(model))


def parts_of_wrappers(model: nn.Module) -> set[str]:
    """Return the modules within a tuner's wrappers."""
    return {f"{name}.{each}" for name, layer in wrappers(model) for each, _ in layer.named_modules() if each}


def layer_at(model: nn.Module, name: str) -> nn.Module:
    """Return the base model's layer at a name, inside of an adapter."""
    module = model.get_submodule(saved_copies(model, name)[0])
    return wrapped(module) if low_rank(module) is not None else module


def path_of_layer(model: nn.Module, name: str) -> str:
    """Return the name of a layer inside of a tuner's wrapper."""
    return _path(model.get_submodule(name), name)


def _path(outer: nn.Module, name: str) -> str:
    inner = wrapped(outer)
    while outer is not inner:
        outer, name = outer.base_layer, f"{name}.base_layer"
    return name


def _of_adapter(layer: LowRank, style: str) -> Iterator[tuple[str, str]]:
    """Yield names within the wrapper, and styles, of the parameters of an adapter whose base has a style."""
    divides_out, divides_in = style in OUT, style in IN
    if layer.is_transposed:
        divides_out, divides_in = divides_in, divides_out
    packed = "packed_" if style.startswith("packed") else ""
    whole = PARTIAL if divides_out or divides_in else style
    for name in layer.outer:
        yield name, f"{packed}colwise" if divides_out else whole
    for name in layer.inner:
        yield name, f"{packed}rowwise" if divides_in else whole


def divided_along_input(model: nn.Module, divisions: Mapping[str, Division]) -> Iterator[LowRank]:
    """Yield the adapters of layers whose input is divided."""
    for name, module in model.named_modules():
        adapter = low_rank(module)
        if adapter is not None and any(divisions[f"{name}.{each}"].is_sharded for each in adapter.inner):
            yield adapter


def readers_of(model: nn.Module, modules: set[nn.Module]) -> set[nn.Module]:
    """Replace modules that are never called, because a wrapper reads their parameters, by the wrapper."""
    found = set(modules)
    for _, layer in wrappers(model):
        adapter = low_rank(layer)
        if adapter is not None:
            read = {layer.get_submodule(each.rpartition(".")[0]) for each in (*adapter.outer, *adapter.inner)}
            read = {each for each in read if adapter.parameter is not None or isinstance(each, nn.ParameterDict)}
            found = (found - read) | {layer} if found & read else found
    return found


def divide_input(parallel: Around, layer: LowRank, is_active: Callable[[], bool]) -> None:
    """Let a wrapper whose base divides its input compute this rank's part while `is_active()`; in place."""
    wrap = functools.partial(wrap_forward, layer=Layer.TENSOR, is_active=is_active)
    for bias in layer.biases:
        wrap(bias, run=functools.partial(_with_share_of_bias, parallel.size, bias))
    for dropout in layer.dropouts:
        wrap(dropout, run=functools.partial(_dropped, parallel, layer, dropout))
    for magnitude in layer.magnitudes:
        sum_norms(magnitude, lambda squares: all_reduce(squares, "sum", parallel.group), is_active)


def _with_share_of_bias(size: int, module: nn.Module, forward: Callable[..., Any], x: Tensor) -> Any:
    """Add an equal part of the bias on each rank."""
    bias = own_parameters(module)["bias"]
    own_parameters(module)["bias"] = None if bias is None else bias / size
    try:
        return forward(x)
    finally:
        own_parameters(module)["bias"] = bias


def _dropped(parallel: Around, layer: LowRank, module: Any, forward: Callable[..., Any], x: Tensor) -> Any:
    """Apply this rank's part of a mask that is drawn for the full input."""
    if not module.training or module.p == 0:
        return x
    sizes = chunk_sizes(layer.in_features, parallel.size)
    mask = F.dropout(torch.ones(*x.shape[:-1], layer.in_features, dtype=x.dtype, device=x.device), module.p)
    return x * mask.narrow(-1, sum(sizes[: parallel.rank]), sizes[parallel.rank])
