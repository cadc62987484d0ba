"""What docs/reference/cli.md shows of each command is what the command prints, apart from numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import commands_page
import pytest
from command_outputs import EXAMPLES, RESULTS, record_outputs

KEPT = json.loads(RESULTS.read_text(encoding="utf-8"))
PRINTS_OTHERS_TEXT = {"chat", "data show"}
"""Commands that print sources of the installed Python, or what a model makes of them: their first line is compared."""


def _mask(line: str) -> str:
    """Replace numbers, and what depends on their length, in a line."""
    line = re.sub(r"\d[\d.,]*(e[-+]\d+)?", "#", line)
    return re.sub(r"[\s─━┏┓┗┛┡┩╇┳┻└┘┴·]+", " ", line).strip()


def test_each_command_has_an_example_with_its_output() -> None:
    assert {name for name, _ in commands_page.list_commands()} == EXAMPLES.keys() == KEPT.keys()
    for name, lines in KEPT.items():
        output = "\n".join(lines)
        assert output, name
        assert "Traceback" not in output, name
        assert not re.search(r"/(tmp|home|root|work)/", output), name


def test_text_by_hand_stays_with_its_command() -> None:
    page = commands_page.PAGE.read_text(encoding="utf-8")
    header, notes = commands_page.read_notes(page)
    assert header.startswith("# Commands")
    assert "/reset" in notes["chat"]
    assert notes["strategies"].strip() == ""


@pytest.mark.zoo
def test_commands_print_what_the_page_shows(tmp_path: Path) -> None:
    found = record_outputs(tmp_path)
    for name, lines in KEPT.items():
        printed = [_mask(line) for line in found[name].splitlines()]
        for line in lines[: 1 if name in PRINTS_OTHERS_TEXT else None]:
            assert line == "..." or _mask(line) in printed, (name, line)
