"""Section `profile` of the run file, and names of the files that profiles leave. No torch in this module."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from meshwright.plugin import ConfigError, FrozenModel, Size

PROFILE_DIRECTORY, FAULT_DIRECTORY = "profile", "faults"

Window = Annotated[list[Size], Field(min_length=2, max_length=2)]
"""First and last step, from 1, both included."""


class ProfileConfig(FrozenModel):
    """Which steps are profiled, on which ranks, and how; see docs/reference/profiles.md."""

    steps: Window | list[Window] = Field(
        description="The first and the last step, counted from 1 and of the whole run: [10, 12]; or several such "
        "windows: [[10, 12], [500, 501]]."
    )
    ranks: list[Annotated[int, Field(ge=0)]] | Literal["all"] = Field(default=[0], description="Which, or all.")
    memory: bool = Field(
        default=False,
        description="Memory over time, too: on CUDA the allocator's history as a snapshot, on a CPU what the window "
        "takes and gives back.",
    )
    record_shapes: bool = Field(
        default=True, description="Shapes of what operators are given; on a CPU bytes of messages are known by them."
    )
    with_stack: bool = Field(default=False, description="Lines of Python that have called operators; slows steps down.")

    @field_validator("steps")
    @classmethod
    def _check_windows(cls, value: list[int] | list[list[int]]) -> list[int] | list[list[int]]:
        found = _normalize_windows(value)
        if not found:
            raise ValueError("names no step; leave the section out to profile none")
        before = 0
        for first, last in found:
            if last < first:
                raise ValueError(f"[{first}, {last}] ends before it begins; write [{last}, {first}]")
            if first <= before:
                raise ValueError("windows must follow one another, and share no step")
            before = last
        return value

    @field_validator("ranks")
    @classmethod
    def _check_ranks(cls, value: list[int] | str) -> list[int] | str:
        if not value:
            raise ValueError("names no rank; leave the section out to profile none")
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
            f"profile.steps={', '.join(beyond)} ends behind the last step of the run, {num_steps}. Name steps from 1 "
            f"to {num_steps}."
        )
    if config.ranks != "all" and max(config.ranks) >= world_size:
        raise ConfigError(
            f"profile.ranks={config.ranks} names a rank that is not there: {world_size} ranks run, 0 to "
            f"{world_size - 1}."
        )


def format_rank_file_name(
    rank: int, window: tuple[int, int], windows: Sequence[tuple[int, int]], extension: str
) -> str:
    """Return the name of a rank's file of one window, which is in it where there are several."""
    return f"rank-{rank:05}{format_window_suffix(window, windows)}{extension}"


def format_window_suffix(window: tuple[int, int], windows: Sequence[tuple[int, int]]) -> str:
    return "" if len(windows) == 1 else f"-steps-{window[0]}-{window[1]}"


def find_traces(directory: Path) -> list[Path]:
    for place in (directory / PROFILE_DIRECTORY, directory):
        found = sorted(place.glob("rank-*.json.gz"))
        if found:
            return found
    raise ConfigError(
        f"{directory} holds no profile: there is no {PROFILE_DIRECTORY}/rank-*.json.gz. Set profile.steps in the run "
        "file, such as --set profile.steps=[4,6], and run it."
    )
