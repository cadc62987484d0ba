"""A model with a peft adapter: the source of its values, and its base.

peft initializes the adapter without values of the base. For a base on the meta device, the base's parameters are
replaced during initialization by CPU tensors that are NaN everywhere and take no memory. An adapter that starts from
values of the base then contains NaN, and is rejected. Two cases are supported: copies of full modules, which are read
as the base's, and the magnitudes of DoRA, which are computed from a few rows of the base at a time. Each rank holds the
full initialized adapter.

[Note: the base] An adapter is useful only with the base that it was trained on. A base is identified by the location of
its files and by a fingerprint of their content, so it may be moved. Frozen weights of the base are not stored in
checkpoints. A model of an unknown base (built by a script, with its own weights) is saved in full. Source: Hu et al.
2021, arXiv:2106.09685; Liu et al. 2024, arXiv:2402.09353 (DoRA); peft.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.peft import (
    DoraFactors,
    apply_peft,
    create_nan_placeholder,
    import_peft,
    is_transposed,
    iter_dora_magnitudes,
    map_file_names,
    tie_adapters,
    to_base_name,
)
from ..base.errors import ModelError, suggest_match
from ..files.parsing import explain_library_error, read_json_object
from .model_files import InMemoryReader, TensorReader, open_safetensors, open_weights
from .weights import Weights, has_meta_tensors, load_weights, move_to_meta, replace_parameters

BASE_FILE = "meshwright_base.json"
"""File in an adapter's directory that names its base; peft ignores it."""
ADAPTER_CONFIG = "adapter_config.json"
"""peft's name of the file with an adapter's configuration."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_ELEMENTS_AT_ONCE = 1 << 24
"""Number of elements of a base weight that are read at a time."""
_NUM_SAMPLED_ROWS, _NUM_SAMPLED_ELEMENTS = 4, 512
"""Number of rows of each tensor, and of elements of each row, that a fingerprint samples."""
_INIT_HINT = (
    "Values of the base are read only when the model has been sharded: use an adapter that is drawn without them "
    "(init_lora_weights=true, gaussian or orthogonal), or resume from one that is saved."
)

# -- the base


@dataclass(frozen=True)
class BaseModelRef:
    """Reference to the base of adapters: absolute directory, or Hub id and revision; see `compute_fingerprint`."""

    path: str
    revision: str | None
    fingerprint: str

    def __str__(self) -> str:
        revision = f" at {self.revision}" if self.revision else ""
        return f"{self.path}{revision} (fingerprint {self.fingerprint[:12]})"


@dataclass(frozen=True)
class BaseParameters:
    """The base of an adapted model. `names`: parameters with values from the base, and their names in its files."""

    base: BaseModelRef
    names: Mapping[str, str]


def attach_base(model: nn.Module, base: BaseModelRef, names: Iterable[str]) -> None:
    """Attach its base to an adapted model; `names` are those of the base's own parameters."""
    base_names = set(names)
    all_names = {name: to_base_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    model.meshwright_base = BaseParameters(
        base, {name: base_name for name, base_name in all_names.items() if base_name in base_names}
    )


def get_base(model_parts: Sequence[nn.Module]) -> BaseParameters | None:
    """Return what `attach_base` attached to the model; None if nothing."""
    base: BaseParameters | None = getattr(model_parts[0], "meshwright_base", None) if model_parts else None
    return base


def find_frozen_base_parameters(model_parts: Sequence[nn.Module]) -> frozenset[str]:
    """Return the names of frozen parameters of the base, which a checkpoint may omit."""
    base = get_base(model_parts)
    if base is None:
        return frozenset()
    trained = {name for part in model_parts for name, value in part.named_parameters() if value.requires_grad}
    return frozenset(base.names.keys() - trained)


def get_adapter_configs(model: nn.Module) -> dict[str, Any]:
    configs = getattr(model, "peft_config", None)
    return dict(configs) if isinstance(configs, dict) else {}


def get_adapter_subfolder(name: str) -> str:
    """Return an adapter's folder relative to that of all adapters; peft has none for "default"."""
    return "." if name == "default" else name


def compute_fingerprint(directory: Path, *, allow_pickle: bool = False) -> str:
    """Return a digest of a directory's weight files: each tensor's name, shape, dtype, and values of four rows."""
    digest = hashlib.sha256()
    for name, source in sorted(open_weights(directory, allow_pickle=allow_pickle).items()):
        digest.update(json.dumps([name, list(source.shape), str(source.dtype)]).encode())
        for value in _iter_samples(source):
            digest.update(value)
    return digest.hexdigest()


def _iter_samples(source: TensorReader) -> Iterator[bytes]:
    # A vector is a single row.
    outer, inner = (source.shape[:1], source.shape[1:]) if len(source.shape) > 1 else ([], source.shape)
    if 0 in source.shape:
        return
    sizes, left = list(inner), _NUM_SAMPLED_ELEMENTS
    for dim in reversed(range(len(inner))):
        sizes[dim], left = min(inner[dim], left), max(1, left // inner[dim])
    last = outer[0] - 1 if outer else 0
    for row in sorted({last * i // (_NUM_SAMPLED_ROWS - 1) for i in range(_NUM_SAMPLED_ROWS)}):
        value = source.read([*[row for _ in outer], *[0] * len(inner)], [*[1 for _ in outer], *sizes])
        yield value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def read_base(directory: Path) -> BaseModelRef | None:
    """Return the base that a run recorded with an adapter; None if there is no record."""
    path = directory / BASE_FILE
    if not path.is_file():
        return None
    try:
        return BaseModelRef(**read_json_object(path))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{path} names no base ({error}). Write the adapter again, or remove the file.") from None


# -- the adapter


ReadRectangle = Callable[[Sequence[int], Sequence[int]], Tensor]
"""Reads the rectangle of given sizes at given offsets."""


class AdapterWeights:
    """Values of an adapted model by peft's names: those of `base` and those of `adapter`. Implements `Weights`."""

    def __init__(self, base: Weights | None, adapter: Mapping[str, ReadRectangle]) -> None:
        self.base, self._adapter = base, adapter

    def __contains__(self, name: object) -> bool:
        return name in self._adapter or (self.base is not None and to_base_name(str(name)) in self.base)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        if name in self._adapter:
            return self._adapter[name](offsets, sizes)
        if self.base is None:
            raise ModelError(f"no values of {name}")
        return self.base.read(to_base_name(name), offsets, sizes)


def add_adapter(
    model: nn.Module,
    weights: Weights | None,
    peft_config: Any = None,
    *,
    seed: int,
    adapter_dir: str | Path | None = None,
) -> tuple[nn.Module, Weights | None]:
    """Add a trainable adapter to a model in place, under peft's name "default". No communication.

    Values are those of `torch.manual_seed(seed)` and `peft.get_peft_model` in one process.

    Args:
        weights: values of a model on the meta device; None for a model that has its values.
        peft_config: peft's configuration; None: that of `adapter_dir`.
        adapter_dir: directory of a saved adapter to continue.

    Returns:
        The `PeftModel`, on the meta device if the model was, and its values; None if `weights` is None.
    """
    import_peft()
    directory = None if adapter_dir is None else Path(adapter_dir)
    if peft_config is None and directory is None:
        raise ModelError("no adapter is given: neither a configuration of peft nor the directory of a saved one.")
    config = peft_config if directory is None or peft_config is not None else read_adapter_config(directory)
    if getattr(config, "is_prompt_learning", False):
        raise ModelError(
            f"an adapter of type {config.peft_type.value} puts tokens before each sequence, which labels and positions "
            f"here do not know of. Use one that changes weights, such as lora."
        )
    is_deferred = has_meta_tensors(model)
    if is_deferred and weights is None:
        raise ModelError("the model is on the meta device, and no weights of it are given.")
    if is_deferred:
        replace_parameters(model, create_nan_placeholder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = tie_adapters(apply_peft(model, config, hint=f" {_INIT_HINT}" if is_deferred else ""))
    files = {} if directory is None else open_adapter_tensors(directory, adapted)
    if is_deferred and weights is not None:
        return adapted, collect_adapter_weights(adapted, weights, files)
    if files:
        load_weights(adapted, AdapterWeights(None, {name: each.read for name, each in files.items()}))
    return adapted, weights


def collect_adapter_weights(adapted: nn.Module, weights: Weights, files: Mapping[str, TensorReader]) -> Weights:
    """Return the values of a model whose adapter was initialized over NaN placeholders, or is in `files`.

    The model is on the meta device afterwards.
    """
    readers: dict[str, ReadRectangle] = {
        name: partial(_compute_row_norms, weights, path, each) for name, path, each in iter_dora_magnitudes(adapted)
    }
    initialized = {
        name: parameter.detach()
        for name, parameter in adapted.named_parameters(remove_duplicate=False)
        if name not in readers and to_base_name(name) not in weights
    }
    invalid = next(
        (name for name, value in initialized.items() if name not in files and bool(value.isnan().any())), None
    )
    if invalid is not None:
        raise ModelError(
            f"{invalid} starts from values of the base model. {_explain_base_dependence(adapted, invalid)}"
        )
    move_to_meta(adapted)
    readers |= {name: InMemoryReader(value).read for name, value in initialized.items()}
    return AdapterWeights(weights, readers | {name: each.read for name, each in files.items()})


def _explain_base_dependence(adapted: nn.Module, name: str) -> str:
    (config,) = get_adapter_configs(adapted).values()
    indices = getattr(config, "trainable_token_indices", None)
    if indices is not None and ".trainable_tokens_" in name:
        return (
            f"trainable_token_indices={indices!r} copies rows of the embedding, and values of the base are read only "
            f"when the model has been sharded. Train the whole embedding (modules_to_save), or build the adapted model "
            f"with peft, from a base that has its values, and give it to the manager's parallelize."
        )
    return _INIT_HINT


def _compute_row_norms(
    base: Weights, path: str, factors: DoraFactors, offsets: Sequence[int], sizes: Sequence[int]
) -> Tensor:
    """Return row norms of a weight with its adapter, as peft computes them, in the dtype of the base."""
    (start,), (size,), columns = offsets, sizes, factors.right.shape[1]
    norms = []
    step = max(1, _ELEMENTS_AT_ONCE // columns)
    for begin in range(start // step * step, start + size, step):
        first, end = max(begin, start), min(begin + step, start + size)
        order = -1 if factors.is_transposed else 1
        rows = base.read(f"{path}.weight", (first, 0)[::order], (end - first, columns)[::order]).to(factors.dtype)
        norms.append(factors.compute_norms(rows, first, slice(begin, begin + step)))
    return torch.cat(norms)


def read_adapter_config(directory: Path) -> Any:
    """Return peft's configuration of a saved adapter, set to training mode."""
    peft = import_peft()
    path = directory / ADAPTER_CONFIG
    if not path.is_file():
        problem = "is no directory" if not directory.is_dir() else f"holds no {ADAPTER_CONFIG}"
        raise ModelError(
            f"{str(directory)!r} {problem}, so it is no adapter of peft. Give a directory that a run with model.peft, "
            f"or peft's `save_pretrained`, has written."
        )
    try:
        read_json_object(path)
        config: Any = peft.PeftConfig.from_pretrained(str(directory))
    except Exception as error:
        # peft raises errors of any type for invalid values.
        raise ModelError(
            f"{path} is no configuration of an adapter: {explain_library_error(error)}. Write it again."
        ) from None
    config.inference_mode = False
    return config


def open_adapter_tensors(directory: Path, adapted: nn.Module) -> dict[str, TensorReader]:
    """Return the tensors of a saved adapter by name in the model. Raises ModelError for another adapter or base."""
    path = directory / ADAPTER_WEIGHTS
    if not path.is_file():
        raise ModelError(
            f"{directory} holds no adapter: no {path.name}. Give a directory that peft's save_pretrained wrote."
        )
    stored, names = open_safetensors(path), map_file_names(adapted)
    shapes = {name: tensor.shape for name, tensor in adapted.state_dict(keep_vars=True).items()}
    parameters = dict(adapted.named_parameters(remove_duplicate=False))
    lost = sorted(names.keys() - stored.keys())
    if lost:
        raise ModelError(
            f"{path} lacks {len(lost)} tensors of the adapter that its configuration describes, such as {lost[0]}."
            f"{suggest_match(lost[0], stored)} Give the configuration that it was saved with, and the same base model."
        )
    # The adapter's file may hold full embeddings that replace the base's.
    names |= {key: key for key in stored.keys() & shapes.keys()}
    unexpected = sorted(stored.keys() - names.keys())
    if unexpected:
        raise ModelError(
            f"{path} holds {len(unexpected)} tensors that this adapter has no place for, such as {unexpected[0]}."
            f"{suggest_match(unexpected[0], names)} It belongs to another base model or configuration."
        )
    # Tied weights are read once, in the embedding's layout.
    names = {key: name for key, name in names.items() if not is_transposed(name)}
    for key, name in names.items():
        if stored[key].shape != shapes[name]:
            raise ModelError(
                f"{path}: {key} is {tuple(stored[key].shape)}, and that of this base model {tuple(shapes[name])}. The "
                f"adapter belongs to another base model or configuration."
            )
    readers = {id(adapted.get_parameter(name)): stored[key] for key, name in names.items() if name in parameters}
    buffers = {name: stored[key] for key, name in names.items() if name not in parameters}
    # Tied parameters have all of their names.
    return buffers | {name: readers[id(each)] for name, each in parameters.items() if id(each) in readers}
