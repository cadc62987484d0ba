"""Write the model of a checkpoint as a Hugging Face directory, in bounded memory, by one process or by many.

The files are what `save_pretrained` would write: safetensors with an index, in the format of published models, which
transformers converts to the names and shapes of its modules when it loads. Each rank writes files of its own. A rank
holds one file's tensors at a time.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from .._compat.transformers import is_left_out_of_files, saved_together, to_saved_format
from ..base.errors import CheckpointError, ConfigError
from ..files.parsing import reason
from ..mesh.world import World
from ..model.build import check_brings_no_code
from ..tensors.pieces import Sharded, tensor_pieces
from .directory import HUGGING_FACE
from .loading import checked
from .manifest import Manifest, read_manifest, verify
from .payload import read_tensors
from .read_index import read_index
from .values import MODEL

LEAST_FILE_BYTES = 64_000_000
"""Ranks share the work in files of at least this size."""
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass
class _File:
    """One file to be written.

    Attributes:
        groups: names of tensors, together where transformers converts them together.
        sizes: bytes of what is written, by its name.
    """

    groups: list[list[str]] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())


def export_checkpoint(
    checkpoint: str | Path,
    output: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: str | int = "5GB",
    world: World | None = None,
) -> None:
    """Write the model of a checkpoint, its configuration and its tokenizer as a Hugging Face directory.

    It appears under its name when it is complete, and not before.

    Args:
        checkpoint: its directory.
        output: a directory that is missing or empty.
        dtype: of the weights; None: as they were saved.
        max_shard_size: of a file, in bytes or as "5GB"; memory is bounded by it.
        world: ranks that share the work, and a file system; None: this process alone.

    Raises:
        CheckpointError: the checkpoint is not whole, has no configuration, or is not of the model that it names.
        ConfigError: the output is in the way, or a size is none.
    """
    checkpoint, output = Path(checkpoint), Path(output)
    rank, size = (world.rank, world.size) if world is not None else (0, 1)

    def plan() -> _Export:
        if world is None:
            manifest = read_manifest(checkpoint)
            verify(checkpoint, manifest, list(manifest.files))
        else:
            manifest = checked(checkpoint, world)
        if rank == 0:
            _check_empty(output)
        return _Export(checkpoint, manifest, dtype, as_bytes(max_shard_size), ranks=size)

    export = plan() if world is None else world.together(plan)
    writing = output.resolve().with_name(f"{output.resolve().name}.writing")
    if rank == 0:
        # What an interrupted one has left.
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
    if world is not None:
        world.reduce_ints([0])
    for name, file in list(export.files.items())[rank::size]:
        export.write(file, writing / name)
    if world is not None:
        world.reduce_ints([0])
    if rank == 0:
        export.describe(writing)
        writing.rename(output.resolve())
    if world is not None:
        world.reduce_ints([0])


class _Export:
    """What there is to be written."""

    def __init__(
        self, checkpoint: Path, manifest: Manifest, dtype: torch.dtype | None, limit: int, *, ranks: int
    ) -> None:
        self._checkpoint = checkpoint
        self._described = [name for name in manifest.files if PurePath(name).parts[0] == HUGGING_FACE]
        self._dtype = dtype
        self._index = read_index(checkpoint, manifest)
        self._stored = {
            name.removeprefix(MODEL): kind for name, kind in self._index.kinds.items() if name.startswith(MODEL)
        }
        self._model = _model_on_meta(checkpoint, self._described, self._stored)
        self._source = self._sources()
        self.files = self._planned(limit, ranks)

    def _sources(self) -> dict[str, str]:
        """For each name that is written, the name under which the checkpoint has it."""
        state = self._model.state_dict(keep_vars=True)
        first = {id(value): name for name, value in reversed(state.items())}
        tied = getattr(self._model, "all_tied_weights_keys", None) or {}
        sources = {
            name: first[id(value)]
            for name, value in state.items()
            if name not in tied and not is_left_out_of_files(self._model, name)
        }
        shapes = {name: self._stored[source][0] for name, source in sources.items() if source in self._stored}
        for name, value in state.items():
            if name in sources and shapes.get(name) != value.shape:
                raise CheckpointError(
                    f"the checkpoint {self._checkpoint} is not of the model that its configuration gives: {name} is "
                    f"{tuple(value.shape)} there, and {tuple(shapes[name]) if name in shapes else 'missing'} here."
                )
        return sources

    def _planned(self, limit: int, ranks: int) -> dict[str, _File]:
        sized = [(group, self._sizes(group)) for group in saved_together(self._model, list(self._source))]
        total = sum(sum(sizes.values()) for _, sizes in sized)
        limit = min(limit, max(-(-total // ranks), LEAST_FILE_BYTES))
        files = [_File()]
        for group, sizes in sized:
            if files[-1].sizes and files[-1].nbytes + sum(sizes.values()) > limit:
                files.append(_File())
            files[-1].groups.append(group)
            files[-1].sizes.update(sizes)
        if len(files) == 1:
            return {"model.safetensors": files[0]}
        return {f"model-{i + 1:05d}-of-{len(files):05d}.safetensors": file for i, file in enumerate(files)}

    def _sizes(self, group: list[str]) -> dict[str, int]:
        """Bytes of what a group becomes."""
        made = to_saved_format(self._model, {name: self._empty(name, "meta") for name in group})
        return {name: tensor.nbytes for name, tensor in made.items()}

    def _empty(self, name: str, device: str) -> Tensor:
        shape, dtype = self._stored[self._source[name]]
        if self._dtype is not None and dtype.is_floating_point:
            dtype = self._dtype
        return torch.empty(shape, dtype=dtype, device=device)

    def write(self, file: _File, path: Path) -> None:
        """Read a file's tensors from the checkpoint and write them."""
        tensors: dict[str, Tensor] = {}
        for group in file.groups:
            read = {name: self._empty(name, "cpu") for name in group}
            state = {
                f"{MODEL}{self._source[name]}": Sharded(tensor.shape, tensor.dtype, tuple(tensor_pieces(tensor)))
                for name, tensor in read.items()
            }
            read_tensors(self._checkpoint, self._index, state)
            made = to_saved_format(self._model, read)
            tensors.update({name: tensor.contiguous() for name, tensor in made.items()})
        save_file(tensors, path, metadata={"format": "pt"})

    def describe(self, output: Path) -> None:
        """Write the index, the configuration, and the tokenizer."""
        total = sum(file.nbytes for file in self.files.values())
        if len(self.files) > 1:
            index = {
                "metadata": {"total_size": total},
                "weight_map": {name: path for path, file in self.files.items() for name in file.sizes},
            }
            (output / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        for name in self._described:
            place = output / PurePath(name).relative_to(HUGGING_FACE)
            if place.name != "config.json":
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self._checkpoint / name, place)
        model: Any = self._model
        model.config.architectures = [type(model).__name__]
        floating = {self._empty(name, "meta").dtype for name in self._source}
        dtype = next((each for each in sorted(floating, key=str) if each.is_floating_point), torch.float32)
        model.config.dtype = str(dtype).removeprefix("torch.")
        model.config.save_pretrained(output)
        if model.can_generate():
            model.generation_config.save_pretrained(output)


