"""A model with an adapter of peft, and where its values come from, also where the base model has none yet.

The adapter is drawn as peft draws it, by peft, whatever the base is: for a base on the meta device its parameters are
for this while tensors on the CPU that are not a number anywhere and take no memory. So an adapter that starts from
values of the base is known by what it becomes, and is refused, but for two kinds that are told apart: copies of whole
modules, which are read as the base's, and the magnitudes of DoRA, which are computed from the base's rows, a few at a
time. A rank holds all of what is drawn; it is the part of the model that is small.
Source: Hu et al. 2021, arXiv:2106.09685; Liu et al. 2024, arXiv:2402.09353 (DoRA); peft.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.peft import (
    Factors,
    base_name,
    file_names,
    inject,
    is_transposed,
    magnitudes,
    require_peft,
    stand_in,
)
from .._compat.peft_tying import tie_adapters
from ..base.errors import ModelError, nearest
from ..files.parsing import read_json_object, reason
from .adapter_base import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_configs
from .pretrained.files import Source, open_safetensors, rectangle
from .weights import Weights, fill, is_meta, leave_on_meta, replace_parameters

AT_ONCE = 1 << 24
"""So many elements of a base weight are looked at together."""


_DRAWN_ALONE = (
    "Values of the base are read only when the model has been sharded: use an adapter that is drawn without them "
    "(init_lora_weights=true, gaussian or orthogonal), or go on from one that is saved."
)


class AdapterWeights:
    """The values of an adapted model by peft's names; `Weights` of it.

    Attributes:
        base: of the base model.
        own: what has been drawn, whole.
    """

    def __init__(
        self,
        base: Weights,
        own: Mapping[str, Tensor],
        files: Mapping[str, Source],
        magnitudes: Mapping[str, Callable[[int, int], Tensor]],
    ) -> None:
        self.base, self.own = base, own
        self._files, self._magnitudes = files, magnitudes

    def __contains__(self, name: object) -> bool:
        own = (self._files, self._magnitudes, self.own)
        return any(name in each for each in own) or base_name(str(name)) in self.base

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """See `meshwright.model.weights.Weights`."""
        if name in self._files:
            return self._files[name].read(offsets, sizes)
        if name in self._magnitudes:
            return self._magnitudes[name](offsets[0], sizes[0])
        if name in self.own:
            return self.own[name][rectangle(offsets, sizes)]
        return self.base.read(base_name(name), offsets, sizes)


def with_adapter(
    model: nn.Module,
    weights: Weights | None,
    peft_config: Any = None,
    *,
    seed: int,
    adapter_dir: str | Path | None = None,
) -> tuple[nn.Module, Weights | None]:
    """Put an adapter into a model, trainable, under peft's name for it, "default".

    The values are those that one process gets from `torch.manual_seed(seed)` and `peft.get_peft_model`, equal on every
    rank. No communication.

    Args:
        model: of transformers; it becomes the base, in place.
        weights: of the model by its own names; None: it has its values already.
        peft_config: of peft, such as `LoraConfig(...)`; None: that of `adapter_dir`.
        seed: of what is drawn.
        adapter_dir: of an adapter that `save_pretrained` of peft wrote, to go on from.

    Returns:
        The `PeftModel`, on the meta device where the model was, and the values of it; None where it has them.

    Raises:
        ModelError: peft is not installed, or refuses; the adapter starts from values that the base does not have yet;
            the files are not those of this adapter and base.
    """
    require_peft()
    directory = None if adapter_dir is None else Path(adapter_dir)
    if peft_config is None and directory is None:
        raise ModelError("no adapter is given: neither a configuration of peft nor the directory of a saved one.")
    config = peft_config if directory is None or peft_config is not None else read_adapter_config(directory)
    if getattr(config, "is_prompt_learning", False):
        raise ModelError(
            f"an adapter of type {config.peft_type.value} puts tokens before each sequence, which labels and positions "
            f"here do not know of. Use one that changes weights, such as lora."
        )
    is_deferred = is_meta(model)
    if is_deferred and weights is None:
        raise ModelError("the model is on the meta device, and no weights of it are given.")
    if is_deferred:
        replace_parameters(model, stand_in)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = tie_adapters(inject(model, config, hint=f" {_DRAWN_ALONE}" if is_deferred else ""))
    files = {} if directory is None else files_of(directory, adapted)
    if not is_deferred or weights is None:
        if files:
            fill(adapted, AdapterWeights(_Nothing(), {}, files, {}))
        return adapted, weights
    return adapted, values_on_meta(adapted, weights, files)


def values_on_meta(adapted: nn.Module, weights: Weights, files: Mapping[str, Source]) -> Weights:
    """The values of a model whose adapter peft has drawn over a base of stand-ins; leaves the model on the meta device.

    Args:
        weights: of the base.
        files: of a saved adapter, by the names of the adapted model; they replace what was drawn.

    Raises:
        ModelError: the adapter starts from values of the base.
    """
    made = AdapterWeights(weights, _drawn(adapted, weights), files, _magnitudes(adapted, weights))
    wrong = next((name for name, value in made.own.items() if name not in files and bool(value.isnan().any())), None)
    if wrong is not None:
        raise ModelError(f"{wrong} starts from values of the base model. {_why(adapted, wrong)}")
    leave_on_meta(adapted)
    return made


def _why(adapted: nn.Module, name: str) -> str:
    """Which option lets a parameter start from values of the base, and what to do instead."""
    (config,) = adapter_configs(adapted).values()
    indices = getattr(config, "trainable_token_indices", None)
    if indices is not None and ".trainable_tokens_" in name:
        return (
            f"trainable_token_indices={indices!r} copies rows of the embedding, and values of the base are read only "
            f"when the model has been sharded. Train the whole embedding (modules_to_save), or build the adapted model "
            f"with peft, from a base that has its values, and give it to the manager's parallelize."
        )
    return _DRAWN_ALONE


def _drawn(adapted: nn.Module, base: Weights) -> dict[str, Tensor]:
    """What peft has drawn, by name."""
    computed = {name for name, *_ in magnitudes(adapted)}
    named = adapted.named_parameters(remove_duplicate=False)
    return {
        name: parameter.detach() for name, parameter in named if name not in computed and base_name(name) not in base
    }


def _magnitudes(adapted: nn.Module, base: Weights) -> dict[str, Callable[[int, int], Tensor]]:
    """For each magnitude of DoRA: its values from one entry on, so many."""
    return {name: partial(_norms, base, path, factors) for name, path, factors in magnitudes(adapted)}


def _norms(base: Weights, path: str, factors: Factors, start: int, size: int) -> Tensor:
    """Norms of rows of a weight with its adapter, as peft takes them, in the dtype of the base."""
    found = []
    step = max(1, AT_ONCE // factors.shape[1])
    for begin in range(start // step * step, start + size, step):
        first, end = max(begin, start), min(begin + step, start + size)
        count = end - first
        offsets, sizes = (first, 0), (count, factors.shape[1])
        if factors.transposed:
            offsets, sizes = offsets[::-1], sizes[::-1]
        rows = base.read(f"{path}.weight", offsets, sizes).to(factors.dtype)
        found.append(factors.norms(rows, first, slice(begin, begin + step)))
    return torch.cat(found)


def read_adapter_config(directory: Path) -> Any:
    """peft's configuration of a saved adapter, to be trained.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    peft = require_peft()
    path = directory / ADAPTER_CONFIG
    if not path.is_file():
        told = "is no directory" if not directory.is_dir() else f"holds no {ADAPTER_CONFIG}"
        raise ModelError(
            f"{str(directory)!r} {told}, so it is no adapter of peft. Give a directory that a run with model.peft, or "
            f"peft's `save_pretrained`, has written."
        )
    try:
        read_json_object(path)
        config: Any = peft.PeftConfig.from_pretrained(str(directory))
    except Exception as error:
        # peft raises whatever the values meet.
        raise ModelError(f"{path} is no configuration of an adapter: {reason(error)}. Write it again.") from None
    config.inference_mode = False
    return config


