"""The exceptions that meshwright raises on purpose.

Every message says what is wrong, the value, what is allowed, and how to fix it. Each class has a section in
docs/troubleshooting.md.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable


class MeshwrightError(Exception):
    """Base of all errors raised on purpose; its message is meant for the user, without a traceback."""

    exit_code = 2
    """Of the command line: 2 for what the user can correct, 1 for a failure while running."""

    def __str__(self) -> str:
        # It may quote what somebody wrote, of which no character is to steer a terminal, or to be half of one.
        return escape_unprintable(super().__str__())


class ConfigError(MeshwrightError):
    """A run file, an option or a strategy config holds a bad value."""


class MeshError(MeshwrightError):
    """Sizes, axes and world do not fit together."""


class ReplicateSizeError(MeshError, AssertionError):
    """dp_replicate_size is given to a strategy that does not take it; also an AssertionError, as in the reference."""


class StrategyError(MeshwrightError):
    """A strategy cannot be used."""


class UnknownStrategyError(StrategyError):
    """No strategy of that name is installed."""


class ModelError(MeshwrightError):
    """The model cannot be built, loaded or parallelized."""


class MissingPlanError(ModelError, AssertionError):
    """A model has no tensor-parallel plan of its own; also an AssertionError, which the reference raises."""


class DataError(MeshwrightError):
    """Corpus, tokenizer or split cannot be used."""


class BatchError(MeshwrightError):
    """The microbatches of a step are malformed or differ in number between ranks."""


class TrainingError(MeshwrightError):
    """Training cannot continue."""

    exit_code = 1


class NonFiniteError(TrainingError):
    """A loss or gradient is not finite."""


class CheckpointError(MeshwrightError):
    """A checkpoint cannot be read, or is not of this model or run."""


class IncompleteCheckpointError(CheckpointError):
    """A checkpoint has lost or changed something since it was written, or was never completed."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint cannot be written."""

    exit_code = 1


class RankError(MeshwrightError):
    """A worker process failed (the message carries its own report), or the rendezvous store cannot be reached."""

    exit_code = 1


def escape_unprintable(text: str) -> str:
    """Escape characters that steer a terminal, and halves of characters; line ends and tabs stay."""
    return "".join(each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in text)


def suggest_match(name: str, candidates: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the closest of `candidates`, or an empty string where none is close."""
    matches = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def format_error(error: MeshwrightError) -> str:
    """Return its message, and a line that leads to the section about its class."""
    # A room's own subclass is documented under the class that it derives from.
    known = next(cls for cls in type(error).__mro__ if cls.__module__ == __name__)
    return f"error: {error}\nsee docs/troubleshooting.md#{known.__name__.lower()}"


def format_exception_only(error: BaseException) -> str:
    """Return "Type: message" with the notes, as the interpreter ends a traceback."""
    return "".join(traceback.TracebackException.from_exception(error).format_exception_only()).rstrip("\n")
