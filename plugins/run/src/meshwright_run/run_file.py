"""The run file: a training run as one validated, frozen config. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, ValidationInfo, create_model, field_validator, model_validator

from meshwright.plugin import (
    EMA_SUFFIX,
    BadStepConfig,
    ConfigError,
    Degrees,
    EMAConfig,
    FinitePositive,
    FrozenModel,
    MeshSizes,
    OptimizerConfig,
    PathStr,
    PluginFailure,
    RunSection,
    ScheduleConfig,
    Size,
    Stack,
    check_objective,
    format_install_hint,
    get_registry,
    resolve,
    validate_config,
)

from .data.config import DataConfig
from .data.order import check_batch_size
from .other_names import NO_EVALUATION, OTHER_NAMES, SHORT_FORMS
from .profile.config import ProfileConfig
from .run_file_values import read_values
from .run_sections import (
    HELD_OUT,
    ElasticConfig,
    EvalConfig,
    MetricsConfig,
    ResumeConfig,
    SampleConfig,
    check_model_section,
)
from .run_sections import CheckpointConfig as CheckpointConfig
from .secrets import redact_run_file

PositiveFloat = Annotated[float, Field(gt=0)]
MIN_WATCHDOG_S = 2.0
"""Minimum of `watchdog_s`: with a lower limit, a busy machine would look like a hang."""


_SECTION_EXTRAS = {"plan": "plan", "launch": "cluster"}
"""Sections that plugins of this project add, and the extra that installs each."""
_Section = TypeVar("_Section", bound=FrozenModel)


class BaseRunConfig(MeshSizes):
    """A training run. Sizes are at the top level, see `meshwright.mesh.sizes.MeshSizes`."""

    other_names: ClassVar[Mapping[str, str]] = OTHER_NAMES

    strategy: str = Field(default="fsdp2", description="Name or alias of an installed strategy.")
    strategy_config: dict[str, Any] = Field(
        default={}, description="Options of the strategy; `meshwright schema` lists them."
    )
    wrapper_config: dict[str, dict[str, Any]] = Field(
        default={}, description="Options of wrapping strategies, by name."
    )

    nproc: Annotated[Size, Field(le=4096)] | Literal["auto"] = Field(
        default="auto",
        description="Number of ranks to start on this node. auto: one per accelerator, or 4 on a CPU; for a strategy "
        "without a data-parallel axis, the product of the sizes. Not used under torchrun.",
    )
    threads_per_rank: Annotated[Size, Field(le=4096)] | Literal["auto"] = Field(
        default="auto", description="CPU threads of each rank; auto: the node's cores divided by its ranks."
    )
    device: str | None = Field(default=None, description="cpu, cuda or cuda:0; null: the accelerator if there is one.")
    timeout_s: FinitePositive = Field(
        default=600.0, le=31_536_000, description="Seconds that ranks wait for a rank that hangs."
    )
    max_restarts: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        default=0,
        description="How many times this command restarts a failed run from its newest checkpoint. Not used under "
        "torchrun, which has --max-restarts.",
    )
    elastic: ElasticConfig | None = Field(
        default=None,
        description="Numbers of ranks on which the run may be restarted, {min: 2, max: 8}; null: always the same "
        "number. The batch size stays the same.",
    )
    watchdog_s: FinitePositive | None = Field(
        default=None,
        ge=MIN_WATCHDOG_S,
        description="Seconds that a rank may stall in a phase of a step, or send no heartbeat, after the first step; "
        "at most timeout_s. null: no heartbeat for timeout_s, and stalls are allowed. See docs/reference/watchdog.md.",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of weights, data order, dropout and sampling.")
    output_dir: PathStr = Field(default="runs/run", description="Directory for metrics, loss curve and model.")
    overwrite: bool = Field(
        default=False,
        description="Replace the results of another run in output_dir. Results of this same run are replaced only "
        "with resume=never.",
    )

    model: dict[str, Any] = Field(
        description="A configuration (model_type and its fields); or `path`, a local directory or a hub id with a "
        "revision; or `checkpoint`, of which only the weights are used. With path or checkpoint: fields to change. "
        "dtype: dtype of the parameters; allow_pickle: true reads .bin files if there are no safetensors; "
        "trust_remote_code: the commit whose code is run; peft: adapters to train instead of the model, {type: lora, "
        "r: 16, target_modules: all-linear, ...}, see docs/guides/fine-tune.md."
    )
    data: DataConfig = DataConfig()
    seq_len: Annotated[Size, Field(ge=2)] | None = Field(default=None, description="Short for data.seq_len.")

    steps: Size | None = Field(default=None, description="Optimizer steps; either this or epochs.")
    epochs: FinitePositive | None = Field(
        default=None, description="Number of passes over the rows of the data; the number of steps is rounded up."
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
        description="Objective to minimize, also used on the held-out split: its name, or the import path of your own, "
        "or a mapping of name and options; null: the cross entropy of the next token.",
    )
    max_grad_norm: PositiveFloat | None = Field(
        default=1.0, description="Clip the total gradient norm; null: only measure it."
    )
    grad_norm_type: PositiveFloat = Field(
        default=2.0, description="p of the gradient norm; .inf: the largest absolute value."
    )
    on_bad_step: Literal["stop", "skip", "rollback"] | BadStepConfig = Field(
        default="stop",
        description="What to do if the loss or gradient norm of a step is not finite: stop the run, skip the batch, or "
        "roll back to the newest checkpoint and skip all batches since; or {action: skip, max_deviations: 10, ...}.",
    )
    verify_every: Size | None = Field(
        default=None,
        description="Steps between bitwise comparisons of tensors that several ranks hold; each rank also checks its "
        "own memory for flipped bits. null: neither. See docs/guides/survive-failures.md.",
    )
    eval: EvalConfig = EvalConfig()
    sample: SampleConfig | None = Field(default=SampleConfig(), description="null: no sample.")
    checkpoint: CheckpointConfig = CheckpointConfig()
    resume: PathStr | ResumeConfig = Field(
        default="auto",
        description="auto: resume from the newest valid checkpoint in output_dir; never: start over each time; "
        "otherwise the directory of a checkpoint to resume from. If it is in output_dir, later ones are archived, and "
        "the same command then resumes from what was saved since. Or {from: ..., allow: [...]}.",
    )
    metrics: MetricsConfig = MetricsConfig()
    trackers: list[str | dict[str, Any]] = Field(
        default=[],
        description="Trackers to which rank 0 reports the run: names of installed ones, such as tensorboard, or "
        "mappings of name and options, {name: wandb, mode: offline}; see docs/reference/trackers.md.",
    )
    profile: ProfileConfig | None = Field(
        default=None, description="Steps to profile; null: none. See docs/reference/profiles.md."
    )
    log_every: Size = Field(
        default=10, description="Steps between log lines, which replace the progress bar if there is no terminal."
    )

    @model_validator(mode="before")
    @classmethod
    def _check_sections_installed(cls, values: Any) -> Any:
        for key, extra in _SECTION_EXTRAS.items():
            if isinstance(values, dict) and key in values and key not in cls.model_fields:
                raise ValueError(
                    f"{key}: this section belongs to a plugin that is not installed. {format_install_hint(extra)}"
                )
        return values

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_checkpoint(cls, values: Any) -> Any:
        # Without the section, no checkpoints are saved, which is what null means.
        if isinstance(values, dict) and values.get("checkpoint", ...) is None:
            return {key: value for key, value in values.items() if key != "checkpoint"}
        return values

    @model_validator(mode="before")
    @classmethod
    def _move_seq_len_to_data(cls, values: Any) -> Any:
        data = values.get("data") if isinstance(values, dict) else None
        if not isinstance(values, dict) or values.get("seq_len") is None or not isinstance(data, dict | None):
            return values
        length, own = values["seq_len"], (data or {}).get("seq_len")
        if own not in (None, length):
            raise ValueError(f"seq_len={length!r} and data.seq_len={own!r} differ. Leave one of them out")
        return {**values, "data": {**(data or {}), "seq_len": length}}

    @field_validator(*SHORT_FORMS, mode="before")
    @classmethod
    def _check_no_short_form(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str):
            raise ValueError(f"must be a mapping. Write {SHORT_FORMS[str(info.field_name)].format(value)}")
        return value

    @field_validator("resume", mode="before")
    @classmethod
    def _check_resume(cls, value: Any) -> Any:
        return {True: "auto", False: "never"}[value] if isinstance(value, bool) else value

    @field_validator("eval", mode="before")
    @classmethod
    def _check_not_null(cls, value: Any) -> Any:
        if value is None:
            raise ValueError(NO_EVALUATION)
        return value

    @field_validator("model")
    @classmethod
    def _check_model(cls, value: dict[str, Any]) -> dict[str, Any]:
        return check_model_section(value)

    @field_validator("objective")
    @classmethod
    def _check_objective(cls, value: Any) -> Any:
        try:
            if value is not None:
                check_objective(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return value

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if problems := [*self._find_problems(), *self._find_eval_problems()]:
            raise ValueError("\n".join(problems))
        return self

    def _find_problems(self) -> Iterator[str]:
        if self.watchdog_s is not None and self.watchdog_s > self.timeout_s:
            yield (
                f"watchdog_s={self.watchdog_s:g} is more than timeout_s={self.timeout_s:g}, after which collectives "
                f"time out; lower it, or raise timeout_s"
            )
        if (self.steps is None) == (self.epochs is None):
            yield "give either steps or epochs"
        if self.steps is not None and self.schedule.warmup_steps > self.steps:
            yield (f"schedule.warmup_steps={self.schedule.warmup_steps} is more than steps={self.steps}; lower it")
        if self.steps is not None and self.ema is not None and self.ema.start_step >= self.steps:
            yield (f"ema.start_step={self.ema.start_step}, so no weights are averaged in steps={self.steps}; lower it")
        if self.bad_step_config.action == "rollback" and not self.checkpoint.has_scheduled_saves:
            yield "on_bad_step=rollback needs checkpoints; set checkpoint.every, or on_bad_step=skip"
        if self.bad_step_config.action == "rollback" and self.checkpoint.replicate is not None:
            yield (
                "on_bad_step=rollback needs checkpoints of this attempt, which a run that resumes from memory "
                "(checkpoint.replicate) does not have; set on_bad_step=skip, or leave checkpoint.replicate out"
            )
        if self.checkpoint.replicate is not None and not get_registry().find_implementations("open_state_replication"):
            yield (f"checkpoint.replicate needs a plugin that is not installed. {format_install_hint('replicate')}")
        if self.elastic is not None and None not in (self.dp_size, self.tp_size, self.pp_size, self.cp_size):
            yield (
                f"elastic needs a size that depends on the number of ranks, but all sizes are set; leave out "
                f"dp_size={self.dp_size}"
            )

    def _find_eval_problems(self) -> Iterator[str]:
        known = [*([HELD_OUT] if self.data.eval_fraction else []), *self.data.eval_sets]
        if self.ema is not None and self.ema.evaluate:
            known += [f"{name}{EMA_SUFFIX}" for name in known]
        stopping, best = self.eval.early_stopping, self.checkpoint.keep_best
        for key, wanted in (("eval.early_stopping.eval_set", stopping), ("checkpoint.keep_best.eval_set", best)):
            if wanted is not None and wanted.eval_set not in known:
                yield (
                    f"{key}={wanted.eval_set!r} is not an evaluation set of this run. "
                    f"Known: {', '.join(known) or 'none'}"
                )
        if stopping is not None and self.eval.every is None:
            yield "eval.early_stopping needs evaluations before the end; set eval.every"

    @property
    def bad_step_config(self) -> BadStepConfig:
        given = self.on_bad_step
        return given if isinstance(given, BadStepConfig) else BadStepConfig(action=given)

    @property
    def resume_config(self) -> ResumeConfig:
        return ResumeConfig.model_validate({"from": self.resume}) if isinstance(self.resume, str) else self.resume

    def count_local_ranks(self, claimed_axes: frozenset[str], num_accelerators: int) -> int:
        """Return the number of ranks to start on this node."""
        if self.nproc != "auto":
            return self.nproc
        known = self.known_product()
        if self.dp_size is not None or not claimed_axes & {"dp_replicate", "dp_shard"}:
            return known
        wanted = num_accelerators or 4
        return known * max(1, wanted // known)

    def get_section(self, config_cls: type[_Section]) -> _Section | None:
        """Return the section that a plugin has registered with this class; None if the run file has none."""
        return next((value for value in vars(self).values() if isinstance(value, config_cls)), None)


def load_plugin_sections() -> list[RunSection]:
    """Return the sections of plugins. A plugin with an invalid section adds none, and is recorded as failed."""
    registry, known = get_registry(), dict[str, RunSection]()
    for plugin, register in registry.find_implementations("register_run_sections"):
        try:
            sections = {each.name: each for sections in register() for each in sections}
            if taken := sections.keys() & {*known, *BaseRunConfig.model_fields}:
                raise ConfigError(f"these sections exist already: {', '.join(sorted(taken))}")
            known |= sections
        except (Exception, SystemExit) as error:
            # A plugin may raise anything; see [Note: isolation] in `meshwright.strategy.registry`.
            registry.record_failure(PluginFailure(plugin, f"register_run_sections: {type(error).__name__}: {error}"))
    return list(known.values())


PLUGIN_SECTIONS = load_plugin_sections()

if TYPE_CHECKING:

    class RunConfig(BaseRunConfig):
        """A training run, with the sections of the installed plugins."""

else:
    RunConfig = create_model(
        "RunConfig",
        __base__=BaseRunConfig,
        __doc__=BaseRunConfig.__doc__,
        __module__=__name__,
        **{
            each.name: (
                each.config_cls if each.default is not None else each.config_cls | None,
                Field(default=each.default, description=each.description),
            )
            for each in PLUGIN_SECTIONS
        },
    )


def load_run(path: str | Path, assignments: Sequence[str] = ()) -> RunConfig:
    """Read a run file and apply assignments to single values.

    Args:
        path: a YAML file.
        assignments: "key.of.value=yaml", such as "model.num_hidden_layers=8".

    Raises:
        ConfigError: the file or an assignment cannot be read, or a value is not valid.
    """
    return validate_config(RunConfig, read_values(path, assignments), where=str(path))


def to_redacted_dict(config: RunConfig) -> dict[str, Any]:
    """Return the config as plain values without secrets; see `secrets`. Otherwise, `load_run` reads an equal config."""
    return redact(config.model_dump(by_alias=True))


def redact(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a run file with secrets redacted; see `secrets`."""
    return redact_run_file(values, PLUGIN_SECTIONS)


