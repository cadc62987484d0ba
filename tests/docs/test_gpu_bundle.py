"""`benchmarks/gpu/all.py`: parts end at their limits and lose nothing of others; docs/gpu.md says what was found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tables

gpu_page = tables.script("tools/gpu_page.py").gpu_page
runner = tables.script("benchmarks/gpu/runner.py")
everything = tables.script("benchmarks/gpu/all.py")
ROOT = Path(__file__).resolve().parents[2]


def _part(name: str, limit_s: int, **commands: list[str]) -> Any:
    return runner.Part(name, "a claim", "index.md", limit_s, commands)


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.slow
def test_parts_that_fail_or_hang_cost_their_own_result_only(tmp_path: Path) -> None:
    child = (
        "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"
    )
    write = "import json, sys; json.dump({'found': 1}, open(sys.argv[1], 'w'))"
    run = runner.Runner(tmp_path, 20, {"device": "cpu"})
    start = time.monotonic()
    report = run.run(
        [
            _part("hangs", 3, only=_python(child)),
            _part("fails", 5, first=_python("raise SystemExit('told so')"), second=[*_python(write), "{json}"]),
            _part("long", 1000, only=_python("")),
            _part("works", 5, only=[*_python(write), "{json}"]),
        ]
    )
    assert time.monotonic() - start < 15
    parts = report["parts"]
    assert json.loads((tmp_path / "gpu.json").read_text()) == report
    assert parts["hangs"]["results"]["only"]["ending"] == "limit"
    grandchild = int(parts["hangs"]["results"]["only"]["output"])
    with pytest.raises(ProcessLookupError):
        _until_gone(grandchild)
    assert parts["fails"]["status"] == "failed: first"
    assert parts["fails"]["results"]["first"]["ending"] == "exit code 1"
    assert "told so" in parts["fails"]["results"]["first"]["output"]
    assert parts["fails"]["results"]["second"]["result"] == {"found": 1}
    assert parts["long"]["status"] == "not reached"
    assert "needs 1000 s" in parts["long"]["reason"]
    assert parts["works"]["status"] == "done"


def _until_gone(process: int) -> None:
    for _ in range(50):
        os.kill(process, 0)
        time.sleep(0.1)


@pytest.mark.slow
def test_the_report_is_there_after_each_part(tmp_path: Path) -> None:
    seen = f"import json; print(len(json.load(open({str(tmp_path / 'gpu.json')!r}))['parts'])); raise SystemExit(1)"
    report = runner.Runner(tmp_path, 20, {}).run(
        [_part("one", 5, only=_python("")), _part("two", 5, only=_python(seen))]
    )
    assert report["parts"]["two"]["results"]["only"]["output"] == "1\n"


def test_the_page_has_a_result_or_says_that_there_is_none(tmp_path: Path) -> None:
    result = {"ending": "done", "seconds": 1.0, "result": {"counts": {"passed": 3}}}
    failed = {"ending": "exit code 2", "seconds": 1.0, "output": "a\nerror: no GPU\n"}
    parts = {
        "nccl": {"status": "done", "results": {"cells": result}},
        "smoke": {"status": "x", "results": {"ddp": failed}},
    }
    (tmp_path / "card.json").write_text(json.dumps({"date": "2030-01-01", "parts": parts}))
    page = gpu_page(tmp_path, everything.parts("cuda"))
    sections = dict(section.split("\n", 1) for section in page.split("\n## ")[1:])
    found = {name.partition(":")[0]: text for name, text in sections.items()}
    assert "- card, cells: passed 3" in found["nccl"]
    assert "- card, ddp: failed: exit code 2, error: no GPU" in found["smoke"]
    assert "- not yet measured" in found["offload"]
    assert all((ROOT / "docs" / part.page).is_file() for part in everything.parts("cuda"))


def test_parts_are_listed_and_an_unknown_one_is_refused() -> None:
    script = str(ROOT / "benchmarks" / "gpu" / "all.py")
    listed = subprocess.run([sys.executable, script, "--list"], capture_output=True, text=True, check=True).stdout
    assert len(listed.splitlines()) == len(everything.parts("cuda"))
    refused = subprocess.run([sys.executable, script, "nothing"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "unknown part 'nothing'; parts: about, smoke" in refused.stderr


def test_the_most_valuable_parts_fit_into_eight_minutes() -> None:
    limits = [part.limit_s for part in everything.parts("cuda")]
    assert sum(limits[:5]) <= 480


@pytest.mark.slow
def test_contestants_do_the_same_work_one_at_a_time(tmp_path: Path) -> None:
    script, file = str(ROOT / "benchmarks" / "gpu" / "throughput.py"), tmp_path / "found.json"
    options = ["--size", "tiny", "--device", "cpu", "--rounds", "1", "--seq", "32", "--out", str(file)]
    subprocess.run([sys.executable, script, *options], check=True, capture_output=True, timeout=200)
    found = json.loads(file.read_text())
    assert set(found["contestants"]) == {"by hand", "by hand, loss in chunks", "ours"}
    assert found["largest_relative_disagreement"] < 1e-4
    assert set(found["ours_to"]) == {"by hand", "by hand, loss in chunks"}
