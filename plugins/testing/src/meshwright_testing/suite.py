"""Build the conformance suite of a strategy: every layout that it claims, compared with `single`.

    @pytest.mark.parametrize("cell", conformance("my_strategy"), ids=str)
    def test_conformance(cell):
        cell.check()

See `meshwright_testing.cells` for cells and when they pass.
"""

from __future__ import annotations

import itertools
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from meshwright.plugin import (
    CHANGES_ROUNDING,
    CLAIMABLE_AXES,
    ConfigError,
    Degrees,
    MeshSizes,
    OptimizerConfig,
    ScheduleConfig,
    StrategySpec,
    get_strategy,
    resolve,
    validate_config,
)

from .case import Case
from .cells import Cell, CellKind, register_plugin_module
from .models import find_unsupported_reason

MOE_MODEL = "mixtral"
"""Model for layouts with `ep`: four experts, two per token."""
DECAYING_SCHEDULE = ScheduleConfig(name="linear", warmup_steps=1)
GROUP_SETTINGS = (("*embed*", 3e-2, 0.0), ("*norm*", 2e-2, 0.2))
"""Parameter groups, whose number differs between the stages of a pipeline; see `Case.group_settings`."""
SGD = OptimizerConfig(name="SGD", lr=0.1, weight_decay=0.1, options={"momentum": 0.9})


