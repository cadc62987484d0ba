"""One cell of the conformance suite: a layout, a case of training and a config, and what becomes of it.

It passes when losses, norms and every rank's weights are those of `single`; it does not apply when the strategy refuses
it with one MeshwrightError on all ranks. If that error names a remedy ("set option=value") that is an option of the
strategy, the cell is run again with it, and must pass.
"""

from __future__ import annotations

import importlib
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from ..base.errors import MeshwrightError, RankError, TrainingError
from ..step.agreement import count_tokens
from ..strategy.registry import get_registry, get_strategy
from .block_norms import norms_reference, train_by_block
from .case import Case, Outcome, share
from .objectives import objective_reference, train_objective
from .parity import build_manager, difference, reference, train_case, train_from_checkpoint, train_part
from .pool import pool
from .resumed import train_resumed, uninterrupted, wrong_rates

Status = Literal["passed", "failed", "does not apply"]
Kind = Literal["train", "architecture", "objective", "norms", "state", "checkpoint", "resume", "bad input"]


@dataclass(frozen=True)
class Result:
    """What became of a cell."""

    cell: Cell
    status: Status
    detail: str = ""
    """The difference that was found, the error, or why the cell does not apply."""
    worst: float | None = None
    """Largest absolute difference from `single`, where it was compared."""


