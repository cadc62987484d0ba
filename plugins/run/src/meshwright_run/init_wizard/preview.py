"""Show the first example of a new run file as the model sees it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from meshwright.plugin import IGNORE_INDEX, DataError, MeshwrightError

from ..data.config import DataConfig, SourceConfig
from ..data.encoder import Encoder, Example
from ..data.parallel_tokenization import build_tokenization
from ..data.report import decode_row, render_row
from ..data.sources import read_records
from ..data.tokenizer import has_tokenizer, load_tokenizer

_MAX_TEXT_TOKENS = 64
"""Number of tokens to show of an example that is supervised in full, such as a text."""


def print_first_example(data: DataConfig, model: str, console: Console) -> None:
    """Print the first example of the data, or why it cannot be used."""
    try:
        rows = render_first_example(data, model, use_marks=not console.color_system)
    except MeshwrightError as error:
        console.print(f"the first example cannot be used yet: {error}", markup=False, highlight=False, soft_wrap=True)
        return
    if rows:
        marks = "supervised tokens in color" if console.color_system else "supervised tokens between ⟦ and ⟧"
        console.print(f"the first example as the model sees it, {marks}:", highlight=False, soft_wrap=True)
    for row in rows:
        console.print(row, soft_wrap=True)


def render_first_example(data: DataConfig, model: str, *, use_marks: bool) -> list[Text]:
    """Return the rendered documents of the first example; supervised tokens have a color, or ⟦ ⟧ if `use_marks`.

    Empty if the model is not a local directory. Raises DataError if the example cannot be used.
    """
    directory = Path(data.tokenizer or model).expanduser()
    if not directory.is_dir():
        return []
    (source,) = data.get_training_sources()
    if not has_tokenizer(directory):
        raise DataError(
            f"{directory} holds no tokenizer. Name the directory of one under data.tokenizer, usually that of the "
            "model from which this one was made."
        )
    tokenizer = load_tokenizer(directory)
    encoder = Encoder(tokenizer, source.base_format, **build_tokenization(source, data, 0.0).options)
    record = next(read_records(source), None)
    if record is None:
        raise DataError(f"{source.location!r} is empty: it holds no example. Name a source that holds some.")
    [examples], counts = encoder.encode([record])
    if not examples:
        raise DataError(
            f"{record.location}: the first example has {counts.tokens or 'no supervised'} tokens within seq_len="
            f"{data.seq_len}. Increase data.seq_len."
        )
    rows = [decode_row(_to_row(_shorten(each, source)), "none", tokenizer) for each in examples]
    return [render_row(row, number, use_marks=use_marks) for number, row in enumerate(rows, start=1)]


def _shorten(example: Example, source: SourceConfig) -> Example:
    return example.get_slice(0, _MAX_TEXT_TOKENS) if source.base_format in ("text", "tokens") else example


def _to_row(example: Example) -> dict[str, np.ndarray]:
    ids = example.tokens.astype(np.int64)
    labels = ids.copy() if example.loss_mask is None else np.where(example.loss_mask, ids, IGNORE_INDEX)
    labels[:1] = IGNORE_INDEX
    return {"input_ids": ids, "labels": labels}
