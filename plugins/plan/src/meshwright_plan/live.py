"""Plan a run, print the plan, refuse a run that does not fit, and compare the plan with the third step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.plugin import (
    CONTROL_TAG,
    CollectiveRecorder,
    Evaluation,
    MeshwrightError,
    ModelError,
    StepResult,
    StrategyManager,
    apply_assignments,
    create_console,
    find_device,
    get_objective,
    hookimpl,
    list_tensors,
    validate_config,
)
from meshwright_run.model_probe import get_node_memory
from meshwright_run.preflight import resolve_model
from meshwright_run.run_file import RunConfig

from .config import DeviceSpec, get_plan_config, list_device_specs
from .config import load_device_spec as find_file
from .meter import StepMeter
from .model_flops import ModelFlops, count_model_flops, estimate_mfu, get_main_dtype
from .planner import build_job, plan_job, summarize_collectives
from .tables import format_seconds, format_size
from .trace import TrainingJob, get_process_groups

COMPARED_STEP = 2  # Compared step, from 0: the first allocates persistent state, the second may not be steady yet
MIN_REPORTED_PERCENT = 1.0  # Smaller deviations are reported as none
FALLBACK_DEVICE = "h100-80gb"  # Device file used for an accelerator that no file describes; its times are not reported
SUGGESTED_CHANGES: tuple[tuple[str, ...], ...] = (
    ("strategy_config.activation_checkpointing=full",),
    ("micro_batch_size=1", "strategy_config.activation_checkpointing=full"),
    ("strategy=fsdp2", "strategy_config={activation_checkpointing: full}", "micro_batch_size=1"),
)
"""Changes that may make a run fit, cheapest first; each is tried alone."""


@dataclass
class PlanMonitor:
    """Monitor a run and compare it with its plan; see `meshwright_run.run_rank.RunMonitor`."""

    plan: dict[str, Any] | None  # from `planner.plan_job`; None: no plan, for `unavailable_reason`
    unavailable_reason: str = ""
    refusal_error: MeshwrightError | None = None
    model_flops: ModelFlops = field(default_factory=lambda: ModelFlops(None))
    peak_flops: float | None = None
    has_device_times: bool = False  # whether the times of the plan's device are known
    can_observe_operators: bool = True  # whether operators can be observed; False if they are compiled
    measured: dict[str, Any] = field(default_factory=dict)
    step_seconds: list[float] = field(default_factory=list)  # seconds of this attempt's steps so far
    has_document_masks: bool = False  # whether rows are packed with documents, or padded
    _evaluated_step: int | None = None  # last step of this attempt that an evaluation followed
    _meter: StepMeter | None = None
    _first_step: int = 1  # number of this attempt's first step in the run, from 1
    _steady_after_steps: int = 0  # see `StrategyManager.steady_after_steps`
    _is_reported: bool = False
    _has_device_stats: bool = False

    @property
    def flops_per_token(self) -> float | None:
        return self.model_flops.per_token

    def startup_lines(self) -> list[str]:
        reason = self.model_flops.unavailable_reason
        uncounted = [f"MFU is not reported, since the FLOPs of the model are unknown: {reason}"] if reason else []
        return [self._describe_plan(), *uncounted]

    def _describe_plan(self) -> str:
        if self.plan is None:
            return f"not planned: {self.unavailable_reason}"
        largest = max(self.plan["ranks"], key=lambda each: each["peak_allocated_bytes"])
        parts = ", ".join(
            f"{owner} {format_size(size)}" for owner, size in largest["peak_by_owner"].items() if size >= 50_000
        )
        communicated = sum(row["bytes"] for row in self.plan["collectives"])
        took = f"; a step takes {format_seconds(self.plan['step_seconds'])}" if self.has_device_times else ""
        return (
            f"planned: a rank holds {format_size(largest['peak_allocated_bytes'])} at the peak of a step ({parts}), "
            f"{format_size(self.plan['persistent_bytes'])} between steps; it communicates "
            f"{format_size(communicated)} per step{took}"
        )

    def observe_setup(self) -> AbstractContextManager[None]:
        if self.plan is None or not self.can_observe_operators:
            return nullcontext()
        if self._meter is None:
            self._meter = StepMeter(is_real=True)
        return self._meter

    def step_contexts(self, manager: StrategyManager) -> Callable[[int], AbstractContextManager[None]]:
        is_on, self._steady_after_steps = self.plan is not None, manager.steady_after_steps
        return lambda step: self._measure_step(manager, step) if step <= COMPARED_STEP and is_on else nullcontext()

    @contextmanager
    def _measure_step(self, manager: StrategyManager, step: int) -> Iterator[None]:
        """Measure peak memory, memory after the step, and collectives of a step."""
        device = manager.mesh.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        recorder = CollectiveRecorder(get_process_groups(manager.mesh), ignored_tags=[CONTROL_TAG])
        meter = self.observe_setup()
        if isinstance(meter, StepMeter):
            # Loading a checkpoint, to resume or to roll back, replaces the state outside of the observed code.
            meter.track(_list_training_state(manager))
            meter.begin_step()
            meter.phase = "activations"
            with meter, recorder:
                yield
            meter.phase = "other"
            self.measured = {"peak_allocated_bytes": meter.peak, "persistent_bytes": meter.total_bytes}
            self.measured["collectives"] = summarize_collectives(recorder.calls)
        else:
            yield
        if device.type == "cuda":
            self.measured["peak_allocated_bytes"] = torch.cuda.max_memory_allocated(device)
            self.measured["persistent_bytes"] = torch.cuda.memory_allocated(device)
            self._has_device_stats = True
        if step == COMPARED_STEP:
            self._meter = None

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        if self.plan is None or self._is_reported:
            return
        if not self.step_seconds:
            self._first_step = result.step
        self.step_seconds.append(result.seconds)
        # With times, wait one more step: observation slows down the compared step.
        self._is_reported = (
            len(self.step_seconds) > COMPARED_STEP + self.has_device_times or result.step == result.num_steps
        )
        if self._is_reported:
            for line in self.format_comparison():
                create_console().print(line, highlight=False, soft_wrap=True)

    @hookimpl
    def on_evaluation(self, evaluation: Evaluation) -> None:
        if not self._is_reported:
            self._evaluated_step = evaluation.step

    def format_comparison(self) -> list[str]:
        """Return the line that compares the plan with the last observed step; none if no step was in a steady state."""
        reported = (self.plan or {}).get("ranks", [{}])[0]
        index, lines = min(COMPARED_STEP, len(self.step_seconds) - 1), []
        if index < self._steady_after_steps:
            return []
        # Observed operators do not show workspaces; the statistics of a device allocator include them.
        unobserved = 0 if self._has_device_stats else reported.get("library_workspace_bytes", 0)
        for name, key in (("at the peak", "peak_allocated_bytes"), ("between steps", "persistent_bytes")):
            if key in self.measured:
                lines.append(
                    f"memory {name}: {_format_deviation(reported[key] - unobserved, self.measured[key], format_size)}"
                )
        if "collectives" in self.measured:
            lines.append(_compare_collectives(reported["collectives"], self.measured["collectives"]))
        if self.has_device_times and len(self.step_seconds) > COMPARED_STEP + 1:
            lines.append(f"time: {_format_deviation(reported['step_seconds'], self.step_seconds[-1], format_seconds)}")
        step = self._first_step + index
        unplanned = ["the masks of documents"] if self.has_document_masks else []
        unplanned += ["the evaluation before this step"] if self._evaluated_step == step - 1 else []
        if unplanned and not all(line.endswith("as planned") for line in lines):
            lines[-1] += f" (the plan leaves out {' and '.join(unplanned)})"
        return [f"plan compared with step {step}: " + "; ".join(lines)] if lines else []


def _list_training_state(manager: StrategyManager) -> list[torch.Tensor]:
    parameters = [each for part in manager.model_parts for each in part.parameters()]
    return list(list_tensors([parameters, *manager.optimizer.state.values()]))


def create_plan_monitor(config: RunConfig, world_size: int) -> PlanMonitor | None:
    """Plan a run on `world_size` ranks. Return None if the run is invalid or its `plan` section disables plans."""
    if not get_plan_config(config).enabled:
        return None
    try:
        device, has_time = _find_run_device(config, world_size)
        job = build_job(config, world_size)
        objective = None if config.objective is None else get_objective(config.objective)
    except MeshwrightError:
        return None
    monitor = _plan_and_check(config, world_size, job, device, has_device_times=has_time)
    if monitor.refusal_error is None:
        monitor.model_flops = count_model_flops(job, objective)
        if monitor.plan is None:
            dtype = str(resolve_model(config.model).get_dtype(config.model)).removeprefix("torch.")
        else:
            dtype = get_main_dtype(monitor.plan)
        monitor.peak_flops = get_peak_flops(find_device(config.device), dtype)
    return monitor


def _plan_and_check(
    config: RunConfig, world_size: int, job: TrainingJob, device: DeviceSpec, *, has_device_times: bool
) -> PlanMonitor:
    if config.objective is not None:
        return PlanMonitor(None, f"plans cover only the token loss, not objective={config.objective!r}")
    try:
        # Rank 0 holds the most memory; all stages of its pipeline are traced with it.
        plan = plan_job(job, device, [0])
    except MeshwrightError as error:
        return PlanMonitor(None, str(error))
    monitor = PlanMonitor(
        plan,
        has_device_times=has_device_times,
        can_observe_operators=not job.is_compiled,
        has_document_masks=config.data.resolve_packing() != "stream",
    )
    if not plan["fits"]:
        needed, has = (format_size(plan[key]) for key in ("peak_reserved_bytes", "memory_bytes"))
        refusal = ModelError(
            f"the run does not fit: a rank needs {needed}, but {plan['device']} has {has}. "
            f"{_suggest_changes(config, world_size, device)} To try it anyway, set plan.on_oom=warn."
        )
        if get_plan_config(config).on_oom == "error":
            monitor.refusal_error = refusal
        else:
            create_console(stderr=True).print(f"warning: {refusal}", highlight=False, soft_wrap=True)
    return monitor


def _suggest_changes(config: RunConfig, world_size: int, device: DeviceSpec) -> str:
    """Return a sentence about the first of `SUGGESTED_CHANGES` that makes a run fit, or else the nearest one."""
    nearest: tuple[int, str] | None = None
    for changes in SUGGESTED_CHANGES:
        flags = " ".join(f"--set {change!r}" if " " in change else f"--set {change}" for change in changes)
        try:
            changed = validate_config(
                RunConfig, apply_assignments(config.model_dump(by_alias=True), changes), where="the run file"
            )
            found = plan_job(build_job(changed, world_size), device, [0])
        except MeshwrightError:
            continue
        if found["fits"]:
            return f"It fits with {flags}."
        if nearest is None or found["peak_reserved_bytes"] < nearest[0]:
            nearest = found["peak_reserved_bytes"], flags
    if nearest is None:
        return "Use more ranks, or a smaller model."
    return f"{nearest[1]} would still need {format_size(nearest[0])}. Use more ranks, or a smaller model."


def build_plan(config: RunConfig, world_size: int) -> tuple[dict[str, Any], bool]:
    """Return the plan of a run on `world_size` ranks and on its device, and whether the device's times are known."""
    job, (device, has_times) = build_job(config, world_size), _find_run_device(config, world_size)
    plan = plan_job(job, device)
    return plan | ({"mfu": estimate_mfu(job, device, plan)} if has_times else {}), has_times


