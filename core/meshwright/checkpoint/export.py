"""Export the model of a checkpoint as a Hugging Face directory, in bounded memory, with one process or many.

The files are those of `save_pretrained`: safetensors with an index, in the format of published models. Each rank writes
its own files, and holds the tensors of one file at a time. Adapters become a directory that `PeftModel.from_pretrained`
loads with bitwise identical values. Sources: transformers.PreTrainedModel and peft.PeftModel.
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
"""Minimum size of the files over which ranks divide the work."""


@dataclass
class _OutputFile:
    """A file to write: tensor names, in the groups that transformers converts together, and sizes in bytes."""

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
    """Export the model, configuration and tokenizer of a checkpoint as a Hugging Face directory.

    The directory appears under its name only when it is complete.

    Args:
        checkpoint: path, URL or storage of the checkpoint.
        output: a directory that does not exist or is empty.
        dtype: dtype of the weights; None: as they were saved.
        max_shard_size: maximum size of a file, in bytes or as "5GB". It bounds the memory needed.
        use_ema: export the moving averages of the weights, rounded to their dtype; see `meshwright.training.loop.ema`.
        world: ranks that divide the work and share a file system; None: this process alone.

    Raises:
        CheckpointError: the checkpoint is incomplete, has no configuration or no moving averages, or does not match its
            configuration.
        ConfigError: the output is not empty, or a size is invalid.
    """
    output = Path(output)
    rank, size = (world.rank, world.size) if world is not None else (0, 1)

    def plan() -> ModelExporter | AdapterExporter:
        storage = open_storage(checkpoint)
        manifest = read_and_verify(storage) if world is None else read_and_verify_share(storage, world)
        if rank == 0:
            check_output_empty(output)
        stored = StoredModel(storage, manifest, use_ema=use_ema)
        if has_adapters(stored):
            return AdapterExporter(stored, dtype, build_model_on_meta(stored, is_adapter_base=True))
        limit, where = parse_size(max_shard_size), f"the checkpoint {storage}"
        return ModelExporter(
            build_model_on_meta(stored), stored, stored.metadata_files, dtype, limit, num_ranks=size, where=where
        )

    exporter = plan() if world is None else world.run_on_all_ranks(plan)
    with atomic_directory(output, world) as temporary:
        for name in list(exporter.files)[rank::size]:
            exporter.write(name, temporary / name)
        if rank == 0:
            exporter.write_metadata(temporary)


@contextmanager
def atomic_directory(output: Path, world: World | None = None) -> Iterator[Path]:
    """Yield a temporary directory, which is renamed to `output` if the context exits without an error. Collective."""

    def wait() -> None:
        if world is not None:
            world.reduce_ints([0])

    temporary = output.resolve().with_name(f"{output.resolve().name}.writing")
    is_first = world is None or world.rank == 0
    if is_first:
        # Left over from an interrupted export.
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    wait()
    yield temporary
    wait()
    if is_first:
        temporary.rename(output.resolve())
    wait()


class ModelTensors(Protocol):
    """Parameters and buffers of a model: shapes and dtypes by name, and full tensors on the CPU."""

    @property
    def metas(self) -> Mapping[str, TensorMeta]: ...

    def read(self, name: str, dtype: torch.dtype) -> Tensor: ...


class ModelExporter:
    """Write a full model, in files of at most `max_file_bytes` bytes that are divided over ranks.

    Args:
        model: model on the meta device; its class gives names, shapes and tied weights.
        tensors: values of the model.
        metadata_files: files to copy: the path of each, and its name in the output directory.
        dtype: dtype of the weights; None: as they are.
        where: source of the tensors, for errors.
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
        """Map each written name to its name in the checkpoint.

        A tied weight that the checkpoint holds under its own name is written separately: it may have been untied.
        """
        state, metas = self._model.state_dict(keep_vars=True), self._tensors.metas
        tied = (getattr(self._model, "all_tied_weights_keys", None) or {}).keys()
        sources = {
            name: name if name in metas else first
            for name, first in map_to_first_names(self._model).items()
            if name in metas or (name not in tied and not is_ignored_on_save(self._model, name))
        }
        shapes = {name: metas[source][0] for name, source in sources.items() if source in metas}
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
            values = {each: self._tensors.read(self._source_names[each], self._resolve_dtype(each)) for each in group}
            converted = to_saved_format(self._model, values)
            tensors.update({name: tensor.contiguous() for name, tensor in converted.items()})
        save_file(tensors, path, metadata={"format": "pt"})

    def write_metadata(self, output: Path) -> None:
        """Write the index, the configuration and the tokenizer."""
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
    """Write the adapters of a checkpoint; the tensors of one adapter are in memory at a time.

    `base` is on the meta device. A dtype of None leaves the weights as they were saved.
    """

    def __init__(self, stored: StoredModel, dtype: torch.dtype | None, base: nn.Module) -> None:
        self._stored, self._dtype = stored, dtype
        self.configs = load_adapter_configs(stored)
        recorded = stored.manifest.base
        # peft replaces the base's name in configurations by that of the model on the meta device.
        self._bases = {
            name: (each.base_model_name_or_path, each.revision)
            if recorded is None
            else (recorded["path"], recorded.get("revision"))
            for name, each in self.configs.items()
        }
        self._model = add_adapters_on_meta(base, self.configs)
        check_adapter_tensors(self._model, stored)
        self.files = {f"{get_adapter_subfolder(name)}/{ADAPTER_WEIGHTS}": name for name in self.configs}
        self._check_all_exported()

    def write(self, name: str, path: Path) -> None:
        tensors = {}
        names = map_file_names(self._model, self.files[name])
        for key, source in self._map_contents(self.files[name]).items():
            stored_dtype = self._stored.metas[source][1]
            value = self._stored.read(
                source, self._dtype if self._dtype and stored_dtype.is_floating_point else stored_dtype
            )
            tensors[key] = value.t().contiguous() if is_transposed(names[key]) else value
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata={"format": "pt"})

    def write_metadata(self, output: Path) -> None:
        """Write the configurations, the reference to the base, and the tokenizer."""
        for name, config in self.configs.items():
            config.inference_mode = True
            config.base_model_name_or_path, config.revision = self._bases[name]
            config.save_pretrained(output / get_adapter_subfolder(name))
        if self._stored.manifest.base is not None:
            (output / BASE_FILE).write_text(json.dumps(self._stored.manifest.base, indent=2) + "\n")
        configurations = (ADAPTER_CONFIG, "config.json")
        files = [
            (source, name)
            for source, name in self._stored.metadata_files
            if not name.endswith(configurations) or name == "tokenizer_config.json"
        ]
        copy_files(files, output)

    def _map_contents(self, adapter: str) -> dict[str, str]:
        """Map each tensor in an adapter's file to its name in the checkpoint."""
        first_names = map_to_first_names(self._model)
        sources = {key: first_names[name] for key, name in map_file_names(self._model, adapter).items()}
        return {key: name for key, name in sources.items() if name in self._stored.metas}

    def _check_all_exported(self) -> None:
        """Raise CheckpointError for trained tensors that peft's format cannot hold.

        A checkpoint without a known base also holds the base, and does not record which part of it was trained.
        """
        if self._stored.manifest.base is None:
            return
        written = {source for adapter in self.configs for source in self._map_contents(adapter).values()}
        parameters = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        lost = sorted((self._stored.metas.keys() & parameters) - written)
        if lost:
            some = ", ".join(lost[:3]) + (", ..." if len(lost) > 3 else "")
            raise CheckpointError(
                f"the checkpoint {self._stored.storage} holds parameters trained besides its adapters, and the "
                f"directory of an adapter cannot hold: {some}. Train it by peft's modules_to_save; or write the "
                f"merged model: meshwright export --merge."
            )


