"""Write the model of a checkpoint as a Hugging Face directory, in bounded memory, by one process or many.

The files are those of `save_pretrained`: safetensors with an index, in the format of published models. Each rank writes
files of its own, and holds the tensors of one file at a time. Adapters become a directory that
`PeftModel.from_pretrained` loads, bit for bit. Sources: transformers.PreTrainedModel and peft.PeftModel.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
from pydantic import ByteSize, Field, TypeAdapter, ValidationError
from safetensors.torch import save_file
from torch import Tensor, nn

from .._compat.peft import add_adapters_on_meta, is_transposed, map_file_names
from .._compat.transformers import group_for_saving, is_ignored_on_save, to_saved_format
from ..base.errors import CheckpointError, ConfigError
from ..mesh.world import World
from ..model.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_FILE, get_adapter_subfolder, read_adapter_config
from ..model.model_files import GENERATION_CONFIG, format_generation_config
from ..tensors.state import TensorMeta
from .loading import read_and_verify_share
from .manifest import read_and_verify
from .remote_storage import open_storage
from .storage import StorageLike
from .stored_model import StoredModel, build_model_on_meta, copy_files, map_to_first_names

MIN_FILE_BYTES = 64_000_000
"""Ranks share the work in files of at least this size."""


@dataclass
class _OutputFile:
    """A file to be written: names of tensors, in groups that transformers converts together, and sizes in bytes."""

    groups: list[list[str]] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())


def export_checkpoint(
    checkpoint: StorageLike,
    output: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: str | int = "5GB",
    use_ema: bool = False,
    world: World | None = None,
) -> None:
    """Write the model of a checkpoint, its configuration and its tokenizer as a Hugging Face directory.

    The directory appears under its name when it is complete.

    Args:
        checkpoint: a path, a URL or a place.
        output: a directory that is missing or empty.
        dtype: of the weights; None: as they were saved.
        max_shard_size: of a file, in bytes or as "5GB"; it bounds the memory needed.
        use_ema: write the averages of the weights, rounded to their dtype; see `meshwright.train.loop.ema`.
        world: ranks that share the work and a file system; None: this process alone.

    Raises:
        CheckpointError: the checkpoint is incomplete, has no configuration or no average, or is not of the model that
            its configuration gives.
        ConfigError: the output is not empty, or a size is invalid.
    """
    output = Path(output)
    rank, size = (world.rank, world.size) if world is not None else (0, 1)

    def plan() -> ModelExporter | AdapterExporter:
        place = open_storage(checkpoint)
        manifest = read_and_verify(place) if world is None else read_and_verify_share(place, world)
        if rank == 0:
            check_output_empty(output)
        stored = StoredModel(place, manifest, use_ema=use_ema)
        if has_adapters(stored):
            return AdapterExporter(stored, dtype, build_model_on_meta(stored, is_adapter_base=True))
        limit, where = parse_size(max_shard_size), f"the checkpoint {place}"
        return ModelExporter(
            build_model_on_meta(stored), stored, stored.metadata_files, dtype, limit, num_ranks=size, where=where
        )

    export = plan() if world is None else world.run_on_all_ranks(plan)
    with atomic_directory(output, world) as writing:
        for name in list(export.files)[rank::size]:
            export.write(name, writing / name)
        if rank == 0:
            export.write_metadata(writing)


@contextmanager
def atomic_directory(output: Path, world: World | None = None) -> Iterator[Path]:
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
    wait()
    if first:
        writing.rename(output.resolve())
    wait()


class ModelTensors(Protocol):
    """The values of a model's parameters and buffers: shapes and dtypes by name, and full tensors on the CPU."""

    @property
    def metas(self) -> Mapping[str, TensorMeta]: ...

    def read(self, name: str, dtype: torch.dtype) -> Tensor: ...


