"""Find, open and build Hugging Face models: first without weights, then with a reader of their values.

transformers does the loading (names, prefixes, checkpoint conversions, ties, dtypes, missing weights), on tensors that
record where their values are (`lazy_tensor`). So a directory loads as in `from_pretrained`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.transformers import load_state_dict_as_pretrained
from ..base.errors import ModelError, suggest_match
from ..files.parsing import explain_library_error
from ..mesh.world import World
from .configuration import DTYPE_NAMES, INIT_METHODS, PARALLEL_INIT, check_choice
from .deferred_init import DeferredWeights
from .layout import sync_tie_config
from .lazy_tensor import LazyTensor, read_full
from .model_files import InMemoryReader, TensorReader, attach_extra_files, open_weights
from .weights import Weights, move_to_meta

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}
MAX_NAMES_SHOWN = 5
"""Maximum number of names listed in a message."""

# -- the directory of a path or Hub id

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILES = ["*.json", "model*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja"]
_FILES += ["LICENSE*", "NOTICE*", "USE_POLICY*"]


def find_model_directory(
    path: str | Path, *, revision: str | None = None, allow_pickle: bool = False, include_code: bool = False
) -> Path:
    """Return the local directory of a path or Hub id. Files from the Hub are downloaded to its cache once."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists() or not isinstance(path, str) or _HUB_ID.fullmatch(path) is None:
        raise ModelError(
            f"{str(path)!r} is not a directory. Give a local Hugging Face model directory, or a hub id such as "
            f"'Qwen/Qwen3-0.6B'."
        )
    # A path that starts with a local directory must not resolve to a Hub model.
    parent = directory.parent
    if parent != Path(".") and parent.is_dir():
        raise ModelError(
            f"{str(path)!r} is not a directory: {parent.absolute()} holds no {directory.name!r}. Name one that is "
            f"there; or, to have the model of that id from the Hugging Face hub, download it and give its "
            f"directory, since {str(parent)!r} is a directory here."
        )
    from huggingface_hub import snapshot_download

    patterns = [*_FILES, *["pytorch_model*.bin"] * allow_pickle, *["*.py"] * include_code]
    download = functools.partial(
        snapshot_download, path, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]
    )
    try:
        return Path(download())
    except Exception as error:
        # Offline, huggingface_hub 1.33 does not look up a commit in its cache, although a commit cannot change.
        if revision is not None and _COMMIT.fullmatch(revision):
            with contextlib.suppress(Exception):
                return Path(download(local_files_only=True))
        # No network, no such model, no permission, offline mode: each has its own error, from several libraries.
        first_line = str(error).strip().split("\n")[0]
        suffix = f" at revision {revision!r}" if revision else ""
        raise ModelError(
            f"{path!r} is no local directory, and it cannot be had from the Hugging Face "
            f"hub{suffix} ({type(error).__name__}: {first_line}). Give a directory that exists, or check the id, the "
            f"network and your access to the model."
        ) from error


def find_model_directory_on_all_ranks(
    path: str | Path,
    world: World,
    *,
    revision: str | None = None,
    allow_pickle: bool = False,
    include_code: bool = False,
) -> Path:
    """Call `find_model_directory` on all ranks, for the same commit of the Hub. Collective.

    Files are downloaded once on each node.
    """

    find = functools.partial(find_model_directory, path, allow_pickle=allow_pickle, include_code=include_code)
    commit = world.run_on_first_rank(lambda: get_hub_commit(path, find(revision=revision)))
    if commit is not None:
        # Each node has its own cache, which its ranks share.
        world.run_on_all_ranks(lambda: find(revision=commit) if os.environ.get("LOCAL_RANK", "0") == "0" else None)
    return world.run_on_all_ranks(lambda: find(revision=commit or revision))


def get_hub_commit(path: str | Path, directory: Path) -> str | None:
    """Return the Hub commit that `find_model_directory` found in the cache; None for a user's directory."""
    is_local = Path(path).expanduser().is_dir()
    return directory.name if not is_local and _COMMIT.fullmatch(directory.name) else None


