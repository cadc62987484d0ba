"""The exceptions that meshwright raises.

Every message states the problem, the value, what is allowed, and how to fix it. Each class has a section in
docs/troubleshooting.md.
"""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Iterable
from types import FrameType

from .docs import format_docs_link


class MeshwrightError(Exception):
    """Base class of all errors. Its message is shown to the user without a traceback."""

    exit_code = 2
    """Exit code of the command line: 2 for an error that the user can fix, 1 for a failure at run time."""

    def __str__(self) -> str:
        # The message may quote user input, which must not control the terminal or contain unpaired surrogates.
        return escape_unprintable(super().__str__())

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython and notebooks show: the message, then the caller's own lines.

        Source: IPython.core.interactiveshell.InteractiveShell.showtraceback.
        """
        frames = (each for each in traceback.walk_tb(self.__traceback__) if _is_own_code(each[0]))
        lines = [each.rstrip() for each in traceback.StackSummary.extract(frames).format()]
        name = _get_documented_name(self)
        return [f"{name}: {self}", f"see {_format_link(name)}", *([""] if lines else []), *lines]


class ConfigError(MeshwrightError):
    """A run file, an option or a strategy config has an invalid value."""


class MeshError(MeshwrightError):
    """The sizes, axes and world are inconsistent."""


class ReplicateSizeError(MeshError, AssertionError):
    """dp_replicate_size is set for a strategy without it; also an AssertionError, as in the reference."""


class StrategyError(MeshwrightError):
    """A strategy cannot be used."""


class UnknownStrategyError(StrategyError):
    """No strategy of that name is installed."""


class ModelError(MeshwrightError):
    """The model cannot be built, loaded or parallelized."""


class MissingPlanError(ModelError, AssertionError):
    """A model has no tensor-parallel plan; also an AssertionError, as in the reference."""


class DataError(MeshwrightError):
    """A corpus, tokenizer or split cannot be used."""


class BatchError(MeshwrightError):
    """The microbatches of a step are malformed or differ in number between ranks."""


class TrainingError(MeshwrightError):
    """Training cannot continue."""

    exit_code = 1


class NonFiniteError(TrainingError):
    """A loss or gradient is not finite."""


class CheckpointError(MeshwrightError):
    """A checkpoint cannot be read, or belongs to another model or run."""


class IncompleteCheckpointError(CheckpointError):
    """A checkpoint was never completed, or its files have changed or are missing."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint cannot be written."""

    exit_code = 1


class RankError(MeshwrightError):
    """A worker process failed (the message contains its report), or the rendezvous store cannot be reached."""

    exit_code = 1


def escape_unprintable(text: str) -> str:
    """Escape terminal control characters and unpaired surrogates, except for line ends and tabs."""
    return "".join(each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in text)


def suggest_match(name: str, candidates: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the closest of `candidates`, or an empty string if none is close."""
    matches = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def format_error(error: MeshwrightError) -> str:
    """Return an error's message, with a link to the documentation of its class."""
    return f"error: {error}\nsee {_format_link(_get_documented_name(error))}"


def parse_error(text: str) -> MeshwrightError | None:
    """Return the error that `format_error` has formatted; None for other text."""
    message, _, link = text.removeprefix("error: ").rstrip().rpartition("\nsee ")
    anchor = link.rpartition("#")[2].partition(" ")[0]
    known = (each for each in globals().values() if isinstance(each, type) and issubclass(each, MeshwrightError))
    error_cls = next((each for each in known if each.__name__.lower() == anchor), None)
    return error_cls(message) if link and error_cls is not None else None


def _get_documented_name(error: MeshwrightError) -> str:
    # Subclasses that are defined elsewhere are documented under their base class in this module.
    return next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == __name__)


def _format_link(name: str) -> str:
    return escape_unprintable(format_docs_link("troubleshooting.md", name.lower()))


def _is_own_code(frame: FrameType) -> bool:
    """Return whether a frame is of the user's code: not of meshwright, its plugins, IPython or Python itself."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    libraries = {"meshwright", "IPython", "ipykernel"} | (sys.stdlib_module_names - {"__main__"})
    return package not in libraries and not package.startswith("meshwright_")


def format_exception_only(error: BaseException) -> str:
    """Return "Type: message" with the exception's notes, as at the end of a traceback."""
    return "".join(traceback.TracebackException.from_exception(error).format_exception_only()).rstrip("\n")
