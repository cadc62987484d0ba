"""`benchmarks/gpu/all.py`: parts end at their limits and lose nothing of others."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import generated_pages
import pytest

runner = generated_pages.load_script("benchmarks/gpu/runner.py")
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
    seen = f"import json; print(len(json.load(open({str(tmp_path / 'gpu.json')!r}))['parts'])); raise SystemExit(1)"
    run = runner.Runner(tmp_path, 20, {"device": "cpu"})
    start = time.monotonic()
    report = run.run(
        [
            _part("hangs", 3, only=_python(child)),
            _part("fails", 5, first=_python("raise SystemExit('reported so')"), second=[*_python(write), "{json}"]),
            _part("long", 1000, only=_python("")),
            _part("works", 5, only=[*_python(write), "{json}"]),
            _part("sees", 5, only=_python(seen)),
        ]
    )
    assert time.monotonic() - start < 15
    parts = report["parts"]
    assert json.loads((tmp_path / "gpu.json").read_text()) == report
    assert parts["hangs"]["results"]["only"]["ending"] == "limit"
    grandchild = int(parts["hangs"]["results"]["only"]["output"])
    until = time.monotonic() + 5
    while Path(f"/proc/{grandchild}").exists():
        assert time.monotonic() < until
        time.sleep(0.1)
    assert parts["fails"]["status"] == "failed: first"
    assert parts["fails"]["results"]["first"]["ending"] == "exit code 1"
    assert "reported so" in parts["fails"]["results"]["first"]["output"]
    assert parts["fails"]["results"]["second"]["result"] == {"found": 1}
    assert parts["long"]["status"] == "not reached"
    assert "needs 1000 s" in parts["long"]["reason"]
    assert parts["works"]["status"] == "done"
    # The report is there after each part.
    assert parts["sees"]["results"]["only"]["output"] == "4\n"


@pytest.mark.slow
def test_contestants_do_the_same_work_one_at_a_time(tmp_path: Path) -> None:
    script, file = str(ROOT / "benchmarks" / "gpu" / "throughput.py"), tmp_path / "found.json"
    options = ["--size", "tiny", "--device", "cpu", "--rounds", "1", "--seq", "32", "--out", str(file)]
    subprocess.run([sys.executable, script, *options], check=True, capture_output=True, timeout=200)
    found = json.loads(file.read_text())
    assert set(found["contestants"]) == {"by hand", "by hand, loss in chunks", "ours"}
    assert found["largest_relative_disagreement"] < 1e-4
    assert set(found["ours_to"]) == {"by hand", "by hand, loss in chunks"}
