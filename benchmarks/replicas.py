"""What copies in memory cost a step.

Steps after which state is copied take turns with steps after which it is not, in one run: of each step the time since
the one before it has ended, so that what the copying thread does meanwhile counts.

    python benchmarks/replicas.py --json benchmarks/results/replicas-cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from common import origin

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.commands import LAUNCHER_VARIABLES, write_run
from support.kill_sweep import TrainingRun, end_session

MODEL = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6}
SEQ_LEN = 64
FIRST = 6
"""Steps before it are not counted: they compile, fill caches, and make the optimizer's state."""


def made(workplace: Path, name: str, **changes: Any) -> TrainingRun:
    if not (workplace / "run.yaml").exists():
        write_run(workplace)
    values = yaml.safe_load((workplace / "run.yaml").read_text())
    values["model"] |= {**MODEL, "num_key_value_heads": 6, "max_position_embeddings": SEQ_LEN}
    values["data"]["seq_len"] = SEQ_LEN
    values |= {"output_dir": str(workplace / name), "sample": None, "max_restarts": 9, "plan": {"enabled": False}}
    path = workplace / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values | changes))
    return TrainingRun(path, workplace / name)


def started(run: TrainingRun) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    command = [sys.executable, "-m", "meshwright", "train", str(run.file)]
    with run.directory.with_suffix(".said").open("wb") as said:
        return subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)


def lines_of(run: TrainingRun) -> list[dict[str, Any]]:
    path = run.directory / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def steps(workplace: Path, count: int) -> dict[str, Any]:
    """Seconds from step to step, after a copy and after none."""
    copies = {"every": 10**6, "replicate": {"every": 2}}
    run = made(workplace, "steps", steps=count, checkpoint=copies)
    process = started(run)
    try:
        assert process.wait(900) == 0, run.directory.with_suffix(".said").read_text()
    finally:
        end_session(process)
    lines = {line["step"]: line for line in lines_of(run)}
    took = {step: lines[step]["time"] - lines[step - 1]["time"] for step in range(FIRST, count)}
    after_copy = [seconds for step, seconds in took.items() if (step - 1) % 2 == 0]
    after_none = [seconds for step, seconds in took.items() if (step - 1) % 2]
    pairs = [took[step + 1] / took[step] for step in range(FIRST, count - 1, 2)]
    held = [
        line["times"]["replicate"] for step, line in lines.items() if "replicate" in line["times"] and step >= FIRST
    ]
    events = [json.loads(line) for line in (run.directory / "events.jsonl").read_text().splitlines()]
    (reported,) = [each for each in events if each["event"] == "replication" and "step" not in each]
    state = sum(path.stat().st_size for path in (run.checkpoints / f"step-{count:08d}").glob("tensors-*"))
    return {
        "state_bytes_per_rank": state // 2,
        "after_none_s": statistics.median(after_none),
        "after_copy_s": statistics.median(after_copy),
        "ratio_of_pairs": statistics.median(pairs),
        "pairs": len(pairs),
        "held_up_s": statistics.median(held),
        "copied": reported["num_copied"],
        "left_out": reported["num_skipped"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=66)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="meshwright-copies-") as workplace:
        report = {
            "command": f"python benchmarks/replicas.py --steps {options.steps}",
            **origin(),
            "load": os.getloadavg()[0],
            "model": MODEL,
            "steps": steps(Path(workplace), options.steps),
        }
        report["load_at_end"] = os.getloadavg()[0]
    text = json.dumps(report, indent=1) + "\n"
    if options.json is not None:
        options.json.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
