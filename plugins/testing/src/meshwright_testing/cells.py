"""Cells of the conformance suite: a layout, a training case and a config, with a result.

A cell passes if losses, norms and every rank's weights equal those of `single`. It does not apply if the strategy
rejects it with the same MeshwrightError on all ranks. If this error names a remedy ("set option=value") that is an
option of the strategy, the cell runs again with this option, and must pass.
"""

from __future__ import annotations

import importlib
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from meshwright.plugin import MeshwrightError, RankError, TrainingError, get_registry, get_strategy

from . import tasks
from .case import Case, Outcome
from .parity import find_max_difference, run_reference, train_case, train_part
from .workers import pool

CellStatus = Literal["passed", "failed", "does not apply"]
CellKind = Literal["train", "architecture", "objective", "norms", "state", "resume", "bad input"]


@dataclass(frozen=True)
class Result:
    """Result of a cell.

    Attributes:
        detail: the difference, the error, or the reason why the cell does not apply.
        worst: largest absolute difference from `single`; None if nothing was compared.
    """

    cell: Cell
    status: CellStatus
    detail: str = ""
    worst: float | None = None


@dataclass(frozen=True)
class Cell:
    """One test of the suite; see the module.

    Attributes:
        layout: name of the layout, such as "dp_shard=2 x dp_replicate=2".
        ranks: world size.
        sizes: fields of MeshSizes.
        name: name of the case.
        config: options of the strategy.
        kind: kind of the test.
        device: cpu or cuda.
        plugin: module that registers the strategy, for suites whose package is not installed.
        skip_reason: reason why the cell does not apply, if known in advance.
    """

    strategy: str
    layout: str
    ranks: int
    sizes: Mapping[str, Any]
    name: str
    case: Case
    config: Mapping[str, Any] = field(default_factory=dict)
    kind: CellKind = "train"
    device: str = "cpu"
    plugin: str | None = None
    skip_reason: str | None = None

    def __str__(self) -> str:
        return f"{self.layout}-{self.name}".replace(" ", "_")

    def run(self) -> Result:
        """Run the cell. Errors of the strategy become part of the result."""
        if self.skip_reason is not None:
            return Result(self, "does not apply", self.skip_reason)
        try:
            refusal = self._run_once()
        except (RankError, AssertionError) as error:
            return Result(self, "failed", str(error).strip())
        if isinstance(refusal, Result):
            return refusal
        remedy = self._parse_remedy(refusal)
        if remedy:
            settings = ", ".join(f"{name}={value}" for name, value in remedy.items())
            again = replace(self, config={**self.config, **remedy}).run()
            return replace(again, cell=self, detail=f"with {settings}, as its error says. {again.detail}".strip())
        return Result(self, "does not apply", f"refused: {refusal}")

    def check(self) -> None:
        """Raise AssertionError if the cell fails; for pytest, skip if it does not apply."""
        result = self.run()
        if result.status == "failed":
            raise AssertionError(f"{self}: {result.detail}")
        if result.status == "does not apply":
            import pytest

            pytest.skip(result.detail)

    def _run_once(self) -> Result | str:
        """Return a result, or the error text with which all ranks reject the cell."""
        if self.kind == "state":
            return self._run_with_state_moved_in_memory()
        if self.kind == "resume":
            with tempfile.TemporaryDirectory() as root:
                return self._run_with_checkpoints(root)
        known: dict[str, Callable[..., Any]] = {
            "objective": tasks.train_objective,
            "norms": tasks.train_with_gradient_norms,
            "bad input": tasks.train_on_bad_input,
        }
        answers = self._run(
            self.ranks, known.get(self.kind, train_case), self.strategy, *self._task_arguments, self.device
        )
        if isinstance(answers, str):
            return answers
        match self.kind:
            case "objective":
                expected = tasks.run_objective_reference(self.case, self.device)
                difference = max(answer.max_difference(expected) for answer in answers)
                return self._compare_with_extra(answers, expected, difference, f"token_stats differ by {difference}")
            case "norms":
                norms = tasks.run_norms_reference(self.case, self.device)
                difference = max(
                    max(answer.max_difference(norms), answer.max_difference_from_total()) for answer in answers
                )
                message = f"gradient_norms returns {answers[0].by_block[0]} instead of {norms.by_block[0]}"
                return self._compare_with_extra(answers, norms, difference, message)
            case "bad input":
                texts, losses = ({answer[index] for answer in answers} for index in (0, 1))
                if len(texts) > 1 or len(losses) > 1:
                    return Result(self, "failed", f"ranks differ: {sorted(texts)}, losses {sorted(losses)}")
                return Result(self, "passed")
        # Some architectures compute parts in float32 under any dtype, with last bits that depend on the shape of the
        # microbatch, so the reference uses the same microbatches.
        microbatches = self.ranks if self.kind == "architecture" else 1
        return self._compare(answers, run_reference(self.case, self.device, microbatches))

    @property
    def _task_arguments(self) -> tuple[dict[str, Any], dict[str, Any], Case]:
        return dict(self.config), dict(self.sizes), self.case

    def _run(self, ranks: int, task: Callable[..., Any], *args: Any) -> list[Any] | str:
        """Run a task on ranks. Return its results, or the error text with which all ranks reject the cell."""
        answers = pool(ranks).run(_run_or_catch_refusal, self.plugin, task, args, device=self.device)
        refusals = {answer.text for answer in answers if isinstance(answer, _Refusal)}
        if not refusals:
            return answers
        if len(refusals) == 1 and all(isinstance(answer, _Refusal) for answer in answers):
            return refusals.pop()
        raise AssertionError(f"ranks do not raise the same error: {sorted(refusals)}")

    def _run_with_state_moved_in_memory(self) -> Result | str:
        state: list[Any] = [None]

        def train(ranks: int, *arguments: Any) -> list[Outcome] | str:
            parts = self._run(ranks, train_part, *arguments, state[0], self.device)
            if isinstance(parts, str):
                return parts
            state[0] = parts[0][1]
            return [outcome for outcome, _ in parts]

        return self._run_in_parts(train, run_reference(self.case, self.device))

    def _run_with_checkpoints(self, root: str) -> Result | str:
        expected = tasks.run_uninterrupted(self.case, self.device)

        def train(ranks: int, strategy: str, *arguments: Any) -> list[Outcome] | Result | str:
            steps: range = arguments[-1]
            source, target = f"{root}/{steps.start}" if steps.start else None, f"{root}/{steps.stop}"
            parts = self._run(
                ranks, tasks.train_part_from_checkpoint, strategy, *arguments, source, target, self.device
            )
            if isinstance(parts, str):
                return parts
            wrong = tasks.find_settings_error(parts, steps, expected)
            if wrong:
                return Result(self, "failed", f"under {strategy}, {'resumed' if steps.start else 'started'}: {wrong}")
            return [part.outcome for part in parts]

        return self._run_in_parts(train, expected.outcome)

    def _run_in_parts(self, train: Callable[..., list[Outcome] | Result | str], expected: Outcome) -> Result | str:
        """Train the steps in parts, each from the state of the previous part. The last but one runs under `single`."""
        bounds = (0, 2, 3, 4) if self.case.steps == 4 else (0, 2, 5, 8, 11)
        outcomes: list[Outcome] = []
        losses: list[float] = []
        norms: list[float] = []
        for number, steps in enumerate(map(range, bounds, bounds[1:])):
            is_single = number == len(bounds) - 3
            setting = (
                ("single", {}, {}, self.case.on_one_rank()) if is_single else (self.strategy, *self._task_arguments)
            )
            found = train(1 if is_single else self.ranks, *setting, steps)
            if isinstance(found, Result):
                return found
            if isinstance(found, str):
                # A strategy may reject a case at the start, but not later.
                text = f"rejected at step {steps.start + 1}: {found}"
                return Result(self, "failed", text) if steps.start else found
            outcomes = found
            losses += outcomes[0].losses
            norms += outcomes[0].norms
        return self._compare([replace(each, losses=losses, norms=norms) for each in outcomes], expected)

    def _compare(self, outcomes: Sequence[Outcome], expected: Outcome) -> Result:
        found = find_max_difference(list(outcomes), expected)
        # A NaN is not within any tolerance.
        status: CellStatus = "passed" if found.worst <= self.case.tolerance else "failed"
        return Result(self, status, "" if status == "passed" else str(found), found.worst)

    def _compare_with_extra(self, answers: Sequence[Any], expected: Any, difference: float, message: str) -> Result:
        """Compare outcomes. If they agree, fail with `message` if `difference` exceeds the tolerance."""
        result = self._compare([answer.outcome for answer in answers], expected.outcome)
        if result.status == "passed" and not difference <= self.case.tolerance:
            return Result(self, "failed", message, difference)
        return result

    def _parse_remedy(self, text: str) -> dict[str, Any]:
        """Return the options that an error text says to set, without those that are already set."""
        options = get_strategy(self.strategy).config_cls.model_fields if self.plugin is None else {}
        named = re.findall(r"[Ss]et (\w+)=(\w+)", text)
        values = {"true": True, "false": False}
        return {name: values.get(value, value) for name, value in named if name in options and name not in self.config}


@dataclass(frozen=True)
class _Refusal:
    text: str


def _run_or_catch_refusal(plugin: str | None, task: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    register_plugin_module(plugin)
    try:
        return task(*args)
    except TrainingError:
        # An error of the training, not a rejected case.
        raise
    except MeshwrightError as error:
        return _Refusal(str(error))


def register_plugin_module(plugin: str | None) -> None:
    """Import and register a module with a strategy, once."""
    if plugin is not None and plugin not in _registered_modules:
        get_registry().register(importlib.import_module(plugin), name=plugin)
        _registered_modules.add(plugin)


_registered_modules: set[str] = set()