class PretrainedWeights:
    """Values of a model's parameters and persistent buffers, read from files that stay open; implements `Weights`.

    `missing` names the weights that the directory lacks. `warnings` describe them for the user, and weights that the
    model does not use.
    """

    def __init__(
        self, sources: Mapping[str, TensorReader], directory: Path, remarks: tuple[str, ...], missing: tuple[str, ...]
    ) -> None:
        self.sources, self._directory = sources, directory
        self.warnings, self.missing = remarks, missing

    def compute_fingerprint(self) -> int:
        """Return a 62-bit number of names, shapes and dtypes, which ranks compare."""
        description = sorted((name, tuple(each.shape), str(each.dtype)) for name, each in self.sources.items())
        return int.from_bytes(hashlib.sha256(repr(description).encode()).digest()[:8]) >> 2

    def __contains__(self, name: object) -> bool:
        return name in self.sources

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def get_shape(self, name: str) -> torch.Size:
        return self._get_source(name).shape

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        source = self._get_source(name)
        full_shape = tuple(source.shape)
        is_inside = len(offsets) == len(sizes) == len(full_shape) and all(
            0 <= offset <= offset + size <= length
            for offset, size, length in zip(offsets, sizes, full_shape, strict=True)
        )
        if not is_inside:
            raise ModelError(
                f"no rectangle of {name}, whose shape is {full_shape}: offsets={tuple(offsets)}, sizes={tuple(sizes)}."
            )
        return torch.empty(tuple(sizes), dtype=source.dtype) if 0 in sizes else source.read(offsets, sizes)

    def _get_source(self, name: str) -> TensorReader:
        if name not in self.sources:
            raise ModelError(f"{self._directory} gives no weight {name!r}.{suggest_match(name, self.sources)}")
        return self.sources[name]


def open_pretrained(
    directory: Path, config: Any, *, dtype: torch.dtype | None = None, allow_pickle: bool = False, seed: int = 0
) -> tuple[nn.Module, PretrainedWeights]:
    """Build the model of a directory on the meta device, and return it with a reader of its values.

    Buffers have values: those that the model computes are computed, those that it saves are read.

    Args:
        dtype: dtype of the parameters, except those that the model keeps in float32. None: the configuration's or,
            without one, that of the files.
        seed: seed of the weights that the directory lacks, equal on all ranks.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"{directory} holds a quantized model (config.quantization_config), which cannot be trained here. "
            f"Save it dequantized, or take the directory that it was made from."
        )
    if (directory / "adapter_config.json").is_file():
        raise ModelError(
            f"{directory} holds an adapter (adapter_config.json), not a whole model. Merge it first: meshwright export "
            f"--merge {directory} OUT."
        )
    # transformers also looks up the extra files that a few classes name.
    extra_files = [str(name) for name in getattr(type(config), "extra_files", None) or ()]
    sources = open_weights(directory, extra_files=extra_files, allow_pickle=allow_pickle)
    lazy_state = {key: LazyTensor.from_source(source) for key, source in sources.items()}
    with torch.random.fork_rng(devices=[]), _capture_load_report() as report:
        torch.manual_seed(seed)
        try:
            model, load_info = load_state_dict_as_pretrained(copy.deepcopy(config), lazy_state, dtype or "auto")
        except Exception as error:
            # Model classes and conversions raise errors of any type; transformers logs why a conversion failed.
            pairs = re.findall(r"^(.+)\nError: (.+)$", "\n".join(report), re.MULTILINE)
            reasons = "".join(f"\n  {where}: {cause}" for cause, where in pairs[:MAX_NAMES_SHOWN])
            raise ModelError(
                f"transformers cannot load {directory}: {type(error).__name__}: {error}{reasons}"
            ) from error
    model.config.name_or_path = str(directory)
    sync_tie_config(model)
    warnings = (*_format_load_warnings(load_info, directory), *attach_extra_files(model, directory))
    values = {
        name: value.source if isinstance(value, LazyTensor) else InMemoryReader(value.detach())
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    }
    move_to_meta(model)
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if isinstance(buffer, LazyTensor):
                setattr(module, name, read_full(buffer.source).clone())
    return model, PretrainedWeights(values, directory, warnings, tuple(sorted(load_info["missing_keys"])))


@contextmanager
def _capture_load_report() -> Iterator[list[str]]:
    """Keep transformers' warnings and progress bar off the terminal; yield all warnings at any log level."""
    from transformers.utils import logging as transformers_logging

    lines: list[str] = []
    keep = logging.Handler(logging.WARNING)
    keep.emit = lambda record: lines.append(re.sub(r"\x1b\[[0-9;]*m", "", record.getMessage()))  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    # A program that configures logging, such as by `logging.config.dictConfig`, disables existing loggers.
    disabled = [
        each
        for name, each in logging.root.manager.loggerDict.items()
        if name.split(".")[0] == "transformers" and isinstance(each, logging.Logger) and each.disabled
    ]
    handlers, propagate, level = logger.handlers[:], logger.propagate, logger.level
    bars = transformers_logging.is_progress_bar_enabled()
    logger.handlers[:], logger.propagate = [keep], False
    logger.setLevel(logging.WARNING)
    for each in disabled:
        each.disabled = False
    transformers_logging.disable_progress_bar()
    try:
        yield lines
    finally:
        for each in disabled:
            each.disabled = True
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _format_load_warnings(found: dict[str, Any], directory: Path) -> list[str]:
    def join(names: Any, separator: str = ", ") -> str:
        return separator.join(names[:MAX_NAMES_SHOWN]) + (
            f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
        )

    mismatched = sorted(found["mismatched_keys"])
    if mismatched:
        shapes = [f"{name} is {tuple(is_)}, not {tuple(wanted)}" for name, is_, wanted in mismatched]
        raise ModelError(
            f"{directory} holds {len(mismatched)} weights of another shape than the model's: {join(shapes, '; ')}. "
            f"Load it with the configuration that it was saved with."
        )
    texts = (
        ("missing_keys", "lacks {} weights of the model, which start as the model initialises them"),
        ("unexpected_keys", "holds {} weights that the model has no place for, which are not read"),
    )
    return [
        f"{directory} {text.format(len(found[key]))}: {join(sorted(found[key]))}" for key, text in texts if found[key]
    ]


