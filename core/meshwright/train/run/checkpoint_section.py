"""The section of the run file on checkpoints and copies of state. No torch here."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from ...base.stopping import StopName
from ...base.validation import FrozenModel
from ...files.writing import PathText
from ...mesh.sizes import Size
from ...optim.config import FinitePositive
from .run_sections import HELD_OUT

_SECONDS = {"s": 1, "m": 60, "h": 3600}
_TIME = re.compile(r"(\d+\.?\d*|\.\d+)[smh]")
Duration = Annotated[str, Field(pattern=f"^{_TIME.pattern}$")]
"""A time above 0, such as 90s, 20m or 1.5h."""
_BYTES = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_BANDWIDTH = re.compile(r"(\d+\.?\d*|\.\d+)(KB|MB|GB|TB)(?:/s)?")
Bandwidth = Annotated[str, Field(pattern=f"^{_BANDWIDTH.pattern}$")]
"""Bytes a second above 0, such as 500MB/s or 1.5GB."""


class KeepBestConfig(FrozenModel):
    """Checkpoints that are kept because their loss is low."""

    set: str = Field(default=HELD_OUT, description="The loss of which set; held_out, or a name of data.eval_sets.")
    n: Size = Field(default=1, description="How many.")


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
        "is not begun. null: as long as it takes.",
    )


class ReplicateConfig(FrozenModel):
    """Copies of the state in the memory of nodes; see docs/memory-copies.md."""

    to: Literal["neighbour"] = Field(
        default="neighbour",
        description="Where each rank's state is copied to, beside the memory of its own node: that of the next one.",
    )
    every: Size = Field(
        default=1, description="Steps between copies. One that is not done when the next is due makes that be left out."
    )
    bandwidth: FinitePositive | Bandwidth | None = Field(
        default=None,
        description="Bytes a second that each rank sends to another node, such as 2e9 or 2GB/s; null: as many as there "
        "can be.",
    )

    @field_validator("bandwidth")
    @classmethod
    def _is_above_zero(cls, value: float | str | None) -> float | str | None:
        if isinstance(value, str) and not float(_BANDWIDTH.fullmatch(value)[1]):  # type: ignore[index]
            raise ValueError(f"{value!r} sends nothing; give more, or null")
        return value

    @property
    def bytes_per_s(self) -> float | None:
        """`bandwidth` as a number."""
        if not isinstance(self.bandwidth, str):
            return self.bandwidth
        number, unit = _BANDWIDTH.fullmatch(self.bandwidth).groups()  # type: ignore[union-attr]
        return float(number) * _BYTES[unit]


class CheckpointConfig(FrozenModel):
    """Checkpoints; after the last step, too, if there are any. See docs/storage.md."""

    every: Size | Duration | list[Size | Duration] | None = Field(
        default=None,
        description="Steps between checkpoints, such as 500; or a time after the last one, or the start, by the clock "
        "of the first rank: 90s, 20m or 1.5h; or both, whichever comes first: [500, 20m]. null: as the next says, or "
        "none.",
    )
    keep_best: KeepBestConfig | None = Field(
        default=None,
        description="Save after each evaluation that is among the best n, and keep these, too: {set: held_out, n: 1}.",
    )
    keep_last: Size | None = Field(default=2, description="How many of the newest are kept; null: all.")
    keep_every: Size | None = Field(default=None, description="Those of steps that are multiples of it are kept, too.")
    asynchronous: bool = Field(default=True, description="Go on training while one is written.")
    on_error: Literal["stop", "continue"] = Field(
        default="stop",
        description="What to do when one, or metrics.jsonl, cannot be written; what was there is kept either way.",
    )
    retries: Annotated[int, Field(ge=0, le=100)] = Field(
        default=3,
        description="Attempts after the first, half a second later and then twice as long each time, at most 30 s, "
        "where an error may be gone a moment later: EIO, ESTALE, time-outs, and those of a server.",
    )
    to: PathText | None = Field(
        default=None,
        description="Where they go: a URL of fsspec, such as s3://bucket/prefix, or a directory; null: "
        "output_dir/checkpoints. Another run has another.",
    )
    key_file: PathText | None = Field(
        default=None,
        description="A file with a secret of at least 32 bytes, the same on all nodes: checkpoints are signed with it, "
        "and others are refused; null: neither.",
    )
    replicate: Literal["neighbour"] | ReplicateConfig | None = Field(
        default=None,
        description="Copy the state of each rank after its steps to the memory of its node and of the next one, from "
        "which ranks that are begun anew go on (max_restarts): neighbour, or {every: 1, bandwidth: 1GB/s}; null: go on "
        "from checkpoints alone. See docs/memory-copies.md.",
    )
    on_signal: OnSignalConfig | None = Field(
        default=None,
        description="Save when a signal asks the run to stop; the same command goes on. null: on SIGTERM, SIGUSR1 and "
        "SIGINT, if checkpoints are saved otherwise.",
    )

    @property
    def saves(self) -> bool:
        """Whether there are any."""
        return self.saves_in_time or bool(self.on_signal and self.on_signal.signals)

    @property
    def saves_in_time(self) -> bool:
        """Whether there are any without a signal."""
        return bool(self._occasions) or self.keep_best is not None

    @property
    def stops_on(self) -> OnSignalConfig:
        """`on_signal`, written out."""
        return self.on_signal or (OnSignalConfig() if self.saves else OnSignalConfig(signals=[]))

    @property
    def copies(self) -> ReplicateConfig | None:
        """`replicate`, written out."""
        return ReplicateConfig() if isinstance(self.replicate, str) else self.replicate

    @property
    def every_steps(self) -> int | None:
        """Steps between checkpoints; None where steps do not count."""
        return next((each for each in self._occasions if isinstance(each, int)), None)

    @property
    def after_s(self) -> float | None:
        """Seconds between checkpoints; None where the clock does not count."""
        return next((float(text[:-1]) * _SECONDS[text[-1]] for text in self._times), None)

    @property
    def _occasions(self) -> list[int | str]:
        given = self.every
        return given if isinstance(given, list) else [] if given is None else [given]

    @property
    def _times(self) -> list[str]:
        return [each for each in self._occasions if isinstance(each, str)]

    @field_validator("every", mode="before")
    @classmethod
    def _is_steps_or_time(cls, value: Any) -> Any:
        given = value if isinstance(value, list) else [] if value is None else [value]
        times = [each for each in given if isinstance(each, str) and _TIME.fullmatch(each) and float(each[:-1])]
        steps = [each for each in given if type(each) is int and 0 < each < 2**31]
        if len(times) > 1 or len(steps) > 1 or len(times) + len(steps) < len(given) or value == []:
            raise ValueError(
                f"{value!r} is neither a number of steps, such as 500, nor a time above 0, such as 90s, 20m or 1.5h, "
                f"nor one of each, [500, 20m]"
            )
        return value