def conformance(
    strategy: str,
    *,
    ranks: int = 4,
    config: Mapping[str, Any] | None = None,
    models: Sequence[str] | None = None,
    device: str = "cpu",
    plugin: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> list[Cell]:
    """Return the conformance cells of a strategy.

    Args:
        strategy: name or alias.
        ranks: world size of the larger layouts, at least 2; pairs of axes need an even number of at least 4.
        config: options of the strategy in every cell.
        models: names for `meshwright_testing.models.build_case_model`, each trained in one layout: `sizes`, or
            data-parallel over `ranks`. None: every case in every layout, with a small Llama, or a small Mixtral for
            expert parallelism.
        device: cpu or cuda.
        plugin: module that registers the strategy, if its package is not installed.
        sizes: fields of MeshSizes, for one layout of `ranks` ranks instead of all claimed ones. They may include an
            axis of a wrapping strategy, such as `pp_size`.

    Raises:
        StrategyError: the strategy does not exist.
        ConfigError: `ranks` or an option is invalid.
        MeshError: the product of `sizes` is not `ranks`.
    """
    if ranks < 2:
        raise ConfigError(f"ranks={ranks} is too few to test a strategy; use 2 or more.")
    register_plugin_module(plugin)
    spec = get_strategy(strategy)
    fixed = dict(config or {})
    validate_config(spec.config_cls, fixed, where=f"options of {spec.name!r}")
    layouts = (
        [(str(_resolve_degrees(spec, ranks, sizes)), ranks, dict(sizes), True)]
        if sizes
        else [*iter_layouts(spec, ranks)]
    )
    if models is not None:
        # The data-parallel layout with the most axes, if there is one.
        data = [each for each in layouts if set(each[2]) <= {"dp_size", "dp_replicate_size"} and each[1] > 1]
        layout_fields = (spec.name, *(data or layouts)[-1][:3])
        cases = ((name, Case(name, tied=None), find_unsupported_reason(name)) for name in models)
        return [
            Cell(*layout_fields, name, case, fixed, "architecture", device, plugin, reason)
            for name, case, reason in cases
        ]
    return [
        Cell(spec.name, layout, count, sizes, name, case, {**fixed, **extra}, kind, device, plugin, reason)
        for layout, count, sizes, main in layouts
        for name, case, extra, kind, reason in _iter_cases(spec, _resolve_degrees(spec, count, sizes), main, fixed)
    ]


def iter_layouts(spec: StrategySpec, ranks: int) -> Iterator[tuple[str, int, dict[str, int], bool]]:
    """Yield name, world size, sizes and whether all cases are tried, for each layout that the strategy claims."""
    axes = [axis for axis in CLAIMABLE_AXES if axis in spec.axes and axis != "ep"]
    yield "one rank", 1, {}, not axes
    for axis in axes:
        yield f"{axis}=2", 2, _build_sizes({axis: 2}, spec), False
        if ranks > 2:
            yield f"{axis}={ranks}", ranks, _build_sizes({axis: ranks}, spec), True
    has_pairs = ranks >= 4 and ranks % 2 == 0
    for first, second in itertools.combinations(axes, 2) if has_pairs else ():
        degrees = {first: 2, second: ranks // 2}
        yield f"{first}=2 x {second}={ranks // 2}", ranks, _build_sizes(degrees, spec), True
    if "ep" not in spec.axes:
        return
    # `ep` shares its ranks with other axes: dp_shard, and possibly tp or dp_replicate.
    yield "ep=2", 2, {**_build_sizes({"dp_shard": 2}, spec), "ep_size": 2}, False
    if not has_pairs:
        return
    yield f"ep={ranks}", ranks, {**_build_sizes({"dp_shard": ranks}, spec), "ep_size": ranks}, False
    yield f"ep=2 x ep_shard={ranks // 2}", ranks, {**_build_sizes({"dp_shard": ranks}, spec), "ep_size": 2}, True
    for axis, size in (("tp", ranks), ("dp_replicate", ranks // 2)):
        if axis in spec.axes:
            degrees = {axis: 2, "dp_shard": ranks // 2}
            yield f"{axis}=2 x ep={size}", ranks, {**_build_sizes(degrees, spec), "ep_size": size}, False


def _resolve_degrees(spec: StrategySpec, ranks: int, sizes: Mapping[str, int]) -> Degrees:
    """Return the degrees of the strategy's stack, with a wrapping strategy for axes that it does not claim."""
    return resolve(spec.name, validate_config(MeshSizes, sizes, where="sizes"), ranks)[1]


def _build_sizes(degrees: Mapping[str, int], spec: StrategySpec) -> dict[str, int]:
    replicate, shard = degrees.get("dp_replicate", 1), degrees.get("dp_shard", 1)
    sizes = {"dp_size": replicate * shard}
    if "dp_shard" in spec.axes:
        sizes["dp_replicate_size"] = replicate
    return sizes | {f"{axis}_size": degree for axis, degree in degrees.items() if axis in ("tp", "pp", "cp", "ep")}


def _build_combined_case(case: Case, shares: tuple[int, ...] | None) -> Case:
    """Return the case with accumulation, tied weights and uneven shares."""
    doubled = tuple(2 * share for share in shares) if shares else None
    return replace(case, tied=True, microbatches=2, sequences=24, shares=doubled)


_CaseEntry = tuple[str, Case, dict[str, Any], CellKind, str | None]


def _build_entry(
    name: str, case: Case, extra: dict[str, Any] | None = None, kind: CellKind = "train", reason: str | None = None
) -> _CaseEntry:
    return name, case, extra or {}, kind, reason


def _iter_cases(
    spec: StrategySpec, degrees: Degrees, is_main_layout: bool, fixed: Mapping[str, Any]
) -> Iterator[_CaseEntry]:
    ranks, data_ranks = degrees.world_size, degrees.dp
    # In a pipeline, two blocks per rank, and one more, so that they do not divide evenly.
    layers = 2 * degrees.pp + 1 if degrees.pp > 1 or "pp" in spec.axes else None
    base, routed = Case(layers=layers), Case(model_type="routed", layers=layers)
    has_experts = degrees.ep > 1
    if has_experts:
        base = replace(base, model_type=MOE_MODEL)
    yield _build_entry("ragged masks", base)
    resumed = replace(base, steps=11, schedule=DECAYING_SCHEDULE, group_settings=GROUP_SETTINGS)
    yield _build_entry("resume", resumed, kind="resume")
    uneven = (*range(1, data_ranks), 12 - sum(range(1, data_ranks))) if 1 < data_ranks <= 4 else None
    yield _build_entry("all at once", _build_combined_case(resumed, uneven), kind="resume")
    yield _build_entry("objective", replace(_build_combined_case(base, uneven), steps=2), kind="objective")
    if not is_main_layout:
        return
    cases: dict[str, Case] = {
        "accumulation 2": replace(base, microbatches=2, sequences=24),
        "accumulation 4": replace(base, microbatches=4, sequences=48),
        "tied": replace(base, tied=True, microbatches=2, sequences=24),
        "frozen": replace(base, frozen=("*embed_tokens*", "*layers.1.*")),
        "only norms train": replace(base, frozen=("*proj*", "*embed*", "lm_head*")),
        "norm 1": replace(base, norm_type=1.0, max_norm=5.0),
        "norm inf": replace(base, norm_type=math.inf, max_norm=0.05),
        "unclipped": replace(base, max_norm=None),
        "sgd with momentum": replace(base, optimizer=SGD),
        "schedule": replace(base, steps=4, schedule=ScheduleConfig(name="cosine", warmup_steps=1)),
        "evaluation between steps": replace(base, eval_after=True),
        "unshard between steps": replace(base, unshard_after=True),
    }
    for name, case in cases.items():
        yield _build_entry(name, case)
    yield _build_entry("norms by block", replace(_build_combined_case(base, uneven), steps=2), kind="norms")
    alone = "there is no other data rank to differ from" if data_ranks == 1 else None
    lonely = "there is no other rank to differ from" if ranks == 1 else None
    few = None if uneven else "there are shares for 2 to 4 data ranks only"
    dense = "its model has no experts" if has_experts else None
    wide = "its model's float32 is made float64 in forwards" if has_experts else None
    empty = replace(base, num_masked_sequences=12 // data_ranks)
    more = replace(base, num_masked_sequences=24 // data_ranks, sequences=24)
    yield _build_entry("a rank without tokens", empty, reason=alone)
    yield _build_entry("a rank without tokens, accumulating", replace(more, microbatches=2), reason=alone)
    yield _build_entry("uneven shares", replace(base, shares=uneven), reason=alone or few)
    yield _build_entry("unused parameters", routed, reason=dense)
    yield _build_entry("no gradient in a step", replace(routed, route="steps"), reason=dense)
    yield _build_entry("ranks use different parameters", replace(routed, route="ranks"), reason=dense)
    yield _build_entry("state to single and back", replace(base, steps=4), kind="state")
    yield _build_entry("state to single and back, tied", replace(base, steps=4, tied=True), kind="state")
    yield _build_entry("checkpoint to single and back", replace(base, steps=4, tied=True), kind="resume")
    norms = replace(base, steps=4, float32_parameters=("*norm*",))
    yield _build_entry("norms in float32", norms, kind="resume", reason=wide)
    yield _build_entry("bad input", replace(base, microbatches=2, sequences=24), kind="bad input", reason=lonely)
    for option, value, reason in _iter_option_values(spec.config_cls, fixed):
        case = replace(base, microbatches=2, sequences=24, tied=True)
        if CHANGES_ROUNDING in spec.config_cls.model_fields[option].metadata:
            case = replace(case, model_type="gpt2")  # It has no parts in float32.
        yield _build_entry(f"{option}={value}", case, {option: value}, reason=reason)


def _iter_option_values(config_cls: type[BaseModel], fixed: Mapping[str, Any]) -> Iterator[tuple[str, Any, str | None]]:
    """Yield option, value and skip reason for each value except the default of options with few values or examples."""
    for name, info in config_cls.model_fields.items():
        if name in fixed:
            continue
        default = info.get_default(call_default_factory=True)
        values = [value for value in (*_find_values(info.annotation), *(info.examples or ())) if value != default]
        yield from ((name, value, None) for value in values)
        if not values:
            yield name, "...", f"any value of its type: try one with --set {name}=value"


def _find_values(annotation: Any) -> list[Any]:
    """Return all values of a type with few: bool, Literal, None and unions of these."""
    if annotation is bool:
        return [True, False]
    if annotation is type(None):
        return [None]
    parts = typing.get_args(annotation)
    match typing.get_origin(annotation):
        case typing.Literal:
            return list(parts)
        case typing.Union | types.UnionType:
            return [value for part in parts for value in _find_values(part)]
    return []
