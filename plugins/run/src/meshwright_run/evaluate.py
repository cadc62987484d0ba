"""Evaluate a model on sets of data, under any layout: loss, perplexity and token accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Column, Table

from meshwright.plugin import (
    ADAPTER_CONFIG,
    IGNORE_INDEX,
    MANIFEST_FILE,
    ConfigError,
    Degrees,
    Mesh,
    Stack,
    StrategyManager,
    apply_assignments,
    build_model_config,
    create_output_console,
    is_launched,
    is_url,
    list_checkpoints,
    load_checkpoint,
    open_storage,
    open_world,
    read_adapter_config,
    read_json_object,
    read_manifest,
    resolve,
    storage_exists,
    validate_config,
    write_json,
)

from .commands import open_checkpoint_storage
from .data.config import BaseFormat, SourceConfig
from .data.layouts import detect_layout
from .data.prepare import PreparedData
from .data.progress import CONSOLE
from .data.tokenizer import has_tokenizer, load_tokenizer
from .data.train_sampler import DataShard, build_datasets, read_eval_microbatches
from .harness_tasks import RankModel, TaskOptions, run_tasks
from .init_wizard.answers import parse_format
from .launch.rank_process import heartbeat, run_guarded
from .loop_setup import build_data_shard
from .preflight import (
    ResolvedModel,
    build_run_model,
    count_local_ranks,
    download_model,
    needs_padding_mask,
    prepare_data_and_model_config,
    resolve_model,
)
from .run_directory import RunDirectory
from .run_file import RunConfig
from .run_file_values import read_values
from .step_text import format_eval_set

if TYPE_CHECKING:
    from torch.distributed import Store

    from .data.packing import RowDataset

_KEPT_SECTIONS = (
    *("strategy", "strategy_config", "wrapper_config", "nproc", "threads_per_rank", "device", "timeout_s", "seed"),
    *("dp_size", "dp_replicate_size", "tp_size", "pp_size", "cp_size", "ep_size"),
    *("model", "data", "seq_len", "micro_batch_size"),
)
"""Keys of a run file that say how a model is evaluated."""
_TRUST_KEYS = ("trust_remote_code", "allow_pickle")
_MICRO_BATCH_SIZE, _SEQ_LEN = 8, 1024
"""Defaults for a model without a run file; `_SEQ_LEN` is an upper limit."""
_MICROBATCHES_PER_BLOCK = 16
"""Micro-batches whose statistics are in memory at once."""


@dataclass(frozen=True)
class EvalJob:
    """What is evaluated: a model with its sets and its layout, and a checkpoint to load into it (None: none)."""

    config: RunConfig
    checkpoint: str | None
    key_file: str | None
    max_sequences: int | None
    json_file: Path | None
    name: str
    tasks: TaskOptions | None = None


@dataclass(frozen=True)
class SetResult:
    """Sums of one set: negative log-likelihood [nats], tokens whose most likely continuation is right, tokens."""

    nll: float
    num_correct: int
    num_tokens: int
    num_sequences: int

    def to_dict(self) -> dict[str, float | int]:
        loss = self.nll / self.num_tokens if self.num_tokens else math.nan
        return {
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "accuracy": self.num_correct / self.num_tokens if self.num_tokens else math.nan,
            "tokens": self.num_tokens,
            "sequences": self.num_sequences,
        }


def build_eval_job(
    target: str,
    data: Sequence[str] = (),
    *,
    format: str | None = None,
    assignments: Sequence[str] = (),
    max_sequences: int | None = None,
    key_file: str | None = None,
    json_file: Path | None = None,
    tasks: TaskOptions | None = None,
) -> EvalJob:
    """Return the evaluation of a run directory, a checkpoint, a model directory or a model of the Hub.

    Args:
        target: path, URL of a checkpoint, or Hub id.
        data: globs of files, or `NAME=GLOB`; empty: the evaluation sets of the run.
        format: format of these files; None: detected from their columns.
        assignments: changes of the run file, `key=value`.
        tasks: tasks of the lm-eval harness, instead of sets of data.
    """
    if tasks is not None and data:
        raise ConfigError("--task and --data: give one of them; each is an evaluation of its own.")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigError(
            f"--json={str(json_file)!r} lies in a directory that does not exist. Create it, or name another."
        )
    values, checkpoint = read_target(target, key_file)
    values = {key: each for key, each in values.items() if key in _KEPT_SECTIONS and each is not None}
    # Which code runs is for the user to say, not for files: --set model.trust_remote_code=....
    values["model"] = {key: each for key, each in values["model"].items() if key not in _TRUST_KEYS}
    if data:
        section = _build_data_section(data, format)
        formats = {validate_config(SourceConfig, each, where="--data").base_format for each in section["sources"]}
        values["data"] = {**_keep_tokenization(values.get("data") or {}, formats), **section}
    elif not values.get("data") and tasks is None:
        if not Path(target).is_dir():
            raise ConfigError(
                f"there is no run, checkpoint or model directory {target}. A model of the Hub needs files: --data "
                "'eval/*.jsonl'."
            )
        raise ConfigError(f"{target} is a model, so it names no data. Give files: --data 'eval/*.jsonl'.")
    # The model brings its tokenizer, also one that its run has trained.
    values["data"] = {key: each for key, each in (values.get("data") or {}).items() if key != "vocab_size"}
    values |= {"steps": 1, "batch_size": 1, "sample": None}
    values = apply_assignments(values, assignments)
    config = validate_config(RunConfig, values, where=target)
    return EvalJob(config, checkpoint, key_file, max_sequences, json_file, target, tasks)


def read_target(target: str, key_file: str | None) -> tuple[dict[str, Any], str | None]:
    """Return the values of a run file, and the checkpoint to load."""
    directory = Path(target).expanduser()
    if is_url(target) or (directory / MANIFEST_FILE).exists():
        return _read_checkpoint(target, key_file)
    run = RunDirectory(directory)
    if run.run_file.is_file():
        values = read_values(run.run_file)
        if run.model.is_dir():
            values["model"] = _describe_model(run.model, values["model"])
            return values, None
        config = validate_config(RunConfig, values, where=str(run.run_file))
        found = list_checkpoints(RunDirectory(directory, config.checkpoint).checkpoint_storage)
        if not found:
            raise ConfigError(f"{target} is a run without a model and without a checkpoint. Train it first.")
        return _read_checkpoint(str(found[0]), key_file)
    if directory.is_dir() and list(directory.glob(f"*/{MANIFEST_FILE}")):
        newest = list_checkpoints(open_storage(directory))[0]
        return _read_checkpoint(str(newest), key_file)
    model = _describe_model(directory if directory.is_dir() else target, {})
    return {"model": model, "seq_len": _choose_seq_len(Path(model["path"]))}, None


def _read_checkpoint(target: str, key_file: str | None) -> tuple[dict[str, Any], str]:
    storage = open_checkpoint_storage(target, key_file)
    if not storage_exists(storage):
        raise ConfigError(f"{target} does not exist, or holds no checkpoint.")
    manifest = read_manifest(storage)
    run = manifest.extra.get("run")
    values: dict[str, Any] = dict(run) if isinstance(run, Mapping) else {}
    if manifest.base is None:
        values["model"] = {"checkpoint": target, "dtype": (values.get("model") or {}).get("dtype", "float32")}
        return values, target
    if "model" not in values:
        raise ConfigError(
            f"{target} holds adapters of a script's model. Export them (meshwright export {target} DIR), and name DIR."
        )
    return values, target


def _describe_model(place: str | Path, section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `model` for a directory, which may hold an adapter of peft."""
    dtype = {"dtype": section["dtype"]} if "dtype" in section else {}
    if not isinstance(place, Path) or not (place / ADAPTER_CONFIG).is_file():
        return {"path": str(place), **dtype}
    base = section.get("path") or read_adapter_config(place).base_model_name_or_path
    revision = {"revision": section["revision"]} if "revision" in section else {}
    return {"path": str(base), **dtype, **revision, "peft": {"adapter": str(place)}}