def files_of(directory: Path, adapted: nn.Module) -> dict[str, Source]:
    """The tensors of a saved adapter by the names of the model.

    Raises:
        ModelError: they are not those of this adapter and this base.
    """
    path = directory / ADAPTER_WEIGHTS
    if not path.is_file():
        raise ModelError(
            f"{directory} holds no adapter: no {path.name}. Give a directory that peft's save_pretrained wrote."
        )
    stored, names = open_safetensors(path), file_names(adapted)
    shapes = {name: tensor.shape for name, tensor in adapted.state_dict(keep_vars=True).items()}
    parameters = dict(adapted.named_parameters(remove_duplicate=False))
    lost = sorted(names.keys() - stored.keys())
    if lost:
        raise ModelError(
            f"{path} lacks {len(lost)} tensors of the adapter that its configuration describes, such as {lost[0]}."
            f"{nearest(lost[0], stored)} Give the configuration that it was saved with, and the same base model."
        )
    # Whole embeddings may be saved beside the adapter, in the place of the base's.
    names |= {key: key for key in stored.keys() & shapes.keys()}
    foreign = sorted(stored.keys() - names.keys())
    if foreign:
        raise ModelError(
            f"{path} holds {len(foreign)} tensors that this adapter has no place for, such as {foreign[0]}."
            f"{nearest(foreign[0], names)} It belongs to another base model or configuration."
        )
    # What is tied is read once, as the embedding has it.
    names = {key: name for key, name in names.items() if not is_transposed(name)}
    for key, name in names.items():
        if stored[key].shape != shapes[name]:
            raise ModelError(
                f"{path}: {key} is {tuple(stored[key].shape)}, and that of this base model {tuple(shapes[name])}. The "
                f"adapter belongs to another base model or configuration."
            )
    found = {id(adapted.get_parameter(name)): stored[key] for key, name in names.items() if name in parameters}
    buffers = {name: stored[key] for key, name in names.items() if name not in parameters}
    # What is tied is known by each of its names.
    return buffers | {name: found[id(each)] for name, each in parameters.items() if id(each) in found}


class _Nothing:
    """Weights of no tensor."""

    def __contains__(self, name: object) -> bool:
        return False

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        raise ModelError(f"no values of {name}")
