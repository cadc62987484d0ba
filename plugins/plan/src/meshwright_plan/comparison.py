"""A run and its plan: printed before it begins, compared with its third step, and a reason to refuse the run."""

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
    MeshwrightError,
    ModelError,
    StepResult,
    StrategyManager,
    assigned,
    find_device,
    get_objective,
    hookimpl,
    new_console,
    validated,
)
from meshwright_run.model_trial import memory_of_node
from meshwright_run.preflight import find_model
from meshwright_run.run_file import RunConfig

from .config import Device, asked_of, devices
from .config import find_device as find_file
from .meter import StepMeter
from .planned import ModelFlops, job_of, model_flops, plan, sums_of
from .trace import Job, groups

LOOKED_AT = 2  # The step that is compared, from 0: the first makes what is kept, and the second may still settle
TOLD_PERCENT = 1.0  # Smaller deviations count as none
LIKE = "h100-80gb"  # Device whose figures stand for an accelerator that no file describes; its times are not reported
CHANGES: tuple[tuple[str, ...], ...] = (
    ("strategy_config.activation_checkpointing=full",),
    ("micro_batch_size=1", "strategy_config.activation_checkpointing=full"),
    ("strategy=fsdp2", "strategy_config={activation_checkpointing: full}", "micro_batch_size=1"),
)
"""Changes that may make a run fit, the cheapest first; each is tried by itself."""


@dataclass
class Comparison:
    """A run's monitor; see `meshwright_run.run_rank.Companion`."""

    plan: dict[str, Any] | None  # from `planned.plan`; None, with `why_not`: the run cannot be planned
    why_not: str = ""
    refusal: MeshwrightError | None = None
    model: ModelFlops = field(default_factory=lambda: ModelFlops(None))
    peak_flops: float | None = None
    has_time: bool = False  # whether the times of the plan's device are known
    sees_operators: bool = True  # whether operators can be observed: not where they are compiled
    found: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)  # of the steps so far
    _meter: StepMeter | None = None
    _is_told: bool = False
    _is_of_device: bool = False

    @property
    def flops_per_token(self) -> float | None:
        return self.model.per_token

    def lines(self) -> list[str]:
        reason = self.model.why_not
        uncounted = [f"FLOPs of the model are not counted, so there is no MFU: {reason}"] if reason else []
        return [self._planned(), *uncounted]

    def _planned(self) -> str:
        if self.plan is None:
            return f"not planned: {self.why_not}"
        largest = max(self.plan["ranks"], key=lambda each: each["peak_allocated_bytes"])
        parts = ", ".join(f"{owner} {_mb(size)}" for owner, size in largest["peak_by_owner"].items() if size >= 50_000)
        passed = sum(row["bytes"] for row in self.plan["collectives"])
        took = f"; a step of {self.plan['step_seconds']:.3g} s" if self.has_time else ""
        return (
            f"planned: a rank holds {_mb(largest['peak_allocated_bytes'])} at the peak of a step ({parts}), "
            f"{_mb(self.plan['held_bytes'])} between steps, and passes {_mb(passed)} a step{took}"
        )

    def seeing(self) -> AbstractContextManager[None]:
        if self.plan is None or not self.sees_operators:
            return nullcontext()
        if self._meter is None:
            self._meter = StepMeter(is_real=True)
        return self._meter

    def around(self, manager: StrategyManager) -> Callable[[int], AbstractContextManager[None]]:
        is_on = self.plan is not None
        return lambda step: self._looking(manager, step) if step <= LOOKED_AT and is_on else nullcontext()

    @contextmanager
    def _looking(self, manager: StrategyManager, step: int) -> Iterator[None]:
        """Measure what a step holds at most, and sends; of earlier steps, only what they leave."""
        device = manager.mesh.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        recorder = CollectiveRecorder(groups(manager.mesh), tags=[CONTROL_TAG])
        meter = self.seeing()
        if isinstance(meter, StepMeter):
            meter.begin()
            meter.phase = "activations"
            with meter, recorder:
                yield
            meter.phase = "other"
            self.found = {"peak_allocated_bytes": meter.peak, "held_bytes": meter.total}
            self.found["collectives"] = sums_of(recorder.calls)
        else:
            yield
        if device.type == "cuda":
            self.found["peak_allocated_bytes"] = torch.cuda.max_memory_allocated(device)
            self.found["held_bytes"] = torch.cuda.memory_allocated(device)
            self._is_of_device = True
        if step == LOOKED_AT:
            self._meter = None

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        if self.plan is None or self._is_told:
            return
        self.seconds.append(result.seconds)
        # The time is that of the first step that is not observed.
        self._is_told = len(self.seconds) > LOOKED_AT + self.has_time or result.step == result.steps
        if self._is_told:
            for line in self.compared():
                new_console().print(line, highlight=False, soft_wrap=True)

    def compared(self) -> list[str]:
        told = (self.plan or {}).get("ranks", [{}])[0]
        lines = []
        # Operators show no workspaces; a device's allocator has them.
        left_out = 0 if self._is_of_device else told.get("library_bytes", 0)
        for name, key in (("at the peak", "peak_allocated_bytes"), ("between steps", "held_bytes")):
            if key in self.found:
                lines.append(f"memory {name}: {_off(told[key] - left_out, self.found[key], _mb)}")
        if "collectives" in self.found:
            lines.append(_traffic(told["collectives"], self.found["collectives"]))
        if self.has_time and len(self.seconds) > LOOKED_AT + 1:
            lines.append(f"time: {_off(told['step_seconds'], self.seconds[-1], '{:.3g} s'.format)}")
        return [f"plan beside step {LOOKED_AT + 1}: " + "; ".join(lines)] if lines else []


