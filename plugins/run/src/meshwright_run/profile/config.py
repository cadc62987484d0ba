"""Section `profile` of the run file, and names of the files of profiles. This module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from meshwright.plugin import ConfigError, FrozenModel, Size

PROFILE_DIRECTORY, FAULT_DIRECTORY = "profile", "faults"

Window = Annotated[list[Size], Field(min_length=2, max_length=2)]
"""First and last step, counted from 1, both inclusive."""


class ProfileConfig(FrozenModel):
    """Steps and ranks to profile, and what to record; see docs/reference/profiles.md."""

    steps: Window | list[Window] = Field(
        description="First and last step of a window, counted from 1 over the full run, such as [10, 12]; or several "
        "windows: [[10, 12], [500, 501]]."
    )
    ranks: list[Annotated[int, Field(ge=0)]] | Literal["all"] = Field(
        default=[0], description="Ranks to profile, or all."
    )
    memory: bool = Field(
        default=False,
        description="Also record memory over time: on CUDA a snapshot of the allocator's history, on a CPU the "
        "allocations and frees within the window.",
    )
    record_shapes: bool = Field(
        default=True, description="Record shapes of operator inputs; on a CPU, they give the sizes of messages."
    )
    with_stack: bool = Field(default=False, description="Record the Python stack of operators; slows steps down.")

    @field_validator("steps")
    @classmethod
    def _check_windows(cls, value: list[int] | list[list[int]]) -> list[int] | list[list[int]]:
        windows = _normalize_windows(value)
        if not windows:
            raise ValueError("names no step; leave the section out to disable profiling")
        before = 0
        for first, last in windows:
            if last < first:
                raise ValueError(f"[{first}, {last}] ends before it starts; write [{last}, {first}]")
            if first <= before:
                raise ValueError("windows must be in ascending order and must not overlap")
            before = last
        return value

    @field_validator("ranks")
    @classmethod
    def _check_ranks(cls, value: list[int] | str) -> list[int] | str:
        if not value:
            raise ValueError("names no rank; leave the section out to disable profiling")
        return value

    @property
    def windows(self) -> list[tuple[int, int]]:
        return _normalize_windows(self.steps)

    def includes_rank(self, rank: int) -> bool:
        return self.ranks == "all" or rank in self.ranks

    @property
    def summary_rank(self) -> int:
        return 0 if self.ranks == "all" else min(int(rank) for rank in self.ranks)


def _normalize_windows(steps: list[int] | list[list[int]]) -> list[tuple[int, int]]:
    pairs = [steps] if steps and isinstance(steps[0], int) else steps
    return [(first, last) for first, last in pairs]  # type: ignore[misc] # a list of pairs either way


def check_profile(config: ProfileConfig | None, *, num_steps: int, world_size: int) -> None:
    if config is None:
        return
    beyond = [f"[{first}, {last}]" for first, last in config.windows if last > num_steps]
    if beyond:
        raise ConfigError(
            f"profile.steps={', '.join(beyond)} ends after the last step of the run, {num_steps}. Name steps from 1 "
            f"to {num_steps}."
        )
    if config.ranks != "all" and max(config.ranks) >= world_size:
        raise ConfigError(
            f"profile.ranks={config.ranks} names a rank that does not exist: the run has {world_size} ranks, 0 to "
            f"{world_size - 1}."
        )


def format_rank_file_name(
    rank: int, window: tuple[int, int], windows: Sequence[tuple[int, int]], extension: str
) -> str:
    """Return the name of a rank's file for one window; it contains the window if there are several."""
    return f"rank-{rank:05}{format_window_suffix(window, windows)}{extension}"


def format_window_suffix(window: tuple[int, int], windows: Sequence[tuple[int, int]]) -> str:
    return "" if len(windows) == 1 else f"-steps-{window[0]}-{window[1]}"


def find_traces(directory: Path) -> list[Path]:
    for folder in (directory / PROFILE_DIRECTORY, directory):
        traces = sorted(folder.glob("rank-*.json.gz"))
        if traces:
            return traces
    raise ConfigError(
        f"{directory} holds no profile: there is no {PROFILE_DIRECTORY}/rank-*.json.gz. Set profile.steps in the run "
        "file, such as --set profile.steps=[4,6], and train again."
    )
