"""Sections of the run file: evaluation, sample, metrics, resume, elastic ranks and checkpoints. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from meshwright.plugin import (
    DTYPE_ALIASES,
    MAX_STEP_TIMES,
    FinitePositive,
    FrozenModel,
    PathStr,
    Size,
    StopName,
    check_path,
)

HELD_OUT = "held_out"
"""Name of the evaluation set that is split from the training sources."""


class EarlyStoppingConfig(FrozenModel):
    """When to end a run whose loss on an evaluation set no longer falls."""

    eval_set: str = Field(default=HELD_OUT, description="Evaluation set: held_out, or a name of data.eval_sets.")
    patience: Size = Field(
        default=3, description="Number of consecutive evaluations without a lower loss that ends the run."
    )
    min_delta: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="Minimum decrease that counts as a lower loss."
    )


class EvalConfig(FrozenModel):
    """Evaluation losses."""

    every: Size | None = Field(default=None, description="Steps between evaluations; null: only at the end.")
    max_sequences: Size | None = Field(
        default=None,
        description="Maximum number of sequences per set, spread evenly over the set; null: all.",
    )
    early_stopping: EarlyStoppingConfig | None = Field(
        default=None, description="When to end the run early; null: never."
    )


class SampleConfig(FrozenModel):
    """The text that is generated at the end."""

    prompt: str | None = Field(
        default=None,
        description="Prompt; null: the beginning of a held-out document, or a held-out conversation up to its first "
        "answer.",
    )
    max_new_tokens: Size = Field(default=80, description="Maximum number of tokens to generate.")
    temperature: float = Field(default=0.7, ge=0, allow_inf_nan=False, description="0: greedy decoding.")


class StragglersConfig(FrozenModel):
    """When a rank is reported as slower than the others; see docs/reference/watchdog.md."""

    window_steps: Annotated[Size, Field(le=MAX_STEP_TIMES)] = Field(
        default=20, description="Number of last steps of each rank over which the median is taken."
    )
    deviations: float = Field(
        default=5.0,
        gt=0,
        allow_inf_nan=False,
        description="Number of deviations above the median of all ranks. The unit is the median absolute deviation, "
        "scaled to a standard deviation.",
    )


class MetricsConfig(FrozenModel):
    """What is measured besides losses, norms and rates; see docs/guides/python-api.md."""

    per_rank: bool = Field(
        default=True, description="Write times and memory of each rank's steps to a file in output_dir/ranks."
    )
    norms_every: Size | None = Field(
        default=None,
        description="Steps between measurements of gradient norms by block; null: none.",
    )
    communication_every: Size | None = Field(
        default=None, description="Steps between measurements of exposed communication; null: none."
    )
    timeline_every: Size | None = Field(
        default=100,
        description="Steps between timelines of a pipeline, in which ranks record their actions; null: none.",
    )
    stragglers: StragglersConfig | None = Field(
        default=StragglersConfig(), description="When to report slow ranks; needs at least 4 ranks. null: never."
    )


AllowedChange = Literal[
    "optimizer.lr",
    "optimizer.weight_decay",
    "optimizer.no_decay",
    "schedule",
    "ema",
    "max_grad_norm",
    "grad_norm_type",
    "objective",
    "batch_size",
    "data",
    "seed",
]
"""A setting that may differ in a resumed run."""


class ResumeConfig(FrozenModel):
    """What a run resumes from, and which settings may have changed."""

    source: str = Field(default="auto", alias="from", description="As in the short form: auto, never or a checkpoint.")
    allow: list[AllowedChange] = Field(
        default=[],
        description="Settings that may differ from those that the run was started with. They take effect at once: "
        "rates and decay are those of the run file, and a schedule is at the current step. Other data or another seed "
        "start a new data order; another batch size continues in the old order.",
    )


class ElasticConfig(FrozenModel):
    """Range of the number of ranks of a run."""

    min: Annotated[Size, Field(le=4096)] = Field(default=1, description="Minimum number of ranks.")
    max: Annotated[Size, Field(le=4096)] = Field(
        default=4096, description="Maximum number of ranks; nproc is another limit."
    )

    @model_validator(mode="after")
    def _check_range(self) -> ElasticConfig:
        if self.min > self.max:
            raise ValueError(f"min={self.min} is more than max={self.max}; lower it")
        return self


_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600}
_DURATION_PATTERN = re.compile(r"(\d+\.?\d*|\.\d+)[smh]")
Duration = Annotated[str, Field(pattern=f"^{_DURATION_PATTERN.pattern}$")]
"""A duration above 0, such as 90s, 20m or 1.5h."""
_UNIT_BYTES = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_BANDWIDTH_PATTERN = re.compile(r"(\d+\.?\d*|\.\d+)(KB|MB|GB|TB)(?:/s)?")
Bandwidth = Annotated[str, Field(pattern=f"^{_BANDWIDTH_PATTERN.pattern}$")]
"""Bytes per second above 0, such as 500MB/s or 1.5GB."""


class KeepBestConfig(FrozenModel):
    """Checkpoints that are kept because of their low evaluation loss."""

    eval_set: str = Field(
        default=HELD_OUT, description="Set whose loss is compared: held_out, or a name of data.eval_sets."
    )
    count: Size = Field(default=1, description="Number of checkpoints.")


class OnSignalConfig(FrozenModel):
    """Reaction to a signal that announces the end of a job: the run stops after the current step, and saves."""

    signals: list[StopName] = Field(
        default=["SIGTERM", "SIGUSR1", "SIGINT"],
        description="Signals that stop the run; []: none, so each signal ends the run at once. SIGINT is Ctrl-C.",
    )
    exit_code: int = Field(
        default=143,
        ge=0,
        le=255,
        description="Exit code of the ranks and the command after such a stop; after SIGINT it is 130.",
    )
    grace_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Seconds from the signal until the job is killed. A save is not started if, judged by earlier "
        "ones, it would take longer. null: no limit.",
    )


class ReplicateConfig(FrozenModel):
    """Replicas of the training state in the memory of nodes; see docs/reference/memory-replicas.md."""

    target: Literal["neighbor"] = Field(
        default="neighbor",
        description="Where each rank's state is copied, besides the memory of its own node: neighbor is the next node.",
    )
    every: Size = Field(
        default=1, description="Steps between copies. A copy is skipped if the one before is not finished."
    )
    max_bandwidth: FinitePositive | Bandwidth | None = Field(
        default=None,
        description="Maximum bytes per second that each rank sends to another node, such as 2e9 or 2GB/s; null: no "
        "limit.",
    )

    @field_validator("max_bandwidth")
    @classmethod
    def _check_bandwidth(cls, value: float | str | None) -> float | str | None:
        if isinstance(value, str) and not float(_BANDWIDTH_PATTERN.fullmatch(value)[1]):  # type: ignore[index]
            raise ValueError(f"{value!r} sends nothing; give a higher bandwidth, or null")
        return value

    @property
    def bytes_per_s(self) -> float | None:
        if not isinstance(self.max_bandwidth, str):
            return self.max_bandwidth
        number, unit = _BANDWIDTH_PATTERN.fullmatch(self.max_bandwidth).groups()  # type: ignore[union-attr]
        return float(number) * _UNIT_BYTES[unit]


class CheckpointConfig(FrozenModel):
    """Checkpoints. If any are enabled, one is also saved after the last step. See docs/reference/storage.md."""

    every: Size | Duration | list[Size | Duration] | None = Field(
        default=None,
        description="Steps between checkpoints, such as 500; or the time since the last one, or since the start, by "
        "the clock of rank 0: 90s, 20m or 1.5h; or both, whichever comes first: [500, 20m]. null: only those of "
        "keep_best, if set.",
    )
    keep_best: KeepBestConfig | None = Field(
        default=None,
        description="Save after each evaluation whose loss is among the `count` lowest, and keep these checkpoints, "
        "too: {eval_set: held_out, count: 1}.",
    )
    keep_last: Size | None = Field(default=2, description="Number of newest checkpoints to keep; null: all.")
    keep_every: Size | None = Field(
        default=None, description="Also keep checkpoints of steps that are multiples of it."
    )
    asynchronous: bool = Field(default=True, description="Continue training while a checkpoint is written.")
    on_error: Literal["stop", "continue"] = Field(
        default="stop",
        description="What to do if a checkpoint or metrics.jsonl cannot be written. Existing ones are kept either way.",
    )
    retries: Annotated[int, Field(ge=0, le=100)] = Field(
        default=3,
        description="Retries after a temporary error: EIO, ESTALE, timeouts, and errors of a server. The first is half "
        "a second later; the delay doubles each time, up to 30 s.",
    )
    path: PathStr | None = Field(
        default=None,
        description="Location of the checkpoints: a URL of fsspec, such as s3://bucket/prefix, or a directory; null: "
        "output_dir/checkpoints. Runs must not share it.",
    )
    key_file: PathStr | None = Field(
        default=None,
        description="File with a secret of at least 32 bytes, the same on all nodes. Checkpoints are signed with it, "
        "and those with another signature, or none, are rejected. null: no signatures.",
    )
    replicate: Literal["neighbor"] | ReplicateConfig | None = Field(
        default=None,
        description="Copy the state of each rank after its steps to the memory of its own node and of the next one, "
        "from which restarted ranks resume (max_restarts): neighbor, or {every: 1, max_bandwidth: 1GB/s}; null: "
        "resume only from checkpoints. See docs/reference/memory-replicas.md.",
    )
    on_signal: OnSignalConfig | None = Field(
        default=None,
        description="Save when a signal asks the run to stop; the same command resumes. null: on SIGTERM, SIGUSR1 "
        "and SIGINT, if checkpoints are enabled by every or keep_best.",
    )

    @property
    def is_enabled(self) -> bool:
        return self.has_scheduled_saves or bool(self.on_signal and self.on_signal.signals)

    @property
    def has_scheduled_saves(self) -> bool:
        """Whether checkpoints are saved without a signal."""
        return bool(self._intervals) or self.keep_best is not None

    @property
    def stop_config(self) -> OnSignalConfig:
        return self.on_signal or (OnSignalConfig() if self.is_enabled else OnSignalConfig(signals=[]))

    @property
    def replicate_config(self) -> ReplicateConfig | None:
        return ReplicateConfig() if isinstance(self.replicate, str) else self.replicate

    @property
    def every_steps(self) -> int | None:
        """Steps between checkpoints; None if no number of steps is set."""
        return next((each for each in self._intervals if isinstance(each, int)), None)

    @property
    def every_seconds(self) -> float | None:
        """Seconds between checkpoints; None if no time is set."""
        times = (each for each in self._intervals if isinstance(each, str))
        return next((float(text[:-1]) * _UNIT_SECONDS[text[-1]] for text in times), None)

    @property
    def _intervals(self) -> list[int | str]:
        given = self.every
        return given if isinstance(given, list) else [] if given is None else [given]

    @field_validator("every", mode="before")
    @classmethod
    def _check_every(cls, value: Any) -> Any:
        given = value if isinstance(value, list) else [] if value is None else [value]
        times = [
            each for each in given if isinstance(each, str) and _DURATION_PATTERN.fullmatch(each) and float(each[:-1])
        ]
        steps = [each for each in given if type(each) is int and 0 < each < 2**31]
        if len(times) > 1 or len(steps) > 1 or len(times) + len(steps) < len(given) or value == []:
            raise ValueError(
                f"{value!r} is not valid; give a number of steps, such as 500, or a time above 0, such as 90s, 20m or "
                f"1.5h, or one of each, [500, 20m]"
            )
        return value


_STRING_KEYS = ("path", "model_type", "checkpoint", "dtype", "init", "revision", "trust_remote_code")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def check_model_section(value: dict[str, Any]) -> dict[str, Any]:
    """Return the section if it names exactly one source and its keys have valid values; ValueError otherwise."""
    if isinstance(dtype := value.get("dtype"), str):
        value = {**value, "dtype": DTYPE_ALIASES.get(dtype, dtype)}
    if sum(key in value for key in ("path", "model_type", "checkpoint")) != 1:
        raise ValueError(
            "give one of model_type, to train from new weights; path, a local model directory or a hub id; or "
            "checkpoint, to start from its weights"
        )
    for key in _STRING_KEYS:
        if not isinstance(value.get(key, ""), str):
            raise ValueError(f"{key} must be a string, not {value[key]!r}")
    for key in ("path", "checkpoint"):
        if key in value:
            check_path(value[key])
    if "://" in value.get("checkpoint", ""):
        raise ValueError(
            f"checkpoint={value['checkpoint']!r} is a URL, but initial weights are read from a directory; export "
            f"it first (meshwright export URL DIR), and set path: DIR"
        )
    for key in ("revision", "trust_remote_code"):
        if key in value and "path" not in value:
            raise ValueError(f"{key} needs path, which is not set; leave it out")
    if not isinstance(value.get("allow_pickle", False), bool):
        raise ValueError(f"allow_pickle must be true or false, not {value['allow_pickle']!r}")
    if "init" in value and "model_type" not in value:
        raise ValueError("init is for new weights, but these weights come from a directory; leave it out")
    _check_trust(value)
    if "peft" in value:
        _check_adapter(value)
    return value


def _check_trust(value: Mapping[str, Any]) -> None:
    trusted, revision = value.get("trust_remote_code"), value.get("revision")
    if trusted is None:
        return
    if not _DIGEST.fullmatch(trusted):
        raise ValueError(
            f"trust_remote_code={trusted!r} is not valid. Give the hub commit whose code you have read, in 40 "
            f"hexadecimal digits; or for a local directory the digest that the error message without it states"
        )
    if len(trusted) == 40 and revision not in (None, trusted):
        raise ValueError(f"trust_remote_code={trusted!r} differs from revision={revision!r}; leave out revision")


def _check_adapter(value: Mapping[str, Any]) -> None:
    section = value["peft"]
    if not isinstance(section, Mapping):
        raise ValueError(f"peft must be a mapping, such as {{type: lora, r: 16}}, not {section!r}")
    if "path" not in value:
        raise ValueError(
            "peft needs path: an adapter is only useful with a base that others can load. For new weights "
            "(model_type), train the full model; export a checkpoint first: meshwright export"
        )
    for key in ("type", "adapter", "base_dtype"):
        if not isinstance(section.get(key, ""), str):
            raise ValueError(f"peft.{key} must be a string, not {section[key]!r}")
    if not section.get("type") and not section.get("adapter"):
        raise ValueError("peft has no type: give type: lora, or adapter, a directory to continue from")
    if "adapter" in section:
        check_path(section["adapter"])