# -- the model of a run file or configuration


def build_model(
    section: Mapping[str, Any],
    config: Any,
    *,
    seed: int,
    directory: Path | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[nn.Module, Weights | None]:
    """Build the model of a run file's section `model` on the meta device, and return it with its values.

    The result is the same on every rank. The values are those at the section's `path`, or new ones from `seed` as its
    `init` says. Weights of a `checkpoint` are loaded later.

    Args:
        directory: local directory of the path or checkpoint.
        dtype: overrides the section's dtype.
    """
    if "path" not in section:
        model, values = init_model_on_meta(
            config, get_model_dtype(section), seed, init=section.get("init", PARALLEL_INIT)
        )
        if directory is not None:
            attach_extra_files(model, directory)
        return model, values
    path, allow_pickle = directory or Path(section["path"]).expanduser(), bool(section.get("allow_pickle", False))
    model, weights = open_pretrained(
        path, config, dtype=dtype or get_model_dtype(section), allow_pickle=allow_pickle, seed=seed
    )
    if weights.missing:
        raise ModelError(
            f"model.path={section['path']!r} lacks {len(weights.missing)} weights of the model, which would start at "
            f"random: {', '.join(weights.missing[:3])}{', ...' if len(weights.missing) > 3 else ''}. "
            f"Remove the fields that make the model larger than the saved one, or use a complete directory."
        )
    return model, weights


def init_model(config: Any, dtype: torch.dtype, seed: int) -> nn.Module:
    """Build the causal LM of a Hugging Face configuration, as transformers initializes it for `seed`."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    try:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except Exception as error:
        # Model classes check their configurations with errors of several types.
        raise ModelError(
            f"transformers cannot build the model {getattr(config, 'model_type', config)!r}: "
            f"{explain_library_error(error)}"
        ) from error


def init_model_on_meta(
    config: Any, dtype: torch.dtype, seed: int, *, init: str = PARALLEL_INIT
) -> tuple[nn.Module, Weights | None]:
    """Build the causal LM of a configuration on the meta device, and return it with its initial values.

    With init="parallel" each rank samples only its shards, and every layout gets the same values. "transformers" gives
    values that are bitwise identical to those of `init_model`. A few classes read values while they are built: such a
    model has memory and values, and the second result is None.
    """
    check_choice(INIT_METHODS, init, "init")
    with torch.device("meta"):
        model = init_model(config, dtype, seed)
    torch.manual_seed(seed)
    try:
        return model, DeferredWeights(model, seed=seed if init == PARALLEL_INIT else None)
    except ModelError:
        return init_model(config, dtype, seed), None


def get_model_dtype(section: Mapping[str, Any]) -> torch.dtype:
    """Return the parameter dtype that a run file's section `model` requests."""
    return DTYPES[check_choice(DTYPE_NAMES, section.get("dtype", "float32"), "model.dtype")]


def to_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    """Return a parameter dtype given as a dtype or a name; None stays None."""
    return None if value is None else DTYPES[check_choice(DTYPE_NAMES, str(value).removeprefix("torch."), "dtype")]
