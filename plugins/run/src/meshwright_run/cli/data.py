"""`meshwright data`: the data of a run, before it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.plugin import RunFile, Traceback, output_console, told


def show(
    run_file: RunFile,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a value, such as data.seq_len=512."),
    ] = None,
    rows: Annotated[int, typer.Option(min=0, help="So many rows are shown whole.")] = 2,
    png: Annotated[Path | None, typer.Option(help="Draw lengths and learnt tokens into this file.")] = None,
    traceback: Traceback = False,
) -> None:
    """Show the data of a run: its first rows as the model sees them, lengths, and what was cut or left out."""
    with told(traceback):
        from ..data.feed import Feed, Place
        from ..data.run_rows import first_rows, lay_out, measured_fill, summarize
        from ..data.tokenizer import load_tokenizer
        from ..preflight import data_and_model_config
        from ..run_file import load_run
        from .data_report import as_histogram, as_table, as_text, draw

        config = load_run(run_file, assignments or [])
        data, _ = data_and_model_config(config)
        laid_out, kind = lay_out(data, config.data), config.data.packing_kind()
        summaries = summarize(data, laid_out, kind)
        place = Place(0, 1, config.micro_batch_size or config.batch_size)

        def feed() -> Feed:
            # Each reads from the beginning, as sources do that are read while training.
            return Feed(
                laid_out.training, place, batch_size=config.batch_size, seed=config.seed, weights=laid_out.weights
            )

        console = output_console(160)
        tokenizer = load_tokenizer(data.tokenizer_dir)
        for number, row in enumerate(first_rows(feed(), rows, kind, tokenizer), start=1):
            console.print(as_text(row, number, marks=not console.color_system), soft_wrap=True)
        console.print(as_histogram(summaries, config.data.seq_len))
        console.print(as_table(summaries, measured_fill(feed()) if kind == "none" and summaries else None))
        for source in data.sources:
            if source.train is None:
                told_of = f"{source.config.place} is read while training: nothing of it is counted before"
                console.print(told_of, highlight=False, markup=False, soft_wrap=True)
        if png is not None:
            draw(summaries, config.data.seq_len, png)
            console.print(f"written {png}", highlight=False, soft_wrap=True)
