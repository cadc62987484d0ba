"""Sections of the run file: evaluation, sample, plan, metrics, resumption, checkpoints and copies. No torch here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from meshwright.plugin import MAX_STEP_TIMES, FinitePositive, FrozenModel, PathStr, Size, StopName, check_path

HELD_OUT = "held_out"
"""The set that is held out of the sources."""


class EarlyStoppingConfig(FrozenModel):
    """Ends a run whose loss on a set no longer falls."""

    eval_set: str = Field(default=HELD_OUT, description="Which set; held_out, or a name of data.eval_sets.")
    patience: Size = Field(default=3, description="So many evaluations in a row without a lower loss end the run.")
    min_delta: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="By how much a lower loss must be lower."
    )


class EvalConfig(FrozenModel):
    """Losses on held-out sets."""

    every: Size | None = Field(default=None, description="Steps between evaluations; null: only at the end.")
    max_sequences: Size | None = Field(
        default=None,
        description="Sequences of each set to evaluate on, spread over it, or all where it has less; null: all.",
    )
    early_stopping: EarlyStoppingConfig | None = Field(default=None, description="When to end before; null: never.")


class SampleConfig(FrozenModel):
    """The text generated at the end."""

    prompt: str | None = Field(
        default=None,
        description="Text to continue; null: the beginning of a held-out document, or a held-out conversation up to "
        "its first answer.",
    )
    max_new_tokens: Size = Field(default=80)
    temperature: float = Field(default=0.7, ge=0, allow_inf_nan=False, description="0: the likeliest token each time.")


class StragglersConfig(FrozenModel):
    """When a rank is named that is slower than the others by itself; see docs/reference/watchdog.md."""

    window_steps: Annotated[Size, Field(le=MAX_STEP_TIMES)] = Field(
        default=20, description="The last steps of each rank, whose median counts."
    )
    deviations: float = Field(
        default=5.0,
        gt=0,
        allow_inf_nan=False,
        description="Median absolute deviations from the median of all ranks, scaled as a standard deviation is.",
    )


class MetricsConfig(FrozenModel):
    """What is measured of a run beside losses, norms and rates; see docs/guides/python-api.md."""

    per_rank: bool = Field(
        default=True, description="A file of each rank in output_dir/ranks, with its times and memory by step."
    )
    norms_every: Size | None = Field(
        default=None,
        description="Steps between those in which norms of the gradients are measured by block; null: none.",
    )
    communication_every: Size | None = Field(
        default=None, description="Steps between those in which exposed communication is measured; null: none."
    )
    timeline_every: Size | None = Field(
        default=100,
        description="Steps between those in which ranks of a pipeline note when they compute what; null: none.",
    )
    stragglers: StragglersConfig | None = Field(
        default=StragglersConfig(), description="Which ranks are named as slow, of 4 or more; null: none."
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
"""What may differ in a resumed run."""


class ResumeConfig(FrozenModel):
    """From where a run continues, and what may have changed."""

    source: str = Field(default="auto", alias="from", description="As the plain word: auto, never, or a checkpoint.")
    allow: list[AllowedChange] = Field(
        default=[],
        description="What may differ from what the run was started with. Each takes effect at once: rates and decay "
        "are those of the run file, a schedule is at the step that it continues at, other data or another seed begin a "
        "new order, and another batch size continues in the old one.",
    )


class ElasticConfig(FrozenModel):
    """How many ranks a run may have."""

    min: Annotated[Size, Field(le=4096)] = Field(default=1, description="At least so many.")
    max: Annotated[Size, Field(le=4096)] = Field(default=4096, description="At most so many, of those that nproc says.")

    @model_validator(mode="after")
    def _check_range(self) -> ElasticConfig:
        if self.min > self.max:
            raise ValueError(f"min={self.min} is more than max={self.max}; lower it")
        return self


_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600}
_DURATION_PATTERN = re.compile(r"(\d+\.?\d*|\.\d+)[smh]")
Duration = Annotated[str, Field(pattern=f"^{_DURATION_PATTERN.pattern}$")]
"""A time above 0, such as 90s, 20m or 1.5h."""
_UNIT_BYTES = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_BANDWIDTH_PATTERN = re.compile(r"(\d+\.?\d*|\.\d+)(KB|MB|GB|TB)(?:/s)?")
Bandwidth = Annotated[str, Field(pattern=f"^{_BANDWIDTH_PATTERN.pattern}$")]
"""Bytes a second above 0, such as 500MB/s or 1.5GB."""


class KeepBestConfig(FrozenModel):
    """Checkpoints that are kept because their loss is low."""

    eval_set: str = Field(default=HELD_OUT, description="The loss of which set; held_out, or a name of data.eval_sets.")
    count: Size = Field(default=1, description="How many.")


class OnSignalConfig(FrozenModel):
    """What a signal does that announces the end of a job: the run stops after its step, and saves."""

    signals: list[StopName] = Field(
        default=["SIGTERM", "SIGUSR1", "SIGINT"],
        description="Which; []: none, so that each ends the run at once. SIGINT is Ctrl-C.",
    )
    exit_code: int = Field(
        default=143, ge=0, le=255, description="Of each rank, and of the command, when it has stopped so."
    )
    grace_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Seconds from the signal until the job is ended: a save that would take longer, by those before, "
        "is not started. null: as long as it takes.",
    )


class ReplicateConfig(FrozenModel):
    """Copies of the state in the memory of nodes; see docs/reference/memory-replicas.md."""

    target: Literal["neighbor"] = Field(
        default="neighbor",
        description="Where each rank's state is copied to, beside the memory of its own node: that of the next one.",
    )
    every: Size = Field(
        default=1, description="Steps between copies. One that is not done when the next is due makes that be left out."
    )
    max_bandwidth: FinitePositive | Bandwidth | None = Field(
        default=None,
        description="Bytes a second that each rank sends to another node, such as 2e9 or 2GB/s; null: as many as there "
        "can be.",
    )

    @field_validator("max_bandwidth")
    @classmethod
    def _check_bandwidth(cls, value: float | str | None) -> float | str | None:
        if isinstance(value, str) and not float(_BANDWIDTH_PATTERN.fullmatch(value)[1]):  # type: ignore[index]
            raise ValueError(f"{value!r} sends nothing; give more, or null")
        return value

    @property
    def bytes_per_s(self) -> float | None:
        if not isinstance(self.max_bandwidth, str):
            return self.max_bandwidth
        number, unit = _BANDWIDTH_PATTERN.fullmatch(self.max_bandwidth).groups()  # type: ignore[union-attr]
        return float(number) * _UNIT_BYTES[unit]


class CheckpointConfig(FrozenModel):
    """Checkpoints; after the last step, too, if there are any. See docs/reference/storage.md."""

    every: Size | Duration | list[Size | Duration] | None = Field(
        default=None,
        description="Steps between checkpoints, such as 500; or a time after the last one, or the start, by the clock "
        "of the first rank: 90s, 20m or 1.5h; or both, whichever comes first: [500, 20m]. null: as the next says, or "
        "none.",
    )
    keep_best: KeepBestConfig | None = Field(
        default=None,
        description="Save after each evaluation that is among the best `count`, and keep these, too: {eval_set: "
        "held_out, count: 1}.",
    )
    keep_last: Size | None = Field(default=2, description="How many of the newest are kept; null: all.")
    keep_every: Size | None = Field(default=None, description="Those of steps that are multiples of it are kept, too.")
    asynchronous: bool = Field(default=True, description="Continue training while one is written.")
    on_error: Literal["stop", "continue"] = Field(
        default="stop",
        description="What to do when one, or metrics.jsonl, cannot be written; what was there is kept either way.",
    )
    retries: Annotated[int, Field(ge=0, le=100)] = Field(
        default=3,
        description="Attempts after the first, half a second later and then twice as long each time, at most 30 s, "
        "where an error may be gone a moment later: EIO, ESTALE, time-outs, and those of a server.",
    )
    path: PathStr | None = Field(
        default=None,
        description="Where they go: a URL of fsspec, such as s3://bucket/prefix, or a directory; null: "
        "output_dir/checkpoints. Another run has another.",
    )
    key_file: PathStr | None = Field(
        default=None,
        description="A file with a secret of at least 32 bytes, the same on all nodes: checkpoints are signed with it, "
        "and others are refused; null: neither.",
    )
    replicate: Literal["neighbor"] | ReplicateConfig | None = Field(
        default=None,
        description="Copy the state of each rank after its steps to the memory of its node and of the next one, from "
        "which restarted ranks resume (max_restarts): neighbor, or {every: 1, max_bandwidth: 1GB/s}; null: "
        "resume from checkpoints alone. See docs/reference/memory-replicas.md.",
    )
    on_signal: OnSignalConfig | None = Field(
        default=None,
        description="Save when a signal asks the run to stop; the same command continues. null: on SIGTERM, SIGUSR1 "
        "and SIGINT, if checkpoints are saved otherwise.",
    )

    @property
    def is_enabled(self) -> bool:
        return self.has_scheduled_saves or bool(self.on_signal and self.on_signal.signals)

    @property
    def has_scheduled_saves(self) -> bool:
        """Whether there are any without a signal."""
        return bool(self._intervals) or self.keep_best is not None

    @property
    def stop_config(self) -> OnSignalConfig:
        return self.on_signal or (OnSignalConfig() if self.is_enabled else OnSignalConfig(signals=[]))

    @property
    def replicate_config(self) -> ReplicateConfig | None:
        return ReplicateConfig() if isinstance(self.replicate, str) else self.replicate

    @property
    def every_steps(self) -> int | None:
        """Steps between checkpoints; None where steps do not count."""
        return next((each for each in self._intervals if isinstance(each, int)), None)

    @property
    def every_seconds(self) -> float | None:
        """Seconds between checkpoints; None where the clock does not count."""
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
                f"{value!r} is neither a number of steps, such as 500, nor a time above 0, such as 90s, 20m or 1.5h, "
                f"nor one of each, [500, 20m]"
            )
        return value


_STRING_KEYS = ("path", "model_type", "checkpoint", "dtype", "init", "revision", "trust_remote_code")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def check_model_section(value: dict[str, Any]) -> dict[str, Any]:
    """Return the section if it names one source and its keys have valid values."""
    if sum(key in value for key in ("path", "model_type", "checkpoint")) != 1:
        raise ValueError(
            "give either model_type, to train from new weights, or path, a local model directory or a hub id, or "
            "checkpoint, to begin with the weights of one"
        )
    for key in _STRING_KEYS:
        if not isinstance(value.get(key, ""), str):
            raise ValueError(f"{key} must be a string, not {value[key]!r}")
    for key in ("path", "checkpoint"):
        if key in value:
            check_path(value[key])
    if "://" in value.get("checkpoint", ""):
        raise ValueError(
            f"checkpoint={value['checkpoint']!r} is a URL, and weights to begin with are read from a directory; export "
            f"it first: meshwright export URL DIR, and path: DIR"
        )
    for key in ("revision", "trust_remote_code"):
        if key in value and "path" not in value:
            raise ValueError(f"{key} is of a model at path, and there is none")
    if not isinstance(value.get("allow_pickle", False), bool):
        raise ValueError(f"allow_pickle must be true or false, not {value['allow_pickle']!r}")
    if "init" in value and "model_type" not in value:
        raise ValueError("init says how new weights are drawn, and these come from a directory; leave it out")
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
            f"trust_remote_code={trusted!r} names no code. It is the commit on the hub whose code you have read, in 40 "
            f"hexadecimal digits; or of a local directory the digest that the error without it tells"
        )
    if len(trusted) == 40 and revision not in (None, trusted):
        raise ValueError(f"trust_remote_code={trusted!r} is another commit than revision={revision!r}; leave that out")


def _check_adapter(value: Mapping[str, Any]) -> None:
    section = value["peft"]
    if not isinstance(section, Mapping):
        raise ValueError(f"peft must be a mapping, such as {{type: lora, r: 16}}, not {section!r}")
    if "path" not in value:
        raise ValueError(
            "peft needs path: an adapter is of use with a base that everybody can load. New weights "
            "(model_type) are to be trained whole; a checkpoint is to be exported first: meshwright export"
        )
    for key in ("type", "adapter", "base_dtype"):
        if not isinstance(section.get(key, ""), str):
            raise ValueError(f"peft.{key} must be a string, not {section[key]!r}")
    if not section.get("type") and not section.get("adapter"):
        raise ValueError("peft has no type: give type: lora, or adapter, a directory to resume from")
    if "adapter" in section:
        check_path(section["adapter"])
