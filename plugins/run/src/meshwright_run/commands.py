"""The commands of a run. Each imports what it needs when it runs."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.plugin import (
    Assignments,
    ConfigError,
    RunFile,
    Traceback,
    get_registry,
    how_to_install,
    join,
    leave,
    new_console,
    output_console,
    say,
    started_by_launcher,
    told,
    uncollected,
)

if TYPE_CHECKING:
    from meshwright.plugin import Folder

    from .run_file import RunConfig


def train(
    run_file: RunFile,
    assignments: Assignments = None,
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Show what the run would hold, send and take, and start nothing.")
    ] = False,
    timings: Annotated[
        bool, typer.Option("--timings", help="After the first step, print what each part of the way to it took.")
    ] = False,
    traceback: Traceback = False,
) -> None:
    """Train a model. Starts the ranks of this node itself, or joins those that a launcher has started."""
    from .observers import Startup
    from .run_file import check_model, load_run

    startup = Startup(timings)
    with told(traceback, everywhere=True):
        join()
    with told(traceback):
        config = load_run(run_file, assignments or [])
        if plan_only:
            with uncollected():
                check_model(config.model, config.data.seq_len)
            _plan_only(config)
            return
        if not started_by_launcher() and config.processes(get_registry().get(config.strategy).axes, 0) > 1:
            # The fork server imports torch and transformers while this process does, too.
            from .launch.local import warm_up

            warm_up(["meshwright_run.run_rank"])
        with uncollected():
            if not started_by_launcher():
                check_model(config.model, config.data.seq_len)
            from .start import start

        startup.end("imports and run file")
        code = start(config, show_traceback=traceback, startup=startup)
    leave(code)


def _plan_only(config: RunConfig) -> None:
    from .preflight import processes

    count = int(os.environ["WORLD_SIZE"]) if started_by_launcher() else processes(config)
    if os.environ.get("RANK", "0") != "0":
        return
    parts = get_registry().hook.show_plan(config=config, ranks=count)
    if parts is None:
        raise ConfigError(f"--plan-only needs a plugin that is not installed. {how_to_install('plan')}")
    console = output_console(200)
    for part in parts:
        console.print(part, highlight=False)


Directory = Annotated[
    str, typer.Argument(help="A checkpoint, or a directory of checkpoints; or a URL, such as s3://bucket/prefix.")
]
KeyFile = Annotated[
    str | None, typer.Option(help="The file with the key that they are signed with; others are refused.")
]


def show(directory: Directory, key_file: KeyFile = None) -> None:
    """Tell what is in a checkpoint, and whether it is whole; exits with 1 where one is not."""
    with told(traceback=False):
        from .verifying import shown

        table, all_whole = shown(_place(directory, key_file))
        output_console().print(table)
    raise typer.Exit(0 if all_whole else 1)


def verify(directory: Directory, key_file: KeyFile = None) -> None:
    """Read every byte of a checkpoint, and compare it with the manifest.

    Exits with 0 where all are whole, 1 where one is not, and 2 where there is none, or it cannot be read, or a key is
    given and one is not signed with it.
    """
    with told(traceback=False):
        from .verifying import signed, verified

        console, all_whole = new_console(soft_wrap=True, highlight=False), True
        for each in verified(_place(directory, key_file)):
            all_whole = all_whole and not each.problems
            state = "torn" if each.problems else "whole"
            if each.manifest is not None:
                state += f", {len(each.manifest.files)} files, {each.nbytes:,} bytes read, "
                state += signed(each.manifest, each.place)
            console.print(f"{each.place}: {state}")
            for problem in each.problems:
                console.print(f"  {problem}")
    raise typer.Exit(0 if all_whole else 1)


def _place(where: str, key_file: str | None) -> Folder:
    from meshwright.plugin import Access, place_of, read_key

    key = None if key_file is None else read_key(key_file, where="--key-file")
    return place_of(where, Access(key))


def export(
    checkpoint: Annotated[str, typer.Argument(help="The checkpoint: a directory, or a URL.")],
    output: Annotated[Path, typer.Argument(help="The Hugging Face directory to write: new, or empty.")],
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 ... for the weights; as they were saved otherwise.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of a file, such as 5GB; memory is bounded by it.")] = "5GB",
    ema: Annotated[
        bool, typer.Option("--ema", help="The average of the weights in their place, which the run has kept (ema).")
    ] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of adapters, or of an adapter's directory: the whole model that they make.")
    ] = False,
    trust_remote_code: Annotated[
        str | None, typer.Option(help="The digest of the model's own code, which the error without it tells.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="With --merge: where the base is, if it is not where it was in training.")
    ] = None,
    key_file: KeyFile = None,
) -> None:
    """Write the model of a checkpoint as a Hugging Face directory, with one process and no network.

    Of a checkpoint of adapters it is their directory, as peft has it; with --merge the whole model.
    """
    with told(traceback=False):
        from meshwright.plugin import HUGGING_FACE, export_checkpoint, is_url, merge_adapter, trust_code
        from meshwright.plugin import dtype as dtype_of

        chosen = None if dtype is None else dtype_of(dtype)
        if base is not None and not merge:
            raise ConfigError("--base is of --merge: what is written without it holds no base. Leave it out.")
        if trust_remote_code is not None:
            if is_url(checkpoint):
                raise ConfigError(
                    f"--trust-remote-code is of code that you have read, and {checkpoint} is elsewhere. Copy the "
                    f"checkpoint into a directory, and export it from there."
                )
            trust_code(Path(checkpoint) / HUGGING_FACE, trust_remote_code, commit=None, where="--trust-remote-code")
        place = _place(checkpoint, key_file)
        if merge:
            merge_adapter(place, output, base=base, dtype=chosen, max_shard_size=max_shard_size, average=ema)
        else:
            export_checkpoint(place, output, dtype=chosen, max_shard_size=max_shard_size, average=ema)
    say(f"written {output}\n")


def show_data(
    run_file: RunFile,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value, such as data.seq_len=512.")
    ] = None,
    rows: Annotated[int, typer.Option(min=0, help="So many rows are shown whole.")] = 2,
    png: Annotated[Path | None, typer.Option(help="Draw lengths and learnt tokens into this file.")] = None,
    traceback: Traceback = False,
) -> None:
    """Show the data of a run: its first rows as the model sees them, lengths, and what was cut or left out."""
    with told(traceback):
        from .data.feed import Feed, Place, lay_out
        from .data.report import as_histogram, as_table, as_text, draw, first_rows, measured_fill, summarize
        from .data.tokenizer import load_tokenizer
        from .preflight import data_and_model_config
        from .run_file import load_run

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


def schema() -> None:
    """Print the JSON schema of the run file, with the options of the installed strategies, for editors."""
    from .run_schema import run_schema

    say(json.dumps(run_schema(), indent=2) + "\n")


def init(
    file: Annotated[Path, typer.Argument(help="The run file to write.")] = Path("run.yaml"),
    model: Annotated[
        str | None, typer.Option(help="A model directory, a hub id, or new: a small one with new weights (default).")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="A glob of files, which may be given several times; default: stdlib, Python's own sources."),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(help="What files hold: text, messages or prompt_completion; default: what the first line shows."),
    ] = None,
    adapter: Annotated[
        bool | None, typer.Option("--adapter/--full", help="Train an adapter (LoRA), or the whole model (default).")
    ] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="Ranks on this machine; default: what is found.")] = None,
    strategy: Annotated[str | None, typer.Option(help="Default: what is recommended for so many.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps; default: 300.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Times that each row is trained on; in place of steps.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: defaults where no flag says more.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if there is one.")] = False,
    traceback: Traceback = False,
) -> None:
    """Write a first run file, with a comment on each part. Asks five questions; flags answer them, too."""
    with told(traceback):
        from .first_run.answers import Wishes, answered, find_machine, known_of
        from .first_run.text import check_place, write_run_file

        check_place(file, overwrite=overwrite)
        asks = not yes and sys.stdin.isatty() and sys.stdout.isatty()
        wishes = Wishes(model, tuple(data) if data else None, format, adapter, devices, strategy, steps, epochs)
        answers = answered(wishes, find_machine, get_registry(), new_console() if asks else None)
        write_run_file(file, answers, known_of(answers.model), find_machine(), overwrite=overwrite)
        name = shlex.quote(str(file))
        say(
            f"written {file}: {answers.strategy} on {answers.ranks} rank{'s' if answers.ranks > 1 else ''}\n"
            f"  meshwright explain {name}    # what it will do, in words\n"
            f"  meshwright train {name}      # do it\n"
        )