@dataclass(frozen=True)
class Cell:
    """One thing to try; see the module.

    Attributes:
        strategy: name.
        layout: what the ranks are called in the table, such as "dp_shard=2 x dp_replicate=2".
        ranks: world size.
        sizes: for MeshSizes.
        name: of the case.
        case: what is trained.
        config: options of the strategy.
        kind: how it is tried.
        device: cpu or cuda.
        plugin: a module that brings the strategy, for suites that do not install their package.
        reason: why it does not apply, where that is known before.
    """

    strategy: str
    layout: str
    ranks: int
    sizes: Mapping[str, Any]
    name: str
    case: Case
    config: Mapping[str, Any] = field(default_factory=dict)
    kind: Kind = "train"
    device: str = "cpu"
    plugin: str | None = None
    reason: str | None = None

    def __str__(self) -> str:
        return f"{self.layout}-{self.name}".replace(" ", "_")

    def run(self) -> Result:
        """Try the cell; never raises for what the strategy does."""
        if self.reason is not None:
            return Result(self, "does not apply", self.reason)
        try:
            refusal = self._try()
        except (RankError, AssertionError) as error:
            return Result(self, "failed", str(error).strip())
        if isinstance(refusal, Result):
            return refusal
        remedy = self._remedy(refusal)
        if remedy:
            told = ", ".join(f"{name}={value}" for name, value in remedy.items())
            again = replace(self, config={**self.config, **remedy}).run()
            return replace(again, cell=self, detail=f"with {told}, as its error says. {again.detail}".strip())
        return Result(self, "does not apply", f"refused: {refusal}")

    def check(self) -> None:
        """Raise AssertionError if the cell fails; for pytest, skip if it does not apply."""
        result = self.run()
        if result.status == "failed":
            raise AssertionError(f"{self}: {result.detail}")
        if result.status == "does not apply":
            import pytest

            pytest.skip(result.detail)

    def _try(self) -> Result | str:
        """A result, or the text with which all ranks refuse."""
        kinds: dict[str, Callable[[], Result | str]] = {
            "train": self._train,
            "architecture": self._train,
            "objective": self._objective,
            "norms": self._norms,
            "state": self._state,
            "checkpoint": self._checkpoint,
            "resume": self._resume,
            "bad input": self._bad_input,
        }
        return kinds[self.kind]()

    def _run(self, ranks: int, task: Callable[..., Any], *args: Any) -> list[Any] | str:
        """Run a task on ranks: its results, or the text with which all ranks refuse.

        Raises:
            RankError: a rank failed.
            AssertionError: ranks disagree on whether to refuse.
        """
        answers = pool(ranks).run(_attempt, self.plugin, task, args, device=self.device)
        refusals = {answer.text for answer in answers if isinstance(answer, _Refusal)}
        if not refusals:
            return answers
        if len(refusals) == 1 and all(isinstance(answer, _Refusal) for answer in answers):
            return refusals.pop()
        raise AssertionError(f"ranks do not refuse alike: {sorted(refusals)}")

    def _train(self) -> Result | str:
        task = (self.strategy, dict(self.config), dict(self.sizes), self.case, self.device)
        outcomes = self._run(self.ranks, train_case, *task)
        if isinstance(outcomes, str):
            return outcomes
        # Some architectures compute parts in float32 whatever their dtype, whose last bits depend on the shape of the
        # microbatch; so the reference gets the same microbatches.
        microbatches = self.ranks if self.kind == "architecture" else 1
        return self._compared(outcomes, reference(self.case, self.device, microbatches))

    def _objective(self) -> Result | str:
        """Training with an objective, and statistics of tokens behind it."""
        task = (self.strategy, dict(self.config), dict(self.sizes), self.case, self.device)
        answers = self._run(self.ranks, train_objective, *task)
        if isinstance(answers, str):
            return answers
        expected = objective_reference(self.case, self.device)
        result = self._compared([answer.outcome for answer in answers], expected.outcome)
        apart = max(answer.apart(expected) for answer in answers)
        if result.status == "passed" and not apart <= self.case.tolerance:
            return Result(self, "failed", f"token_stats differ by {apart}", apart)
        return result

    def _norms(self) -> Result | str:
        """Norms by block before clipping, which all ranks are told alike, and which make up the total."""
        task = (self.strategy, dict(self.config), dict(self.sizes), self.case, self.device)
        answers = self._run(self.ranks, train_by_block, *task)
        if isinstance(answers, str):
            return answers
        expected = norms_reference(self.case, self.device)
        result = self._compared([answer.outcome for answer in answers], expected.outcome)
        apart = max(max(answer.apart(expected), answer.apart_from_total()) for answer in answers)
        if result.status == "passed" and not apart <= self.case.tolerance:
            told = f"gradient_norms tells {answers[0].by_block[0]}, and not {expected.by_block[0]}"
            return Result(self, "failed", told, apart)
        return result

    def _state(self) -> Result | str:
        """State moves in memory; see `_in_parts`."""
        state: list[Any] = [None]

        def train(ranks: int, *arguments: Any) -> list[Outcome] | str:
            parts = self._run(ranks, train_part, *arguments, state[0], self.device)
            if isinstance(parts, str):
                return parts
            state[0] = parts[0][1]
            return [outcome for outcome, _ in parts]

        return self._in_parts(train)

    def _checkpoint(self) -> Result | str:
        """State moves in checkpoints; see `_in_parts`."""
        with tempfile.TemporaryDirectory() as root:
            places = [f"{root}/{number}" for number in range(3)]

            def train(ranks: int, *arguments: Any) -> list[Outcome] | str:
                steps: range = arguments[-1]
                number = max(0, steps.start - 1)
                source = places[number - 1] if steps.start else None
                return self._run(ranks, train_from_checkpoint, *arguments, source, places[number], self.device)

            return self._in_parts(train)

    def _in_parts(self, train: Callable[..., list[Outcome] | str]) -> Result | str:
        """Two steps under the strategy, one under `single`, one under the strategy again."""
        outcomes: list[Outcome] = []
        losses: list[float] = []
        norms: list[float] = []
        for ranks, strategy, steps in (
            (self.ranks, self.strategy, range(2)),
            (1, "single", range(2, 3)),
            (self.ranks, self.strategy, range(3, 4)),
        ):
            mine = strategy == self.strategy
            config, sizes = (dict(self.config), dict(self.sizes)) if mine else ({}, {})
            case = self.case if mine else self.case.undivided()
            found = train(ranks, strategy, config, sizes, case, steps)
            if isinstance(found, str):
                return self._refused(found, steps)
            outcomes = found
            losses += outcomes[0].losses
            norms += outcomes[0].norms
        expected = reference(self.case, self.device)
        return self._compared([replace(each, losses=losses, norms=norms) for each in outcomes], expected)

    def _resume(self) -> Result | str:
        """Two steps under the strategy; then three each, from the checkpoint before, under it, `single` and it again.

        See `resumed`.
        """
        strategies = [self.strategy, self.strategy, "single", self.strategy]
        bounds = [0, 2, 5, 8, 11]
        expected, outcomes = uninterrupted(self.case, self.device), []
        losses: list[float] = []
        norms: list[float] = []
        with tempfile.TemporaryDirectory() as root:
            for number, strategy in enumerate(strategies):
                steps = range(bounds[number], bounds[number + 1])
                mine = strategy == self.strategy
                own = (dict(self.config), dict(self.sizes), self.case)
                setting = own if mine else ({}, {}, self.case.undivided())
                places = (f"{root}/{number - 1}" if number else None, f"{root}/{number}")
                ranks = self.ranks if mine else 1
                parts = self._run(ranks, train_resumed, strategy, *setting, steps, *places, self.device)
                if isinstance(parts, str):
                    return self._refused(parts, steps)
                wrong = wrong_rates(parts, steps, expected)
                if wrong:
                    return Result(self, "failed", f"under {strategy}, {'resumed' if number else 'begun'}: {wrong}")
                outcomes = [part.outcome for part in parts]
                losses += outcomes[0].losses
                norms += outcomes[0].norms
        return self._compared([replace(each, losses=losses, norms=norms) for each in outcomes], expected.outcome)

    def _refused(self, text: str, steps: range) -> Result | str:
        """A strategy may refuse to begin with a case, but not to go on with what it has begun."""
        return Result(self, "failed", f"refused to go on at step {steps.start + 1}: {text}") if steps.start else text

    def _compared(self, outcomes: Sequence[Outcome], expected: Outcome) -> Result:
        found = difference(list(outcomes), expected)
        # A NaN is not within any tolerance.
        status: Status = "passed" if found.worst <= self.case.tolerance else "failed"
        return Result(self, status, "" if status == "passed" else str(found), found.worst)

    def _bad_input(self) -> Result | str:
        """One rank's microbatches are wrong, and a clipping limit is: all ranks say the same and training goes on."""
        answers = self._run(
            self.ranks, _bad_input, self.strategy, dict(self.config), dict(self.sizes), self.case, self.device
        )
        if isinstance(answers, str):
            return answers
        texts = {text for text, _ in answers}
        losses = {loss for _, loss in answers}
        if len(texts) > 1 or len(losses) > 1:
            return Result(self, "failed", f"ranks differ: {sorted(texts)}, losses {sorted(losses)}")
        return Result(self, "passed")

    def _remedy(self, text: str) -> dict[str, Any]:
        """Options that a refusal tells to set, and that are not set already."""
        options = get_strategy(self.strategy).config_cls.model_fields if self.plugin is None else {}
        named = re.findall(r"[Ss]et (\w+)=(\w+)", text)
        values = {"true": True, "false": False}
        return {name: values.get(value, value) for name, value in named if name in options and name not in self.config}


