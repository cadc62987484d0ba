"""Each option that changes a run acts: a run under another value is told from one under the values below.

Options of RunConfig, OptimizerConfig, OptimizerGroup, EMAConfig, ScheduleConfig, EvalConfig, EarlyStoppingConfig,
SampleConfig, CheckpointConfig, KeepBestConfig and DataConfig.
"""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import MODEL
from support.runs import Place

from meshwright import open_world
from meshwright.checkpoint import Checkpointer
from meshwright_run import run_rank as run
from meshwright_run.preflight import plan_run, processes
from meshwright_run.run_file import load_run
from meshwright_testing import pool

BASE: dict[str, Any] = {
    "steps": 4,
    "log_every": 3,
    "eval": {"every": 2, "sequences": 2},
    "sample": {"prompt": "4 is ", "max_new_tokens": 5, "temperature": 0.7},
    "optimizer": {"name": "AdamW", "lr": 1e-2, "weight_decay": 0.5},
    "schedule": {"name": "cosine", "warmup_steps": 1},
    "checkpoint": {"every": 1, "keep_last": 1, "asynchronous": False},
}


def _facts(place: Place, output: str) -> dict[str, Any]:
    metrics = place.metrics()
    return {
        "losses": [line["loss"] for line in metrics],
        "norms": [line["grad_norm"] for line in metrics],
        "rates": [line["learning_rate"] for line in metrics],
        "tokens": [line["num_tokens"] for line in metrics],
        "evaluated": [line["step"] for line in metrics if line.get("held_out_loss") is not None],
        "held out": [line.get("held_out_loss") for line in metrics],
        "headline": output.split(":")[0],
        "lines": re.findall(r"^step (\d+)/", output, re.MULTILINE),
        "sample": output.partition("\nsample\n")[2].partition("\nwritten")[0],
        "checkpoints": place.steps(),
        "sums": [line.get("sums") for line in metrics],
        "averaged": [line.get("evaluations", {}).get("held_out_ema") for line in metrics],
        "written": sorted(path.name for path in place.out.iterdir() if not path.name.startswith(".")),
    }


@pytest.fixture(scope="module")
def base(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = Place(workplace, tmp_path_factory.mktemp("base"))
    return _facts(place, place.runs(**BASE))


def _inside(key: str, **changes: Any) -> dict[str, Any]:
    return {key: BASE[key] | changes}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "changed"),
    [
        ({}, set()),
        ({"strategy": "ddp"}, ["headline"]),
        ({"seed": 1}, ["losses"]),
        ({"steps": 3}, ["rates", "losses"]),
        ({"batch_size": 8}, ["tokens"]),
        ({"model": MODEL | {"num_hidden_layers": 1}}, ["losses"]),
        ({"log_every": 2}, ["lines"]),
        ({"max_grad_norm": 0.01}, ["losses"]),
        ({"grad_norm_type": 1.0}, ["norms"]),
        ({"objective": {"name": "cross_entropy", "sums": ["correct"]}}, ["sums"]),
        ({"objective": {"name": "cross_entropy", "label_smoothing": 0.2}}, ["losses", "held out"]),
        (_inside("optimizer", name="SGD"), ["losses"]),
        (_inside("optimizer", lr=1e-3), ["rates", "losses"]),
        (_inside("optimizer", weight_decay=0.0), ["losses"]),
        (_inside("optimizer", no_decay=["*"]), ["losses"]),
        (_inside("optimizer", options={"betas": [0.5, 0.9]}), ["losses"]),
        (_inside("optimizer", groups=[{"match": ["*norm*"], "lr": 0.5}]), ["losses"]),
        (_inside("optimizer", groups=[{"matrices": True, "name": "Muon"}]), ["losses"]),
        ({"ema": {"decay": 0.5}}, ["averaged", "written"]),
        ({"ema": {"decay": 0.5, "evaluate": False}}, ["written"]),
        ({"ema": {"decay": 0.5, "export": False}}, ["averaged"]),
        (_inside("schedule", name="linear"), ["rates", "losses"]),
        (_inside("schedule", warmup_steps=3), ["rates", "losses"]),
        (_inside("schedule", options={"num_cycles": 2.0}), ["rates", "losses"]),
        ({"steps": None, "epochs": 0.0625}, ["rates", "losses"]),
        (_inside("schedule", warmup_steps=0, warmup_ratio=0.75), ["rates", "losses"]),
        (_inside("eval", early_stopping={"patience": 1, "min_delta": 99.0}, every=1), ["losses", "evaluated"]),
        (_inside("eval", every=None), ["evaluated"]),
        (_inside("eval", sequences=1), ["held out"]),
        (_inside("sample", prompt="3 is "), ["sample"]),
        (_inside("sample", max_new_tokens=2), ["sample"]),
        (_inside("sample", temperature=0.0), ["sample"]),
        (_inside("checkpoint", every=None), ["checkpoints"]),
        (_inside("checkpoint", keep_last=2), ["checkpoints"]),
        (_inside("checkpoint", keep_every=2), ["checkpoints"]),
        (_inside("checkpoint", keep_best={"n": 2}), ["checkpoints"]),
        (_inside("checkpoint", keep_last=4, every="0.001s"), ["checkpoints"]),
        ({"sample": None}, ["sample"]),
    ],
    ids=str,
)
def test_a_run_heeds_the_option(
    changes: dict[str, Any], changed: list[str], base: dict[str, Any], workplace: Path, tmp_path: Path
) -> None:
    place = Place(workplace, tmp_path)
    facts = _facts(place, place.runs(**BASE | changes))
    differing = {name for name, value in facts.items() if value != base[name]}
    assert set(changed) <= differing
    assert bool(differing) == bool(changes)