# -- the device of the run


def _find_run_device(config: RunConfig, world_size: int) -> tuple[DeviceSpec, bool]:
    """Return the device of a run, and whether its times are known."""
    if (name := get_plan_config(config).device) is not None:
        return find_file(name), True
    kind = find_device(config.device)
    if kind.type != "cuda":
        # A CPU has no context outside the allocator, and ranks on a node share its memory.
        memory = get_node_memory() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
        changes: dict[str, Any] = {"name": "this CPU", "memory_bytes": memory, "context_bytes": 0}
        return find_file("cpu").model_copy(update=changes), False
    found, known = torch.cuda.get_device_properties(kind), _find_local_device_spec(kind)
    base = known or find_file(FALLBACK_DEVICE)
    return base.model_copy(update={"name": found.name, "memory_bytes": found.total_memory}), known is not None


def _find_local_device_spec(kind: torch.device) -> DeviceSpec | None:
    """Return this process's device spec by the driver's name; None for a CPU, or a device without a file."""
    if kind.type != "cuda":
        return None
    name = torch.cuda.get_device_properties(kind).name
    return next((each for each in map(find_file, list_device_specs()) if name in each.driver_names), None)


def get_peak_flops(kind: torch.device, dtype: str) -> float | None:
    """Return the peak FLOP/s of a dtype on this process's device; None if it is unknown, or for a CPU."""
    known = _find_local_device_spec(kind)
    return None if known is None else known.flops.get(dtype)