def has_adapters(stored: StoredModel) -> bool:
    """Return whether a checkpoint holds adapters, with or without their base."""
    return any(name.rpartition("/")[2] == ADAPTER_CONFIG for _, name in stored.metadata_files)


def load_adapter_configs(stored: StoredModel) -> dict[str, Any]:
    """Return peft's configuration of each adapter in a checkpoint, by adapter name. Raises CheckpointError."""
    configs = {}
    for path, name in stored.metadata_files:
        *folder, file = name.split("/")
        if file == ADAPTER_CONFIG and len(folder) < 2:
            configs[folder[0] if folder else "default"] = read_adapter_config(path.parent)
    if not configs:
        raise CheckpointError(f"the checkpoint {stored.storage} is of adapters, but has no {ADAPTER_CONFIG}.")
    return configs


def check_adapter_tensors(model: nn.Module, stored: StoredModel) -> None:
    """Raise CheckpointError if the tensors of a checkpoint do not match its adapters."""
    shapes = {name: value.shape for name, value in model.state_dict(keep_vars=True).items()}
    for name, (shape, _) in stored.metas.items():
        if shapes.get(name) != shape:
            expected = tuple(shapes[name]) if name in shapes else "nothing"
            raise CheckpointError(
                f"the checkpoint {stored.storage} is not of the adapters that its configuration gives: {name} is "
                f"{expected} there, and {tuple(shape)} here."
            )


def parse_size(size: str | int) -> int:
    """Return a size such as "5GB" or 5000000000 in bytes. Raises ConfigError."""
    try:
        return TypeAdapter(Annotated[ByteSize, Field(ge=1)]).validate_python(size)
    except ValidationError:
        message = f"max_shard_size={size!r} is no size. Give bytes, or a number with KB, MB, GB or TB."
        raise ConfigError(message) from None


def check_output_empty(output: Path) -> None:
    """Raise ConfigError if `output` exists and is not an empty directory."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} is there already and not empty. Name another directory.")
