"""Layouts that are planned and then run on real ranks, and how far the two are apart."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import Result
from torch import nn
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.files.command_helpers import gc_paused
from meshwright.files.terminal import create_console
from meshwright.launch.open_world import open_world
from meshwright.mesh.mesh import Mesh
from meshwright.mesh.sizes import MeshSizes
from meshwright.optim.build import optimizer_factory
from meshwright.optim.config import OptimizerConfig
from meshwright.strategy.stack import resolve
from meshwright_plan import pipeline_extrapolation
from meshwright_plan import planner as planned_module
from meshwright_plan.allocator import LARGE_BUFFER
from meshwright_plan.config import load_device_spec
from meshwright_plan.extrapolation import APPROXIMATE_KEYS
from meshwright_plan.planner import choose_representative_ranks, trace_rank
from meshwright_plan.trace import StepTrace, TrainingJob, trace_job

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 160}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 64}
RUN: dict[str, Any] = {"strategy": "fsdp2", "steps": 1, "batch_size": 128, "micro_batch_size": 1}
RUN |= {"model": {"model_type": "llama", **SIZES, "dtype": "bfloat16"}, "data": {"seq_len": 16}}
EXPERTS = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 4}
"""Each token goes to all of them, so routing is even whatever the weights."""


def plan_command(directory: Path, *arguments: str, **changes: Any) -> Result:
    """Plan `RUN` with changes by the command line, in this process."""
    file = directory / "run.yaml"
    file.write_text(yaml.safe_dump({**RUN, **changes}), encoding="utf-8")
    return CliRunner().invoke(app, ["plan", str(file), *arguments])


@dataclass(frozen=True)
class PlannedLayout:
    """A strategy on so many ranks, of a small model."""

    strategy: str
    ranks: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    wrapper: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float64"
    model: str = "llama"
    layers: int = 4
    microbatches: int = 2
    is_adapted: bool = False

    def __str__(self) -> str:
        parts = [self.strategy, *(f"{k}={v}" for k, v in {**self.sizes, **self.config, **self.wrapper}.items())]
        counts = {"layers": (self.layers, 4), "microbatches": (self.microbatches, 2)}
        parts += [f"{name}={value}" for name, (value, default) in counts.items() if value != default]
        parts += ["adapters"] if self.is_adapted else []
        others = [each for each in (self.dtype, self.model) if each not in ("float64", "llama")]
        return "-".join([*parts, f"{self.ranks}ranks", *others])

    def build_job(self) -> TrainingJob:
        wrapper = {"pipeline": dict(self.wrapper)} if self.wrapper else None
        stack, degrees = resolve(
            self.strategy, MeshSizes(**self.sizes), self.ranks, config=dict(self.config), wrapper_config=wrapper
        )
        make = functools.partial(build_model, self.model, self.dtype, self.layers, self.is_adapted)
        optimizer = optimizer_factory(OptimizerConfig(lr=1e-2))
        return TrainingJob(stack, degrees, make, optimizer, num_microbatches=self.microbatches, micro_batch_size=2)

    def build_deep_job(self, layers: int | None = None, microbatches: int | None = None) -> TrainingJob:
        """Return the job with so many blocks and microbatches, which knows how to have fewer."""
        make = functools.partial(build_model, self.model, self.dtype, is_adapted=self.is_adapted)
        num_layers = layers or self.layers
        return replace(
            self.build_job(),
            build_model=functools.partial(make, num_layers),
            build_with_layers=make,
            num_layers=num_layers,
            num_microbatches=microbatches or self.microbatches,
        )


def render_parts(width: int, parts: Sequence[Any]) -> str:
    """Return what a terminal of `width` columns shows of rich's renderables."""
    console = create_console(width=width, file=io.StringIO())
    for part in parts:
        console.print(part, highlight=False, crop=False)
    shown: str = console.file.getvalue()
    return shown


def assert_fits(width: int, parts: Sequence[Any]) -> None:
    """Check that no line is longer than `width`, and that no cell is cut."""
    shown = render_parts(width, parts)
    assert max(map(len, shown.splitlines())) <= width, shown
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown, shown


def build_deep_layout(engine: str, ranks: int, schedule: str, layers: int, microbatches: int) -> PlannedLayout:
    """A deep pipeline over a strategy."""
    wrapper = {"pp_schedule": schedule, "pp_microbatch_size": 2}
    return PlannedLayout(engine, ranks, {"pp_size": ranks}, wrapper=wrapper, layers=layers, microbatches=microbatches)


def plan_deep_layout(layout: PlannedLayout, *, from_small: bool) -> list[dict[str, Any]] | None:
    """Return reports of the ranks that stand for all, of a pipeline; None if `extrapolate_ranks` ones do not give
    them."""
    job, device = layout.build_deep_job(), load_device_spec("h100-80gb")
    known: list[Any] = []

    def asked(*given: Any) -> Any:
        known.append(pipeline_extrapolation.extrapolate_ranks(*given) if from_small else None)
        return known[-1]

    ranks = choose_representative_ranks(job.degrees)
    with pytest.MonkeyPatch.context() as patched, gc_paused():
        patched.setattr(planned_module, "extrapolate_ranks", asked)
        found = planned_module.plan_job(job, device, ranks)["ranks"]
    return None if from_small and known != [found] else [each for each in found if each["rank"] in ranks]


def assert_reports_match(report: dict[str, Any], expected: dict[str, Any], *, seconds: float = 0.01) -> None:
    """Check that two reports agree to the byte, except for what need not; `seconds`: how far times may be off."""
    assert report.keys() == expected.keys()
    for key in report:
        assert key in APPROXIMATE_KEYS or report[key] == expected[key], key
    # Memory is taken by granules.
    assert report["peak_reserved_bytes"] == pytest.approx(expected["peak_reserved_bytes"], rel=0.03, abs=LARGE_BUFFER)
    for key, off in (("step_seconds", seconds), ("busy_seconds", seconds), ("peak_by_phase", 0.02)):
        assert report[key] == pytest.approx(expected[key], rel=off)


def build_model(model_type: str, dtype: str, layers: int = 4, is_adapted: bool = False) -> nn.Module:
    """Make a small model on the meta device; "X of N" has N experts, "X grouped" groups their products."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    is_grouped = model_type.endswith(" grouped")
    model_type, _, experts = model_type.removesuffix(" grouped").partition(" of ")
    more = {} if model_type == "llama" else dict(EXPERTS)
    if experts:
        more |= dict.fromkeys(("num_experts", "num_experts_per_tok"), int(experts))
    config = AutoConfig.for_model(model_type, **SIZES, **more, **tokens)
    config._experts_implementation = "grouped_mm" if is_grouped else "eager"
    config.num_hidden_layers = layers
    with torch.device("meta"):
        made: nn.Module = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    if not is_adapted:
        return made
    from peft import LoraConfig

    from meshwright._compat.peft import add_adapters_on_meta

    return add_adapters_on_meta(made, {"default": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])})


def trace_real_rank(layout: PlannedLayout) -> StepTrace:
    """Trace this real rank."""
    job = layout.build_job()
    if layout.is_adapted:
        # peft's models are not materialised, but read.
        job = replace(job, build_model=functools.partial(_materialize, job.build_model))
    return trace_job(job, Mesh(job.degrees, open_world("cpu")))


def _materialize(make: Callable[[], nn.Module]) -> nn.Module:
    made = make().to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            tensor.zero_()
    return made


def trace_planned_rank(layout: PlannedLayout, rank: int) -> StepTrace:
    """Trace a rank of a planned world."""
    return trace_rank(layout.build_job(), rank)
