"""Write the model of a checkpoint as a Hugging Face directory, in bounded memory, by one process or by many.

The files are what `save_pretrained` would write: safetensors with an index, in the format of published models, which
transformers converts to the names and shapes of its modules when it loads. Each rank writes files of its own. A rank
holds one file's tensors at a time. Of a checkpoint of adapters the first rank writes what peft would: see
`adapter_files`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence, Set
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
from ..model.base_files import GENERATION_CONFIG, generation_json
from ..tensors.state import TensorKind
from .adapter_files import AdapterFiles, has_adapters
from .loading import checked
from .manifest import read_manifest, verify
from .opening import place_of
from .places import Where
from .stored_model import StoredModel, model_on_meta

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
    checkpoint: Where,
    output: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: str | int = "5GB",
    average: bool = False,
    world: World | None = None,
) -> None:
    """Write the model of a checkpoint, its configuration and its tokenizer as a Hugging Face directory.

    It appears under its name when it is complete, and not before.

    Args:
        checkpoint: its directory, or another place that it lies in.
        output: a directory that is missing or empty.
        dtype: of the weights; None: as they were saved.
        max_shard_size: of a file, in bytes or as "5GB"; memory is bounded by it.
        average: of the weights in their place, rounded to their dtype; see `meshwright.train.ema`.
        world: ranks that share the work, and a file system; None: this process alone.

    Raises:
        CheckpointError: the checkpoint is not whole, has no configuration or no average, or is not of the model that
            it names.
        ConfigError: the output is in the way, or a size is none.
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
        return Export(
            model_on_meta(stored),
            stored,
            stored.described,
            dtype,
            as_bytes(max_shard_size),
            ranks=size,
            where=f"the checkpoint {place}",
        )

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
    """A directory to write into, which gets its name when the context is left, and not before. Collective."""
    writing = output.resolve().with_name(f"{output.resolve().name}.writing")
    first = world is None or world.rank == 0
    if first:
        # What an interrupted one has left.
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
    if world is not None:
        world.reduce_ints([0])
    yield writing
    if first:
        writing.rename(output.resolve())
    if world is not None:
        world.reduce_ints([0])


class Tensors(Protocol):
    """The values of a model's parameters and buffers."""

    @property
    def kinds(self) -> Mapping[str, TensorKind]:
        """Shape and dtype of each, by its name in the model."""

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """All of one, on the CPU, in this dtype."""


class Export:
    """What there is to be written of a whole model.

    Args:
        model: on the meta device, as it is written; its class gives names, shapes and ties.
        tensors: its values.
        described: files to be copied: source and place in the directory.
        dtype: of the weights; None: as the tensors have it.
        limit: bytes of a file.
        ranks: that share the files.
        where: how to name the source of the tensors in errors.
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
        """For each name that is written, the name under which the checkpoint has it.

        A weight that the class ties, and that the checkpoint has under its own name, is not tied: files may have given
        it values of its own, or code a parameter.
        """
        state = self._model.state_dict(keep_vars=True)
        first = {id(value): name for name, value in reversed(state.items())}
        tied, kinds = _tied(self._model), self._tensors.kinds
        sources = {
            name: name if name in kinds else first[id(value)]
            for name, value in state.items()
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
        """Bytes of what a group becomes."""
        made = to_saved_format(self._model, {name: self._empty(name) for name in group})
        return {name: tensor.nbytes for name, tensor in made.items()}

    def _empty(self, name: str) -> Tensor:
        return torch.empty(self._tensors.kinds[self._source[name]][0], dtype=self._dtype_of(name), device="meta")

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
        total = sum(file.nbytes for file in self.files.values())
        if len(self.files) > 1:
            index = {
                "metadata": {"total_size": total},
                "weight_map": {name: path for path, file in self.files.items() for name in file.sizes},
            }
            (output / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        model: Any = self._model
        if model.can_generate():
            (output / GENERATION_CONFIG).write_bytes(generation_json(model.generation_config))
        for source, name in self._described:
            if name != "config.json":
                (output / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, output / name)
        model.config.architectures = [type(model).__name__]
        floating = {self._dtype_of(name) for name in self._source}
        dtype = next((each for each in sorted(floating, key=str) if each.is_floating_point), torch.float32)
        model.config.dtype = str(dtype).removeprefix("torch.")
        model.config.save_pretrained(output)


def _tied(model: nn.Module) -> Set[str]:
    """Names of the weights that a model's class and configuration tie to others."""
    return (getattr(model, "all_tied_weights_keys", None) or {}).keys()


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


def check_empty(output: Path) -> None:
    """Refuse an output that is in the way.

    Raises:
        ConfigError: it holds something.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} is there already and not empty. Name another directory.")