def _choose_seq_len(model: Path) -> int:
    """Return the default length of sequences: at most the positions of the model."""
    file = model / "config.json"
    config = read_json_object(file) if file.is_file() else {}
    positions = (config.get("text_config") or config).get("max_position_embeddings")
    return min(_SEQ_LEN, positions) if isinstance(positions, int) and positions > 1 else _SEQ_LEN


def _keep_tokenization(section: Mapping[str, Any], formats: set[BaseFormat]) -> dict[str, Any]:
    kept = ["tokenizer", "seq_len", "cache_dir", "text_field"]
    # These are errors where they have no effect.
    if formats - {"text", "tokens"}:
        kept += ["loss_on", "chat_template"]
    if formats - {"text", "tokens", "messages"}:
        kept.append("template")
    return {key: section[key] for key in kept if section.get(key) is not None}


def _build_data_section(globs: Sequence[str], format: str | None) -> dict[str, Any]:
    patterns: dict[str, str] = {}
    for each in globs:
        name, separator, pattern = each.partition("=")
        if not separator or "/" in name or "*" in name:
            name, pattern = Path(each).name.split(".")[0].strip("*") or "data", each
        if name in patterns:
            raise ConfigError(f"--data: two sets are called {name!r}. Name them: --data NAME={pattern!r}.")
        patterns[name] = pattern
    named = None if format is None else parse_format(format)
    layouts = {name: detect_layout([each], format=named) for name, each in patterns.items()}
    sets = {
        name: {"files": patterns[name], "format": layout.format, "fields": dict(layout.fields)}
        for name, layout in layouts.items()
    }
    return {"sources": list(sets.values()), "eval_sets": sets, "eval_fraction": 0.0}