@pytest.mark.slow
def test_cross_entropy_by_name_is_what_a_run_minimizes_by_default(
    base: dict[str, Any], workplace: Path, tmp_path: Path
) -> None:
    place = Place(workplace, tmp_path)
    output = place.runs(**BASE | {"objective": {"name": "cross_entropy", "sums": ["correct"]}})
    facts = _facts(place, output)
    for name in ("losses", "norms", "held out"):
        assert [each or 0.0 for each in facts[name]] == pytest.approx([each or 0.0 for each in base[name]], rel=1e-5)
    assert facts["tokens"] == base["tokens"]
    for sums, tokens in zip(facts["sums"], facts["tokens"], strict=True):
        assert sums.keys() == {"correct"}
        assert sums["correct"] in range(tokens + 1)
    told = re.findall(r"correct ([0-9.]+)", output)
    assert float(told[-1]) == pytest.approx(facts["sums"][-1]["correct"] / facts["tokens"][-1], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "changed"),
    [
        ({"seq_len": 8}, ["tokens"]),
        ({"vocab_size": 280}, ["losses"]),
        ({"eval_fraction": 0.7}, ["held out"]),
        ({"text_field": "body"}, ["losses"]),
        ({"corpus": "*.txt"}, ["losses"]),
    ],
    ids=str,
)
def test_data_heed_the_option(
    changes: dict[str, Any], changed: list[str], base: dict[str, Any], workplace: Path, tmp_path: Path
) -> None:
    data = {"corpus": [str(workplace / "*.txt"), str(workplace / "*.jsonl")], "vocab_size": 300, "seq_len": 16}
    data |= {"cache_dir": str(tmp_path / "cache")} | changes
    if "corpus" in changes:
        data["corpus"] = str(workplace / changes["corpus"])
    place = Place(workplace, tmp_path)
    facts = _facts(place, place.runs(**BASE | {"data": data}))
    assert (tmp_path / "cache").is_dir()
    assert set(changed) <= {name for name, value in facts.items() if value != base[name]}


def test_a_plan_heeds_what_is_said_of_ranks_strategies_and_microbatches(workplace: Path, tmp_path: Path) -> None:
    options = {"strategy": "fsdp2", "strategy_config": {"activation_checkpointing": "full"}, "pp_size": 2}
    options |= {"wrapper_config": {"pipeline": {"pp_schedule": "gpipe"}}, "micro_batch_size": 2, "nproc": 2}
    config = load_run(Place(workplace, tmp_path).file(**BASE | options))
    assert processes(config) == 2
    plan = plan_run(config, 2)
    assert str(plan.stack) == "pipeline over fsdp2"
    assert plan.stack.inner.config.activation_checkpointing == "full"  # type: ignore[attr-defined]
    assert plan.stack.wrappers[0].config.pp_schedule == "gpipe"  # type: ignore[attr-defined]
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
    file = Place(workplace, tmp_path).file(**BASE | options | {"output_dir": str(tmp_path / "other")})
    assert pool(1).run(_handed_on, str(file)) == [(3, 41.0, False, "continue")]
    assert (tmp_path / "other" / "metrics.jsonl").is_file()


def test_checkpoints_go_to_the_directory_that_is_named_and_the_run_goes_on_from_there(
    workplace: Path, tmp_path: Path
) -> None:
    place, elsewhere = Place(workplace, tmp_path), tmp_path / "elsewhere"
    options = BASE | _inside("checkpoint", keep_last=None, to=str(elsewhere))
    assert place.run(kill_after=3, **options)[1] == "killed"
    assert place.steps(elsewhere) == [2, 1]
    assert f"going on from {elsewhere}" in place.runs(**options)
    assert place.steps(elsewhere) == [4, 3, 2, 1]
    assert not place.root.exists()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="tries a device that is not there")
def test_a_run_takes_the_device_that_is_named(workplace: Path, tmp_path: Path) -> None:
    place = Place(workplace, tmp_path)
    assert place.run(**BASE | {"device": "cpu", "steps": 1})[2] == 0
    _, error, code = place.run(**BASE | {"device": "cuda", "steps": 1, "output_dir": str(tmp_path / "other")})
    assert (code, "cuda" in error) == (2, True)