def as_bytes(size: str | int) -> int:
    """The number of bytes that "5GB" or 5000000000 means.

    Raises:
        ConfigError: it means none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B)?", str(size).strip().upper())
    count = int(float(match[1]) * _UNITS.get(match[2], 1)) if match else 0
    if count < 1:
        raise ConfigError(f"max_shard_size={size!r} is no size. Give bytes, or a number with KB, MB, GB or TB.")
    return count


def _model_on_meta(checkpoint: Path, described: Sequence[str], stored: Collection[str]) -> nn.Module:
    """The model whose tensors have been stored: a causal LM, or one with a head over tokens or sequences."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    directory = checkpoint / HUGGING_FACE
    if f"{HUGGING_FACE}/config.json" not in described:
        raise CheckpointError(
            f"the checkpoint {checkpoint} has no configuration of a Hugging Face model, so it cannot be exported."
        )
    check_brings_no_code(directory / "config.json")
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        build: Any = functools.partial(AutoModelForCausalLM.from_config, trust_remote_code=False)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            # That of the text part of a multimodal type, which the auto class takes as a part of the whole only.
            known: list[Any] = [each for each in MODEL_FOR_CAUSAL_LM_MAPPING.values() if isinstance(each, type)]
            build = next((each for each in known if each.config_class is type(config)), build)
        with torch.device("meta"):
            model: nn.Module = build(config)
            if not model.state_dict().keys() >= set(stored):
                model = _with_other_head(config, stored) or model
    except Exception as error:
        # Each configuration and each model class fails in its own way.
        raise CheckpointError(
            f"transformers cannot build the model of the checkpoint {checkpoint}: {reason(error)}"
        ) from error
    unknown = sorted(set(stored) - model.state_dict().keys())
    if unknown:
        raise CheckpointError(
            f"the checkpoint {checkpoint} is not of the model that its configuration gives: {type(model).__name__} has "
            f"no {', '.join(unknown[:3])}{', ...' if len(unknown) > 3 else ''}."
        )
    return model


def _with_other_head(config: Any, stored: Collection[str]) -> nn.Module | None:
    """The model with a head over tokens or sequences that has these tensors; on the device of the context."""
    from transformers import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    autos: list[tuple[Any, Any]] = [
        (MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, AutoModelForTokenClassification),
        (MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification),
    ]
    for mapping, auto in autos:
        if type(config) in mapping:
            model: nn.Module = auto.from_config(config, trust_remote_code=False)
            if model.state_dict().keys() == set(stored):
                return model
    return None


def _check_empty(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} is there already and not empty. Name another directory.")
