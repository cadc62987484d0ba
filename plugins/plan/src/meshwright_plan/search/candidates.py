"""Enumerate the layouts of a run on a number of devices. Layouts are validated by the code that a run would use.

[Note: variants] A strategy's config class may define a class method
`variants(*, degrees, num_layers, micro_batch_size, num_microbatches, is_dtype_free)`. It returns the options worth
trying, as a list of mappings. If `is_dtype_free`, the run file does not set the precision, and options may contain
`model.dtype`. The option `activation_checkpointing`, if there is one, is always tried. The config class of a wrapping
strategy may define `estimate_schedule(*, num_layers, pp_size, num_sequences, head_cost)`. It returns the fraction of
time in which ranks are idle, and the number of microbatches whose activations a rank holds at once.

[Note: fixed keys] Keys that the command line sets are fixed. The layout of the run file is not, except that its
strategy is tried first. Its other options are kept for all strategies that have them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import yaml
from pydantic import BaseModel

from meshwright.plugin import (
    ROOT_AXES,
    Degrees,
    MeshSizes,
    MeshwrightError,
    ModelSize,
    Stack,
    StrategySpec,
    get_registry,
    resolve,
    to_plain_data,
    validate_config,
)
from meshwright_run.data.order import check_batch_size
from meshwright_run.run_file import RunConfig

from ..config import DeviceSpec

CHECKPOINTING_KEY = "activation_checkpointing"
BYTES_PER_ELEMENT = {"bfloat16": 2, "float32": 4, "float64": 8}
CHECKPOINTING_MODES: tuple[Any, ...] = (False, "selective", "full")
SIZE_KEYS = ("pp_size", "dp_size", "dp_replicate_size", "cp_size", "tp_size", "ep_size")


@dataclass(frozen=True)
class Candidate:
    """One layout of a run, with its options."""

    degrees: Degrees
    micro_batch_size: int  # sequences per microbatch
    num_microbatches: int  # per data-parallel rank and step
    family: str  # the strategy, and the options of its variant under data parallelism alone, as text
    activation_checkpointing: Any  # None: the strategy has no such option
    values: Mapping[str, Any] = field(hash=False)  # values of the run file by dotted key
    wrapper_options: BaseModel | None = field(default=None, hash=False)
    schedule: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.family, self.activation_checkpointing, self.micro_batch_size, self.degrees, self.schedule)

    def format_assignments(self, file_values: Mapping[str, Any]) -> list[str]:
        """Return the values as `KEY=VALUE`, for --set, without defaults of keys that a run file does not set."""
        fields = RunConfig.model_fields
        return [
            f"{key}={_format_flow_yaml(value)}"
            for key, value in self.values.items()
            if key in file_values or key not in fields or value != fields[key].get_default(call_default_factory=True)
        ]

    def __str__(self) -> str:
        options = {**self.values.get("strategy_config", {})}
        options.pop(CHECKPOINTING_KEY, None)
        wrapped = self.values.get("wrapper_config", {})
        reported = [
            f"{key}={_format_flow_yaml(value)}" for each in (options, *wrapped.values()) for key, value in each.items()
        ]
        return ", ".join([str(self.values["strategy"]), *reported])


@dataclass
class SearchSpace:
    """The candidates of a run, and counts of those that were rejected."""

    values: Mapping[str, Any]  # of the run file, with the assignments of the command line
    fixed_keys: tuple[str, ...]  # dotted; see [Note: fixed keys]
    world_size: int  # every candidate uses all ranks
    device: DeviceSpec
    num_layers: int
    seq_len: int
    model_size: ModelSize
    has_experts: bool
    refusal_counts: Counter[str] = field(default_factory=Counter)
    refusal_examples: dict[str, str] = field(default_factory=dict)
    num_enumerated: int = 0  # layouts, including rejected ones

    def refuse(self, reason: str, count: int = 1) -> None:
        lines = [line.strip() for line in reason.strip().splitlines()]
        reason = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
        key = re.sub(r"\d+", "N", reason)
        self.refusal_counts[key] += count
        self.refusal_examples.setdefault(key, reason)

    def is_fixed(self, key: str) -> bool:
        """Return whether the command line sets a key or its section."""
        return any(each == key or key.startswith(f"{each}.") for each in self.fixed_keys)

    def iter_candidates(self) -> Iterator[Candidate]:
        """Yield candidates that pass all checks before tracing, without pipeline options; see `expand_schedules`."""
        registry = get_registry()
        named = registry.get(str(self.values.get("strategy", "fsdp2")))
        specs = [named]
        if not self.is_fixed("strategy"):
            inner = (spec for spec in registry.strategies.values() if not spec.is_wrapper)
            specs = sorted(inner, key=lambda each: each != named)
        for spec in specs:
            for degrees in self.iter_layouts():
                yield from self._iter_layout_candidates(spec, degrees)

    def iter_layouts(self) -> Iterator[Degrees]:
        """Yield the possible meshes, those that shard the model least first."""
        given = {key: self.values.get(key) for key in SIZE_KEYS if self.is_fixed(key)}
        found = []
        for pp, replicate, shard, cp, tp in _factorizations(self.world_size, len(ROOT_AXES)):
            sizes = {"pp_size": pp, "dp_size": replicate * shard, "dp_replicate_size": replicate}
            sizes |= {"cp_size": cp, "tp_size": tp}
            if any(value is not None and sizes.get(key, value) != value for key, value in given.items()):
                continue
            for ep in divisors(shard * cp * tp) if self.has_experts else (1,):
                if given.get("ep_size") in (None, ep):
                    found.append(Degrees(pp, replicate, shard, cp, tp, ep))
        return iter(sorted(found, key=lambda each: (each.pp * each.cp * each.tp, each.ep, -each.dp_shard)))

    def _iter_layout_candidates(self, spec: StrategySpec, degrees: Degrees) -> Iterator[Candidate]:
        batch = int(self.values["batch_size"])
        rows = divisors(batch // degrees.dp) if batch % degrees.dp == 0 else [1]
        if self.is_fixed("micro_batch_size"):
            rows = [int(self.values["micro_batch_size"])]
        most = max(1, batch // (degrees.dp * rows[0]))
        made, once = (self._get_variants(spec, degrees, rows[0], microbatches) for microbatches in (most, 1))
        alone = self._get_variants(spec, Degrees(dp_shard=degrees.dp_shard * degrees.cp), rows[0], most)
        named = zip(made, alone if len(alone) == len(made) else made, strict=True)
        recomputations: tuple[Any, ...] = CHECKPOINTING_MODES
        if CHECKPOINTING_KEY not in spec.config_cls.model_fields:
            recomputations = (None,)
        elif self.is_fixed(f"strategy_config.{CHECKPOINTING_KEY}"):
            recomputations = (self.values["strategy_config"][CHECKPOINTING_KEY],)
        options = [(*each, recomputed) for each in named for recomputed in recomputations]
        self.num_enumerated += len(options) * len(rows)
        try:
            if degrees.tp > self.device.node.ranks:
                raise MeshwrightError(f"tp={degrees.tp} crosses nodes of {self.device.node.ranks}.")
            check_batch_size(batch, data_size=degrees.dp, micro_batch_size=rows[0])
            resolve(spec.name, get_mesh_sizes(degrees), self.world_size)
        except MeshwrightError as error:
            self.refuse(str(error), len(options) * len(rows))
            return
        for variant, name, recomputed in options:
            try:
                first = self._build_candidate(spec, variant, recomputed, degrees, rows[0])
            except MeshwrightError as error:
                self.refuse(str(error), len(rows))
                continue
            for count in rows:
                values = {**first.values, "micro_batch_size": count}
                microbatches = batch // (degrees.dp * count)
                if microbatches > 1 or variant in once:
                    family = f"{spec.name} {name}"
                    yield replace(
                        first, micro_batch_size=count, num_microbatches=microbatches, family=family, values=values
                    )

    def _get_variants(self, spec: StrategySpec, degrees: Degrees, rows: int, microbatches: int) -> list[dict[str, Any]]:
        ask = getattr(spec.config_cls, "variants", None)
        if ask is None:
            return [{}]
        sizes = {"num_layers": self.num_layers, "micro_batch_size": rows, "num_microbatches": microbatches}
        is_open = "dtype" not in self.values["model"]
        return [dict(each) for each in ask(degrees=degrees, is_dtype_free=is_open, **sizes)]

    def _build_candidate(
        self, spec: StrategySpec, variant: Mapping[str, Any], recomputed: Any, degrees: Degrees, rows: int
    ) -> Candidate:
        chosen = {key: value for key, value in variant.items() if key != "model.dtype"}
        if recomputed is not None:
            chosen[CHECKPOINTING_KEY] = recomputed
        options, _ = self._merge_options("strategy_config", spec, self.values.get("strategy_config"), chosen)
        sizes = get_mesh_sizes(degrees).model_dump()
        values: dict[str, Any] = {"strategy": spec.name, **{key: sizes[key] for key in SIZE_KEYS}}
        values |= {"strategy_config": options, "micro_batch_size": rows, "wrapper_config": {}}
        if variant.get("model.dtype") is not None:
            values["model.dtype"] = variant["model.dtype"]
        return Candidate(degrees, rows, 1, spec.name, recomputed, values)

    def _merge_options(
        self, section: str, spec: StrategySpec, file_options: Mapping[str, Any] | None, chosen: Mapping[str, Any]
    ) -> tuple[dict[str, Any], BaseModel]:
        """Merge options and validate them. Precedence: fixed keys, then `chosen`, then the rest of `file_options`."""
        file_options = file_options or {}
        options = {key: value for key, value in file_options.items() if key in spec.config_cls.model_fields}
        options |= chosen
        options |= {key: value for key, value in file_options.items() if self.is_fixed(f"{section}.{key}")}
        name = section.partition(".")[0]
        return options, validate_config(spec.config_cls, options, where=f"{name} of {spec.name!r}")

    def resolve_stack(self, candidate: Candidate) -> Stack:
        values, sizes = candidate.values, get_mesh_sizes(candidate.degrees)
        options = {"config": values["strategy_config"], "wrapper_config": values["wrapper_config"]}
        return resolve(values["strategy"], sizes, self.world_size, **options)[0]

    def expand_schedules(self, candidate: Candidate) -> list[Candidate]:
        """Return a candidate once for each variant of its wrapping strategies; rejected ones are counted."""
        found = []
        for spec in (layer.spec for layer in self.resolve_stack(candidate).wrappers):
            target = (spec, candidate.degrees)
            more, alone = (
                self._get_variants(*target, rows, candidate.num_microbatches)
                for rows in (candidate.micro_batch_size, 1)
            )
            self.num_enumerated += len(more) - 1
            file_options = (self.values.get("wrapper_config") or {}).get(spec.name)
            for variant, of_one_row in zip(more, alone, strict=True):
                try:
                    options, config = self._merge_options(f"wrapper_config.{spec.name}", spec, file_options, variant)
                except MeshwrightError as error:
                    self.refuse(str(error))
                    continue
                values = {**candidate.values, "wrapper_config": {spec.name: options}}
                found.append(replace(candidate, values=values, wrapper_options=config, schedule=repr(of_one_row)))
        return list({repr(each.values["wrapper_config"]): each for each in found}.values())

    def min_bytes(self, candidate: Candidate) -> float:
        """Return a lower bound of the bytes of a rank: its parameters, divided by all axes that shard them."""
        degrees = candidate.degrees
        width = BYTES_PER_ELEMENT.get(candidate.values.get("model.dtype", ""), self.model_size.bytes_per_element)
        return self.model_size.num_parameters * width / (degrees.pp * degrees.dp_shard * degrees.cp * degrees.tp)

    def estimate_schedule(self, candidate: Candidate, head: float) -> tuple[float, float]:
        """Return the idle fraction and the live microbatches of a pipeline; 0 and 1 without one.

        `head` is the time of the layers outside of blocks, as a number of blocks.
        """
        ask = getattr(candidate.wrapper_options, "estimate_schedule", None)
        if ask is None:
            return 0.0, 1.0
        sequences = candidate.num_microbatches * candidate.micro_batch_size
        reported: tuple[float, float] = ask(
            num_layers=self.num_layers, pp_size=candidate.degrees.pp, num_sequences=sequences, head_cost=head
        )
        return reported


def get_mesh_sizes(degrees: Degrees) -> MeshSizes:
    return MeshSizes(**{key: getattr(degrees, key.removesuffix("_size")) for key in SIZE_KEYS})


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield all ordered factorizations of a number into `count` factors."""
    if count == 1:
        yield (number,)
        return
    for first in divisors(number):
        for rest in _factorizations(number // first, count - 1):
            yield (first, *rest)


def _format_flow_yaml(value: Any) -> str:
    text = yaml.safe_dump(to_plain_data(value), default_flow_style=True, width=10**9, sort_keys=False)
    return text.removesuffix("\n...\n").strip()


def set_dotted_keys(values: Mapping[str, Any], more: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a copy of a run file's values with dotted keys set, as --set does."""
    found = dict(values)
    for key, value in more:
        *parents, last = key.split(".")
        inside = found
        for parent in parents:
            inside[parent] = dict(inside.get(parent) or {})
            inside = inside[parent]
        inside[last] = value
    return found
