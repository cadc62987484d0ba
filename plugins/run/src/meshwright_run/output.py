"""What a run leaves behind when it ends: the model, the picture of its losses, a summary, and a sample."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from torch import Tensor

from meshwright.plugin import (
    ADAPTER_CONFIG,
    IGNORED_LABEL,
    Access,
    StepResult,
    StrategyManager,
    all_in,
    best_of,
    export_checkpoint,
    place_of,
    plain,
    put_in_place,
    save_checkpoint,
    styled,
    write_whole,
)

from .data.rows import Rows
from .data.tokenizer import load_tokenizer
from .preflight import Plan
from .report import draw_loss_curve, show, shown
from .run_directory import ON_THE_WAY, RunDirectory
from .run_sections import HELD_OUT, SampleConfig

AVERAGED_STEPS = 20
"""Last steps over which the reported training loss is the mean."""
_BEGINNING = 16
"""Tokens of a document that make a prompt."""


def export(manager: StrategyManager, plan: Plan, *, step: int) -> None:
    """Write the model after a step as a Hugging Face directory, each rank a part of it; and the averaged weights as
    another, if the run asks for it. Collective."""
    config = plan.config
    averages = config.ema is not None and config.ema.export
    world, directory = manager.mesh.world, RunDirectory.of(config)
    world.progress.enter("exporting")
    checkpoint, model, averaged = (directory.path / name for name in ON_THE_WAY)
    # It is soon removed, and needs no signature.
    place = place_of(checkpoint, Access(retries=config.checkpoint.retries))
    save_checkpoint(manager, place, step=step, tokenizer=plan.tokenizer(), with_optimizer=False)
    export_checkpoint(checkpoint, model, world=world)
    if averages:
        export_checkpoint(checkpoint, averaged, average=True, world=world)
    if world.rank == 0:
        put_in_place(model, directory.model)
        if averages:
            put_in_place(averaged, directory.averaged_model)
        shutil.rmtree(checkpoint)


def finish(plan: Plan, results: list[StepResult], console: Console) -> None:
    """Write loss curve and summary; show a sample and what to do next."""
    config, directory = plan.config, RunDirectory.of(plan.config)
    tokenizer = load_tokenizer(plan.data.tokenizer_dir)
    draw_loss_curve(results, directory.curve, of_tokens=config.objective is None)
    summary = summarized(plan, results, vocab_size=len(tokenizer))
    write_whole(directory.summary, json.dumps(summary, indent=2) + "\n")
    show("\n".join(told(summary, plan)), console)
    if config.sample is not None:
        transformers.utils.logging.disable_progress_bar()
        model = load_trained(directory.model, plan.model.directory)
        text = generate_sample(model, tokenizer, config.sample, plan.rows.evaluated, seed=config.seed)
        console.print(styled("\n[bold]sample[/bold]"))
        show(text, console)
    averages = config.ema is not None and config.ema.export
    averaged = f"{directory.averaged_model} (with averaged weights), " if averages else ""
    adapted = plan.model.base is not None
    what = "an adapter of peft" if adapted else "a Hugging Face directory"
    show(
        styled(
            f"\n[bold]written[/bold] {plain(directory.model)} ({what}), {plain(averaged)}{plain(directory.curve)}, "
            f"{plain(directory.metrics)}, {plain(directory.summary)}\n"
            f"[bold]next[/bold]\n"
            f"  {f'meshwright export --merge {plain(directory.model)} OUT' if adapted else 'meshwright strategies'}\n"
        ).append(
            f'  python -c "from transformers import pipeline; '
            f"print(pipeline('text-generation', '{directory.model}')('The ')[0]['generated_text'])\""
        ),
        console,
    )


def summarized(plan: Plan, results: list[StepResult], *, vocab_size: int) -> dict[str, Any]:
    config, last = plan.config, [result.loss for result in results[-AVERAGED_STEPS:]]
    best = config.checkpoint.keep_best
    kept = [] if best is None else best_of(all_in(RunDirectory.of(config).checkpoints), best.set, best.n)
    return {
        "strategy": str(plan.stack),
        "mesh": str(plan.degrees),
        "steps": results[-1].step,
        "of_steps": plan.steps,
        "train_loss": sum(last) / len(last),
        "train_loss_steps": len(last),
        "held_out_loss": results[-1].held_out_loss,
        "evaluations": dict(results[-1].evaluations),
        "best_checkpoints": [
            {"step": step, "set": best.set, "loss": loss, "checkpoint": str(place)}
            for loss, step, place in kept
            if best is not None
        ],
        "ln_vocab": math.log(vocab_size),
        "held_out": {
            "tokens": str(plan.data.directory / "held_out.npy"),
            "seq_len": config.data.seq_len,
            "sequences": config.eval.sequences or len(plan.rows.held_out.get(HELD_OUT, ())),
        },
    }


def told(summary: dict[str, Any], plan: Plan) -> Iterator[str]:
    loss, ln_vocab = summary["train_loss"], summary["ln_vocab"]
    losses = "".join(f", {shown(name)} loss {value:.6f}" for name, value in summary["evaluations"].items())
    # Compared with a model that has learnt nothing; an objective may measure something else.
    beside = f"; {loss / ln_vocab:.2f} x ln(vocabulary)" if plan.config.objective is None else ""
    yield f"\ntraining loss {loss:.4f} (mean of the last {summary['train_loss_steps']} steps{beside}){losses}"
    stopping = plan.config.eval.early_stopping
    if stopping is not None and summary["steps"] < summary["of_steps"]:
        yield (
            f"stopped early, after {summary['steps']} of {summary['of_steps']} steps: the {shown(stopping.set)} loss "
            f"has not fallen in {stopping.patience} evaluations"
        )
    for each in summary["best_checkpoints"]:
        yield f"lowest {shown(each['set'])} loss {each['loss']:.6f}: {each['checkpoint']}"


def load_trained(directory: Path, base: Path | None) -> Any:
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if not (directory / ADAPTER_CONFIG).is_file() or base is None:
        return AutoModelForCausalLM.from_pretrained(directory, **options).eval()
    from peft import PeftModel

    with warnings.catch_warnings():
        # Between peft and transformers, of what a user can do nothing about.
        warnings.simplefilter("ignore", FutureWarning)
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, **options), str(directory)).eval()


def generate_sample(model: Any, tokenizer: Any, config: SampleConfig, rows: Rows, *, seed: int) -> str:
    """Return the prompt and its continuation; at temperature 0 the likeliest one."""
    torch.manual_seed(seed)
    prompt = beginning(rows) if config.prompt is None else tokenizer(config.prompt, return_tensors="pt")["input_ids"]
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    room = positions - prompt.shape[1] if positions else config.max_new_tokens
    if room < 1:
        return f"(the prompt fills all {positions} positions of the model)"
    sampling = {"do_sample": True, "temperature": config.temperature} if config.temperature else {"do_sample": False}
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=min(config.max_new_tokens, room),
        pad_token_id=tokenizer.eos_token_id,
        **sampling,
    )
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


def beginning(rows: Rows) -> Tensor:
    """Return the first tokens of a document, or those before the first answer of a conversation: int64, (1, T)."""
    row = rows.take([0])
    (labelled,) = torch.nonzero(row["labels"][0] != IGNORED_LABEL, as_tuple=True)
    # The first token of a document may be masked by itself.
    before = int(labelled[0]) if len(labelled) else 0
    count: int = before if before > 1 else _BEGINNING
    return row["input_ids"][:, :count]
