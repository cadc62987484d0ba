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
    ConfigError,
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
)

if TYPE_CHECKING:
    from meshwright.plugin import Storage

    from .run_file import RunConfig


def train(
    run_file: RunFileArgument,
    assignments: SetOption = None,
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Show what the run would hold, send and take, and start nothing.")
    ] = False,
    timings: Annotated[
        bool, typer.Option("--timings", help="After the first step, print what each part of the way to it took.")
    ] = False,
    traceback: TracebackOption = False,
) -> None:
    """Train a model. Starts the ranks of this node itself, or joins those that a launcher has started."""
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
            # The fork server imports torch and transformers while this process does, too.
            from .launch.local import start_fork_server

            start_fork_server(["meshwright_run.run_rank"])
        with gc_paused():
            if not is_launched():
                check_new_model(config.model, config.data.seq_len)
            from .start import start_run

        startup.end_phase("imports and run file")
        code = start_run(config, show_traceback=traceback, startup=startup)
    exit_process(code)


def _print_plan(config: RunConfig) -> None:
    from .preflight import count_local_ranks

    count = int(os.environ["WORLD_SIZE"]) if is_launched() else count_local_ranks(config)
    if os.environ.get("RANK", "0") != "0":
        return
    parts = get_registry().hook.show_plan(config=config, world_size=count)
    if parts is None:
        raise ConfigError(f"--plan-only needs a plugin that is not installed. {format_install_hint('plan')}")
    console = create_output_console(200)
    for part in parts:
        console.print(part, highlight=False)


CheckpointArgument = Annotated[
    str, typer.Argument(help="A checkpoint, or a directory of checkpoints; or a URL, such as s3://bucket/prefix.")
]
KeyFile = Annotated[
    str | None, typer.Option(help="The file with the key that they are signed with; others are refused.")
]


def show_checkpoint(directory: CheckpointArgument, key_file: KeyFile = None) -> None:
    """Tell what is in a checkpoint, and whether it is whole; exits with 1 where one is not."""
    with exit_on_error(show_traceback=False):
        from .inspect_checkpoints import build_checkpoint_table

        table, all_whole = build_checkpoint_table(_open_storage(directory, key_file))
        create_output_console().print(table)
    raise typer.Exit(0 if all_whole else 1)


def verify_checkpoint(directory: CheckpointArgument, key_file: KeyFile = None) -> None:
    """Read every byte of a checkpoint, and compare it with the manifest.

    Exits with 0 where all are whole, 1 where one is not, and 2 where there is none, or it cannot be read, or a key is
    given and one is not signed with it.
    """
    with exit_on_error(show_traceback=False):
        from .inspect_checkpoints import describe_signature, verify_checkpoints

        console, all_whole = create_console(soft_wrap=True, highlight=False), True
        for each in verify_checkpoints(_open_storage(directory, key_file)):
            all_whole = all_whole and not each.problems
            state = "torn" if each.problems else "whole"
            if each.manifest is not None:
                state += f", {len(each.manifest.files)} files, {each.nbytes:,} bytes read, "
                state += describe_signature(each.manifest, each.storage)
            console.print(f"{each.storage}: {state}")
            for problem in each.problems:
                console.print(f"  {problem}")
    raise typer.Exit(0 if all_whole else 1)


def _open_storage(location: str, key_file: str | None) -> Storage:
    from meshwright.plugin import StorageOptions, open_storage, read_signing_key

    key = None if key_file is None else read_signing_key(key_file, where="--key-file")
    return open_storage(location, StorageOptions(key))


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
    with exit_on_error(show_traceback=False):
        from meshwright.plugin import (
            HUGGING_FACE_FOLDER,
            export_checkpoint,
            is_url,
            merge_adapter,
            register_trusted_code,
        )
        from meshwright.plugin import parse_dtype as dtype_of

        chosen = None if dtype is None else dtype_of(dtype)
        if base is not None and not merge:
            raise ConfigError("--base is of --merge: what is written without it holds no base. Leave it out.")
        if trust_remote_code is not None:
            if is_url(checkpoint):
                raise ConfigError(
                    f"--trust-remote-code is of code that you have read, and {checkpoint} is elsewhere. Copy the "
                    f"checkpoint into a directory, and export it from there."
                )
            register_trusted_code(
                Path(checkpoint) / HUGGING_FACE_FOLDER, trust_remote_code, commit=None, where="--trust-remote-code"
            )
        place = _open_storage(checkpoint, key_file)
        if merge:
            merge_adapter(place, output, base=base, dtype=chosen, max_shard_size=max_shard_size, use_ema=ema)
        else:
            export_checkpoint(place, output, dtype=chosen, max_shard_size=max_shard_size, use_ema=ema)
    echo(f"written {output}\n")


def show_data(
    run_file: RunFileArgument,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value, such as data.seq_len=512.")
    ] = None,
    rows: Annotated[int, typer.Option(min=0, help="So many rows are shown whole.")] = 2,
    png: Annotated[Path | None, typer.Option(help="Draw lengths and learnt tokens into this file.")] = None,
    traceback: TracebackOption = False,
) -> None:
    """Show the data of a run: its first rows as the model sees them, lengths, and what was cut or left out."""
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
        place = DataShard(0, 1, config.micro_batch_size or config.batch_size)

        def feed() -> TrainSampler:
            # Each reads from the beginning, as sources do that are read while training.
            return TrainSampler(
                laid_out.train_sets, place, batch_size=config.batch_size, seed=config.seed, weights=laid_out.weights
            )

        console = create_output_console(160)
        tokenizer = load_tokenizer(data.tokenizer_dir)
        for number, row in enumerate(decode_first_rows(feed(), rows, kind, tokenizer), start=1):
            console.print(render_row(row, number, use_marks=not console.color_system), soft_wrap=True)
        console.print(render_histogram(summaries, config.data.seq_len))
        console.print(render_table(summaries, measure_fill(feed()) if kind == "none" and summaries else None))
        for source in data.sources:
            if source.train_documents is None:
                told_of = f"{source.config.location} is read while training: nothing of it is counted before"
                console.print(told_of, highlight=False, markup=False, soft_wrap=True)
        if png is not None:
            plot_summaries(summaries, config.data.seq_len, png)
            console.print(f"written {png}", highlight=False, soft_wrap=True)


def schema() -> None:
    """Print the JSON schema of the run file, with the options of the installed strategies, for editors."""
    from .run_schema import run_schema

    echo(json.dumps(run_schema(), indent=2) + "\n")


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
    traceback: TracebackOption = False,
) -> None:
    """Write a first run file, with a comment on each part. Asks five questions; flags answer them, too."""
    with exit_on_error(traceback):
        from .init_wizard.answers import InitFlags, collect_answers, detect_machine, inspect_model
        from .init_wizard.run_file_text import check_output_file, write_run_file

        check_output_file(file, overwrite=overwrite)
        asks = not yes and sys.stdin.isatty() and sys.stdout.isatty()
        wishes = InitFlags(model, tuple(data) if data else None, format, adapter, devices, strategy, steps, epochs)
        answers = collect_answers(wishes, detect_machine, get_registry(), create_console() if asks else None)
        write_run_file(file, answers, inspect_model(answers.model), detect_machine(), overwrite=overwrite)
        name = shlex.quote(str(file))
        echo(
            f"written {file}: {answers.strategy} on {answers.num_ranks} rank{'s' if answers.num_ranks > 1 else ''}\n"
            f"  meshwright explain {name}    # what it will do, in words\n"
            f"  meshwright train {name}      # do it\n"
        )
