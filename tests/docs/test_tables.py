"""Pages that follow from results that are kept, or from the sources, are as `python tools/tables.py` writes them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tables

HELD_ELSEWHERE = {"architecture.md", "mutations.md", "tests.md", "trainer-arguments.md"}
"""By test_architecture, test_sweep, test_bugs and the trainer's test_arguments."""


@pytest.mark.parametrize("page", sorted(tables.PAGES.keys() - HELD_ELSEWHERE))
def test_a_page_is_as_its_results_and_sources_are(page: str) -> None:
    assert (tables.DOCS / page).read_text(encoding="utf-8") == tables.PAGES[page](), "run python tools/tables.py"


def test_a_page_that_is_not_is_told_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "DOCS", tmp_path)
    monkeypatch.setattr(tables, "PAGES", {"faults.md": tables.faults})
    for arguments, code, said in (
        (["--check"], 1, "not as it should be"),
        ([], 0, "written"),
        (["--check"], 0, ""),
    ):
        monkeypatch.setattr(sys, "argv", ["tables.py", *arguments])
        with pytest.raises(SystemExit) as end:
            tables.main()
        assert (end.value.code or 0) == code
        assert said in capsys.readouterr().out
    assert (tmp_path / "faults.md").read_text(encoding="utf-8").count("| fsdp2 |") == 10


def test_every_kill_of_the_sweep_is_in_the_table_of_faults() -> None:
    kills = tables.results("kill")["kills"]
    text = tables.faults()
    assert text.split("## Each kill")[1].count("\n| ") - 1 == len(kills)
    assert f"Of {len(kills)} kills" in text
