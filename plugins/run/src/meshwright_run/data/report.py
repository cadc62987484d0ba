"""Output of `meshwright data show`: rows, a histogram of lengths, and a table of sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table
from rich.text import Text

from meshwright.plugin import IGNORE_INDEX, DataError

from .config import Packing
from .documents import TokenizedDocuments
from .encoder import EncodingCounts
from .order import StreamingSource
from .packing import PAD_TOKEN_ID
from .prepare import PreparedData
from .train_sampler import RunDatasets, TrainSampler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MEASURED_STEPS = 20
"""Steps over which the fill of padded rows is measured; it depends on which rows share a microbatch."""
_NUM_BARS = 12
_WIDTH = 50
_SUPERVISED_STYLE, _CONTEXT_STYLE, _FRAME_STYLE = "bold green", "default", "dim"
_COLORS = ("#2a6fbb", "#d9792b", "#4b9e5f", "#8a5bb0", "#b8434e", "#6b6b6b")


@dataclass(frozen=True)
class SourceSummary:
    """The training split of a source: lengths of documents, fraction of supervised tokens, fill of rows, counts."""

    name: str
    format: str
    lengths: np.ndarray
    supervised_share: float
    num_rows: int
    fill: float | None
    counts: EncodingCounts


@dataclass(frozen=True)
class TokenRun:
    text: str
    is_supervised: bool
    num_tokens: int


@dataclass(frozen=True)
class DecodedRow:
    """A row as the model sees it: runs of each document, number of padding tokens after them, further numbers."""

    documents: tuple[tuple[TokenRun, ...], ...]
    num_padding: int
    columns: dict[str, float]


def summarize_sources(data: PreparedData, datasets: RunDatasets, kind: Packing) -> list[SourceSummary]:
    summaries = []
    for source, dataset in zip(data.sources, datasets.train_sets, strict=True):
        documents, counts, config = source.train_documents, source.counts, source.config
        if isinstance(dataset, StreamingSource) or documents is None or counts is None:
            continue
        lengths, tokens = documents.lengths(), len(documents.tokens)
        fill = {"stream": 1.0, "documents": int(lengths.sum()) / (len(dataset) * dataset.seq_len)}.get(kind)
        supervised = _count_supervised(documents) / max(tokens, 1)
        summaries.append(SourceSummary(config.location, config.format, lengths, supervised, len(dataset), fill, counts))
    return summaries


def measure_fill(sampler: TrainSampler, num_steps: int = _MEASURED_STEPS) -> float:
    num_filled = num_positions = 0
    for step in range(num_steps):
        for batch in sampler.read_microbatches(step):
            for ids, labels in zip(batch["input_ids"].numpy(), batch["labels"].numpy(), strict=True):
                num_filled += len(ids) - _count_padding(ids, labels)
                num_positions += len(ids)
    return num_filled / max(num_positions, 1)


def decode_first_rows(
    sampler: TrainSampler, count: int, kind: Packing, tokenizer: PreTrainedTokenizerBase
) -> Iterator[DecodedRow]:
    step = 0
    while count > 0:
        for batch in sampler.read_microbatches(step):
            for number in range(min(count, len(batch["input_ids"]))):
                row = {name: values[number].numpy() for name, values in batch.items()}
                yield decode_row(row, kind, tokenizer)
                count -= 1
        step += 1


def decode_row(row: Mapping[str, Any], kind: Packing, tokenizer: PreTrainedTokenizerBase) -> DecodedRow:
    """Decode a row: `input_ids` and `labels`, (S,), and the row's other batch entries."""
    ids, labels = row["input_ids"], row["labels"]
    padding = _count_padding(ids, labels)
    stop = len(ids) - padding
    begins = np.array([], np.int64)
    if kind == "documents":
        begins = np.flatnonzero(row["position_ids"][:stop] == 0)
    elif kind == "stream":
        begins = np.flatnonzero(ids[: stop - 1] == tokenizer.eos_token_id) + 1
    bounds = [*sorted({0, *begins.tolist()}), stop]
    documents = tuple(tuple(_split_runs(ids[a:b], labels[a:b], tokenizer)) for a, b in pairwise(bounds))
    return DecodedRow(documents, padding, {name: each.item() for name, each in row.items() if np.ndim(each) == 0})


