"""One run, from its file to its directory: plan it, start its ranks, train, and leave behind what the user wants.

[Note: plan first] `plan_run` finds all that can be wrong with a run before any process starts or any collective is
issued. The launching process calls it, and each rank calls it again for its own node, where the files are cached.

[Note: going on] A run writes its summary last. Without one it is unfinished, and the same command goes on from its
newest whole checkpoint. All that the numbers of a step depend on is the same then: state comes from the checkpoint,
data and random numbers follow from the step.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from rich.console import Console
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from .checkpoint import (
    Checkpointer,
    export_checkpoint,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
    steps_in,
)
from .checkpoint.directory import read_manifest
from .checkpoint.loading import checked
from .contract import StrategyManager
from .data import (
    ORDER_VERSION,
    DataOrder,
    PreparedData,
    check_batch_size,
    eval_microbatches,
    holds_tokenizer,
    load_tokenizer,
    prepare,
    step_microbatches,
)
from .errors import CheckpointError, ConfigError
from .layout import model_layout, model_size
from .loading import check_same_weights, tell
from .mesh import Mesh, World, find_device, open_world
from .model import build_model, model_config
from .optim import build_scheduler, optimizer_factory
from .parsing import as_yaml
from .pretrained import PretrainedWeights
from .rank import guarded, signs_of_life, started_by_launcher
from .registry import get_registry
from .report import Reporter, draw_loss_curve, read_metrics
from .runfile import RunConfig, as_plain
from .sample import generate_sample
from .sizes import Degrees
from .stack import Stack, resolve
from .train import Loop, StepResult, fit

if TYPE_CHECKING:
    from torch.distributed import Store

METRICS, CURVE, MODEL, SUMMARY, RUN = "metrics.jsonl", "loss.png", "model", "summary.json", "run.yaml"
CHECKPOINTS = "checkpoints"
_FIRST_ORDER = 1
"""Of runs whose checkpoints tell no version of it."""
AVERAGED_STEPS = 20
"""Training loss is told as the mean over this many last steps."""


@dataclass(frozen=True)
class Plan:
    """A run that has been checked, as far as that is possible without ranks."""

    stack: Stack
    degrees: Degrees
    micro_batch_size: int
    data: PreparedData
    model_config: Any


def plan_run(config: RunConfig, world_size: int) -> Plan:
    """Check a run and prepare its data; issues no collective.

    Raises:
        MeshwrightError: whatever is wrong with it; see `meshwright.errors`.
    """
    stack, degrees = resolve(
        config.strategy,
        config,
        world_size,
        config=config.strategy_config,
        wrapper_config=config.wrapper_config,
    )
    micro_batch_size = config.micro_batch_size or max(1, config.batch_size // degrees.dp)
    check_batch_size(config.batch_size, data_size=degrees.dp, micro_batch_size=micro_batch_size)
    _check_output(config)
    _check_optimization(config)
    data, hf_config = data_and_model_config(config)
    if config.eval.sequences is not None and config.eval.sequences > len(data.held_out):
        raise ConfigError(
            f"eval.sequences={config.eval.sequences}, but the held-out split has {len(data.held_out)}. "
            f"Lower it, leave it out, or raise data.eval_fraction."
        )
    return Plan(stack, degrees, micro_batch_size, data, hf_config)


def data_and_model_config(config: RunConfig) -> tuple[PreparedData, Any]:
    """Prepare the data, or find them in the cache, and make the Hugging Face configuration that goes with them.

    Raises:
        DataError: the corpus or the tokenizer cannot be used.
        ModelError: the model's section is not valid.
    """
    data = prepare(config.data, tokenizer_dir=_own_tokenizer(config))
    tokenizer = load_tokenizer(data.tokenizer_dir)
    return data, model_config(config.model, tokenizer=tokenizer, seq_len=config.data.seq_len)


def processes(config: RunConfig) -> int:
    """How many ranks `start` starts on this node."""
    on_cpu = find_device(config.device).type == "cpu"
    accelerators = 0 if on_cpu else torch.accelerator.device_count()
    return config.processes(get_registry().get(config.strategy).axes, accelerators)


def start(config: RunConfig, *, show_traceback: bool = False) -> int:
    """Run `config`: join the ranks that torchrun started, or start them here.

    Returns:
        The exit code; what went wrong has been written to stderr.

    Raises:
        MeshwrightError: the run is not valid; nothing was started.
    """
    if started_by_launcher():
        return guarded(run_rank, (config,), show_traceback=show_traceback)
    count = processes(config)
    with Console(stderr=True).status("preparing the run"):
        plan_run(config, count)
    if count == 1:
        return guarded(run_rank, (config,), show_traceback=show_traceback)
    from .launch import launch

    return launch(run_rank, (config,), nproc=count, show_traceback=show_traceback)


def run_rank(store: Store | None, config: RunConfig) -> None:
    """What each rank does."""
    if config.threads_per_rank != "auto":
        torch.set_num_threads(config.threads_per_rank)
    console = Console()
    world_store = torch.distributed.PrefixStore("meshwright/world", store) if store is not None else None
    timeout_s = config.timeout_s
    with signs_of_life(timeout_s), open_world(config.device, store=world_store, timeout_s=timeout_s) as world:
        plan = world.together(lambda: plan_run(config, world.size))
        mesh = Mesh(plan.degrees, world)
        manager = plan.stack.build(mesh)
        model, weights = world.together(lambda: build_model(config.model, plan.model_config, seed=config.seed))
        source = _source(config, world)
        identity = _identity(config, plan, order=world.together(lambda: _order_version(source)))
        if source is not None:
            # Before anything of an earlier run is replaced.
            world.together(lambda: _check_identity(source, identity, config))
        if world.rank == 0:
            _prepare_output(config, goes_on=source is not None)
            console.print(_headline(config, plan, model, mesh), highlight=False, soft_wrap=True)
        if isinstance(weights, PretrainedWeights):
            check_same_weights(weights, world)
            tell(weights, world, stacklevel=2)
        manager.parallelize(model, weights)
        # What a rank needs of them, the manager has; they keep files open, and values that were read last.
        del model, weights
        results = _train(manager, config, plan, source, identity, console)
        _export(manager, config, plan)
    # The other ranks are done: what is left needs no collective.
    if world.rank == 0:
        _finish(config, plan, results, console)


def _train(
    manager: StrategyManager,
    config: RunConfig,
    plan: Plan,
    source: Path | None,
    identity: dict[str, Any],
    console: Console,
) -> list[StepResult]:
    mesh, data = manager.mesh, plan.data
    optimizer = manager.build_optimizer(optimizer_factory(config.optimizer))
    scheduler = build_scheduler(config.schedule, optimizer, config.steps)
    start = 0
    if source is not None:
        start = load_checkpoint(manager, source, scheduler=scheduler).step
        if mesh.rank == 0:
            console.print(f"going on from {source}, after step {start}", highlight=False, soft_wrap=True)
    order = DataOrder(len(data.train), config.batch_size, config.seed, version=identity["order"])
    place = {
        "data_rank": mesh.data_rank,
        "data_size": mesh.data_size,
        "micro_batch_size": plan.micro_batch_size,
    }
    loop = Loop(
        steps=config.steps,
        batches=lambda step: step_microbatches(data.train, order, step, **place),
        max_grad_norm=config.max_grad_norm,
        grad_norm_type=config.grad_norm_type,
        held_out=eval_microbatches(data.held_out, count=config.eval.sequences, **place),
        eval_every=config.eval.every,
        start=start,
        seed=config.seed,
    )
    metrics = Path(config.output_dir) / METRICS
    earlier = read_metrics(metrics, until=start, steps=config.steps) if mesh.rank == 0 else []
    with _saving(manager, scheduler, config, data.tokenizer_dir, identity, loop) as loop:
        if mesh.rank != 0:
            return fit(manager, scheduler, loop)
        reporter = Reporter(metrics, log_every=config.log_every, console=console, earlier=earlier)
        with reporter, get_registry().observing(reporter):
            return earlier + fit(manager, scheduler, loop)


@contextmanager
def _saving(
    manager: StrategyManager,
    scheduler: LRScheduler,
    config: RunConfig,
    tokenizer_dir: Path,
    identity: dict[str, Any],
    loop: Loop,
) -> Iterator[Loop]:
    """The loop, saving checkpoints if the run asks for them; on disk when the context is left."""
    settings = config.checkpoint
    if settings.every is None:
        yield loop
        return
    extra = {"identity": identity, "run": as_plain(config)}
    with Checkpointer(
        manager,
        Path(config.output_dir) / CHECKPOINTS,
        keep_last=settings.keep_last,
        keep_every=settings.keep_every,
        asynchronous=settings.asynchronous,
        on_error=settings.on_error,
        tokenizer=load_tokenizer(tokenizer_dir),
    ) as checkpointer:

        def save(step: int) -> None:
            checkpointer.save(step, scheduler=scheduler, extra=extra)

        yield replace(loop, save=save, save_every=settings.every)


def _source(config: RunConfig, world: World) -> Path | None:
    """The checkpoint to go on from; see [Note: going on]. Collective."""
    if config.resume == "never":
        return None
    if config.resume != "auto":
        world.together(lambda: checked(Path(config.resume), world))
        return Path(config.resume)
    directory = Path(config.output_dir)
    is_unfinished = world.reduce_ints([int(world.rank == 0 and not (directory / SUMMARY).exists())])[0]
    return newest_checkpoint(directory / CHECKPOINTS, world) if is_unfinished else None


def _order_version(source: Path | None) -> int:
    """Of the order of the data; see [Note: versions of the order] in `data.order`."""
    if source is None:
        return ORDER_VERSION
    identity = read_manifest(source).extra.get("identity") or {}
    return int(identity.get("order", _FIRST_ORDER))


def _identity(config: RunConfig, plan: Plan, *, order: int) -> dict[str, Any]:
    """What must be the same for a run to go on as if it had not been interrupted; values of JSON."""
    model = plan.model_config.to_dict()
    for key in ("transformers_version", "architectures", "_name_or_path"):
        model.pop(key, None)
    identity = {
        "model": {**model, "dtype": config.model.get("dtype", "float32")},
        "data": {"fingerprint": plan.data.fingerprint, "seq_len": config.data.seq_len},
        "seed": config.seed,
        "order": order,
        "batch_size": config.batch_size,
        "optimizer": config.optimizer.model_dump(),
        "schedule": config.schedule.model_dump(),
    }
    plain: dict[str, Any] = json.loads(json.dumps(identity, default=str))
    return plain


def _check_identity(source: Path, identity: dict[str, Any], config: RunConfig) -> None:
    """Refuse to go on with something else than what was interrupted.

    Raises:
        CheckpointError: names what differs.
    """
    manifest = read_manifest(source)
    saved = manifest.extra.get("identity")
    if saved is None:
        raise CheckpointError(f"the checkpoint {source} is not of a run of `meshwright train`. Load it in a script.")
    for section, value in identity.items():
        before = saved.get(section, _FIRST_ORDER if section == "order" else None)
        if before != value:
            keys = [section]
            if isinstance(value, dict) and isinstance(before, dict):
                keys = [f"{section}.{key}" for key in {**before, **value} if before.get(key) != value.get(key)]
            raise CheckpointError(
                f"the run differs from the one that {source} is of: {', '.join(keys[:5])}. Give what it was started "
                f"with, or start anew with resume=never."
            )
    if manifest.step > config.steps or (manifest.step == config.steps and config.resume != "auto"):
        raise CheckpointError(
            f"{source} is of step {manifest.step}, but the run is to have {config.steps} steps. Raise steps, or start "
            f"anew with resume=never."
        )


def _own_tokenizer(config: RunConfig) -> Path | None:
    """The model directory, where it brings a tokenizer."""
    path = Path(config.model["path"]).expanduser() if "path" in config.model else None
    return path if path is not None and holds_tokenizer(path) else None


def _check_output(config: RunConfig) -> None:
    directory = Path(config.output_dir)
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"output_dir={config.output_dir!r} is a file. Name a directory.")
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK):
        raise ConfigError(f"output_dir={config.output_dir!r} cannot be written: {existing} is read-only for you.")
    # Also where it was interrupted before its first checkpoint.
    is_unfinished = (directory / RUN).exists() and not (directory / SUMMARY).exists()
    has_checkpoints = config.checkpoint.every is not None or bool(steps_in(directory / CHECKPOINTS))
    if is_unfinished and has_checkpoints and config.resume == "auto":
        return
    if config.resume not in ("auto", "never"):
        source = Path(config.resume)
        read_manifest(source)
        if directory.resolve() in source.resolve().parents:
            return
    if not config.overwrite and directory.is_dir() and any(directory.iterdir()):
        raise ConfigError(
            f"output_dir={config.output_dir!r} holds the results of an earlier run. Name another directory, or set "
            f"overwrite=true to replace them."
        )
    replaced = (directory / MODEL).resolve()
    for key, path in (("model.path", config.model.get("path")), ("data.tokenizer", config.data.tokenizer)):
        if path is not None and replaced in (source := Path(path).expanduser().resolve(), *source.parents):
            raise ConfigError(
                f"{key}={path!r} lies in what this run replaces ({directory / MODEL}). Name another output_dir."
            )


def _check_optimization(config: RunConfig) -> None:
    """Make optimizer and schedule once for a stand-in, so that their errors come before anything is started."""
    stand_in = [("weight", nn.Parameter(torch.zeros(2, 2))), ("bias", nn.Parameter(torch.zeros(2)))]
    optimizer = optimizer_factory(config.optimizer)(stand_in)
    build_scheduler(config.schedule, optimizer, config.steps)


def _prepare_output(config: RunConfig, *, goes_on: bool) -> None:
    directory = Path(config.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    kept = [METRICS] if goes_on else []
    for name in (METRICS, CURVE, SUMMARY, RUN):
        if name not in kept:
            (directory / name).unlink(missing_ok=True)
    for name in (MODEL, *([] if goes_on else [CHECKPOINTS])):
        if (directory / name).is_dir():
            shutil.rmtree(directory / name)
    (directory / RUN).write_text(as_yaml(as_plain(config)), encoding="utf-8")


def _headline(config: RunConfig, plan: Plan, model: nn.Module, mesh: Mesh) -> str:
    layout = model_layout(model)
    size = model_size(model, layout)
    lines = [
        f"{plan.stack} on {plan.degrees} ({mesh.device.type}): {plan.model_config.model_type} with "
        f"{size.parameters:,} parameters in {len(layout.blocks)} blocks",
        f"{plan.data.documents:,} documents: {len(plan.data.train):,} sequences of {config.data.seq_len} tokens to "
        f"train on, {len(plan.data.held_out):,} held out; {config.batch_size} a step",
    ]
    estimate = plan.stack.estimate(plan.degrees, size)
    if estimate is not None:
        lines.append(
            f"a rank holds {_megabytes(estimate.parameters)} of parameters, {_megabytes(estimate.gradients)} of "
            f"gradients, {_megabytes(estimate.optimizer)} of AdamW state, {_megabytes(estimate.gathered)} gathered, "
            f"and activations (estimate)"
        )
    return "\n".join(lines)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _export(manager: StrategyManager, config: RunConfig, plan: Plan) -> None:
    """Write the model as a Hugging Face directory, every rank a part of it. Collective."""
    world, directory = manager.mesh.world, Path(config.output_dir)
    checkpoint = directory / f"{MODEL}.checkpoint"
    tokenizer = load_tokenizer(plan.data.tokenizer_dir)
    save_checkpoint(manager, checkpoint, step=config.steps, tokenizer=tokenizer, with_optimizer=False)
    export_checkpoint(checkpoint, directory / MODEL, world=world)
    if world.rank == 0:
        shutil.rmtree(checkpoint)


def _finish(config: RunConfig, plan: Plan, results: list[StepResult], console: Console) -> None:
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
            "sequences": config.eval.sequences or len(plan.data.held_out),
        },
    }
    (directory / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
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
