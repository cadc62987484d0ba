"""The directory of a run: who holds it, and what is left there."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import transformers
from filelock import FileLock, Timeout
from rich.console import Console

from ..base.errors import ConfigError
from ..checkpoint import export_checkpoint, save_checkpoint
from ..checkpoint.directory import put_in_place
from ..data import load_tokenizer
from ..files.parsing import as_yaml
from ..strategy.contract import StepResult, StrategyManager
from .files import CHECKPOINTS, CURVE, HOLDER, LOCK, METRICS, MODEL, RUN, SUMMARY
from .report import draw_loss_curve
from .run_file import RunConfig, as_plain
from .sample import generate_sample

if TYPE_CHECKING:
    from .plan import Plan

_CHECKPOINT_OF_MODEL, _NEW_MODEL = f"{MODEL}.checkpoint", f"{MODEL}.writing"
AVERAGED_STEPS = 20
"""Training loss is told as the mean over this many last steps."""


@contextmanager
def locked(directory: Path, *, patience_s: float) -> Iterator[None]:
    """Hold an output directory for one run. The system lets go of it when the process ends, however it does.

    Args:
        directory: made if it is missing.
        patience_s: how long to wait for ranks of an earlier run that are about to end.

    Raises:
        ConfigError: another run holds it, or it cannot be made.
    """
    holder = directory / HOLDER
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(directory / LOCK)
        lock.acquire(timeout=patience_s)
    except Timeout:
        raise ConfigError(
            f"output_dir={str(directory)!r} is in use by another run{_told(holder)}. Wait until it has ended, end it, "
            f"or name another directory."
        ) from None
    except (OSError, NotImplementedError) as error:
        raise ConfigError(f"output_dir={str(directory)!r} cannot be locked: {error}. Name another directory.") from None
    try:
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        told = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
        holder.write_text(json.dumps(told) + "\n", encoding="utf-8")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _told(holder: Path) -> str:
    """Who holds a lock, as far as it has said so."""
    try:
        told = json.loads(holder.read_text(encoding="utf-8"))
        return f": process {told['pid']} on {told['host']}, started {told['started']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


def prepare_output(config: RunConfig, *, replaces: bool) -> None:
    """Make the directory that of an unfinished run.

    Raises:
        ConfigError: it cannot be written.
    """
    directory = Path(config.output_dir)
    try:
        if replaces:
            for name in (CHECKPOINTS, MODEL):
                if (directory / name).is_dir():
                    shutil.rmtree(directory / name)
            for name in (METRICS, CURVE):
                (directory / name).unlink(missing_ok=True)
        for name in (_CHECKPOINT_OF_MODEL, _NEW_MODEL):
            shutil.rmtree(directory / name, ignore_errors=True)
        # As long as there is a summary, the directory is that of the run that has finished.
        (directory / SUMMARY).unlink(missing_ok=True)
        _write(directory / RUN, as_yaml(as_plain(config)))
    except OSError as error:
        raise ConfigError(f"output_dir={config.output_dir!r} cannot be written: {error}.") from error


def _write(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all."""
    new = path.with_name(f"{path.name}.tmp")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def export(manager: StrategyManager, config: RunConfig, plan: Plan) -> None:
    """Write the model as a Hugging Face directory, every rank a part of it. Collective."""
    world, directory = manager.mesh.world, Path(config.output_dir)
    checkpoint, model = directory / _CHECKPOINT_OF_MODEL, directory / _NEW_MODEL
    tokenizer = load_tokenizer(plan.data.tokenizer_dir)
    save_checkpoint(manager, checkpoint, step=config.steps, tokenizer=tokenizer, with_optimizer=False)
    export_checkpoint(checkpoint, model, world=world)
    if world.rank == 0:
        put_in_place(model, directory / MODEL)
        shutil.rmtree(checkpoint)


def finish(config: RunConfig, plan: Plan, results: list[StepResult], console: Console) -> None:
    """Write loss curve and summary; show a sample and what to do next."""
    directory = Path(config.output_dir)
    tokenizer = load_tokenizer(plan.data.tokenizer_dir)
    draw_loss_curve(results, directory / CURVE)
    last = [result.loss for result in results[-AVERAGED_STEPS:]]
    train_loss, ln_vocab = sum(last) / len(last), math.log(len(tokenizer))
    summary = {
        "strategy": str(plan.stack),
        "mesh": str(plan.degrees),
        "steps": results[-1].step,
        "train_loss": train_loss,
        "train_loss_steps": len(last),
        "held_out_loss": results[-1].held_out_loss,
        "ln_vocab": ln_vocab,
        "held_out": {
            "tokens": str(plan.data.directory / "held_out.npy"),
            "seq_len": config.data.seq_len,
            "sequences": config.eval.sequences or len(plan.rows.evaluated),
        },
    }
    _write(directory / SUMMARY, json.dumps(summary, indent=2) + "\n")
    console.print(
        f"\ntraining loss {train_loss:.4f} (mean of the last {len(last)} steps; "
        f"{train_loss / ln_vocab:.2f} x ln(vocabulary)), held-out loss {results[-1].held_out_loss:.6f}",
        highlight=False,
        soft_wrap=True,
    )
    if config.sample.prompt is not None:
        transformers.utils.logging.disable_progress_bar()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory / MODEL, local_files_only=True, trust_remote_code=False
        )
        text = generate_sample(model.eval(), tokenizer, config.sample, seed=config.seed)
        console.print("\n[bold]sample[/bold]")
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"\n[bold]written[/bold] {directory / MODEL} (a Hugging Face directory), {directory / CURVE}, "
        f"{directory / METRICS}, {directory / SUMMARY}\n"
        f"[bold]next[/bold]\n"
        f"  meshwright strategies\n"
        f'  python -c "from transformers import pipeline; '
        f"print(pipeline('text-generation', '{directory / MODEL}')('import ')[0]['generated_text'])\"",
        highlight=False,
        soft_wrap=True,
    )
