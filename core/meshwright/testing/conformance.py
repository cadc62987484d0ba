"""Run a strategy through everything that it claims, against `single`.

    @pytest.mark.parametrize("cell", conformance("my_strategy"), ids=str)
    def test_conformance(cell):
        cell.check()

A cell is one layout, one case of training and one config. It passes when losses, norms and every rank's weights are
those of `single`; it does not apply when the strategy refuses it with one MeshwrightError on all ranks. If that error
names a remedy ("set option=value") that is an option of the strategy, the cell is run again with it, and must pass.
"""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import BaseModel
from torch import Tensor

from ..batch import count_tokens
from ..contract import StrategySpec
from ..errors import ConfigError, MeshwrightError, RankError
from ..registry import get_registry, get_strategy
from ..runfile import OptimizerConfig, ScheduleConfig
from ..sizes import CLAIMABLE_AXES
from ..validation import validated
from .models import case_reason
from .parity import TOLERANCE, Case, Outcome, build_manager, difference, reference, share, train_case, train_part
from .pool import pool

Status = Literal["passed", "failed", "does not apply"]
Kind = Literal["train", "architecture", "state", "bad input"]

# The sizes that give one axis a degree. Data-parallel ranks that are not asked for stay at 1.
_SIZES = {"dp_shard": "dp_size", "dp_replicate": "dp_size", "cp": "cp_size", "tp": "tp_size", "pp": "pp_size"}


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
            "state": self._state,
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

    def _state(self) -> Result | str:
        """Two steps under the strategy, one under `single`, one under the strategy again."""
        state = None
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
            case = self.case if mine else replace(self.case, microbatches=1, shares=None)
            parts = self._run(ranks, train_part, strategy, config, sizes, case, steps, state, self.device)
            if isinstance(parts, str):
                return parts
            outcomes, state = [outcome for outcome, _ in parts], parts[0][1]
            losses += outcomes[0].losses
            norms += outcomes[0].norms
        expected = reference(self.case, self.device)
        return self._compared([replace(each, losses=losses, norms=norms) for each in outcomes], expected)

    def _compared(self, outcomes: Sequence[Outcome], expected: Outcome) -> Result:
        found = difference(list(outcomes), expected)
        # A NaN is not within any tolerance.
        status: Status = "passed" if found.worst <= TOLERANCE else "failed"
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


def conformance(
    strategy: str,
    *,
    ranks: int = 4,
    config: Mapping[str, Any] | None = None,
    models: Sequence[str] | None = None,
    device: str = "cpu",
    plugin: str | None = None,
) -> list[Cell]:
    """List what there is to try of a strategy.

    Args:
        strategy: name or alias.
        ranks: world size of the larger layouts, at least 2 and even for pairs of axes.
        config: options of the strategy that hold in every cell.
        models: names for `meshwright.testing.models.case_model`, each trained in the layout with the most axes; None:
            every case of a small Llama in every layout.
        device: cpu or cuda.
        plugin: a module that brings the strategy, where its package is not installed.

    Raises:
        StrategyError: there is no such strategy.
        ConfigError: `ranks` or an option is not usable.
    """
    if ranks < 2:
        raise ConfigError(f"ranks={ranks} cannot show anything of a strategy; use 2 or more.")
    _register(plugin)
    spec = get_strategy(strategy)
    fixed = dict(config or {})
    validated(spec.config_cls, fixed, where=f"options of {spec.name!r}")
    layouts = list(_layouts(spec, ranks))
    if models is not None:
        layout, count, sizes, _ = layouts[-1]
        return [
            Cell(
                spec.name,
                layout,
                count,
                sizes,
                model,
                Case(model_type=model, tied=None),
                fixed,
                "architecture",
                device,
                plugin,
                case_reason(model),
            )
            for model in models
        ]
    return [
        Cell(spec.name, layout, count, sizes, name, case, {**fixed, **extra}, kind, device, plugin, reason)
        for layout, count, sizes, main in layouts
        for name, case, extra, kind, reason in _cases(spec, count, main, fixed)
    ]


