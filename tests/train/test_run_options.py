"""Options of a run file act. Those whose effect other tests compute exactly are left out here."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import RunWorkspace

from meshwright import open_world
from meshwright.checkpoint import Checkpointer
from meshwright_run import run_rank as run
from meshwright_run.preflight import count_local_ranks, preflight
from meshwright_run.run_file import load_run
from meshwright_testing import pool

BASE: dict[str, Any] = {
    "steps": 4,
    "log_every": 3,
    "eval": {"every": 2, "max_sequences": 2},
    "sample": {"prompt": "4 is ", "max_new_tokens": 5, "temperature": 0.7},
    "optimizer": {"name": "AdamW", "lr": 1e-2, "weight_decay": 0.5},
    "schedule": {"name": "cosine", "warmup_steps": 1},
    "checkpoint": {"every": 1, "keep_last": 1, "asynchronous": False},
}


def _facts(place: RunWorkspace, output: str) -> dict[str, Any]:
    metrics = place.read_metrics()
    return {
        "losses": [line["loss"] for line in metrics],
        "norms": [line["grad_norm"] for line in metrics],
        "held out": [line.get("held_out_loss") for line in metrics],
        "sample": output.partition("\nsample\n")[2].partition("\nwritten")[0],
        "checkpoints": place.list_steps(),
    }


@pytest.fixture(scope="module")
def base(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = RunWorkspace(workplace, tmp_path_factory.mktemp("base"))
    return _facts(place, place.run_successfully(**BASE))


def _inside(key: str, **changes: Any) -> dict[str, Any]:
    return {key: BASE[key] | changes}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "changed"),
    [
        ({}, set()),
        ({"grad_norm_type": 1.0}, ["norms"]),
        (_inside("optimizer", name="SGD"), ["losses"]),
        (_inside("optimizer", groups=[{"matrices_only": True, "name": "Muon"}]), ["losses"]),
        (_inside("schedule", options={"num_cycles": 2.0}), ["losses"]),
        (_inside("eval", max_sequences=1), ["held out"]),
        (_inside("sample", max_new_tokens=2), ["sample"]),
        (_inside("sample", temperature=0.0), ["sample"]),
        (_inside("checkpoint", keep_every=2), ["checkpoints"]),
    ],
    ids=str,
)
def test_a_run_respects_the_option(
    changes: dict[str, Any], changed: list[str], base: dict[str, Any], workplace: Path, tmp_path: Path
) -> None:
    place = RunWorkspace(workplace, tmp_path)
    facts = _facts(place, place.run_successfully(**BASE | changes))
    differing = {name for name, value in facts.items() if value != base[name]}
    assert set(changed) <= differing
    assert bool(differing) == bool(changes)


def test_a_plan_respects_what_is_said_of_ranks_strategies_and_microbatches(workplace: Path, tmp_path: Path) -> None:
    options = {"strategy": "fsdp2", "strategy_config": {"activation_checkpointing": "full"}, "pp_size": 2}
    options |= {"wrapper_config": {"pipeline": {"pp_schedule": "gpipe"}}, "micro_batch_size": 2, "nproc": 2}
    config = load_run(RunWorkspace(workplace, tmp_path).write_run_file(**BASE | options))
    assert count_local_ranks(config) == 2
    plan = preflight(config, 2)
    assert str(plan.strategy_stack) == "pipeline over fsdp2"
    assert plan.strategy_stack.inner.config.activation_checkpointing == "full"  # type: ignore[attr-defined]
    assert plan.strategy_stack.wrappers[0].config.pp_schedule == "gpipe"  # type: ignore[attr-defined]
    assert plan.micro_batch_size == 2


def _handed_on(path: str) -> tuple[int, float, bool, str]:
    """The threads of a rank, how long it waits, and how it saves."""
    before, timeouts, saving = torch.get_num_threads(), [], []
    with redirect_stdout(io.StringIO()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "open_world", lambda *a, **b: timeouts.append(b["timeout_s"]) or open_world(*a, **b))
        patch.setattr(run, "Checkpointer", lambda *a, **b: saving.append(b) or Checkpointer(*a, **b))
        run.run_rank(None, load_run(path))
    used = torch.get_num_threads()
    torch.set_num_threads(before)
    return used, timeouts[0], saving[0]["asynchronous"], saving[0]["on_error"]


def test_threads_waiting_saving_and_directory_are_as_the_file_says(workplace: Path, tmp_path: Path) -> None:
    options = {"threads_per_rank": 3, "timeout_s": 41, "steps": 1}
    options |= _inside("checkpoint", asynchronous=False, on_error="continue")
    file = RunWorkspace(workplace, tmp_path).write_run_file(**BASE | options | {"output_dir": str(tmp_path / "other")})
    assert pool(1).run(_handed_on, str(file)) == [(3, 41.0, False, "continue")]
    assert (tmp_path / "other" / "metrics.jsonl").is_file()


def test_checkpoints_go_to_the_directory_that_is_named_and_the_run_resumes_from_there(
    workplace: Path, tmp_path: Path
) -> None:
    place, elsewhere = RunWorkspace(workplace, tmp_path), tmp_path / "elsewhere"
    options = BASE | _inside("checkpoint", keep_last=None, path=str(elsewhere))
    assert place.run(kill_after=3, **options)[1] == "killed"
    assert place.list_steps(elsewhere) == [2, 1]
    assert f"resuming from {elsewhere}" in place.run_successfully(**options)
    assert place.list_steps(elsewhere) == [4, 3, 2, 1]
    assert not place.root.exists()
