"""Write the results of a finished run: the model, the loss curve, a summary and a sample."""

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
    IGNORE_INDEX,
    StepResult,
    StorageOptions,
    StrategyManager,
    escape_markup,
    export_checkpoint,
    find_best_checkpoints,
    list_checkpoints,
    open_storage,
    parse_markup,
    replace_directory,
    save_checkpoint,
    write_atomically,
)

from .data.packing import RowDataset
from .loss_curve import plot_loss_curve
from .metrics_report import print_text
from .preflight import PreparedRun
from .run_directory import IN_PROGRESS, RunDirectory
from .run_sections import HELD_OUT, SampleConfig
from .step_text import format_eval_set

LOSS_WINDOW_STEPS = 20
"""Number of last steps over which the reported training loss is averaged."""
_PROMPT_TOKENS = 16
"""Number of tokens of a document that form the prompt."""


def export_model(manager: StrategyManager, prepared: PreparedRun, *, step: int) -> None:
    """Write the model as a Hugging Face directory, each rank a part of it; and the averaged weights as another, if
    `ema.export` is set. Collective."""
    config = prepared.config
    averages = config.ema is not None and config.ema.export
    world, directory = manager.mesh.world, RunDirectory.from_config(config)
    world.progress.enter_phase("export")
    checkpoint, model, averaged = (directory.path / name for name in IN_PROGRESS)
    # This checkpoint is removed below, so it needs no signature.
    storage = open_storage(checkpoint, StorageOptions(max_retries=config.checkpoint.retries))
    save_checkpoint(manager, storage, step=step, tokenizer=prepared.load_tokenizer(), with_optimizer=False)
    export_checkpoint(checkpoint, model, world=world)
    if averages:
        export_checkpoint(checkpoint, averaged, use_ema=True, world=world)
    if world.rank == 0:
        replace_directory(model, directory.model)
        if averages:
            replace_directory(averaged, directory.averaged_model)
        shutil.rmtree(checkpoint)


def write_results(prepared: PreparedRun, results: list[StepResult], console: Console) -> None:
    """Write the loss curve and the summary; print a sample and commands to continue with."""
    config, directory = prepared.config, RunDirectory.from_config(prepared.config)
    tokenizer = prepared.load_tokenizer()
    plot_loss_curve(results, directory.loss_curve, is_per_token=config.objective is None)
    summary = build_summary(prepared, results, vocab_size=len(tokenizer))
    write_atomically(directory.summary, json.dumps(summary, indent=2) + "\n")
    print_text("\n".join(format_results(summary, prepared)), console)
    if config.sample is not None:
        transformers.utils.logging.disable_progress_bar()
        model = load_trained_model(directory.model, prepared.model.directory)
        text = generate_sample(model, tokenizer, config.sample, prepared.datasets.main_eval_set, seed=config.seed)
        console.print(parse_markup("\n[bold]sample[/bold]"))
        print_text(text, console)
    averages = config.ema is not None and config.ema.export
    averaged = f"{directory.averaged_model} (with averaged weights), " if averages else ""
    adapted = prepared.model.base is not None
    what = "an adapter of peft" if adapted else "a Hugging Face directory"
    run = escape_markup(directory.path)
    chats = tokenizer.chat_template is not None
    prompt, answer = ("[dict(role='user', content='Hello')]", "[-1]['content']") if chats else ("'The '", "")
    # For an adapter, the default is the tokenizer of its base.
    own = f", tokenizer='{directory.model}'" if adapted else ""
    merge = f"  meshwright export --merge {escape_markup(directory.model)} OUT\n" if adapted else ""
    print_text(
        parse_markup(
            f"\n[bold]written[/bold] {escape_markup(directory.model)} ({what}), "
            f"{escape_markup(averaged)}{escape_markup(directory.loss_curve)}, "
            f"{escape_markup(directory.metrics)}, {escape_markup(directory.summary)}\n"
            f"[bold]next[/bold]\n"
            f"  meshwright chat {run}\n  meshwright eval {run}\n  meshwright watch {run}\n{merge}"
        ).append(
            f'  python -c "from transformers import pipeline; '
            f"print(pipeline('text-generation', '{directory.model}'{own})({prompt})[0]['generated_text']{answer})\""
        ),
        console,
    )


