"""Commands for a trained model: export, evaluate, chat. Each imports what it needs when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.plugin import (
    ConfigError,
    JsonOption,
    SetOption,
    TracebackOption,
    echo,
    exit_on_error,
    exit_process,
    join_launcher,
)

from .commands import CheckpointArgument, KeyFile, open_checkpoint_storage
from .completion import complete_checkpoint

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="Run directory, checkpoint, model directory, or Hub id.",
        metavar="MODEL",
        autocompletion=complete_checkpoint,
    ),
]


def export(
    checkpoint: CheckpointArgument,
    output: Annotated[Path, typer.Argument(help="Hugging Face directory to write; new or empty.")],
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of the weights, such as float32 or bfloat16; default: as saved.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Largest size of a file, such as 5GB; it also bounds the memory used.")
    ] = "5GB",
    ema: Annotated[
        bool, typer.Option("--ema", help="Export the exponential moving average of the weights; needs a run with ema.")
    ] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge an adapter into its base and write the full model.")
    ] = False,
    trust_remote_code: Annotated[
        str | None, typer.Option(help="Digest of the model's own code; without it, the error message states it.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="With --merge: directory of the base model, if it has moved since training.")
    ] = None,
    key_file: KeyFile = None,
) -> None:
    """Export the model of a checkpoint as a Hugging Face directory, with one process and no network.

    A checkpoint of an adapter becomes a directory that peft loads; with --merge, the full model.

    \b
    Examples:
      meshwright export runs/a/checkpoints/step-00000300 exported
      meshwright export runs/a/checkpoints/step-00000300 exported --merge --dtype bfloat16
    """
    with exit_on_error(show_traceback=False):
        from meshwright.plugin import (
            HUGGING_FACE_FOLDER,
            export_checkpoint,
            is_url,
            merge_adapter,
            parse_dtype,
            register_trusted_code,
        )

        chosen = None if dtype is None else parse_dtype(dtype)
        if base is not None and not merge:
            raise ConfigError("--base needs --merge: an adapter is exported without its base. Leave it out.")
        if trust_remote_code is not None:
            if is_url(checkpoint):
                raise ConfigError(
                    f"--trust-remote-code is for code that you have read on disk, but {checkpoint} is a URL. Copy the "
                    f"checkpoint into a directory, and export it from there."
                )
            folder = Path(checkpoint) / HUGGING_FACE_FOLDER
            register_trusted_code(folder, trust_remote_code, commit=None, where="--trust-remote-code")
        storage = open_checkpoint_storage(checkpoint, key_file)
        options: Any = {"dtype": chosen, "max_shard_size": max_shard_size, "use_ema": ema}
        if merge:
            merge_adapter(storage, output, base=base, **options)
        else:
            export_checkpoint(storage, output, **options)
    echo(f"written {output}\n")


def evaluate(
    model: ModelArgument,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Set of files, GLOB or NAME=GLOB; repeatable. Default: those of the run."),
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="Format of the files, such as text or messages; default: detected.")
    ] = None,
    max_sequences: Annotated[
        int | None, typer.Option(min=1, help="Sequences of each set, spread evenly; default: all.")
    ] = None,
    tasks: Annotated[
        list[str] | None, typer.Option("--task", help="Task of the lm-eval harness, such as hellaswag; repeatable.")
    ] = None,
    task_dir: Annotated[Path | None, typer.Option(help="Directory of further task files.")] = None,
    trust_task_code: Annotated[
        bool, typer.Option("--trust-task-code", help="Run the code in the files of --task-dir.")
    ] = False,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples in a prompt; default: the task's.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Examples of each task; default: all.")] = None,
    assignments: SetOption = None,
    json_file: JsonOption = None,
    key_file: KeyFile = None,
    traceback: TracebackOption = False,
) -> None:
    """Evaluate a model: loss, perplexity and token accuracy of each set, under any layout.

    \b
    Examples:
      meshwright eval runs/stdlib
      meshwright eval path/to/model --data news='news/*.jsonl' --set strategy=single
      meshwright eval path/to/model --task hellaswag --limit 100
    """
    with exit_on_error(traceback, on_all_ranks=True):
        join_launcher()
    with exit_on_error(traceback):
        from .evaluate import build_eval_job, run_evaluation
        from .harness_tasks import TaskOptions, check_harness

        chosen = TaskOptions(tuple(tasks), task_dir, num_fewshot, limit) if tasks else None
        if chosen is not None:
            check_harness(chosen, trusts_code=trust_task_code)
        elif task_dir is not None or num_fewshot is not None or limit is not None or trust_task_code:
            raise ConfigError(
                "--task-dir, --trust-task-code, --num-fewshot and --limit belong to tasks. Name one: --task NAME."
            )
        job = build_eval_job(
            model,
            data or [],
            format=format,
            assignments=assignments or [],
            max_sequences=max_sequences,
            key_file=key_file,
            json_file=json_file,
            tasks=chosen,
        )
        code = run_evaluation(job, show_traceback=traceback)
    exit_process(code)


def chat(
    model: ModelArgument,
    system: Annotated[str | None, typer.Option(help="System message of the conversation.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0: the most likely token.")] = 0.7,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Sample from the most likely tokens of this mass.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    nproc: Annotated[int, typer.Option(min=1, help="Ranks that shard the model with fsdp2; 1: one process.")] = 1,
    key_file: KeyFile = None,
    traceback: TracebackOption = False,
) -> None:
    """Chat with a model in the terminal. Answers appear as they are generated.

    \b
    Examples:
      meshwright chat runs/sft
      meshwright chat path/to/model --system 'Answer in one sentence.' --temperature 0
    """
    with exit_on_error(traceback):
        from .chat import ChatOptions, run_chat

        options = ChatOptions(system, max_new_tokens, temperature, top_p, seed)
        code = run_chat(model, options, nproc=nproc, key_file=key_file, show_traceback=traceback)
    exit_process(code)
