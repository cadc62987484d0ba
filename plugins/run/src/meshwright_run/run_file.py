"""The run file: a whole training run as one validated, frozen value. No torch in this module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, create_model, field_validator, model_validator

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
    apply_assignments,
    check_objective,
    format_install_hint,
    get_registry,
    parse_yaml,
    read_text,
    resolve,
    validate_config,
)

from .data.config import DataConfig
from .data.order import check_batch_size
from .profile.config import ProfileConfig
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
"""A busy machine must not be taken for a hang."""


_SECTION_EXTRAS = {"plan": "plan", "launch": "cluster"}
"""Sections that plugins of this project bring, and the extra that installs each."""
_Section = TypeVar("_Section", bound=FrozenModel)


class BaseRunConfig(MeshSizes):
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
        description="How often this command begins a run again that has failed, from its newest checkpoint. Not used "
        "under torchrun, which has --max-restarts.",
    )
    elastic: ElasticConfig | None = Field(
        default=None,
        description="On how many ranks the run may be restarted, {min: 2, max: 8}; null: always on as many. The batch "
        "stays the same.",
    )
    watchdog_s: FinitePositive | None = Field(
        default=None,
        ge=MIN_WATCHDOG_S,
        description="How long a phase of a step may stand still, or a rank be silent, once a step has been done, in "
        "seconds; at most timeout_s. null: a rank may be silent for timeout_s. See docs/reference/watchdog.md.",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of weights, data order, dropout and sampling.")
    output_dir: PathStr = Field(default="runs/run", description="Where metrics, the loss curve and the model go.")
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
        "all-linear, ...}, see docs/guides/fine-tune.md."
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
    on_bad_step: Literal["stop", "skip", "rollback"] | BadStepConfig = Field(
        default="stop",
        description="What becomes of a step whose loss or gradient norm is not finite: the run stops, skips the "
        "batch, or goes back to its newest checkpoint and skips all since; or {action: skip, max_deviations: 10, ...}.",
    )
    verify_every: Size | None = Field(
        default=None,
        description="Steps between comparisons of what several ranks hold, bit for bit; each rank also watches its own "
        "memory for bits that change on their own. null: neither. See docs/guides/survive-failures.md.",
    )
    eval: EvalConfig = EvalConfig()
    sample: SampleConfig | None = Field(default=SampleConfig(), description="null: no sample.")
    checkpoint: CheckpointConfig = CheckpointConfig()
    resume: PathStr | ResumeConfig = Field(
        default="auto",
        description="auto: resume from the newest whole checkpoint in output_dir; never: start over, each time that "
        "the command is given; else the directory of a checkpoint to resume from. If it is one of output_dir, later "
        "ones are set aside, and the same command resumes from what has been saved since. Or {from: ..., allow: "
        "[...]}.",
    )
    metrics: MetricsConfig = MetricsConfig()
    trackers: list[str | dict[str, Any]] = Field(
        default=[],
        description="Where the first rank tells of the run: names of installed trackers, such as tensorboard, or "
        "mappings of name and options, {name: wandb, mode: offline}; see docs/reference/trackers.md.",
    )
    profile: ProfileConfig | None = Field(
        default=None, description="Steps to profile; null: none. See docs/reference/profiles.md."
    )
    log_every: Size = Field(default=10, description="Steps between lines where no progress bar can be drawn.")

    @model_validator(mode="before")
    @classmethod
    def _check_sections_installed(cls, values: Any) -> Any:
        for key, extra in _SECTION_EXTRAS.items():
            if isinstance(values, dict) and key in values and key not in cls.model_fields:
                raise ValueError(
                    f"{key}: this section is of a plugin that is not installed. {format_install_hint(extra)}"
                )
        return values

    @model_validator(mode="before")
    @classmethod
    def _move_seq_len_to_data(cls, values: Any) -> Any:
        data = values.get("data") if isinstance(values, dict) else None
        if not isinstance(values, dict) or values.get("seq_len") is None or not isinstance(data, dict | None):
            return values
        length, own = values["seq_len"], (data or {}).get("seq_len")
        if own not in (None, length):
            raise ValueError(f"seq_len={length!r} and data.seq_len={own!r} are two lengths. Leave one of them out")
        return {**values, "data": {**(data or {}), "seq_len": length}}

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
        if self.watchdog_s is not None and self.watchdog_s > self.timeout_s:
            raise ValueError(
                f"watchdog_s={self.watchdog_s:g} is more than timeout_s={self.timeout_s:g}, after which ranks give up "
                f"on their own; lower it, or raise timeout_s"
            )
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give either steps or epochs")
        if self.steps is not None and self.schedule.warmup_steps > self.steps:
            raise ValueError(
                f"schedule.warmup_steps={self.schedule.warmup_steps} is more than steps={self.steps}; lower it"
            )
        if self.steps is not None and self.ema is not None and self.ema.start_step >= self.steps:
            raise ValueError(
                f"ema.start_step={self.ema.start_step}, so nothing is averaged in steps={self.steps}; lower it"
            )
        if self.bad_step_config.action == "rollback" and not self.checkpoint.has_scheduled_saves:
            raise ValueError("on_bad_step=rollback needs checkpoints to go back to; set checkpoint.every, or skip")
        if self.bad_step_config.action == "rollback" and self.checkpoint.replicate is not None:
            raise ValueError(
                "on_bad_step=rollback goes back to checkpoints of this attempt, which a run that resumes from memory "
                "(checkpoint.replicate) has not; take skip, or leave replicate out"
            )
        if self.checkpoint.replicate is not None and not get_registry().find_implementations("open_state_replication"):
            raise ValueError(
                f"checkpoint.replicate needs a plugin that is not installed. {format_install_hint('replicate')}"
            )
        if self.elastic is not None and None not in (self.dp_size, self.tp_size, self.pp_size, self.cp_size):
            raise ValueError(
                f"elastic needs a size that follows from the number of ranks, but all are given, "
                f"dp_size={self.dp_size} among them; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_eval_sets(self) -> Self:
        known = [*([HELD_OUT] if self.data.eval_fraction else []), *self.data.eval_sets]
        if self.ema is not None and self.ema.evaluate:
            known += [f"{name}{EMA_SUFFIX}" for name in known]
        stopping, best = self.eval.early_stopping, self.checkpoint.keep_best
        for key, wanted in (("eval.early_stopping.eval_set", stopping), ("checkpoint.keep_best.eval_set", best)):
            if wanted is not None and wanted.eval_set not in known:
                raise ValueError(
                    f"{key}={wanted.eval_set!r} is no set of this run. Known: {', '.join(known) or 'none'}"
                )
        if stopping is not None and self.eval.every is None:
            raise ValueError("eval.early_stopping needs evaluations before the end; set eval.every")
        return self

    @property
    def bad_step_config(self) -> BadStepConfig:
        given = self.on_bad_step
        return given if isinstance(given, BadStepConfig) else BadStepConfig(action=given)

    @property
    def resume_config(self) -> ResumeConfig:
        return ResumeConfig.model_validate({"from": self.resume}) if isinstance(self.resume, str) else self.resume

    def count_local_ranks(self, claimed_axes: frozenset[str], num_accelerators: int) -> int:
        """Return how many ranks to start on this node."""
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
    """Return the sections of plugins. A plugin that brings a wrong one adds none, and is listed as failed."""
    registry, found = get_registry(), dict[str, RunSection]()
    for plugin, register in registry.find_implementations("register_run_sections"):
        try:
            sections = {each.name: each for sections in register() for each in sections}
            if taken := sections.keys() & {*found, *BaseRunConfig.model_fields}:
                raise ConfigError(f"these sections exist already: {', '.join(sorted(taken))}")
            found |= sections
        except (Exception, SystemExit) as error:
            # Whatever a plugin raises; see [Note: isolation] in the registry.
            registry.record_failure(PluginFailure(plugin, f"register_run_sections: {type(error).__name__}: {error}"))
    return list(found.values())


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
    """Read a run file and change single values.

    Args:
        path: a YAML file.
        assignments: "key.of.value=yaml", for instance "model.num_hidden_layers=8".

    Raises:
        ConfigError: the file or an assignment cannot be read, or a value is not valid.
    """
    return validate_config(RunConfig, read_values(path, assignments), where=str(path))


def read_values(path: str | Path, assignments: Sequence[str] = ()) -> dict[str, Any]:
    """Read a run file with changes as plain values; see `load_run`."""
    file = Path(path)
    try:
        values = parse_yaml(read_text(file))
    except OSError as error:
        raise ConfigError(f"cannot read the run file {file}: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must hold a mapping of keys to values, not {type(values).__name__}.")
    return apply_assignments(values, assignments)


def to_redacted_dict(config: RunConfig) -> dict[str, Any]:
    """Return the run as plain values without secrets, see `secrets`; else `load_run` reads the same run."""
    return redact(config.model_dump(by_alias=True))


def redact(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a run file without secrets; see `secrets`."""
    return redact_run_file(values, PLUGIN_SECTIONS)