def compare(config: RunConfig, world_size: int) -> Comparison | None:
    """Plan a run on so many ranks, as its `plan` section says; None if it is not valid or asks for no plan."""
    if not asked_of(config).enabled:
        return None
    try:
        device, has_time = _device(config, world_size)
        job = job_of(config, world_size)
        objective = None if config.objective is None else get_objective(config.objective)
    except MeshwrightError:
        return None
    comparison = _planned(config, world_size, job, device, has_time=has_time)
    if comparison.refusal is None:
        comparison.model = model_flops(job, objective)
        if comparison.plan is None:
            dtype = str(find_model(config.model).dtype(config.model)).removeprefix("torch.")
        else:
            by_dtype: dict[str, int] = comparison.plan["ranks"][0]["flops_by_dtype"]
            dtype = max(by_dtype, key=by_dtype.__getitem__, default="float32")  # that of most products
        comparison.peak_flops = peak_flops(find_device(config.device), dtype)
    return comparison


def _planned(config: RunConfig, world_size: int, job: Job, device: Device, *, has_time: bool) -> Comparison:
    if config.objective is not None:
        return Comparison(None, f"plans are of the token loss, and not of objective={config.objective!r}")
    try:
        # The first rank has the most, and all stages of its pipeline are traced with it.
        found = plan(job, device, [0])
    except MeshwrightError as error:
        return Comparison(None, str(error))
    comparison = Comparison(found, has_time=has_time, sees_operators=not job.is_compiled)
    if not found["fits"]:
        needed, has = (found[key] / 2**30 for key in ("peak_reserved_bytes", "memory_bytes"))
        refusal = ModelError(
            f"the run does not fit: a rank would take {needed:,.1f} GiB, and {found['device']} has {has:,.1f} GiB for "
            f"it. {_advice(config, world_size, device)} Or set plan.when_too_large=warn to try it all the same."
        )
        if asked_of(config).when_too_large == "refuse":
            comparison.refusal = refusal
        else:
            new_console(stderr=True).print(f"warning: {refusal}", highlight=False, soft_wrap=True)
    return comparison


def _advice(config: RunConfig, world_size: int, device: Device) -> str:
    """Return a sentence: the first of `CHANGES` that makes a run fit, or how near the best of them comes."""
    nearest: tuple[int, str] | None = None
    for changes in CHANGES:
        flags = " ".join(f"--set {change!r}" if " " in change else f"--set {change}" for change in changes)
        try:
            changed = validated(RunConfig, assigned(config.model_dump(by_alias=True), changes), where="the run file")
            found = plan(job_of(changed, world_size), device, [0])
        except MeshwrightError:
            continue
        if found["fits"]:
            return f"It fits with {flags}."
        if nearest is None or found["peak_reserved_bytes"] < nearest[0]:
            nearest = found["peak_reserved_bytes"], flags
    if nearest is None:
        return "Use more ranks, or a smaller model."
    return f"{nearest[1]} would still need {nearest[0] / 2**30:,.1f} GiB. Use more ranks, or a smaller model."


def plan_of(config: RunConfig, world_size: int) -> dict[str, Any]:
    """Return the plan of a run on so many ranks and its device."""
    return plan(job_of(config, world_size), _device(config, world_size)[0])


# -- the device of the run


def _device(config: RunConfig, world_size: int) -> tuple[Device, bool]:
    """Return the device of a run, and whether times on it are known."""
    if (name := asked_of(config).device) is not None:
        return find_file(name), True
    kind = find_device(config.device)
    if kind.type != "cuda":
        # Allocators of the CPU return what is freed, and ranks on a node share its memory.
        memory = memory_of_node() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
        changes: dict[str, Any] = {"name": "this CPU", "memory_bytes": memory, "context_bytes": 0}
        return find_file("cpu").model_copy(update=changes), False
    found, known = torch.cuda.get_device_properties(kind), _known_here(kind)
    base = known or find_file(LIKE)
    return base.model_copy(update={"name": found.name, "memory_bytes": found.total_memory}), known is not None


def _known_here(kind: torch.device) -> Device | None:
    """Return this process's device by its driver's name for it; None: a CPU, or one that no file describes."""
    if kind.type != "cuda":
        return None
    name = torch.cuda.get_device_properties(kind).name
    return next((each for each in map(find_file, devices()) if name in each.known_as), None)


def peak_flops(kind: torch.device, dtype: str) -> float | None:
    """Return the most products a second of a dtype on this process's device; None: not known, or a CPU."""
    known = _known_here(kind)
    return None if known is None else known.flops.get(dtype)


# -- words


def _traffic(told: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> str:
    keys = ("kind", "group", "ranks", "dtype")
    planned, real = ({tuple(row[key] for key in keys): row for row in rows} for rows in (told, found))
    other = []
    for key in dict.fromkeys([*planned, *real]):
        numbers = [[rows.get(key, {}).get(name, 0) for name in ("calls", "bytes")] for rows in (planned, real)]
        if numbers[0] != numbers[1]:
            (calls, size), (real_calls, real_size) = numbers
            other.append(
                f"{key[0]} over {key[1]} ({key[3]}): {calls} calls of {_mb(size)} planned, "
                f"{real_calls} of {_mb(real_size)} done"
            )
    total = sum(row["bytes"] for row in told)
    return f"collectives: {', '.join(other)}" if other else f"collectives: each of {_mb(total)} as planned"


def _off(told: float, found: float, shown: Callable[[Any], str]) -> str:
    off = 100 * (found / told - 1) if told else 0.0
    if abs(off) < TOLD_PERCENT:
        return f"{shown(found)}, as planned"
    return f"{shown(found)}, {shown(told)} planned ({off:+.0f} %)"


def _mb(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"
