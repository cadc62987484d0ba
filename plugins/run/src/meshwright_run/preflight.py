"""Find all that can be wrong with a run before any process starts or any collective is issued.

The launching process calls `plan_run`, and each rank calls it again for its own node, where the files are cached.
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
    HUGGING_FACE,
    AdapterOptions,
    Base,
    ConfigError,
    Degrees,
    Given,
    Mesh,
    ModelError,
    Objective,
    ScheduleConfig,
    Stack,
    Weights,
    World,
    adapt,
    adapter_options,
    base_at,
    build_model,
    check_base,
    check_needs_no_code,
    commit_of,
    dtype_of,
    find_device,
    find_directory,
    find_on_all,
    get_objective,
    get_registry,
    is_commit,
    missing_driver,
    model_config,
    model_layout,
    model_size,
    read_manifest,
    trust_code,
    try_optimization,
)

from .data.chat_template import read_chat_template
from .data.feed import RunRows, check_groups, lay_out
from .data.order import ORDER_VERSION
from .data.prepare import PreparedData, prepare
from .data.tokenizer import holds_tokenizer, load_tokenizer
from .fate import check_output, check_restarts
from .model_trial import can_be_tried, check_memory, columns_to_compute, memory_of_node, try_model, try_rows
from .observers import chosen
from .profile.config import check_profile
from .resume import check_source
from .run_directory import RunDirectory
from .run_file import RunConfig, layout_of
from .run_sections import HELD_OUT


@dataclass(frozen=True)
class Plan:
    """A run that has been checked, as far as that is possible without ranks.

    Where not `rows_tried`, the model is tried as it runs. `identity` is what must be equal to resume; values of JSON.
    """

    config: RunConfig
    stack: Stack
    degrees: Degrees
    micro_batch_size: int
    data: PreparedData
    model: RunModel
    rows: RunRows
    model_config: Any
    objective: Objective | None
    needs_reference: bool
    steps: int
    schedule: ScheduleConfig
    rows_tried: bool
    identity: dict[str, Any]

    def tokenizer(self) -> Any:
        """Load the tokenizer that is written with the model, with the chat template that it was trained with."""
        tokenizer = load_tokenizer(self.data.tokenizer_dir)
        if (template := self.config.data.chat_template) is not None:
            tokenizer.chat_template = read_chat_template(template)
        return tokenizer


def plan_run(config: RunConfig, world_size: int, *, commit: str | None = None) -> Plan:
    """Check a run and prepare its data; issues no collective.

    One thing, since each check needs what the ones before have found.
    """
    stack, degrees, micro_batch_size = layout_of(config, world_size)
    chosen(config.trackers)
    check_restarts(config)
    RunDirectory.of(config).check_place(world_size)
    check_output(config, config.steps)
    device = find_device(config.device)
    if config.steps is not None:
        try_optimization(config.optimizer, config.schedule.over(config.steps), config.steps, device=device)
    model = find_model(config.model, commit=commit)
    data, hf_config = data_and_model_config(config, model)
    adapters, seq_len, dtype = model.adapters, config.data.seq_len, model.dtype(config.model)
    size = try_model(
        hf_config, dtype, seq_len=seq_len, device=device, degrees=degrees, adapters=adapters, optimizer=config.optimizer
    )
    check_memory(degrees, size, memory_of_node())
    tried = can_be_tried(size, seq_len=seq_len, device=device, degrees=degrees)
    masks, packing = masks_padding(hf_config), config.data.packing_kind()
    if tried and packing != "stream":
        try_rows(hf_config, dtype, packing, seq_len=seq_len, masks=masks)
    rows = lay_out(data, config.data, masks=masks)
    check_groups(rows.training[0].group, batch_size=config.batch_size, micro_batch_size=micro_batch_size)
    steps = config.steps or steps_of(config, rows.rows_per_epoch)
    check_profile(config.profile, steps=steps, world_size=world_size)
    schedule = config.schedule.over(steps)
    if config.steps is None:
        check_output(config, steps)
        try_optimization(config.optimizer, schedule, steps, device=device)
    largest = max(map(len, rows.held_out.values()), default=0)
    if config.eval.sequences is not None and config.eval.sequences > largest:
        raise ConfigError(
            f"eval.sequences={config.eval.sequences}, but the held-out split has {largest}. "
            f"Lower it, leave it out, or raise data.eval_fraction."
        )
    objective = None if config.objective is None else get_objective(config.objective)
    if objective is not None and (given := Given(objective)).on != "tokens":
        raise ConfigError(
            f"the {given.name} is over the outputs of another head, and a run file trains causal LMs. Train it in a "
            f"script: see docs/objectives.md."
        )
    needs_reference = columns_to_compute(objective, rows)
    identity = _identity(config, schedule, data, model, hf_config)
    check_source(config, identity, steps)
    return Plan(
        config=config,
        stack=stack,
        degrees=degrees,
        micro_batch_size=micro_batch_size,
        data=data,
        model=model,
        rows=rows,
        model_config=hf_config,
        objective=objective,
        needs_reference=needs_reference,
        steps=steps,
        schedule=schedule,
        rows_tried=tried,
        identity=identity,
    )


def steps_of(config: RunConfig, rows: int | None) -> int:
    """Return the optimizer steps of a run whose length is given in epochs."""
    if rows is None:
        raise ConfigError(f"epochs={config.epochs}, but how many rows the data have is not known. Set steps.")
    steps = max(1, math.ceil(Fraction(str(config.epochs)) * rows / config.batch_size))
    if config.schedule.warmup_steps > steps:
        raise ConfigError(
            f"schedule.warmup_steps={config.schedule.warmup_steps} is more than the {steps} steps of "
            f"epochs={config.epochs}. Lower it, or set schedule.warmup_ratio."
        )
    return steps


def masks_padding(hf_config: Any) -> bool:
    """Whether padding is to be masked: it would count in the statistics of routers otherwise."""
    return bool(getattr(hf_config.get_text_config(), "output_router_logits", False))


def data_and_model_config(config: RunConfig, model: RunModel | None = None) -> tuple[PreparedData, Any]:
    """Prepare the data, or find them in the cache, and make the Hugging Face configuration that goes with them."""
    directory = (model or find_model(config.model)).directory
    own_tokenizer = directory if directory is not None and holds_tokenizer(directory) else None
    data = prepare(config.data, tokenizer_dir=own_tokenizer)
    tokenizer = load_tokenizer(data.tokenizer_dir)
    return data, model_config(config.model, tokenizer=tokenizer, seq_len=config.data.seq_len, directory=directory)


def processes(config: RunConfig) -> int:
    """Return how many ranks `start` starts on this node."""
    on_cpu = find_device(config.device).type == "cpu"
    accelerators = 0 if on_cpu else torch.accelerator.device_count()
    return config.processes(get_registry().get(config.strategy).axes, accelerators)


def _identity(
    config: RunConfig, schedule: ScheduleConfig, data: PreparedData, run_model: RunModel, hf_config: Any
) -> dict[str, Any]:
    model = hf_config.to_dict()
    for key in ("transformers_version", "architectures", "_name_or_path"):
        model.pop(key, None)
    # What else the rows and their order follow from; nothing for a stream of one source.
    kind, weights = config.data.packing_kind(), [source.weight for source in config.data.training_sources()]
    layout: dict[str, Any] = {} if kind == "stream" else {"packing": kind}
    if any(each is not None for each in weights):
        layout["weights"] = weights
    if len(data.sources) > 1:
        layout |= {f"sources.{number}": source.fingerprint for number, source in enumerate(data.sources)}
    identity = {
        "model": {**model, "dtype": config.model.get("dtype", "float32"), **run_model.identity(config.model)},
        "data": {"fingerprint": data.fingerprint, "seq_len": config.data.seq_len, **layout},
        "seed": config.seed,
        "batch_size": config.batch_size,
        # What a checkpoint has not saved differs from nothing.
        "optimizer": config.optimizer.model_dump(exclude=None if config.optimizer.groups else {"groups"}),
        "ema": None if config.ema is None else config.ema.model_dump(exclude={"evaluate", "export"}),
        "schedule": schedule.model_dump(exclude={"warmup_ratio"}),
        "max_grad_norm": config.max_grad_norm,
        "grad_norm_type": config.grad_norm_type,
        "objective": config.objective,
        "order": ORDER_VERSION,
    }
    plain: dict[str, Any] = json.loads(json.dumps(identity, default=str))
    return plain


def headline(plan: Plan, model: nn.Module, mesh: Mesh) -> list[str]:
    config, rows, held_out = plan.config, plan.rows, plan.rows.held_out
    size = model_size(model)
    no_driver = missing_driver("training on the CPU: ") if config.device is None else ""
    found = [f"{rows.at_hand:,}"] if rows.at_hand else []
    found += [f"those of {rows.streams} sources, read while training, as"] if rows.streams else []
    others = "".join(f", {len(each):,} of {name}" for name, each in held_out.items() if name != HELD_OUT)
    return [
        *([no_driver] if no_driver else []),
        f"{plan.stack} on {plan.degrees} ({mesh.device.type}): {plan.model_config.model_type} with "
        f"{size.parameters:,} parameters in {len(model_layout(model).blocks)} blocks"
        + (f"; {size.trainable:,} of them train, over {plan.model.base}" if plan.model.base is not None else ""),
        f"{plan.data.documents:,} documents: {' and '.join(found)} sequences of {config.data.seq_len} tokens to train "
        f"on, {len(held_out.get(HELD_OUT, ())):,} held out{others}; {config.batch_size} a step, {plan.steps} steps",
    ]


_WHERE = "model.peft"


@dataclass(frozen=True)
class RunModel:
    directory: Path | None = None
    adapters: AdapterOptions | None = None
    base: Base | None = None

    def dtype(self, section: Mapping[str, Any]) -> torch.dtype:
        """Return the dtype of the parameters, except those of adapters."""
        return (self.adapters and self.adapters.base_dtype) or dtype_of(section)

    def identity(self, section: Mapping[str, Any]) -> dict[str, Any]:
        if self.base is None:
            return {}
        return {"peft": dict(section["peft"]), "base": self.base.fingerprint}


def fetch_model(section: Mapping[str, Any], world: World) -> str | None:
    """Download the model of a run file on every node, and return its commit if it is one of the hub. Collective."""
    if "path" not in section:
        return None
    return commit_of(section["path"], find_on_all(section["path"], world, **_wanted(section)))


def find_model(section: Mapping[str, Any], *, commit: str | None = None) -> RunModel:
    if "checkpoint" in section:
        checkpoint = Path(section["checkpoint"]).expanduser()
        manifest = read_manifest(checkpoint)
        if manifest.base is not None:
            raise ModelError(
                f"model.checkpoint={str(checkpoint)!r} holds adapters alone. Export it (meshwright export {checkpoint} "
                f"DIR) and go on from it: model.path={manifest.base.get('path')}, model.peft.adapter=DIR; or merge it "
                f"(meshwright export --merge {checkpoint} DIR), and train model.path=DIR."
            )
        return RunModel(checkpoint / HUGGING_FACE)
    if "path" not in section:
        return RunModel()
    wanted = _wanted(section)
    directory = find_directory(section["path"], **{**wanted, "revision": commit or wanted["revision"]})
    if section.get("trust_remote_code") is not None:
        trust_code(directory, section["trust_remote_code"], commit=commit_of(section["path"], directory))
    else:
        check_needs_no_code(directory)
    if "peft" not in section:
        return RunModel(directory)
    adapters = adapter_options(section["peft"], where=_WHERE)
    base = base_at(section["path"], directory, allow_pickle=bool(section.get("allow_pickle", False)))
    check_base(adapters, base, where=_WHERE)
    return RunModel(directory, adapters, base)


def make_model(
    section: Mapping[str, Any], found: RunModel, config: Any, *, seed: int
) -> tuple[nn.Module, Weights | None]:
    """Make the model of a run, with its adapters if it has any; see `build_model`."""
    if found.adapters is None:
        return build_model(section, config, seed=seed, directory=found.directory)
    dtype = found.dtype(section)
    model, weights = build_model(section, config, seed=seed, directory=found.directory, dtype=dtype)
    return adapt(model, weights, found.adapters, found.base, seed=seed, where=_WHERE)


def _wanted(section: Mapping[str, Any]) -> dict[str, Any]:
    trusted = section.get("trust_remote_code")
    commit = trusted if is_commit(trusted) else None
    return {
        "revision": section.get("revision") or commit,
        "allow_pickle": bool(section.get("allow_pickle", False)),
        "code": trusted is not None,
    }
