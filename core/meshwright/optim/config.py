"""Sections of the run file for the optimizer, the learning-rate schedule and EMA weights. Imports no torch."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ..base.errors import ConfigError
from ..base.validation import FrozenModel
from ..files.class_paths import check_import
from ..mesh.sizes import Size

FinitePositive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A finite number above 0."""


def _check_importable(name: str) -> str:
    if "." in name:
        try:
            check_import(name)
        except ConfigError as error:
            raise ValueError(str(error)) from None
    return name


_TORCH_OPTIMIZERS = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam"),
    *("RMSprop", "Rprop", "SGD", "SparseAdam"),
)
_OPTIMIZER_ALIASES = {name.lower(): name for name in _TORCH_OPTIMIZERS} | {"adamw_torch": "AdamW"}


def _resolve_alias(name: Any) -> Any:
    """Return the class name of torch for a name in other letters, such as adamw; other values unchanged."""
    return _OPTIMIZER_ALIASES.get(name.lower(), name) if isinstance(name, str) else name


OptimizerName = Annotated[str, BeforeValidator(_resolve_alias), AfterValidator(_check_importable)]
EMA_SUFFIX = "_ema"
"""Suffix of the name of an evaluation set in results of the EMA weights."""
_DEFAULT_NOTE = "null: as at the top level."


class OptimizerGroup(FrozenModel):
    """Parameters with their own optimizer settings."""

    match: list[str] | None = Field(default=None, description="Shell patterns of parameter names; null: all names.")
    matrices_only: bool = Field(
        default=False,
        description="Only weights of two dims within the model's blocks: no embedding, no head, no expert stack.",
    )
    name: OptimizerName | None = Field(
        default=None, description=f"Class name in torch.optim, or an import path; {_DEFAULT_NOTE}"
    )
    lr: FinitePositive | None = Field(default=None, description=f"Peak learning rate; {_DEFAULT_NOTE}")
    weight_decay: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="Decay of all parameters of the group; null: that of the top level, with its no_decay.",
    )
    options: dict[str, Any] = Field(
        default={},
        description="Further arguments, in addition to those of the top level unless `name` is another optimizer.",
    )

    @model_validator(mode="after")
    def _check_selection(self) -> OptimizerGroup:
        if self.match is None and not self.matrices_only:
            raise ValueError(
                "give match, matrices_only: true, or both; all other parameters have the top level's settings"
            )
        if self.match is not None and not self.match:
            raise ValueError("match must have a pattern; leave it out for all names")
        return self


class OptimizerConfig(FrozenModel):
    """One or several optimizers of torch.optim, or custom ones."""

    name: OptimizerName = Field(
        default="AdamW", description="Class name in torch.optim, or an import path, such as my_package.Lion."
    )
    lr: FinitePositive = Field(default=1e-3, description="Peak learning rate.")
    weight_decay: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="Decay of the parameters that no_decay does not spare."
    )
    no_decay: list[str] | None = Field(
        default=None,
        description="Which parameters are not decayed; null: norms, biases, and other vectors. A list replaces that: "
        "shell patterns of the last component of names, or with a dot of whole names, in any case of letters.",
    )
    options: dict[str, Any] = Field(
        default={}, description="Further arguments of the optimizer, such as betas or momentum."
    )
    groups: list[OptimizerGroup] = Field(
        default=[],
        description="Parameters with settings of their own: each is of the first group that it fits, if any.",
    )


class ScheduleConfig(FrozenModel):
    """A learning-rate schedule of transformers.get_scheduler."""

    name: str = Field(default="cosine", description="Schedule name, such as cosine, linear or constant_with_warmup.")
    warmup_steps: int = Field(default=0, ge=0, lt=2**31, description="Steps of linear warm-up.")
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="Warm-up as a share of all steps, rounded up; instead of warmup_steps."
    )
    options: dict[str, Any] = Field(default={}, description="Further arguments of the schedule, such as num_cycles.")

    @model_validator(mode="after")
    def _check_single_warmup(self) -> ScheduleConfig:
        if self.warmup_steps and self.warmup_ratio is not None:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} and warmup_ratio={self.warmup_ratio} say different things; leave "
                f"one of the two out"
            )
        return self

    def resolve_warmup(self, num_steps: int) -> ScheduleConfig:
        """Return a copy with `warmup_ratio` converted to `warmup_steps`, for a run of `num_steps`."""
        if self.warmup_ratio is None:
            return self
        # Use the decimal value: 0.07 of 100 steps are 7, not 8.
        warmup_steps = math.ceil(Fraction(str(self.warmup_ratio)) * num_steps)
        return self.model_copy(update={"warmup_steps": warmup_steps, "warmup_ratio": None})


class EMAConfig(FrozenModel):
    """An exponential moving average of the weights."""

    decay: float = Field(default=0.999, ge=0, lt=1, description="What is left of the average in an update.")
    every: Size = Field(default=1, description="Optimizer steps between updates.")
    start_step: int = Field(
        default=0, ge=0, lt=2**31, description="The average begins with the weights after so many steps."
    )
    warmup: bool = Field(
        default=False,
        description="The decay of update n is at most (1 + n) / (10 + n), so that the first weights are left.",
    )
    evaluate: bool = Field(default=True, description="Evaluate the averaged weights, too, on each set: as NAME_ema.")
    export: bool = Field(default=True, description="Write the averaged model too, to output_dir/model-ema.")