def run_evaluation(job: EvalJob, *, show_traceback: bool = False) -> int:
    """Evaluate on the ranks that a launcher has started, or start them here; return the exit code."""
    if is_launched():
        return run_guarded(evaluate_on_rank, (job,), show_traceback=show_traceback)
    count = count_local_ranks(job.config)
    with CONSOLE.status("preparing the data"):
        _resolve_layout(job.config, count)
        _prepare(job, resolve_model(job.config.model))
    if count == 1:
        return run_guarded(evaluate_on_rank, (job,), show_traceback=show_traceback)
    from .launch.local import launch_ranks

    return launch_ranks(evaluate_on_rank, (job,), nproc=count, show_traceback=show_traceback)


def _resolve_layout(config: RunConfig, world_size: int) -> tuple[Stack, Degrees]:
    """Return the strategies and the mesh; the batch size does not count here."""
    return resolve(
        config.strategy, config, world_size, config=config.strategy_config, wrapper_config=config.wrapper_config
    )


def _prepare(job: EvalJob, model: ResolvedModel) -> tuple[PreparedData | None, Any, Any]:
    """Return the data, if sets are evaluated, the tokenizer, and the Hugging Face configuration."""
    config, own = job.config, model.directory
    if job.tasks is None:
        data, hf_config = prepare_data_and_model_config(config, model)
        return data, load_tokenizer(data.tokenizer_dir), hf_config
    named = config.data.tokenizer
    place = Path(named).expanduser() if named is not None else own
    if place is None or not has_tokenizer(place):
        raise ConfigError(f"{job.name} has no tokenizer, which tasks need. Name one: --set data.tokenizer=DIR.")
    tokenizer = load_tokenizer(place)
    return (
        None,
        tokenizer,
        build_model_config(config.model, tokenizer=tokenizer, seq_len=config.data.seq_len, directory=own),
    )


