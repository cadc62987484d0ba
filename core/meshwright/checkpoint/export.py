"""Write the model of a checkpoint as a Hugging Face directory, in bounded memory, by one process or many.

The files are those of `save_pretrained`: safetensors with an index, in the format of published models. Each rank writes
files of its own, and holds the tensors of one file at a time. Adapters are written by the first rank: see
`adapter_files`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from .._compat.transformers import is_left_out_of_files, saved_together, to_saved_format
from ..base.errors import CheckpointError, ConfigError
from ..mesh.world import World
from ..model.model_files import GENERATION_CONFIG, generation_json
from ..tensors.state import TensorKind
from .adapter_files import AdapterFiles, has_adapters
from .loading import checked
from .manifest import read_manifest, verify
from .places import Where
from .remote import place_of
from .stored_model import StoredModel, copy_files, first_names, model_on_meta

LEAST_FILE_BYTES = 64_000_000
"""Ranks share the work in files of at least this size."""
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass
class _File:
    """A file to be written: names of tensors, in groups that transformers converts together, and sizes in bytes."""

    groups: list[list[str]] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())


def export_checkpoint(
    checkpoint: Where,
    output: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: str | int = "5GB",
    average: bool = False,
    world: World | None = None,
) -> None:
    """Write the model of a checkpoint, its configuration and its tokenizer as a Hugging Face directory.

    The directory appears under its name when it is complete.

    Args:
        checkpoint: a path, a URL or a place.
        output: a directory that is missing or empty.
        dtype: of the weights; None: as they were saved.
        max_shard_size: of a file, in bytes or as "5GB"; it bounds the memory needed.
        average: write the averages of the weights, rounded to their dtype; see `meshwright.train.loop.ema`.
        world: ranks that share the work and a file system; None: this process alone.

    Raises:
        CheckpointError: the checkpoint is incomplete, has no configuration or no average, or is not of the model that
            its configuration gives.
        ConfigError: the output is not empty, or a size is invalid.
    """
    output = Path(output)
    rank, size = (world.rank, world.size) if world is not None else (0, 1)

    def plan() -> Export | AdapterFiles:
        place = place_of(checkpoint)
        if world is None:
            manifest = read_manifest(place)
            verify(place, manifest, list(manifest.files))
        else:
            manifest = checked(place, world)
        if rank == 0:
            check_empty(output)
        stored = StoredModel(place, manifest, average=average)
        if has_adapters(stored):
            return AdapterFiles(stored, dtype, model_on_meta(stored, adapted=True))
        limit, where = as_bytes(max_shard_size), f"the checkpoint {place}"
        return Export(model_on_meta(stored), stored, stored.described, dtype, limit, ranks=size, where=where)

    export = plan() if world is None else world.together(plan)
    with written_whole(output, world) as writing:
        for name in list(export.files)[rank::size]:
            export.write(name, writing / name)
        if world is not None:
            world.reduce_ints([0])
        if rank == 0:
            export.describe(writing)


@contextmanager
def written_whole(output: Path, world: World | None = None) -> Iterator[Path]:
    """Yield a directory that gets its name when the context is left without an error. Collective."""

    def wait() -> None:
        if world is not None:
            world.reduce_ints([0])

    writing = output.resolve().with_name(f"{output.resolve().name}.writing")
    first = world is None or world.rank == 0
    if first:
        # An interrupted export may have left it.
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
    wait()
    yield writing
    if first:
        writing.rename(output.resolve())
    wait()


class Tensors(Protocol):
    """The values of a model's parameters and buffers."""

    @property
    def kinds(self) -> Mapping[str, TensorKind]:
        """Shape and dtype of each, by its name in the model."""

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Read a full tensor to the CPU, in this dtype."""


class Export:
    """A full model to be written.

    Args:
        model: on the meta device; its class gives names, shapes and ties.
        tensors: its values.
        described: files to be copied: path, and name in the directory.
        dtype: of the weights; None: as the tensors have it.
        limit: bytes of a file.
        ranks: number of ranks that share the files.
        where: names the source of the tensors in errors.
    """

    def __init__(
        self,
        model: nn.Module,
        tensors: Tensors,
        described: Sequence[tuple[Path, str]],
        dtype: torch.dtype | None,
        limit: int,
        *,
        ranks: int,
        where: str,
    ) -> None:
        self._model, self._tensors, self._described = model, tensors, described
        self._dtype, self._where = dtype, where
        self._source = self._sources()
        self.files = self._planned(limit, ranks)

    def _sources(self) -> dict[str, str]:
        """Map each name that is written to its name in the checkpoint.

        A weight that the class ties, but that the checkpoint has under its own name, is written on its own: files may
        have given it other values, or code may have untied it.
        """
        state, kinds = self._model.state_dict(keep_vars=True), self._tensors.kinds
        tied = (getattr(self._model, "all_tied_weights_keys", None) or {}).keys()
        sources = {
            name: name if name in kinds else first
            for name, first in first_names(self._model).items()
            if name in kinds or (name not in tied and not is_left_out_of_files(self._model, name))
        }
        shapes = {name: kinds[source][0] for name, source in sources.items() if source in kinds}
        for name, value in state.items():
            if name in sources and shapes.get(name) != value.shape:
                raise CheckpointError(
                    f"{self._where} is not of the model that its configuration gives: {name} is "
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
        """Return the bytes of each tensor that a group is converted to."""
        shapes = {name: self._tensors.kinds[self._source[name]][0] for name in group}
        empty = {name: torch.empty(shapes[name], dtype=self._dtype_of(name), device="meta") for name in group}
        return {name: tensor.nbytes for name, tensor in to_saved_format(self._model, empty).items()}

    def _dtype_of(self, name: str) -> torch.dtype:
        dtype = self._tensors.kinds[self._source[name]][1]
        return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype

    def write(self, name: str, path: Path) -> None:
        """Read a file's tensors and write them."""
        tensors: dict[str, Tensor] = {}
        for group in self.files[name].groups:
            read = {each: self._tensors.read(self._source[each], self._dtype_of(each)) for each in group}
            made = to_saved_format(self._model, read)
            tensors.update({name: tensor.contiguous() for name, tensor in made.items()})
        save_file(tensors, path, metadata={"format": "pt"})

    def describe(self, output: Path) -> None:
        """Write the index, the configuration, and the tokenizer."""
        if len(self.files) > 1:
            index = {
                "metadata": {"total_size": sum(file.nbytes for file in self.files.values())},
                "weight_map": {name: path for path, file in self.files.items() for name in file.sizes},
            }
            (output / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        model: Any = self._model
        if model.can_generate():
            (output / GENERATION_CONFIG).write_bytes(generation_json(model.generation_config))
        copy_files([(source, name) for source, name in self._described if name != "config.json"], output)
        model.config.architectures = [type(model).__name__]
        dtypes = sorted({self._dtype_of(name) for name in self._source}, key=str)
        dtype = next((each for each in dtypes if each.is_floating_point), torch.float32)
        model.config.dtype = str(dtype).removeprefix("torch.")
        model.config.save_pretrained(output)


def as_bytes(size: str | int) -> int:
    """Return the number of bytes that "5GB" or 5000000000 stands for. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B)?", str(size).strip().upper())
    count = int(float(match[1]) * _UNITS.get(match[2], 1)) if match else 0
    if count < 1:
        raise ConfigError(f"max_shard_size={size!r} is no size. Give bytes, or a number with KB, MB, GB or TB.")
    return count


def check_empty(output: Path) -> None:
    """Raise ConfigError if a directory exists and is not empty."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} is there already and not empty. Name another directory.")
