"""What will go away says so at the user's line, and is gone when it is due."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

import meshwright
from meshwright.files.versions import warn_deprecated

ROOT = Path(__file__).parents[2]
SOURCES = [*ROOT.glob("core/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]


def test_the_warning_says_since_when_until_when_and_what_instead() -> None:
    text = "^the function old is deprecated since meshwright 0.1.0 and goes away in 2.0.0. Call new.$"
    with pytest.warns(DeprecationWarning, match=text):
        warn_deprecated("the function old", since="0.1.0", removed_in="2.0.0", remedy="Call new.")


def test_the_warning_names_the_users_line_through_our_modules_and_pydantic() -> None:
    from meshwright_ddp import DDPConfig

    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        DDPConfig(use_custom_fsdp=True)  # this line
    (warning,) = reported
    assert warning.filename == __file__
    assert Path(__file__).read_text(encoding="utf-8").splitlines()[warning.lineno - 1].endswith("# this line")


def deprecations(source: str) -> Iterator[dict[str, str]]:
    """The versions that calls of warn_deprecated give."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "warn_deprecated":
            yield {each.arg or "": ast.literal_eval(each.value) for each in node.keywords}


def is_due(call: dict[str, str], version: str) -> bool:
    return Version(version) >= Version(call["removed_in"])


def test_what_is_due_has_gone() -> None:
    calls = [call for path in SOURCES for call in deprecations(path.read_text(encoding="utf-8"))]
    assert calls
    assert not [call for call in calls if is_due(call, meshwright.__version__)]
    # A minor version at the least lies between the first warning and the end.
    assert all(Version(call["since"]).release[:2] < Version(call["removed_in"]).release[:2] for call in calls)