def evaluate_on_rank(store: Store | None, job: EvalJob) -> None:
    """Evaluate on this rank, and print the results on the first. Collective."""
    config = job.config
    if config.threads_per_rank != "auto":
        torch.set_num_threads(config.threads_per_rank)
    with (
        heartbeat(config.timeout_s, None) as progress,
        open_world(config.device, store=store, timeout_s=config.timeout_s) as world,
    ):
        world.progress = progress
        commit = download_model(config.model, world)
        stack, degrees = world.run_on_all_ranks(lambda: _resolve_layout(config, world.size))
        resolved = world.run_on_all_ranks(lambda: resolve_model(config.model, commit=commit))
        data, tokenizer, hf_config = world.run_on_all_ranks(lambda: _prepare(job, resolved))
        manager = stack.build(Mesh(degrees, world))
        manager.parallelize(
            *world.run_on_all_ranks(lambda: build_run_model(config.model, resolved, hf_config, seed=config.seed))
        )
        if job.checkpoint is not None:
            load_checkpoint(manager, open_checkpoint_storage(job.checkpoint, job.key_file))
        rows = config.micro_batch_size or _MICRO_BATCH_SIZE
        if data is None or job.tasks is not None:
            length = getattr(hf_config.get_text_config(), "max_position_embeddings", None) or config.data.seq_len
            model = RankModel(manager, tokenizer, max_length=length, micro_batch_size=rows)
            metrics = run_tasks(model, cast("TaskOptions", job.tasks), seed=config.seed)
            if world.rank == 0:
                report_tasks(job, metrics)
            return
        masks = needs_padding_mask(hf_config)
        datasets = world.run_on_all_ranks(lambda: build_datasets(data, config.data, mask_padding=masks))
        shard = build_data_shard(degrees, rows, manager.mesh.data_rank)
        results = {
            name: evaluate_set(manager, each, shard, max_sequences=job.max_sequences)
            for name, each in datasets.eval_sets.items()
        }
        if world.rank == 0:
            report_results(job, results)


def evaluate_set(
    manager: StrategyManager, dataset: RowDataset, shard: DataShard, *, max_sequences: int | None = None
) -> SetResult:
    """Return the sums of one set over all its supervised tokens. Collective.

    `max_sequences`: sequences, spread evenly over the set; None: all.
    """
    count = None if max_sequences is None else min(max_sequences, len(dataset))
    batches = read_eval_microbatches(dataset, shard, num_rows=count)
    sums = torch.zeros(3, dtype=torch.float64)
    for start in range(0, len(batches), _MICROBATCHES_PER_BLOCK):
        block = [
            {name: each for name, each in batch.items() if name not in dataset.column_specs}
            for batch in batches[start : start + _MICROBATCHES_PER_BLOCK]
        ]
        for batch, found in zip(block, manager.token_stats(block, ["log_probs", "is_top1"]), strict=True):
            sums += torch.stack(
                [
                    -found["log_probs"].sum(dtype=torch.float64).cpu(),
                    found["is_top1"].sum(dtype=torch.float64).cpu(),
                    (batch["labels"][:, 1:] != IGNORE_INDEX).sum(dtype=torch.float64),
                ]
            )
    mesh = manager.mesh
    if not mesh.is_data_leader:
        sums.zero_()
    mesh.world.reduce_ints([0])
    dist.all_reduce(sums, group=mesh.world.group)
    nll, correct, tokens = sums.tolist()
    return SetResult(nll, int(correct), int(tokens), count or len(dataset))


def report_tasks(job: EvalJob, metrics: Mapping[str, Mapping[str, float]]) -> None:
    """Print the metrics of tasks as a table, or write them as JSON."""
    if write_json({"model": job.name, "tasks": metrics}, job.json_file):
        return
    table = Table("task", "metric", Column("value", justify="right"), box=None, pad_edge=False)
    for name, values in metrics.items():
        for metric, value in values.items():
            table.add_row(name, metric, f"{value:.4f}")
    create_output_console(80).print(table)


def report_results(job: EvalJob, results: Mapping[str, SetResult]) -> None:
    """Print the results as a table, or write them as JSON."""
    found = {"model": job.name, "sets": {name: each.to_dict() for name, each in results.items()}}
    if write_json(found, job.json_file):
        return
    console: Console = create_output_console(80)
    console.print(f"{'set':<14}{'loss':>10}{'perplexity':>12}{'accuracy':>10}{'tokens':>12}", highlight=False)
    for name, each in results.items():
        values = each.to_dict()
        console.print(
            f"{format_eval_set(name):<14}{values['loss']:>10.6f}{values['perplexity']:>12.2f}"
            f"{values['accuracy']:>10.2%}{values['tokens']:>12,}",
            highlight=False,
            markup=False,
        )
