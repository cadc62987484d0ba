"""Check a run file and write it."""

from __future__ import annotations

from pathlib import Path

from meshwright.plugin import ConfigError, parse_yaml, validated

from ..layout import layout_of
from ..run_file import RunConfig, check_model
from .answers import Answers, Known, Machine
from .text import run_file_text


def check_place(file: Path, *, overwrite: bool) -> None:
    """Raise ConfigError if the file is a directory, or exists and may not be overwritten."""
    if file.is_dir():
        raise ConfigError(f"{file} is a directory. Name a file, such as {file / 'run.yaml'}.")
    if file.exists() and not overwrite:
        raise ConfigError(f"{file} exists, and is left as it is. Give another name, or --overwrite to replace it.")


def write_run_file(file: Path, answers: Answers, known: Known, machine: Machine, *, overwrite: bool) -> RunConfig:
    """Check the run file and write it.

    Raises:
        MeshwrightError: it is not valid, or its layout would be refused; nothing is written.
    """
    text = run_file_text(answers, known, machine, name=str(file))
    config = validated(RunConfig, parse_yaml(text), where=str(file))
    layout_of(config, answers.ranks)
    check_model(config.model, config.data.seq_len)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # "x": a file that has appeared meanwhile is kept.
        with file.open("w" if overwrite else "x", encoding="utf-8") as opened:
            opened.write(text)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}. Name another file.") from None
    return config