UNBOUNDED_STEPS = 2**31 - 1
"""Steps of a run file that sets neither steps nor epochs."""


def read_unbounded_values(run_file: Path, assignments: Sequence[str]) -> dict[str, Any]:
    """Read a run file that may set neither steps nor epochs; see `read_values`."""
    values = read_values(run_file, assignments)
    if values.get("steps") is None and values.get("epochs") is None:
        values["steps"] = UNBOUNDED_STEPS
    return values


def resolve_layout(config: RunConfig, world_size: int) -> tuple[Stack, Degrees, int]:
    """Return a run's strategy stack, its degrees on `world_size` ranks, and the rows of a micro-batch."""
    stack, degrees = resolve(
        config.strategy, config, world_size, config=config.strategy_config, wrapper_config=config.wrapper_config
    )
    rows = config.micro_batch_size or max(1, config.batch_size // degrees.dp)
    check_batch_size(config.batch_size, data_size=degrees.dp, micro_batch_size=rows)
    return stack, degrees, rows


def check_new_model(section: Mapping[str, Any], seq_len: int) -> None:
    """Raise an error for a new model that transformers rejects, before torch is imported. Others are checked later."""
    from meshwright.plugin import build_model_config, check_model_type

    if "model_type" in section:
        # An unknown type is found without importing transformers.
        check_model_type(str(section["model_type"]))
        build_model_config(section, tokenizer=None, seq_len=seq_len)