def _split_runs(ids: np.ndarray, labels: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> Iterator[TokenRun]:
    supervised = labels != IGNORE_INDEX
    bounds = [0, *(np.flatnonzero(supervised[1:] != supervised[:-1]) + 1).tolist(), len(ids)]
    for start, stop in pairwise(bounds):
        text = tokenizer.decode(ids[start:stop].tolist(), skip_special_tokens=False)
        yield TokenRun(str(text), bool(supervised[start]), stop - start)


def _count_padding(ids: np.ndarray, labels: np.ndarray) -> int:
    """Return the number of padding tokens at the end of a row."""
    filled = np.flatnonzero((ids != PAD_TOKEN_ID) | (labels != IGNORE_INDEX))
    return len(ids) - (int(filled[-1]) + 1 if len(filled) else 0)


def _count_supervised(documents: TokenizedDocuments) -> int:
    """Return the number of supervised tokens. The first token of a document never counts."""
    if documents.loss_mask is None:
        return len(documents.tokens) - len(documents)
    firsts = np.concatenate([[0], documents.ends[:-1]]).astype(np.int64)
    return int(np.count_nonzero(documents.loss_mask)) - int(np.count_nonzero(documents.loss_mask[firsts]))


def render_row(row: DecodedRow, number: int, *, use_marks: bool) -> Text:
    """Render a row. Supervised tokens have another color, and marks around them if `use_marks` is set."""
    supervised = sum(run.num_tokens for document in row.documents for run in document if run.is_supervised)
    tokens = sum(run.num_tokens for document in row.documents for run in document)
    columns = "".join(f", {name}={value:g}" for name, value in row.columns.items())
    head = (
        f"row {number}: {tokens} tokens in {_format_count(len(row.documents), 'document')}, {supervised} "
        f"supervised{columns}"
    )
    text = Text(f"── {head} ──\n", style=_FRAME_STYLE)
    for index, document in enumerate(row.documents):
        if index:
            text.append(f"\n┄┄ document {index + 1} ┄┄\n", style=_FRAME_STYLE)
        for run in document:
            shown = f"⟦{run.text}⟧" if run.is_supervised and use_marks else run.text
            text.append(shown, style=_SUPERVISED_STYLE if run.is_supervised else _CONTEXT_STYLE)
    if row.num_padding:
        text.append(f"\n┄┄ {_format_count(row.num_padding, 'token')} of padding ┄┄", style=_FRAME_STYLE)
    return text.append("\n")


def render_histogram(summaries: Sequence[SourceSummary], seq_len: int) -> Text:
    lengths = np.concatenate([summary.lengths for summary in summaries]) if summaries else np.array([], np.int64)
    text = Text("tokens per document\n", style="bold")
    if not len(lengths):
        return text.append("all sources are read during training, so no lengths are known\n", style="default")
    counts, edges = np.histogram(lengths, bins=choose_bins(lengths, _NUM_BARS))
    width = len(f"{int(edges[-1]):,}")
    for count, start, stop in zip(counts, edges[:-1], edges[1:], strict=True):
        bar = "█" * round(_WIDTH * count / counts.max()) or ("▏" if count else "")
        label = f"{int(start):>{width},} to {int(stop) - 1:>{width},}"
        text.append(f"  {label}  ", style="default").append(bar, style="blue").append(f" {count:,}\n", style="default")
    median, most = int(np.median(lengths)), int(lengths.max())
    return text.append(f"  median {median:,}; longest {most:,}; seq_len {seq_len:,}\n", style="dim")


def choose_bins(lengths: np.ndarray, count: int) -> np.ndarray:
    """Return the edges of about `count` bins of equal, round width; the last edge is above the longest length."""
    most = int(lengths.max()) + 1
    least = -(-most // count)
    unit = 10 ** (len(str(least)) - 1)
    width = next(step * unit for step in (1, 2, 5, 10) if step * unit >= least)
    return np.arange(0, most + width, width)


def render_table(summaries: Sequence[SourceSummary], measured_fill: float | None) -> Table:
    """Return a table of sources. `measured_fill`: fill of rows if it depends on the order of documents."""
    table = Table(box=None, pad_edge=False)
    table.add_column("source", overflow="fold")
    table.add_column("format")
    numbered = ("records", "documents", "tokens", "supervised", "rows", "fill", "truncated", "dropped", "split")
    for name in (*numbered, "unsupervised", "trailing turns"):
        table.add_column(name, justify="right")
    for each in summaries:
        counts, fill = each.counts, measured_fill if each.fill is None else each.fill
        numbers = (counts.records, counts.documents, counts.tokens)
        left = (counts.truncated, counts.dropped, counts.split, counts.unsupervised, counts.trailing_turns)
        table.add_row(
            each.name,
            each.format,
            *(f"{value:,}" for value in numbers),
            f"{each.supervised_share:.1%}",
            f"{each.num_rows:,}",
            "" if fill is None else f"{fill:.1%}",
            *(f"{value:,}" for value in left),
        )
    return table


def plot_summaries(summaries: Sequence[SourceSummary], seq_len: int, path: Path) -> None:
    """Plot document lengths and shares of supervised tokens to a PNG file. Raises DataError if that fails."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    lengths, shares = figure.subplots(1, 2, width_ratios=(3, 2))
    _plot_lengths(lengths, summaries, seq_len)
    _plot_shares(shares, summaries)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=130)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}.") from error


def _plot_lengths(axes: Any, summaries: Sequence[SourceSummary], seq_len: int) -> None:
    values = [summary.lengths for summary in summaries]
    if not any(map(len, values)):
        return
    bins = choose_bins(np.concatenate(values), 40)
    colours = [_COLORS[number % len(_COLORS)] for number in range(len(values))]
    names = [_shorten(summary.name) for summary in summaries]
    axes.hist(values, bins=bins, stacked=True, color=colours, label=names, edgecolor="white", linewidth=0.4)
    axes.set_xlim(0, bins[-1])
    if seq_len <= 1.5 * bins[-1]:
        axes.set_xlim(0, max(bins[-1], seq_len * 1.03))
        axes.axvline(seq_len, color="#333333", linestyle="--", linewidth=1, label=f"seq_len {seq_len:,}")
    axes.set_xlabel("tokens per document")
    axes.set_ylabel("documents")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_title("Lengths", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def _plot_shares(axes: Any, summaries: Sequence[SourceSummary]) -> None:
    names = [_shorten(summary.name) for summary in summaries]
    tokens = np.array([summary.lengths.sum() for summary in summaries])
    supervised = np.array([summary.supervised_share for summary in summaries]) * tokens
    axes.barh(names, supervised, color="#4b9e5f", label="supervised")
    axes.barh(names, tokens - supervised, left=supervised, color="#c9ced4", label="not supervised")
    for index, summary in enumerate(summaries):
        axes.annotate(
            f"{summary.supervised_share:.0%} supervised",
            (tokens[index], index),
            (6, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_xlim(0, max(tokens.max(initial=1), 1) * 1.3)
    axes.invert_yaxis()
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("tokens")
    axes.set_title("Supervised tokens", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    axes.margins(y=max(0.05, 0.6 / (len(names) or 1)))


def _shorten(name: str) -> str:
    return name if len(name) <= 28 else f"...{name[-25:]}"


def _format_count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