def build_summary(prepared: PreparedRun, results: list[StepResult], *, vocab_size: int) -> dict[str, Any]:
    config, last = prepared.config, [result.loss for result in results[-LOSS_WINDOW_STEPS:]]
    best = config.checkpoint.keep_best
    kept = (
        []
        if best is None
        else find_best_checkpoints(
            list_checkpoints(RunDirectory.from_config(config).checkpoint_storage), best.eval_set, best.count
        )
    )
    return {
        "strategy": str(prepared.strategy_stack),
        "mesh": str(prepared.degrees),
        "step": results[-1].step,
        "num_steps": prepared.num_steps,
        "train_loss": sum(last) / len(last),
        "num_averaged_steps": len(last),
        "held_out_loss": results[-1].held_out_loss,
        "evaluations": dict(results[-1].evaluations),
        "best_checkpoints": [
            {"step": step, "set": best.eval_set, "loss": loss, "checkpoint": str(checkpoint)}
            for loss, step, checkpoint in kept
            if best is not None
        ],
        "ln_vocab": math.log(vocab_size),
        "held_out": {
            "tokens_file": str(prepared.data.directory / "held_out.npy"),
            "seq_len": config.data.seq_len,
            "sequences": config.eval.max_sequences or len(prepared.datasets.eval_sets.get(HELD_OUT, ())),
        },
    }


def format_results(summary: dict[str, Any], prepared: PreparedRun) -> Iterator[str]:
    loss, ln_vocab = summary["train_loss"], summary["ln_vocab"]
    losses = "".join(f", {format_eval_set(name)} loss {value:.6f}" for name, value in summary["evaluations"].items())
    # ln(vocabulary) is the loss of a model that predicts uniformly. An objective may not be comparable with it.
    ratio = f"; {loss / ln_vocab:.2f} x ln(vocabulary)" if prepared.config.objective is None else ""
    yield f"\ntraining loss {loss:.4f} (mean of the last {summary['num_averaged_steps']} steps{ratio}){losses}"
    stopping = prepared.config.eval.early_stopping
    if stopping is not None and summary["step"] < summary["num_steps"]:
        yield (
            f"stopped early, after {summary['step']} of {summary['num_steps']} steps: the "
            f"{format_eval_set(stopping.eval_set)} loss "
            f"has not fallen in {stopping.patience} evaluations"
        )
    for each in summary["best_checkpoints"]:
        yield f"lowest {format_eval_set(each['set'])} loss {each['loss']:.6f}: {each['checkpoint']}"


def load_trained_model(directory: Path, base: Path | None) -> Any:
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if not (directory / ADAPTER_CONFIG).is_file() or base is None:
        return AutoModelForCausalLM.from_pretrained(directory, **options).eval()
    from peft import PeftModel

    with warnings.catch_warnings():
        # Warnings about how peft calls transformers, which users cannot fix.
        warnings.simplefilter("ignore", FutureWarning)
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, **options), str(directory)).eval()


def generate_sample(model: Any, tokenizer: Any, config: SampleConfig, dataset: RowDataset, *, seed: int) -> str:
    """Return the prompt and a generated continuation; with temperature 0, by greedy decoding."""
    torch.manual_seed(seed)
    prompt = (
        read_prompt(dataset) if config.prompt is None else tokenizer(config.prompt, return_tensors="pt")["input_ids"]
    )
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    remaining = positions - prompt.shape[1] if positions else config.max_new_tokens
    if remaining < 1:
        return f"(the prompt fills all {positions} positions of the model)"
    sampling = {"do_sample": True, "temperature": config.temperature} if config.temperature else {"do_sample": False}
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=min(config.max_new_tokens, remaining),
        pad_token_id=tokenizer.eos_token_id,
        **sampling,
    )
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


def read_prompt(dataset: RowDataset) -> Tensor:
    """Return the first tokens of a document, or of a conversation up to its first answer: int64, (1, T)."""
    row = dataset.read_batch([0])
    (labelled,) = torch.nonzero(row["labels"][0] != IGNORE_INDEX, as_tuple=True)
    # The first label of a document may be masked, too.
    before = int(labelled[0]) if len(labelled) else 0
    count: int = before if before > 1 else _PROMPT_TOKENS
    return row["input_ids"][:, :count]