# -- text


def _compare_collectives(planned_rows: Sequence[dict[str, Any]], measured_rows: Sequence[dict[str, Any]]) -> str:
    keys = ("kind", "group", "ranks", "dtype")
    planned, real = ({tuple(row[key] for key in keys): row for row in rows} for rows in (planned_rows, measured_rows))
    other = []
    for key in dict.fromkeys([*planned, *real]):
        numbers = [[rows.get(key, {}).get(name, 0) for name in ("calls", "bytes")] for rows in (planned, real)]
        if numbers[0] != numbers[1]:
            (calls, size), (real_calls, real_size) = numbers
            other.append(
                f"{key[0]} over {key[1]} ({key[3]}): {calls} calls with {format_size(size)} planned, "
                f"{real_calls} with {format_size(real_size)} measured"
            )
    total = sum(row["bytes"] for row in planned_rows)
    return f"collectives: {', '.join(other)}" if other else f"collectives: {format_size(total)}, as planned"


def _format_deviation(planned: float, measured: float, format_value: Callable[[Any], str]) -> str:
    off = 100 * (measured / planned - 1) if planned else 0.0
    if abs(off) < MIN_REPORTED_PERCENT:
        return f"{format_value(measured)}, as planned"
    return f"{format_value(measured)}, {format_value(planned)} planned ({off:+.0f} %)"
