"""A plan beside its run: told before, compared with the third step, and a reason to refuse what cannot fit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ...base.errors import MeshwrightError, ModelError
from ...events.step import StepResult
from ...files.terminal import new_console
from ...mesh.world import CONTROL_TAG, find_device
from ...objectives.registry import get_objective
from ...strategy.contract import StrategyManager
from ...strategy.hooks import hookimpl
from ...testing.collectives import Recorder
from ...train.model_trial import memory_of_node
from ...train.run_file import RunConfig
from ...train.run_model import find_model
from .. import device as devices
from ..device import Device
from ..job import job_of
from ..meter import StepMeter
from ..model_flops import ModelFlops, model_flops
from ..planned import plan, sums_of
from ..trace import Job, groups
from .advice import advice
from .here import device_here, peak_flops

LOOKED_AT = 2
"""The step that is compared, from 0: the first makes what is kept, and the second may still settle."""
TOLD_PERCENT = 1.0
"""Deviations above this are told."""


@dataclass
class Comparison:
    """See `meshwright.train.companion.Companion`.

    Attributes:
        plan: see `planned.plan`; None: the run cannot be planned.
        why_not: the reason then.
        refusal: why the run is not to be done.
        model: what it needs.
        peak_flops: see `meshwright.train.companion.Companion`.
        has_time: whether the plan is of a device whose times are known.
        sees_operators: whether operators can be seen one by one; not where they are compiled.
        found: of the step that was looked at: bytes, and collectives as in the plan.
        seconds: of the steps so far.
    """

    plan: dict[str, Any] | None
    why_not: str = ""
    refusal: MeshwrightError | None = None
    model: ModelFlops = field(default_factory=lambda: ModelFlops(None))
    peak_flops: float | None = None
    has_time: bool = False
    sees_operators: bool = True
    found: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    _meter: StepMeter | None = None
    _is_told: bool = False
    _is_of_device: bool = False

    @property
    def flops_per_token(self) -> float | None:
        return self.model.per_token

    def lines(self) -> list[str]:
        return [self._planned(), *self._uncounted()]

    def _uncounted(self) -> list[str]:
        reason = self.model.why_not
        return [f"FLOPs of the model are not counted, so there is no MFU: {reason}"] if reason else []

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
        """Count what a step holds at most, and sends; of those before, only what they leave behind."""
        device = manager.mesh.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        recorder = Recorder(groups(manager.mesh), tags=[CONTROL_TAG])
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
        # The time is that of the first step that nobody has looked at.
        self._is_told = len(self.seconds) > LOOKED_AT + self.has_time or result.step == result.steps
        if self._is_told:
            for line in self.compared():
                new_console().print(line, highlight=False, soft_wrap=True)

    def compared(self) -> list[str]:
        """Where the plan was off, quantity by quantity."""
        told = (self.plan or {}).get("ranks", [{}])[0]
        lines = []
        # Operators tell nothing of workspaces; a device's allocator has them.
        left_out = 0 if self._is_of_device else told.get("library_bytes", 0)
        for name, key in (("at the peak", "peak_allocated_bytes"), ("between steps", "held_bytes")):
            if key in self.found:
                lines.append(f"memory {name}: {_off(told[key] - left_out, self.found[key], _mb)}")
        if "collectives" in self.found:
            lines.append(_traffic(told["collectives"], self.found["collectives"]))
        if self.has_time and len(self.seconds) > LOOKED_AT + 1:
            lines.append(f"time: {_off(told['step_seconds'], self.seconds[-1], '{:.3g} s'.format)}")
        return [f"plan beside step {LOOKED_AT + 1}: " + "; ".join(lines)] if lines else []


def accompany(config: RunConfig, world_size: int) -> Comparison | None:
    """Plan a run on so many ranks, as its `plan` section says; see `meshwright.train.companion.Accompany`."""
    asked = config.plan
    if not asked.enabled:
        return None
    try:
        device, has_time = _device(config, world_size)
        job = job_of(config, world_size)
        objective = None if config.objective is None else get_objective(config.objective)
    except MeshwrightError:
        return None
    comparison = _planned(config, world_size, job, device, has_time=has_time)
    if comparison.refusal is not None:
        return comparison
    comparison.model = model_flops(job, objective)
    comparison.peak_flops = peak_flops(find_device(config.device), _dtype(comparison.plan, config))
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
        refusal = _too_large(found, advice(config, world_size, device))
        if config.plan.when_too_large == "refuse":
            comparison.refusal = refusal
        else:
            new_console(stderr=True).print(f"warning: {refusal}", highlight=False, soft_wrap=True)
    return comparison


def _dtype(found: dict[str, Any] | None, config: RunConfig) -> str:
    """In which most of the products of a run are computed; without a plan, that of its model."""
    if found is None:
        return str(find_model(config.model).dtype(config.model)).removeprefix("torch.")
    by_dtype: dict[str, int] = found["ranks"][0]["flops_by_dtype"]
    return max(by_dtype, key=by_dtype.__getitem__, default="float32")


def plan_of(config: RunConfig, world_size: int) -> dict[str, Any]:
    """The plan of a run on so many ranks and the device that it is on.

    Raises:
        MeshwrightError: what is wrong with the run.
    """
    return plan(job_of(config, world_size), _device(config, world_size)[0])


def _device(config: RunConfig, world_size: int) -> tuple[Device, bool]:
    if config.plan.device is not None:
        return devices.find_device(config.plan.device), True
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return device_here(find_device(config.device), ranks_here=here, memory_of_node=memory_of_node())


def _too_large(found: dict[str, Any], how: str) -> ModelError:
    needed, has = (found[key] / 2**30 for key in ("peak_reserved_bytes", "memory_bytes"))
    return ModelError(
        f"the run does not fit: a rank would take {needed:,.1f} GiB, and {found['device']} has {has:,.1f} GiB for it. "
        f"{how} Or set plan.when_too_large=warn to try it all the same."
    )


def _traffic(told: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> str:
    """Which collectives were others than planned."""
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