UNBOUNDED_STEPS = 2**31 - 1
"""Steps of a run that does not say how many."""


def read_unbounded_values(run_file: Path, assignments: Sequence[str]) -> dict[str, Any]:
    """Return the values of a run file, which need not say how long the run is."""
    values = read_values(run_file, assignments)
    if values.get("steps") is None and values.get("epochs") is None:
        values["steps"] = UNBOUNDED_STEPS
    return values


def resolve_layout(config: RunConfig, world_size: int) -> tuple[Stack, Degrees, int]:
    """Return a run's strategies, its mesh on so many ranks, and the sequences of a microbatch."""
    stack, degrees = resolve(
        config.strategy, config, world_size, config=config.strategy_config, wrapper_config=config.wrapper_config
    )
    rows = config.micro_batch_size or max(1, config.batch_size // degrees.dp)
    check_batch_size(config.batch_size, data_size=degrees.dp, micro_batch_size=rows)
    return stack, degrees, rows


def check_new_model(section: Mapping[str, Any], seq_len: int) -> None:
    """Refuse a new model that transformers would refuse, before torch is imported. Others are checked later."""
    from meshwright.plugin import build_model_config, check_model_type

    if "model_type" in section:
        # An unknown type is found without importing transformers.
        check_model_type(str(section["model_type"]))
        build_model_config(section, tokenizer=None, seq_len=seq_len)