class ModelExporter:
    """A full model to be written, in files of at most `max_file_bytes` bytes that ranks share.

    The model is on the meta device; its class gives names, shapes and ties. `metadata_files` are files to be copied,
    each a path and a name in the directory. A dtype of None leaves the weights as they are. `where` names their source.
    """

    def __init__(
        self,
        model: nn.Module,
        tensors: ModelTensors,
        metadata_files: Sequence[tuple[Path, str]],
        dtype: torch.dtype | None,
        max_file_bytes: int,
        *,
        num_ranks: int,
        where: str,
    ) -> None:
        self._model, self._tensors, self._metadata_files = model, tensors, metadata_files
        self._dtype, self._where = dtype, where
        self._source_names = self._map_sources()
        self.files = self._plan_files(max_file_bytes, num_ranks)

    def _map_sources(self) -> dict[str, str]:
        """Map each name that is written to its name in the checkpoint.

        A tied weight that the checkpoint has under its own name is written on its own: it may have been untied.
        """
        state, kinds = self._model.state_dict(keep_vars=True), self._tensors.metas
        tied = (getattr(self._model, "all_tied_weights_keys", None) or {}).keys()
        sources = {
            name: name if name in kinds else first
            for name, first in map_to_first_names(self._model).items()
            if name in kinds or (name not in tied and not is_ignored_on_save(self._model, name))
        }
        shapes = {name: kinds[source][0] for name, source in sources.items() if source in kinds}
        for name, value in state.items():
            if name in sources and shapes.get(name) != value.shape:
                raise CheckpointError(
                    f"{self._where} is not of the model that its configuration gives: {name} is "
                    f"{tuple(value.shape)} there, and {tuple(shapes[name]) if name in shapes else 'missing'} here."
                )
        return sources

    def _plan_files(self, limit: int, ranks: int) -> dict[str, _OutputFile]:
        sized = [
            (group, self._compute_sizes(group)) for group in group_for_saving(self._model, list(self._source_names))
        ]
        total = sum(sum(sizes.values()) for _, sizes in sized)
        limit = min(limit, max(-(-total // ranks), MIN_FILE_BYTES))
        files = [_OutputFile()]
        for group, sizes in sized:
            if files[-1].sizes and files[-1].nbytes + sum(sizes.values()) > limit:
                files.append(_OutputFile())
            files[-1].groups.append(group)
            files[-1].sizes.update(sizes)
        if len(files) == 1:
            return {"model.safetensors": files[0]}
        return {f"model-{i + 1:05d}-of-{len(files):05d}.safetensors": file for i, file in enumerate(files)}

    def _compute_sizes(self, group: list[str]) -> dict[str, int]:
        shapes = {name: self._tensors.metas[self._source_names[name]][0] for name in group}
        empty = {name: torch.empty(shapes[name], dtype=self._resolve_dtype(name), device="meta") for name in group}
        return {name: tensor.nbytes for name, tensor in to_saved_format(self._model, empty).items()}

    def _resolve_dtype(self, name: str) -> torch.dtype:
        dtype = self._tensors.metas[self._source_names[name]][1]
        return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype

    def write(self, name: str, path: Path) -> None:
        tensors: dict[str, Tensor] = {}
        for group in self.files[name].groups:
            read = {each: self._tensors.read(self._source_names[each], self._resolve_dtype(each)) for each in group}
            made = to_saved_format(self._model, read)
            tensors.update({name: tensor.contiguous() for name, tensor in made.items()})
        save_file(tensors, path, metadata={"format": "pt"})

    def write_metadata(self, output: Path) -> None:
        """Write the index, the configuration, and the tokenizer."""
        if len(self.files) > 1:
            index = {
                "metadata": {"total_size": sum(file.nbytes for file in self.files.values())},
                "weight_map": {name: path for path, file in self.files.items() for name in file.sizes},
            }
            (output / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        model: Any = self._model
        if model.can_generate():
            (output / GENERATION_CONFIG).write_bytes(format_generation_config(model.generation_config))
        copy_files([(source, name) for source, name in self._metadata_files if name != "config.json"], output)
        model.config.architectures = [type(model).__name__]
        dtypes = sorted({self._resolve_dtype(name) for name in self._source_names}, key=str)
        dtype = next((each for each in dtypes if each.is_floating_point), torch.float32)
        model.config.dtype = str(dtype).removeprefix("torch.")
        model.config.save_pretrained(output)


class AdapterExporter:
    """The adapters of a checkpoint to be written; the tensors of one adapter are in memory together.

    The base is on the meta device. A dtype of None leaves the weights as they were saved.
    """

    def __init__(self, stored: StoredModel, dtype: torch.dtype | None, base: nn.Module) -> None:
        self._stored, self._dtype = stored, dtype
        self.configs = load_adapter_configs(stored)
        noted = stored.manifest.base
        # peft renames the base in configurations to the model on the meta device.
        self._bases = {
            name: (each.base_model_name_or_path, each.revision)
            if noted is None
            else (noted["path"], noted.get("revision"))
            for name, each in self.configs.items()
        }
        self._model = add_adapters_on_meta(base, self.configs)
        check_adapter_tensors(self._model, stored)
        self.files = {f"{get_adapter_subfolder(name)}/{ADAPTER_WEIGHTS}": name for name in self.configs}
        self._check_all_exported()

    def write(self, name: str, path: Path) -> None:
        tensors = {}
        named = map_file_names(self._model, self.files[name])
        for key, source in self._map_contents(self.files[name]).items():
            own = self._stored.metas[source][1]
            value = self._stored.read(source, self._dtype if self._dtype and own.is_floating_point else own)
            tensors[key] = value.t().contiguous() if is_transposed(named[key]) else value
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata={"format": "pt"})

    def write_metadata(self, output: Path) -> None:
        """Write the configurations, the name of the base, and the tokenizer."""
        for name, config in self.configs.items():
            config.inference_mode = True
            config.base_model_name_or_path, config.revision = self._bases[name]
            config.save_pretrained(output / get_adapter_subfolder(name))
        if self._stored.manifest.base is not None:
            (output / BASE_FILE).write_text(json.dumps(self._stored.manifest.base, indent=2) + "\n")
        configurations = (ADAPTER_CONFIG, "config.json")
        kept = [
            (source, name)
            for source, name in self._stored.metadata_files
            if not name.endswith(configurations) or name == "tokenizer_config.json"
        ]
        copy_files(kept, output)

    def _map_contents(self, adapter: str) -> dict[str, str]:
        """Map each tensor in an adapter's file to its name in the checkpoint."""
        first = map_to_first_names(self._model)
        named = {key: first[name] for key, name in map_file_names(self._model, adapter).items()}
        return {key: name for key, name in named.items() if name in self._stored.metas}

    def _check_all_exported(self) -> None:
        """Refuse trained tensors that peft's format has no place for.

        A checkpoint without a known base holds the base as well, and does not say which part of it was trained.
        """
        if self._stored.manifest.base is None:
            return
        written = {source for adapter in self.configs for source in self._map_contents(adapter).values()}
        parameters = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        lost = sorted((self._stored.metas.keys() & parameters) - written)
        if lost:
            some = ", ".join(lost[:3]) + (", ..." if len(lost) > 3 else "")
            raise CheckpointError(
                f"the checkpoint {self._stored.storage} holds what was trained beside its adapters, and the "
                f"directory of an adapter has no place for: {some}. Train it by peft's modules_to_save; or write the "
                f"merged model: meshwright export --merge."
            )


def has_adapters(stored: StoredModel) -> bool:
    """Return whether a checkpoint holds adapters, with their base or without."""
    return any(name.rpartition("/")[2] == ADAPTER_CONFIG for _, name in stored.metadata_files)


def load_adapter_configs(stored: StoredModel) -> dict[str, Any]:
    """Return peft's configuration of each adapter in a checkpoint, by the adapter's name. Raises CheckpointError."""
    found = {}
    for path, name in stored.metadata_files:
        *folder, file = name.split("/")
        if file == ADAPTER_CONFIG and len(folder) < 2:
            found[folder[0] if folder else "default"] = read_adapter_config(path.parent)
    if not found:
        raise CheckpointError(f"the checkpoint {stored.storage} is of adapters, but has no {ADAPTER_CONFIG}.")
    return found


def check_adapter_tensors(model: nn.Module, stored: StoredModel) -> None:
    """Raise CheckpointError if the tensors of a checkpoint are not those of its adapters."""
    shapes = {name: value.shape for name, value in model.state_dict(keep_vars=True).items()}
    for name, (shape, _) in stored.metas.items():
        if shapes.get(name) != shape:
            own = tuple(shapes[name]) if name in shapes else "nothing"
            raise CheckpointError(
                f"the checkpoint {stored.storage} is not of the adapters that its configuration gives: {name} is "
                f"{own} there, and {tuple(shape)} here."
            )


def parse_size(size: str | int) -> int:
    """Return the number of bytes that "5GB" or 5000000000 stands for. Raises ConfigError."""
    try:
        return TypeAdapter(Annotated[ByteSize, Field(ge=1)]).validate_python(size)
    except ValidationError:
        message = f"max_shard_size={size!r} is no size. Give bytes, or a number with KB, MB, GB or TB."
        raise ConfigError(message) from None


def check_output_empty(output: Path) -> None:
    """Raise ConfigError if a directory exists and is not empty."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} is there already and not empty. Name another directory.")
