"""The run file: a whole training run as one validated, frozen value. No torch in this module."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ...base.errors import ConfigError
from ...base.validation import validated
from ...data.config import DataConfig
from ...files.parsing import parse_yaml, read_text
from ...files.writing import PathText
from ...mesh.sizes import MeshSizes, Size
from ...objectives.registry import check_objective
from ...optim.config import AVERAGED, FinitePositive
from ...optim.config import EMAConfig as EMAConfig
from ...optim.config import OptimizerConfig as OptimizerConfig
from ...optim.config import OptimizerGroup as OptimizerGroup
from ...optim.config import ScheduleConfig as ScheduleConfig
from ...profile.config import ProfileConfig
from ..loop.bad_steps import BadStepConfig
from .checkpoint_section import CheckpointConfig as CheckpointConfig
from .hidden_values import without_secrets
from .launch_section import LaunchConfig
from .model_section import check_model_section
from .run_sections import HELD_OUT, ElasticConfig, EvalConfig, MetricsConfig, PlanConfig, ResumeConfig, SampleConfig

PositiveFloat = Annotated[float, Field(gt=0)]
LEAST_WATCHDOG_S = 2.0
"""A busy machine must not be taken for a hang."""


class RunConfig(MeshSizes):
    """A training run. Sizes are at the top level, see `meshwright.mesh.sizes.MeshSizes`."""

    strategy: str = Field(default="fsdp2", description="Name or alias of an installed strategy.")
    strategy_config: dict[str, Any] = Field(
        default={}, description="Options of the strategy; `meshwright schema` lists them."
    )
    wrapper_config: dict[str, dict[str, Any]] = Field(
        default={}, description="Options of wrapping strategies, by name."
    )

    nproc: Annotated[Size, Field(le=4096)] | Literal["auto"] = Field(
        default="auto",
        description="Ranks to start on this node. auto: one per accelerator, 4 on a CPU; as many as the sizes fill "
        "for a strategy without a data-parallel axis. Not used under torchrun.",
    )
    threads_per_rank: Annotated[Size, Field(le=4096)] | Literal["auto"] = Field(
        default="auto", description="CPU threads of each rank; auto: the cores divided by the ranks of the node."
    )
    device: str | None = Field(default=None, description="cpu, cuda or cuda:0; null: the accelerator if there is one.")
    timeout_s: FinitePositive = Field(
        default=600.0, le=31_536_000, description="How long ranks wait for one that hangs, in seconds."
    )
    max_restarts: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        default=0,
        description="How often this command begins a run anew that has failed, from its newest checkpoint. Not used "
        "under torchrun, which has --max-restarts.",
    )
    elastic: ElasticConfig | None = Field(
        default=None,
        description="On how many ranks the run may be begun anew, {min: 2, max: 8}; null: always on as many. The batch "
        "stays the same.",
    )
    watchdog_s: FinitePositive | None = Field(
        default=None,
        ge=LEAST_WATCHDOG_S,
        description="How long a phase of a step may stand still, or a rank be silent, once a step has been done, in "
        "seconds; at most timeout_s. null: a rank may be silent for timeout_s. See docs/watchdog.md.",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of weights, data order, dropout and sampling.")
    output_dir: PathText = Field(default="runs/run", description="Where metrics, the loss curve and the model go.")
    overwrite: bool = Field(
        default=False,
        description="Replace what is in output_dir: the results of another run, or, with resume=never, of any. What "
        "this same run has left there is never replaced unless resume=never.",
    )

    model: dict[str, Any] = Field(
        description="A configuration (model_type and its fields), or `path`, a local directory or a hub id with a "
        "revision, or `checkpoint`, whose weights alone are taken, with fields to change; dtype is the dtype of the "
        "parameters; allow_pickle: true reads .bin files where there are no safetensors; trust_remote_code: the commit "
        "whose code is run; peft: adapters to train instead of the model, {type: lora, r: 16, target_modules: "
        "all-linear, ...}, see docs/adapters.md."
    )
    data: DataConfig = DataConfig()
    seq_len: Annotated[Size, Field(ge=2)] | None = Field(default=None, description="Short for data.seq_len.")

    steps: Size | None = Field(default=None, description="Optimizer steps; either this or epochs.")
    epochs: FinitePositive | None = Field(
        default=None, description="How often each row is trained on: as many steps as that takes, rounded up."
    )
    batch_size: Size = Field(description="Sequences per optimizer step, over all ranks.")
    micro_batch_size: Size | None = Field(
        default=None,
        description="Sequences per forward pass on each rank; null: batch_size / dp_size, no accumulation.",
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    ema: EMAConfig | None = Field(default=None, description="Average the weights; null: no average.")
    objective: str | dict[str, Any] | None = Field(
        default=None,
        description="What is minimized, on the held-out split too: the name of an objective, or of one of your own its "
        "import path, or a mapping of name and options; null: the cross entropy of the next token.",
    )
    max_grad_norm: PositiveFloat | None = Field(
        default=1.0, description="Clip the total gradient norm; null: only measure it."
    )
    grad_norm_type: PositiveFloat = Field(
        default=2.0, description="p of the gradient norm; .inf: the largest absolute value."
    )
    on_bad_step: Literal["stop", "skip", "rewind"] | BadStepConfig = Field(
        default="stop",
        description="What becomes of a step whose loss or gradient norm is not finite: the run stops, skips the "
        "batch, or goes back to its newest checkpoint and skips all since; or {do: skip, deviations: 10, ...}.",
    )
    verify_every: Size | None = Field(
        default=None,
        description="Steps between comparisons of what several ranks hold, bit for bit; each rank also watches its own "
        "memory for bits that change by themselves. null: neither. See docs/surviving.md.",
    )
    eval: EvalConfig = EvalConfig()
    sample: SampleConfig | None = Field(default=SampleConfig(), description="null: no sample.")
    checkpoint: CheckpointConfig = CheckpointConfig()
    resume: PathText | ResumeConfig = Field(
        default="auto",
        description="auto: go on from the newest whole checkpoint in output_dir; never: start anew, each time that "
        "the command is given; else the directory of a checkpoint to go on from. If it is one of output_dir, later "
        "ones are set aside, and the same command goes on from what has been saved since. Or {from: ..., allow: "
        "[...]}.",
    )
    plan: PlanConfig = PlanConfig()
    metrics: MetricsConfig = MetricsConfig()
    trackers: list[str | dict[str, Any]] = Field(
        default=[],
        description="Where the first rank tells of the run: names of installed trackers, such as tensorboard, or "
        "mappings of name and options, {name: wandb, mode: offline}; see docs/trackers.md.",
    )
    profile: ProfileConfig | None = Field(
        default=None, description="Steps to profile; null: none. See docs/profiles.md."
    )
    launch: LaunchConfig | None = Field(default=None, description="What `meshwright launch` tells a cluster.")
    log_every: Size = Field(default=10, description="Steps between lines where no progress bar can be drawn.")

    @model_validator(mode="before")
    @classmethod
    def _length_is_of_the_data(cls, values: Any) -> Any:
        data = values.get("data") if isinstance(values, dict) else None
        if not isinstance(values, dict) or values.get("seq_len") is None or not isinstance(data, dict | None):
            return values
        length, own = values["seq_len"], (data or {}).get("seq_len")
        if own not in (None, length):
            raise ValueError(f"seq_len={length!r} and data.seq_len={own!r} are two lengths. Leave one of them out")
        return {**values, "data": {**(data or {}), "seq_len": length}}

    @field_validator("model")
    @classmethod
    def _model_is_well_formed(cls, value: dict[str, Any]) -> dict[str, Any]:
        return check_model_section(value)

    @field_validator("objective")
    @classmethod
    def _objective_is_known(cls, value: Any) -> Any:
        if value is not None:
            try:
                check_objective(value)
            except ConfigError as error:
                raise ValueError(str(error)) from None
        return value

    @model_validator(mode="after")
    def _check_length(self) -> RunConfig:
        if self.watchdog_s is not None and self.watchdog_s > self.timeout_s:
            raise ValueError(
                f"watchdog_s={self.watchdog_s:g} is more than timeout_s={self.timeout_s:g}, after which ranks give up "
                f"by themselves; lower it, or raise timeout_s"
            )
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give either steps or epochs")
        if self.steps is not None and self.schedule.warmup_steps > self.steps:
            raise ValueError(
                f"schedule.warmup_steps={self.schedule.warmup_steps} is more than steps={self.steps}; lower it"
            )
        if self.steps is not None and self.ema is not None and self.ema.start >= self.steps:
            raise ValueError(f"ema.start={self.ema.start}, so nothing is averaged in steps={self.steps}; lower it")
        return self

    @model_validator(mode="after")
    def _check_rewinding(self) -> RunConfig:
        if self.bad_steps.do == "rewind" and not self.checkpoint.saves_in_time:
            raise ValueError("on_bad_step=rewind needs checkpoints to go back to; set checkpoint.every, or skip")
        if self.bad_steps.do == "rewind" and self.checkpoint.replicate is not None:
            raise ValueError(
                "on_bad_step=rewind goes back to checkpoints of this sitting, which a run that goes on from memory "
                "(checkpoint.replicate) has not; take skip, or leave replicate out"
            )
        return self

    @model_validator(mode="after")
    def _check_elastic(self) -> RunConfig:
        if self.elastic is not None and None not in (self.dp_size, self.tp_size, self.pp_size, self.cp_size):
            raise ValueError(
                f"elastic needs a size that follows from the number of ranks, but all are given, "
                f"dp_size={self.dp_size} among them; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_sets(self) -> RunConfig:
        known = [*([HELD_OUT] if self.data.eval_fraction else []), *self.data.eval_sets]
        if self.ema is not None and self.ema.evaluate:
            known += [f"{name}{AVERAGED}" for name in known]
        stopping, best = self.eval.early_stopping, self.checkpoint.keep_best
        for key, wanted in (("eval.early_stopping.set", stopping), ("checkpoint.keep_best.set", best)):
            if wanted is not None and wanted.set not in known:
                raise ValueError(f"{key}={wanted.set!r} is no set of this run. Known: {', '.join(known) or 'none'}")
        if stopping is not None and self.eval.every is None:
            raise ValueError("eval.early_stopping needs evaluations before the end; set eval.every")
        return self

    @property
    def bad_steps(self) -> BadStepConfig:
        """`on_bad_step`, written out."""
        given = self.on_bad_step
        return given if isinstance(given, BadStepConfig) else BadStepConfig(do=given)

    @property
    def resumption(self) -> ResumeConfig:
        """`resume`, written out."""
        return ResumeConfig.model_validate({"from": self.resume}) if isinstance(self.resume, str) else self.resume

    def processes(self, claims: frozenset[str], accelerators: int) -> int:
        """Return how many ranks to start on this node."""
        if self.nproc != "auto":
            return self.nproc
        known = self.known_product()
        if self.dp_size is not None or not claims & {"dp_replicate", "dp_shard"}:
            return known
        wanted = accelerators or 4
        return known * max(1, wanted // known)


def load_run(path: str | Path, assignments: Sequence[str] = ()) -> RunConfig:
    """Read a run file and change single values.

    Args:
        path: a YAML file.
        assignments: "key.of.value=yaml", for instance "model.num_hidden_layers=8".

    Raises:
        ConfigError: the file or an assignment cannot be read, or a value is not valid.
    """
    return validated(RunConfig, read_values(path, assignments), where=str(path))


def read_values(path: str | Path, assignments: Sequence[str] = ()) -> dict[str, Any]:
    """Read a run file with changes as plain values; see `load_run`.

    Raises:
        ConfigError: the file or an assignment cannot be read.
    """
    file = Path(path)
    try:
        values = parse_yaml(read_text(file))
    except OSError as error:
        raise ConfigError(f"cannot read the run file {file}: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must hold a mapping of keys to values, not {type(values).__name__}.")
    return assigned(values, assignments)


def assigned(values: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Return the values of a run file with changes; see `load_run`.

    Raises:
        ConfigError: an assignment cannot be read.
    """
    changed = copy.deepcopy(dict(values))
    for assignment in assignments:
        _assign(changed, assignment)
    return changed


def as_options(assignments: Sequence[str]) -> dict[str, Any]:
    """Return the mapping that "key.of.value=yaml" assignments make.

    Raises:
        ConfigError: an assignment cannot be read.
    """
    return assigned({}, assignments)


def _assign(values: dict[str, Any], assignment: str) -> None:
    key, equals, text = assignment.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {assignment!r} is not of the form key=value, such as tp_size=2.")
    try:
        value = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"--set {assignment!r}: the value is not valid YAML: {error}") from None
    *parents, last = key.split(".")
    for parent in parents:
        child = values.get(parent)
        if child is None:
            child = values[parent] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"--set {assignment!r}: {parent!r} holds {child!r}, which has no keys of its own.")
        values = child
    values[last] = value


def as_plain(config: RunConfig) -> dict[str, Any]:
    """Return the run as plain values without secrets, see `hidden_values`; else `load_run` reads the same run."""
    return without_secrets(config.model_dump(by_alias=True))
