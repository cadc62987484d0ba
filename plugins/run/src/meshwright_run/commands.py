"""Commands that start runs and inspect their data and checkpoints. Each imports what it needs when it is called."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.plugin import (
    ConfigError,
    JsonOption,
    RunFileArgument,
    SetOption,
    TracebackOption,
    create_console,
    create_output_console,
    echo,
    exit_on_error,
    exit_process,
    format_install_hint,
    gc_paused,
    get_registry,
    is_launched,
    join_launcher,
    report_results,
    write_json,
)

from .completion import complete_checkpoint, complete_strategy
from .run_directory import CHECKPOINTS, RUN_FILE

if TYPE_CHECKING:
    from meshwright.plugin import Storage

    from .run_file import RunConfig


def train(
    run_file: RunFileArgument,
    assignments: SetOption = None,
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Print predicted memory, communication and time, without training.")
    ] = False,
    timings: Annotated[
        bool, typer.Option("--timings", help="After the first step, print how long each phase of the startup took.")
    ] = False,
    traceback: TracebackOption = False,
) -> None:
    """Train a model. Starts the ranks of this node, or joins those that a launcher has started.

    \b
    Examples:
      meshwright train run.yaml
      meshwright train run.yaml --set strategy=ddp --set steps=100
    """
    from .observers import StartupTimer
    from .run_file import check_new_model, load_run

    startup = StartupTimer(timings)
    with exit_on_error(traceback, on_all_ranks=True):
        join_launcher()
    with exit_on_error(traceback):
        config = load_run(run_file, assignments or [])
        if plan_only:
            with gc_paused():
                check_new_model(config.model, config.data.seq_len)
            _print_plan(config)
            return
        if not is_launched() and config.count_local_ranks(get_registry().get(config.strategy).axes, 0) > 1:
            # The fork server imports torch and transformers in parallel with this process.
            from .launch.local import start_fork_server

            start_fork_server(["meshwright_run.run_rank"])
        with gc_paused():
            if not is_launched():
                check_new_model(config.model, config.data.seq_len)
            from .start import start_run

        startup.end_phase("imports and run file")
        names_overwrite = any(each.partition("=")[0] == "overwrite" for each in assignments or [])
        code = start_run(config, show_traceback=traceback, startup=startup, confirm=not names_overwrite)
    exit_process(code)


def _print_plan(config: RunConfig) -> None:
    from .preflight import count_local_ranks

    count = int(os.environ["WORLD_SIZE"]) if is_launched() else count_local_ranks(config)
    if os.environ.get("RANK", "0") != "0":
        return
    parts = get_registry().hook.render_plan(config=config, world_size=count)
    if parts is None:
        raise ConfigError(f"--plan-only needs a plugin that is not installed. {format_install_hint('plan')}")
    console = create_output_console(80)
    for part in parts:
        console.print(part, highlight=False)


CheckpointArgument = Annotated[
    str,
    typer.Argument(
        help="A checkpoint, or a directory of checkpoints; or a URL, such as s3://bucket/prefix.",
        autocompletion=complete_checkpoint,
    ),
]
KeyFile = Annotated[
    str | None, typer.Option(help="File with the signing key; checkpoints not signed with it are refused.")
]


def show_checkpoint(directory: CheckpointArgument, key_file: KeyFile = None, json_file: JsonOption = None) -> None:
    """Show what checkpoints hold and whether they are valid. Exits with 1 if any is not.

    \b
    Examples:
      meshwright checkpoint show runs/a/checkpoints
      meshwright checkpoint show s3://bucket/run --json -
    """
    with exit_on_error(show_traceback=False):
        from .inspect_checkpoints import describe_checkpoints, render_checkpoints

        found = describe_checkpoints(open_checkpoint_storage(directory, key_file))
        report_results(render_checkpoints(found), found, json_file)
    raise typer.Exit(0 if all(each["state"] == "valid" for each in found) else 1)


def verify_checkpoint(directory: CheckpointArgument, key_file: KeyFile = None, json_file: JsonOption = None) -> None:
    """Read every byte of a checkpoint and compare it with the manifest.

    Exits with 0 if all checkpoints are valid, and with 1 if any is not. Exits with 2 if there is none, if one cannot
    be read, or if one is not signed with the given key.

    \b
    Examples:
      meshwright checkpoint verify runs/a/checkpoints
      meshwright checkpoint verify runs/a/checkpoints --key-file key
    """
    with exit_on_error(show_traceback=False):
        from .inspect_checkpoints import describe_signature, verify_checkpoints

        console, found = create_console(soft_wrap=True, highlight=False), []
        for each in verify_checkpoints(open_checkpoint_storage(directory, key_file)):
            found.append(each.to_dict())
            if json_file == Path("-"):
                continue
            state = found[-1]["state"]
            if each.manifest is not None:
                state += f", {len(each.manifest.files)} files, {each.nbytes:,} bytes read, "
                state += describe_signature(each.manifest, each.storage)
            console.print(f"{each.storage}: {state}")
            for problem in each.problems:
                console.print(f"  {problem}")
        write_json(found, json_file)
    raise typer.Exit(0 if all(each["state"] == "valid" for each in found) else 1)


def open_checkpoint_storage(location: str, key_file: str | None) -> Storage:
    from meshwright.plugin import StorageOptions, open_storage, read_signing_key

    key = None if key_file is None else read_signing_key(key_file, where="--key-file")
    # The directory of a run has its checkpoints in one below it.
    below = Path(location) / CHECKPOINTS
    is_run = (Path(location) / RUN_FILE).is_file() and below.is_dir()
    return open_storage(str(below) if is_run else location, StorageOptions(key))


def show_data(
    run_file: RunFileArgument,
    assignments: SetOption = None,
    rows: Annotated[int, typer.Option(min=0, help="Number of rows to show in full.")] = 2,
    png: Annotated[
        Path | None, typer.Option(help="PNG file to write, with a plot of lengths and supervised tokens.")
    ] = None,
    traceback: TracebackOption = False,
) -> None:
    """Show the data of a run: its first rows as the model sees them, lengths, and what was truncated or skipped.

    \b
    Examples:
      meshwright data show run.yaml
      meshwright data show run.yaml --rows 5 --png lengths.png
    """
    with exit_on_error(traceback):
        from .data.report import (
            decode_first_rows,
            measure_fill,
            plot_summaries,
            render_histogram,
            render_row,
            render_table,
            summarize_sources,
        )
        from .data.tokenizer import load_tokenizer
        from .data.train_sampler import DataShard, TrainSampler, build_datasets
        from .preflight import prepare_data_and_model_config
        from .run_file import load_run

        config = load_run(run_file, assignments or [])
        data, _ = prepare_data_and_model_config(config)
        laid_out, kind = build_datasets(data, config.data), config.data.resolve_packing()
        summaries = summarize_sources(data, laid_out, kind)
        shard = DataShard(0, 1, config.micro_batch_size or config.batch_size)

        def feed() -> TrainSampler:
            # A new sampler reads from the beginning, streaming sources included.
            return TrainSampler(
                laid_out.train_sets, shard, batch_size=config.batch_size, seed=config.seed, weights=laid_out.weights
            )

        console = create_output_console(160)
        tokenizer = load_tokenizer(data.tokenizer_dir)
        for number, row in enumerate(decode_first_rows(feed(), rows, kind, tokenizer), start=1):
            console.print(render_row(row, number, use_marks=not console.color_system), soft_wrap=True)
        console.print(render_histogram(summaries, config.data.seq_len))
        console.print(render_table(summaries, measure_fill(feed()) if kind == "none" and summaries else None))
        for source in data.sources:
            if source.train_documents is None:
                notice = f"{source.config.location} is streamed: its documents are not counted before training"
                console.print(notice, highlight=False, markup=False, soft_wrap=True)
        if png is not None:
            plot_summaries(summaries, config.data.seq_len, png)
            console.print(f"written {png}", highlight=False, soft_wrap=True)


def schema() -> None:
    """Print the JSON schema of run files, with the options of all installed strategies, for editors.

    \b
    Examples:
      meshwright schema
      meshwright schema > run.schema.json
    """
    from .run_schema import run_schema

    echo(json.dumps(run_schema(), indent=2) + "\n")


StrategyOption = Annotated[
    str | None,
    typer.Option(
        help="Strategy; default: the one recommended for this number of devices.", autocompletion=complete_strategy
    ),
]


def init(
    file: Annotated[Path, typer.Argument(help="Run file to write.")] = Path("run.yaml"),
    model: Annotated[
        str | None, typer.Option(help="Model directory, hub id, or new: a small model with new weights (default).")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB", help="Glob of data files; may be repeated; default: stdlib, Python's own sources."
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            help="Format of the files: text, messages, sharegpt, prompt_completion, alpaca, preference or tokens; "
            "default: detected from the columns."
        ),
    ] = None,
    adapter: Annotated[
        bool | None, typer.Option("--adapter/--full", help="Train an adapter (LoRA), or the full model (default).")
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks on this machine; default: the devices found.")
    ] = None,
    strategy: StrategyOption = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Number of optimizer steps; default: 300, or 3 epochs of your files.")
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="Number of epochs, instead of steps.")] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask; use the default of each flag that is not given.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    traceback: TracebackOption = False,
) -> None:
    """Write a commented run file. Asks five questions, unless flags answer them.

    \b
    Examples:
      meshwright init
      meshwright init sft.yaml --model path/to/model --data 'chats/*.jsonl' --adapter --yes
    """
    with exit_on_error(traceback):
        from .init_wizard.answers import InitFlags, collect_answers, detect_machine, inspect_model
        from .init_wizard.preview import print_first_example
        from .init_wizard.run_file_text import check_output_file, write_run_file

        check_output_file(file, overwrite=overwrite)
        asks = not yes and sys.stdin.isatty() and sys.stdout.isatty()
        flags = InitFlags(model, tuple(data) if data else None, format, adapter, devices, strategy, steps, epochs)
        answers = collect_answers(flags, detect_machine, get_registry(), create_console() if asks else None)
        config = write_run_file(file, answers, inspect_model(answers.model), detect_machine(), overwrite=overwrite)
        name = shlex.quote(str(file))
        echo(
            f"written {file}: {answers.strategy} on {answers.num_ranks} rank{'s' if answers.num_ranks > 1 else ''}\n"
            f"  meshwright explain {name}    # what it will do\n"
            f"  meshwright train {name}      # do it\n"
        )
        if answers.model is not None:
            print_first_example(config.data, answers.model, create_console())
