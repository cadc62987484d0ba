"""The directory of a run: who holds it, and what is left there."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from filelock import FileLock, Timeout
from rich.console import Console
from rich.text import Text

from ..base.errors import ConfigError
from ..checkpoint import export_checkpoint, save_checkpoint
from ..checkpoint.directory import best_of, remove_all
from ..checkpoint.drafts import put_in_place
from ..checkpoint.manifest import BESIDE, all_in
from ..checkpoint.places import Access
from ..checkpoint.remote import place_of
from ..data import load_tokenizer
from ..data.encoding.chat_template import read_chat_template
from ..events.step import StepResult
from ..files.parsing import as_yaml, read_json_object
from ..files.terminal import plain, styled
from ..files.writing import write_whole
from ..profile.files import DIRECTORY, FAULTS
from ..strategy.contract import StrategyManager
from .curve import draw_loss_curve
from .files import (
    AVERAGED_MODEL,
    CHECKPOINTS,
    CURVE,
    HOLDER,
    LISTED,
    LOCK,
    METRICS,
    MODEL,
    ON_THE_WAY,
    RANKS,
    REPLACED,
    REPLACED_FILES,
    RUN,
    SUMMARY,
    TIMELINE,
)
from .listing import check_listed, listed
from .report import shown
from .run_file import RunConfig, as_plain
from .run_sections import HELD_OUT
from .sample import generate_sample, load_trained
from .saved import is_elsewhere, saved_by

if TYPE_CHECKING:
    from .plan import Plan

_CHECKPOINT_OF_MODEL, _NEW_MODEL, _NEW_AVERAGED = ON_THE_WAY
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
        _refuse_links(directory)
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
        write_whole(holder, json.dumps(told) + "\n")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _refuse_links(directory: Path) -> None:
    """Refuse a directory with links where a run writes.

    Raises:
        ConfigError: names one.
    """
    within = (CHECKPOINTS, RANKS, TIMELINE, DIRECTORY, FAULTS)
    # A checkpoint itself may lie elsewhere: it is read, and not written again.
    below = [
        path
        for name in within
        if (directory / name).is_dir() and not (directory / name).is_symlink()
        for path in (directory / name).iterdir()
        if name != CHECKPOINTS or path.suffix in BESIDE
    ]
    # Trackers have names of their own. What is on the way to its name is replaced.
    own = [path for path in directory.iterdir() if path.suffix != ".tmp"]
    for path in (*own, *below):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            is_link = "is a link, and a run does not write through links"
            told = is_link if stat.S_ISLNK(mode) else "is neither a file nor a directory"
            raise ConfigError(
                f"{path} {told}. Remove it, or name another output_dir; checkpoints go elsewhere by checkpoint.to."
            )


def _told(holder: Path) -> str:
    """Who holds a lock, as far as it has said so."""
    try:
        told = read_json_object(holder)
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
            if is_elsewhere(config):
                remove_all(saved_by(config))
            check_listed(directory)
            for name in REPLACED:
                if (directory / name).is_dir():
                    shutil.rmtree(directory / name)
            for name in REPLACED_FILES:
                if name not in (SUMMARY, RUN):
                    (directory / name).unlink(missing_ok=True)
        mine = listed(directory) | {name for name in (*REPLACED, *REPLACED_FILES) if not (directory / name).exists()}
        write_whole(directory / LISTED, json.dumps(sorted(mine)) + "\n")
        for name in ON_THE_WAY:
            if name in mine:
                shutil.rmtree(directory / name, ignore_errors=True)
        # As long as there is a summary, the directory is that of the run that has finished.
        (directory / SUMMARY).unlink(missing_ok=True)
        write_whole(directory / RUN, as_yaml(as_plain(config)))
    except OSError as error:
        raise ConfigError(f"output_dir={config.output_dir!r} cannot be written: {error}.") from error


def run_tokenizer(config: RunConfig, plan: Plan) -> Any:
    """The tokenizer that is written with the model, with the chat template that it was trained with."""
    tokenizer = load_tokenizer(plan.data.tokenizer_dir)
    if config.data.chat_template is not None:
        tokenizer.chat_template = read_chat_template(config.data.chat_template)
    return tokenizer


def export(manager: StrategyManager, config: RunConfig, plan: Plan, *, step: int) -> None:
    """Write the model, after so many steps, as a Hugging Face directory, every rank a part of it; and another of the
    averaged weights, if the run asks for it. Collective."""
    world, directory = manager.mesh.world, Path(config.output_dir)
    world.progress.enter("exporting")
    checkpoint, model, averaged = (directory / name for name in (_CHECKPOINT_OF_MODEL, _NEW_MODEL, _NEW_AVERAGED))
    tokenizer = run_tokenizer(config, plan)
    # It is soon gone again, and needs no signature.
    place = place_of(checkpoint, Access(retries=config.checkpoint.retries))
    save_checkpoint(manager, place, step=step, tokenizer=tokenizer, with_optimizer=False)
    export_checkpoint(checkpoint, model, world=world)
    if exports_average(config):
        export_checkpoint(checkpoint, averaged, average=True, world=world)
    if world.rank == 0:
        put_in_place(model, directory / MODEL)
        if exports_average(config):
            put_in_place(averaged, directory / AVERAGED_MODEL)
        shutil.rmtree(checkpoint)


def exports_average(config: RunConfig) -> bool:
    return config.ema is not None and config.ema.export


def finish(config: RunConfig, plan: Plan, results: list[StepResult], console: Console) -> None:
    """Write loss curve and summary; show a sample and what to do next."""
    directory = Path(config.output_dir)
    tokenizer = load_tokenizer(plan.data.tokenizer_dir)
    draw_loss_curve(results, directory / CURVE, of_tokens=config.objective is None)
    summary = summarized(config, plan, results, vocab_size=len(tokenizer))
    write_whole(directory / SUMMARY, json.dumps(summary, indent=2) + "\n")
    _say(console, "\n".join(told(summary, config)))
    if config.sample is not None:
        transformers.utils.logging.disable_progress_bar()
        model = load_trained(directory / MODEL, plan.model.directory)
        text = generate_sample(model, tokenizer, config.sample, plan.rows.evaluated, seed=config.seed)
        console.print(styled("\n[bold]sample[/bold]"))
        console.print(text, highlight=False, soft_wrap=True)
    averaged = f"{directory / AVERAGED_MODEL} (with averaged weights), " if exports_average(config) else ""
    adapted = plan.model.base is not None
    what = "an adapter of peft" if adapted else "a Hugging Face directory"
    _say(
        console,
        styled(
            f"\n[bold]written[/bold] {plain(directory / MODEL)} ({what}), {plain(averaged)}{plain(directory / CURVE)}, "
            f"{plain(directory / METRICS)}, {plain(directory / SUMMARY)}\n"
            f"[bold]next[/bold]\n"
            f"  {f'meshwright export --merge {plain(directory / MODEL)} OUT' if adapted else 'meshwright strategies'}\n"
        ).append(
            f'  python -c "from transformers import pipeline; '
            f"print(pipeline('text-generation', '{directory / MODEL}')('The ')[0]['generated_text'])\""
        ),
    )


def _say(console: Console, text: str | Text) -> None:
    console.print(text, highlight=False, soft_wrap=True)


def summarized(config: RunConfig, plan: Plan, results: list[StepResult], *, vocab_size: int) -> dict[str, Any]:
    """What is to be known of a run that has ended; values of JSON."""
    last = [result.loss for result in results[-AVERAGED_STEPS:]]
    return {
        "strategy": str(plan.stack),
        "mesh": str(plan.degrees),
        "steps": results[-1].step,
        "of_steps": plan.steps,
        "train_loss": sum(last) / len(last),
        "train_loss_steps": len(last),
        "held_out_loss": results[-1].held_out_loss,
        "evaluations": dict(results[-1].evaluations),
        "best_checkpoints": _best_checkpoints(config),
        "ln_vocab": math.log(vocab_size),
        "held_out": {
            "tokens": str(plan.data.directory / "held_out.npy"),
            "seq_len": config.data.seq_len,
            "sequences": config.eval.sequences or len(plan.rows.held_out.get(HELD_OUT, ())),
        },
    }


def _best_checkpoints(config: RunConfig) -> list[dict[str, Any]]:
    """The checkpoints that `keep_best` has kept, the best first."""
    best = config.checkpoint.keep_best
    if best is None:
        return []
    return [
        {"step": step, "set": best.set, "loss": loss, "checkpoint": str(place)}
        for loss, step, place in best_of(all_in(saved_by(config)), best.set, best.n)
    ]


def told(summary: dict[str, Any], config: RunConfig) -> Iterator[str]:
    """A summary in a few lines."""
    loss, ln_vocab = summary["train_loss"], summary["ln_vocab"]
    losses = "".join(f", {shown(name)} loss {value:.6f}" for name, value in summary["evaluations"].items())
    # Beside what a model knows that knows nothing; an objective may measure something else.
    beside = f"; {loss / ln_vocab:.2f} x ln(vocabulary)" if config.objective is None else ""
    yield f"\ntraining loss {loss:.4f} (mean of the last {summary['train_loss_steps']} steps{beside}){losses}"
    stopping = config.eval.early_stopping
    if stopping is not None and summary["steps"] < summary["of_steps"]:
        yield (
            f"stopped early, after {summary['steps']} of {summary['of_steps']} steps: the {shown(stopping.set)} loss "
            f"has not fallen in {stopping.patience} evaluations"
        )
    for each in summary["best_checkpoints"]:
        yield f"lowest {shown(each['set'])} loss {each['loss']:.6f}: {each['checkpoint']}"