def _layouts(spec: StrategySpec, ranks: int) -> Iterator[tuple[str, int, dict[str, int], bool]]:
    """(name, world size, sizes, whether all cases are tried) of each layout that the claims allow."""
    axes = [axis for axis in CLAIMABLE_AXES if axis in spec.axes]
    yield "one rank", 1, {}, not axes
    for axis in axes:
        yield f"{axis}=2", 2, _sizes({axis: 2}, spec), False
        if ranks > 2:
            yield f"{axis}={ranks}", ranks, _sizes({axis: ranks}, spec), True
    for index, first in enumerate(axes):
        for second in axes[index + 1 :]:
            degrees = {first: 2, second: ranks // 2}
            if ranks >= 4 and ranks % 2 == 0:
                yield f"{first}=2 x {second}={ranks // 2}", ranks, _sizes(degrees, spec), True


def _sizes(degrees: Mapping[str, int], spec: StrategySpec) -> dict[str, int]:
    replicate, shard = degrees.get("dp_replicate", 1), degrees.get("dp_shard", 1)
    sizes = {"dp_size": replicate * shard}
    if "dp_shard" in spec.axes:
        sizes["dp_replicate_size"] = replicate
    for axis, degree in degrees.items():
        if axis in ("tp", "pp", "cp", "ep"):
            sizes[f"{axis}_size"] = degree
    return sizes


_Entry = tuple[str, Case, dict[str, Any], Kind, str | None]


def _cases(spec: StrategySpec, ranks: int, main: bool, fixed: Mapping[str, Any]) -> Iterator[_Entry]:
    base = Case()
    yield _entry("ragged masks", base)
    if not main:
        return
    uneven = (*range(1, ranks), 12 - sum(range(1, ranks))) if ranks <= 4 else None
    alone = "there is no other rank to differ from" if ranks == 1 else None
    cases = {
        "accumulation 2": replace(base, microbatches=2, sequences=24),
        "accumulation 4": replace(base, microbatches=4, sequences=48),
        "tied": replace(base, tied=True, microbatches=2, sequences=24),
        "frozen": replace(base, frozen=("*embed_tokens*", "*layers.1.*")),
        "only norms train": replace(base, frozen=("*proj*", "*embed*", "lm_head*")),
        "norm 1": replace(base, norm_type=1.0, max_norm=5.0),
        "norm inf": replace(base, norm_type=math.inf, max_norm=0.05),
        "unclipped": replace(base, max_norm=None),
        "sgd with momentum": replace(
            base, optimizer=OptimizerConfig(name="SGD", lr=0.1, weight_decay=0.1, options={"momentum": 0.9})
        ),
        "schedule": replace(base, steps=4, schedule=ScheduleConfig(name="cosine", warmup_steps=1)),
        "evaluation between steps": replace(base, eval_after=True),
        "unshard between steps": replace(base, unshard_after=True),
    }
    for name, case in cases.items():
        yield _entry(name, case)
    empty = replace(base, empty=12 // ranks)
    yield _entry("a rank without tokens", empty, reason=alone)
    more = replace(base, empty=24 // ranks, sequences=24, microbatches=2)
    yield _entry("a rank without tokens, accumulating", more, reason=alone)
    few = None if uneven else "there are shares for 2 to 4 data ranks only"
    yield _entry("uneven shares", replace(base, shares=uneven), reason=alone or few)
    yield _entry("unused parameters", Case(model_type="routed"))
    yield _entry("no gradient in a step", Case(model_type="routed", route="steps"))
    yield _entry("ranks use different parameters", Case(model_type="routed", route="ranks"))
    for name, tied in (("state to single and back", False), ("state to single and back, tied", True)):
        yield _entry(name, replace(base, steps=4, tied=tied), kind="state")
    yield _entry("bad input", replace(base, microbatches=2, sequences=24), kind="bad input", reason=alone)
    for option, value, reason in _options(spec.config_cls, fixed):
        case = replace(base, microbatches=2, sequences=24, tied=True)
        yield _entry(f"{option}={value}", case, {option: value}, reason=reason)


def _entry(
    name: str,
    case: Case,
    extra: dict[str, Any] | None = None,
    kind: Kind = "train",
    reason: str | None = None,
) -> _Entry:
    return name, case, extra or {}, kind, reason


def _options(config_cls: type[BaseModel], fixed: Mapping[str, Any]) -> Iterator[tuple[str, Any, str | None]]:
    """(option, value, why it is not tried) for every other value of each option that has few."""
    for name, info in config_cls.model_fields.items():
        if name in fixed:
            continue
        values = [value for value in _values(info.annotation) if value != info.get_default(call_default_factory=True)]
        for value in values:
            yield name, value, None
        if not values:
            yield name, "...", f"any value of its type: try one with --set {name}=value"


def _values(annotation: Any) -> list[Any]:
    """The values of a type that has few: bool, Literal, None and unions of them."""
    if annotation is bool:
        return [True, False]
    if annotation is type(None):
        return [None]
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return list(typing.get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        return [value for part in typing.get_args(annotation) for value in _values(part)]
    return []


# -- tasks of the ranks


@dataclass(frozen=True)
class _Refusal:
    text: str


def _attempt(plugin: str | None, task: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    _register(plugin)
    try:
        return task(*args)
    except MeshwrightError as error:
        return _Refusal(str(error))


def _register(plugin: str | None) -> None:
    import importlib

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