# -- tasks of the ranks


@dataclass(frozen=True)
class _Refusal:
    text: str


def _attempt(plugin: str | None, task: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    register(plugin)
    try:
        return task(*args)
    except TrainingError:
        # Of training that went wrong, not of a case that is refused.
        raise
    except MeshwrightError as error:
        return _Refusal(str(error))


def register(plugin: str | None) -> None:
    """Import a module that brings a strategy, once."""
    if plugin is not None:
        module = importlib.import_module(plugin)
        if module.__name__ not in _registered:
            get_registry().register(module, name=module.__name__)
            _registered.add(module.__name__)


_registered: set[str] = set()


def _bad_input(
    strategy: str, config: Mapping[str, Any], sizes: Mapping[str, Any], case: Case, device: str
) -> tuple[str, float]:
    manager = build_manager(strategy, config, sizes, case, device=device)
    good = share(case, 0, manager.mesh.data_rank, manager.mesh.data_size)
    num_tokens: Tensor = count_tokens(good, manager.mesh)
    is_last = manager.mesh.rank == manager.mesh.world.size - 1
    texts = []
    for call in (
        lambda: manager.forward_backward([{"input_ids": good[0]["input_ids"]}], num_tokens=num_tokens),
        lambda: manager.forward_backward(good[: -1 if is_last else None], num_tokens=num_tokens),
        lambda: manager.forward_backward(good, num_tokens=num_tokens * 0),
        lambda: manager.clip_grad_norm(-1.0),
        lambda: manager.clip_grad_norm(1.0, norm_type=0.0),
    ):
        try:
            call()
            texts.append("accepted")
        except MeshwrightError as error:
            texts.append(type(error).__name__)
    return " ".join(texts), float(manager.forward_backward(good, num_tokens=num_tokens))
