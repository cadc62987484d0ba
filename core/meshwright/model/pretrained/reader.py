"""Open a Hugging Face directory: the model without its weights, and its weights without reading them.

transformers does the loading (names, prefixes, conversions of checkpoints, ties, dtypes, what is missing), on tensors
that remember where their values are (`recorded`). So a directory means here what it means to `from_pretrained`.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.transformers import load_state_dict_as_pretrained
from ...base.errors import ModelError, nearest
from ..base_files import note_files
from ..ties import note_ties
from ..weights import leave_on_meta
from .files import Held, Source, open_directory
from .recorded import Recorded, read_whole

TOLD = 5
"""This many names are told of a list."""


class PretrainedWeights:
    """The values of a model's parameters and persistent buffers, read where they lie; `Weights` of them.

    Files stay open as long as this lives.

    Attributes:
        remarks: what the user should be told: weights that are missing, or have no place in the model, unless its class
            expects that.
        missing: names of weights that the directory lacks.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        directory: Path,
        remarks: tuple[str, ...] = (),
        missing: tuple[str, ...] = (),
    ) -> None:
        self._sources = sources
        self._directory = directory
        self.remarks = remarks
        self.missing = missing

    def fingerprint(self) -> int:
        """A number of 62 bits for names, shapes and dtypes, to be compared between ranks."""
        told = sorted((name, tuple(each.shape), str(each.dtype)) for name, each in self._sources.items())
        return int.from_bytes(hashlib.sha256(repr(told).encode()).digest()[:8]) >> 2

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def shape(self, name: str) -> torch.Size:
        """Of the whole parameter or buffer."""
        return self._source(name).shape

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The values of a rectangle of the whole parameter or persistent buffer `name`, on the CPU.

        Args:
            name: fully qualified, in the unwrapped Hugging Face model; each name of a tied parameter will do.
            offsets, sizes: of the rectangle, one for each dim of the whole.

        Raises:
            ModelError: no such name, a rectangle that is not within the whole, or a file that cannot be read.
        """
        source = self._source(name)
        whole = tuple(source.shape)
        within = len(offsets) == len(sizes) == len(whole) and all(
            offset >= 0 and size >= 0 and offset + size <= length
            for offset, size, length in zip(offsets, sizes, whole, strict=True)
        )
        if not within:
            raise ModelError(
                f"no rectangle of {name}, whose shape is {whole}: offsets={tuple(offsets)}, sizes={tuple(sizes)}."
            )
        if 0 in sizes:
            return torch.empty(tuple(sizes), dtype=source.dtype)
        return source.read(offsets, sizes)

    def _source(self, name: str) -> Source:
        if name not in self._sources:
            raise ModelError(f"{self._directory} gives no weight {name!r}.{nearest(name, self._sources)}")
        return self._sources[name]


def open_pretrained(
    directory: Path,
    config: Any,
    *,
    dtype: torch.dtype | None = None,
    allow_pickle: bool = False,
    seed: int = 0,
) -> tuple[nn.Module, PretrainedWeights]:
    """Make the model of a directory with its parameters on the meta device, and a reader of their values.

    Buffers have their values: those that the model computes are computed, those that it saves are read.

    Args:
        directory: as `save_pretrained` writes it.
        config: the model's Hugging Face configuration.
        dtype: of the parameters; None takes the configuration's, or that of the files where it has none. Parts that the
            model keeps in float32 stay so.
        allow_pickle: open `.bin` files where there are no safetensors.
        seed: of the values that the model gives to weights which the directory lacks, equal on every rank.

    Raises:
        ModelError: the files cannot be read, or are not those of this model.
    """
    _check_plain(directory, config)
    # Further files that a few classes name are looked up by transformers beside the usual ones.
    also = [str(name) for name in getattr(type(config), "extra_files", None) or ()]
    sources = open_directory(directory, also=also, allow_pickle=allow_pickle)
    recorded = {key: Recorded.of(source) for key, source in sources.items()}
    with torch.random.fork_rng(devices=[]), _captured_report() as report:
        torch.manual_seed(seed)
        try:
            model, found = load_state_dict_as_pretrained(copy.deepcopy(config), recorded, dtype or "auto")
        except Exception as error:
            # Each model class checks its configuration, and each conversion its sources, with errors of all kinds.
            told = _reasons(report)
            raise ModelError(f"transformers cannot load {directory}: {type(error).__name__}: {error}{told}") from error
    model.config.name_or_path = str(directory)
    note_ties(model)
    remarks = (*_remarks(found, directory), *note_files(model, directory))
    weights = PretrainedWeights(_sources_of(model), directory, remarks, tuple(sorted(found["missing_keys"])))
    leave_on_meta(model)
    _read_buffers(model)
    return model, weights


def _check_plain(directory: Path, config: Any) -> None:
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


@contextmanager
def _captured_report() -> Iterator[list[str]]:
    """Keep transformers' own warnings and progress bar off the terminal of each rank; gives what it warned of.

    Also where the user asked transformers for errors alone, since an error of ours tells the reasons from its warnings.
    """
    from transformers.utils import logging as transformers_logging

    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(re.sub(r"\x1b\[[0-9;]*m", "", record.getMessage()))

    logger = logging.getLogger("transformers")
    handlers, propagate, level = logger.handlers[:], logger.propagate, logger.level
    bars = transformers_logging.is_progress_bar_enabled()
    logger.handlers[:], logger.propagate = [Keep(logging.WARNING)], False
    logger.setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    try:
        yield lines
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _reasons(report: list[str]) -> str:
    """Why conversions failed, from the report that transformers logs, without its tracebacks."""
    found = re.findall(r"^(.+)\nError: (.+)$", "\n".join(report), re.MULTILINE)
    return "".join(f"\n  {where}: {cause}" for cause, where in found[:TOLD])


def _remarks(found: dict[str, Any], directory: Path) -> tuple[str, ...]:
    mismatched = sorted(found["mismatched_keys"])
    if mismatched:
        told = "; ".join(f"{name} is {tuple(is_)}, not {tuple(wanted)}" for name, is_, wanted in mismatched[:TOLD])
        raise ModelError(
            f"{directory} holds {len(mismatched)} weights of another shape than the model's: {told}"
            f"{_more(mismatched)}. Load it with the configuration that it was saved with."
        )
    missing, unexpected = found["missing_keys"], found["unexpected_keys"]
    remarks = []
    if missing:
        remarks.append(
            f"{directory} lacks {len(missing)} weights of the model, which start as the model initialises them: "
            f"{_some(missing)}"
        )
    if unexpected:
        remarks.append(
            f"{directory} holds {len(unexpected)} weights that the model has no place for, which are not read: "
            f"{_some(unexpected)}"
        )
    return tuple(remarks)


def _some(names: Any) -> str:
    return ", ".join(sorted(names)[:TOLD]) + _more(names)


def _more(names: Any) -> str:
    return f" and {len(names) - TOLD} more" if len(names) > TOLD else ""


def _sources_of(model: nn.Module) -> dict[str, Source]:
    return {
        name: value.source if isinstance(value, Recorded) else Held(value.detach())
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    }


def _read_buffers(model: nn.Module) -> None:
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if isinstance(buffer, Recorded):
                setattr(module, name, read_whole(buffer.source).clone())
