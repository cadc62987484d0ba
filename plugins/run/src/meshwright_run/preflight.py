"""Check a run as far as possible before any process starts and any collective is issued.

The launching process calls `preflight`. Each rank calls it again for its own node, where the files are cached.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.plugin import (
    HUGGING_FACE_FOLDER,
    AdapterOptions,
    BaseModelRef,
    BoundObjective,
    ConfigError,
    Degrees,
    Mesh,
    ModelError,
    Objective,
    ScheduleConfig,
    Stack,
    Weights,
    World,
    apply_adapter,
    build_model,
    build_model_config,
    check_adapter_base,
    check_no_custom_code,
    compute_model_size,
    describe_missing_driver,
    find_device,
    find_model_directory,
    find_model_directory_on_all_ranks,
    format_docs_link,
    get_hub_commit,
    get_model_dtype,
    get_objective,
    get_registry,
    identify_base,
    is_commit,
    model_layout,
    parse_adapter_options,
    probe_optimizer,
    read_manifest,
    register_trusted_code,
)

from .data.chat_template import read_chat_template
from .data.order import ORDER_VERSION
from .data.prepare import PreparedData, prepare_data
from .data.tokenizer import has_tokenizer, load_tokenizer
from .data.train_sampler import RunDatasets, build_datasets, check_group_size
from .model_probe import (
    can_probe,
    check_memory,
    get_node_memory,
    needs_reference_log_probs,
    probe_isolation,
    probe_model,
)
from .observers import resolve_trackers
from .profile.config import check_profile
from .resume import check_resume_checkpoint
from .run_action import check_restarts, choose_run_action
from .run_directory import RunDirectory
from .run_file import RunConfig, resolve_layout
from .run_sections import HELD_OUT

MAX_USUAL_EPOCHS = 10
"""Number of epochs above which a warning is printed."""


@dataclass(frozen=True)
class PreparedRun:
    """A run that has passed all checks that are possible without ranks.

    Unless `is_isolation_probed`, the ranks probe document isolation before the first step. `identity`: what must be
    equal to resume the run, as JSON values.
    """

    config: RunConfig
    strategy_stack: Stack
    degrees: Degrees
    micro_batch_size: int
    data: PreparedData
    model: ResolvedModel
    datasets: RunDatasets
    model_config: Any
    objective: Objective | None
    needs_reference_log_probs: bool
    num_steps: int
    schedule: ScheduleConfig
    is_isolation_probed: bool
    identity: dict[str, Any]

    def load_tokenizer(self) -> Any:
        """Load the tokenizer to save with the model, with the chat template used in training."""
        tokenizer = load_tokenizer(self.data.tokenizer_dir)
        if (template := self.config.data.chat_template) is not None:
            tokenizer.chat_template = read_chat_template(template)
        return tokenizer


def preflight(config: RunConfig, world_size: int, *, commit: str | None = None) -> PreparedRun:
    """Check a run and prepare its data. Issues no collective.

    One thing, since each check needs the results of earlier ones.
    """
    stack, degrees, micro_batch_size = resolve_layout(config, world_size)
    resolve_trackers(config.trackers)
    check_restarts(config)
    RunDirectory.from_config(config).check_checkpoint_storage(world_size)
    choose_run_action(config, config.steps)
    device = find_device(config.device)
    if config.steps is not None:
        probe_optimizer(config.optimizer, config.schedule.resolve_warmup(config.steps), config.steps, device=device)
    model = resolve_model(config.model, commit=commit)
    data, hf_config = prepare_data_and_model_config(config, model)
    adapters, seq_len, dtype = model.adapters, config.data.seq_len, model.get_dtype(config.model)
    size = probe_model(
        hf_config, dtype, seq_len=seq_len, device=device, degrees=degrees, adapters=adapters, optimizer=config.optimizer
    )
    check_memory(degrees, size, get_node_memory())
    is_probed = can_probe(size, seq_len=seq_len, device=device, degrees=degrees)
    masks, packing = needs_padding_mask(hf_config), config.data.resolve_packing()
    if is_probed and packing != "stream":
        probe_isolation(hf_config, dtype, packing, seq_len=seq_len, mask_padding=masks)
    rows = build_datasets(data, config.data, mask_padding=masks)
    check_group_size(rows.train_sets[0].group_size, batch_size=config.batch_size, micro_batch_size=micro_batch_size)
    steps = config.steps or compute_num_steps(config, rows.num_rows_per_epoch)
    check_profile(config.profile, num_steps=steps, world_size=world_size)
    schedule = config.schedule.resolve_warmup(steps)
    if config.steps is None:
        choose_run_action(config, steps)
        probe_optimizer(config.optimizer, schedule, steps, device=device)
    largest = max(map(len, rows.eval_sets.values()), default=0)
    if config.eval.max_sequences is not None and config.eval.max_sequences > largest:
        raise ConfigError(
            f"eval.max_sequences={config.eval.max_sequences}, but the largest evaluation set has {largest} sequences. "
            f"Lower it, leave it out, or raise data.eval_fraction."
        )
    objective = None if config.objective is None else get_objective(config.objective)
    if objective is not None and (given := BoundObjective(objective)).input_kind != "tokens":
        raise ConfigError(
            f"the {given.name} needs the outputs of another head, but a run file trains causal LMs. Use it in a "
            f"script: see {format_docs_link('reference/objectives.md')}"
        )
    needs_reference = needs_reference_log_probs(objective, rows)
    identity = _build_identity(config, schedule, data, model, hf_config)
    check_resume_checkpoint(config, identity, steps)
    return PreparedRun(
        config=config,
        strategy_stack=stack,
        degrees=degrees,
        micro_batch_size=micro_batch_size,
        data=data,
        model=model,
        datasets=rows,
        model_config=hf_config,
        objective=objective,
        needs_reference_log_probs=needs_reference,
        num_steps=steps,
        schedule=schedule,
        is_isolation_probed=is_probed,
        identity=identity,
    )


def compute_num_steps(config: RunConfig, num_rows: int | None) -> int:
    """Return the number of optimizer steps of a run whose length is given in epochs."""
    if num_rows is None:
        raise ConfigError(f"epochs={config.epochs}, but the number of rows of the data is unknown. Set steps.")
    steps = max(1, math.ceil(Fraction(str(config.epochs)) * num_rows / config.batch_size))
    if config.schedule.warmup_steps > steps:
        raise ConfigError(
            f"schedule.warmup_steps={config.schedule.warmup_steps} is more than the {steps} steps of "
            f"epochs={config.epochs}. Lower it, or set schedule.warmup_ratio."
        )
    return steps


def needs_padding_mask(hf_config: Any) -> bool:
    """Return whether padding must be masked, since it would otherwise count in the statistics of routers."""
    return bool(getattr(hf_config.get_text_config(), "output_router_logits", False))


def prepare_data_and_model_config(config: RunConfig, model: ResolvedModel | None = None) -> tuple[PreparedData, Any]:
    """Prepare the data, or read them from the cache, and build the matching Hugging Face configuration."""
    directory = (model or resolve_model(config.model)).directory
    own_tokenizer = directory if directory is not None and has_tokenizer(directory) else None
    data = prepare_data(config.data, tokenizer_dir=own_tokenizer)
    tokenizer = load_tokenizer(data.tokenizer_dir)
    return data, build_model_config(config.model, tokenizer=tokenizer, seq_len=config.data.seq_len, directory=directory)


def count_local_ranks(config: RunConfig) -> int:
    """Return the number of ranks that `start_run` starts on this node."""
    on_cpu = find_device(config.device).type == "cpu"
    accelerators = 0 if on_cpu else torch.accelerator.device_count()
    return config.count_local_ranks(get_registry().get(config.strategy).axes, accelerators)


def _build_identity(
    config: RunConfig, schedule: ScheduleConfig, data: PreparedData, run_model: ResolvedModel, hf_config: Any
) -> dict[str, Any]:
    model = hf_config.to_dict()
    for key in ("transformers_version", "architectures", "_name_or_path"):
        model.pop(key, None)
    # Other settings that determine the rows and their order; none for a stream of one source.
    kind, weights = config.data.resolve_packing(), [source.weight for source in config.data.get_training_sources()]
    layout: dict[str, Any] = {} if kind == "stream" else {"packing": kind}
    if any(each is not None for each in weights):
        layout["weights"] = weights
    if len(data.sources) > 1:
        layout |= {f"sources.{number}": source.fingerprint for number, source in enumerate(data.sources)}
    identity = {
        "model": {**model, "dtype": config.model.get("dtype", "float32"), **run_model.build_identity(config.model)},
        "data": {"fingerprint": data.fingerprint, "seq_len": config.data.seq_len, **layout},
        "seed": config.seed,
        "batch_size": config.batch_size,
        # Checkpoints of runs without groups may lack the key, which would count as a difference.
        "optimizer": config.optimizer.model_dump(exclude=None if config.optimizer.groups else {"groups"}),
        "ema": None if config.ema is None else config.ema.model_dump(exclude={"evaluate", "export"}),
        "schedule": {**schedule.model_dump(), "warmup_ratio": config.schedule.warmup_ratio},
        "max_grad_norm": config.max_grad_norm,
        "grad_norm_type": config.grad_norm_type,
        "objective": config.objective,
        "order": ORDER_VERSION,
    }
    plain: dict[str, Any] = json.loads(json.dumps(identity, default=str))
    return plain


def describe_run(prepared: PreparedRun, model: nn.Module, mesh: Mesh) -> list[str]:
    config, rows, held_out = prepared.config, prepared.datasets, prepared.datasets.eval_sets
    size = compute_model_size(model)
    no_driver = describe_missing_driver("training on the CPU: ") if config.device is None else ""
    counts = [f"{rows.num_rows:,}"] if rows.num_rows else []
    counts += [f"an unknown number (from {rows.num_streams} streamed sources) of"] if rows.num_streams else []
    others = "".join(f", {len(each):,} of {name}" for name, each in held_out.items() if name != HELD_OUT)
    return [
        *([no_driver] if no_driver else []),
        f"{prepared.strategy_stack} on {prepared.degrees} ({mesh.device.type}): {prepared.model_config.model_type} "
        f"with {size.num_parameters:,} parameters in {len(model_layout(model).blocks)} blocks"
        + (
            f"; {size.num_trainable:,} of them are trained, on {prepared.model.base}"
            if prepared.model.base is not None
            else ""
        ),
        f"{prepared.data.num_documents:,} documents: {' and '.join(counts)} sequences of {config.data.seq_len} tokens "
        f"to train on, {len(held_out.get(HELD_OUT, ())):,} held out{others}; {config.batch_size} per step, "
        f"{prepared.num_steps} steps",
        *_warn_about_epochs(prepared),
        *_warn_about_tokenizer(prepared),
    ]


def _warn_about_tokenizer(prepared: PreparedRun) -> list[str]:
    config, directory = prepared.config, prepared.model.directory
    if "path" not in config.model or config.data.tokenizer is not None or directory is None or has_tokenizer(directory):
        return []
    return [
        f"warning: model.path={config.model['path']!r} has no tokenizer, so a new one was trained on these texts. Its "
        "tokens are not those that the model was trained with. Set data.tokenizer to the directory of the model's."
    ]


def _warn_about_epochs(prepared: PreparedRun) -> list[str]:
    rows, config = prepared.datasets.num_rows_per_epoch, prepared.config
    epochs = 0.0 if rows is None else prepared.num_steps * config.batch_size / rows
    if epochs <= MAX_USUAL_EPOCHS:
        return []
    length = f"epochs={config.epochs:g}" if config.steps is None else f"steps={config.steps}"
    return [
        f"warning: {length} trains {epochs:.0f} epochs: the model sees each of {rows:,} sequences that often, and is "
        "likely to memorize them. Set epochs: 3, or give more data, and watch the held-out loss."
    ]


_PEFT_KEY = "model.peft"


@dataclass(frozen=True)
class ResolvedModel:
    directory: Path | None = None
    adapters: AdapterOptions | None = None
    base: BaseModelRef | None = None

    def get_dtype(self, section: Mapping[str, Any]) -> torch.dtype:
        """Return the dtype of the parameters, except those of adapters."""
        return (self.adapters and self.adapters.base_dtype) or get_model_dtype(section)

    def build_identity(self, section: Mapping[str, Any]) -> dict[str, Any]:
        if self.base is None:
            return {}
        return {"peft": dict(section["peft"]), "base": self.base.fingerprint}


def download_model(section: Mapping[str, Any], world: World) -> str | None:
    """Download the model of a run file on every node; return its commit if it is from the hub. Collective."""
    if "path" not in section:
        return None
    return get_hub_commit(
        section["path"], find_model_directory_on_all_ranks(section["path"], world, **_get_download_options(section))
    )


def resolve_model(section: Mapping[str, Any], *, commit: str | None = None) -> ResolvedModel:
    if "checkpoint" in section:
        checkpoint = Path(section["checkpoint"]).expanduser()
        manifest = read_manifest(checkpoint)
        if manifest.base is not None:
            raise ModelError(
                f"model.checkpoint={str(checkpoint)!r} holds only adapters. Export it (meshwright export {checkpoint} "
                f"DIR) and continue from it: model.path={manifest.base.get('path')}, model.peft.adapter=DIR; or merge "
                f"it (meshwright export --merge {checkpoint} DIR) and train model.path=DIR."
            )
        return ResolvedModel(checkpoint / HUGGING_FACE_FOLDER)
    if "path" not in section:
        return ResolvedModel()
    options = _get_download_options(section)
    directory = find_model_directory(section["path"], **{**options, "revision": commit or options["revision"]})
    if section.get("trust_remote_code") is not None:
        register_trusted_code(
            directory, section["trust_remote_code"], commit=get_hub_commit(section["path"], directory)
        )
    else:
        check_no_custom_code(directory)
    if "peft" not in section:
        return ResolvedModel(directory)
    adapters = parse_adapter_options(section["peft"], where=_PEFT_KEY)
    base = identify_base(section["path"], directory, allow_pickle=bool(section.get("allow_pickle", False)))
    check_adapter_base(adapters, base, where=_PEFT_KEY)
    return ResolvedModel(directory, adapters, base)


def build_run_model(
    section: Mapping[str, Any], resolved: ResolvedModel, config: Any, *, seed: int
) -> tuple[nn.Module, Weights | None]:
    """Build the model of a run, with its adapters if it has any; see `build_model`."""
    if resolved.adapters is None:
        return build_model(section, config, seed=seed, directory=resolved.directory)
    dtype = resolved.get_dtype(section)
    model, weights = build_model(section, config, seed=seed, directory=resolved.directory, dtype=dtype)
    return apply_adapter(model, weights, resolved.adapters, resolved.base, seed=seed, where=_PEFT_KEY)


def _get_download_options(section: Mapping[str, Any]) -> dict[str, Any]:
    trusted = section.get("trust_remote_code")
    commit = trusted if is_commit(trusted) else None
    return {
        "revision": section.get("revision") or commit,
        "allow_pickle": bool(section.get("allow_pickle", False)),
        "include_code": trusted is not None,
    }
