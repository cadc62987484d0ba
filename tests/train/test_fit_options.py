"""What a run file says of how long, how patiently and how often: each as the plain thing that it stands for.

When a run stops is documented in `EarlyStoppingConfig`, and what is best by `KeepBestConfig`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.checkpoints import step_directory
from support.runs import RunWorkspace

from meshwright.base.errors import ConfigError
from meshwright_run.data.tokenizer import load_tokenizer
from meshwright_run.output import read_prompt
from meshwright_run.preflight import compute_num_steps, preflight, prepare_data_and_model_config
from meshwright_run.run_file import ScheduleConfig, load_run


def _summary(place: RunWorkspace) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place.out / "summary.json").read_text())
    return found


# -- epochs and warm-up


@pytest.mark.slow
def test_epochs_and_a_share_of_warm_up_are_the_steps_that_they_come_to(
    place: RunWorkspace, workplace: Path, tmp_path: Path
) -> None:
    reported = {"steps": None, "epochs": 0.21, "schedule": {"warmup_ratio": 0.3}}
    place.run_successfully(**reported)
    rows = sum(map(len, preflight(load_run(place.write_run_file(**reported)), 1).datasets.train_sets))
    steps = math.ceil(0.21 * rows / 4)
    assert 4 < steps < 12
    assert _summary(place)["num_steps"] == steps
    # Started in the one way, and continued with in the other.
    mixed = RunWorkspace(workplace, tmp_path / "mixed")
    mixed.directory.mkdir()
    assert mixed.run(kill_after=3, **reported)[1] == "killed"
    _, error, code = mixed.run(**reported | {"schedule": {"warmup_ratio": 0.9}})
    assert code == 2
    assert ": schedule.warmup_ratio=0.9 (was 0.3). Restore" in error
    assert "--set 'resume={from: auto, allow: [schedule]}'" in error
    assert "resuming from" in mixed.run_successfully(steps=steps, schedule={"warmup_steps": math.ceil(0.3 * steps)})
    assert mixed.read_metrics() == place.read_metrics()


def test_a_share_of_warm_up_is_rounded_up_as_it_is_written() -> None:
    for ratio, steps, warmup in ((0.07, 100, 7), (0.0701, 100, 8), (0.1, 30, 3), (0.03, 10, 1), (1, 9, 9), (0, 9, 0)):
        assert ScheduleConfig(warmup_ratio=ratio).resolve_warmup(steps) == ScheduleConfig(warmup_steps=warmup)


def test_an_epoch_has_each_row_once_the_last_step_is_whole_and_there_is_room_for_the_warm_up(
    place: RunWorkspace,
) -> None:
    for epochs, batch_size, steps in ((1, 4, 3), (2, 4, 5), (0.1, 4, 1), (0.3, 1, 3), (3, 2, 15), (1, 32, 1)):
        config = load_run(place.write_run_file(steps=None, epochs=epochs, batch_size=batch_size, schedule={}))
        assert compute_num_steps(config, 10) == steps
    config = load_run(place.write_run_file(steps=None, epochs=1, schedule={"warmup_steps": 9}))
    with pytest.raises(ConfigError, match="the number of rows of the data is unknown"):
        compute_num_steps(config, None)
    with pytest.raises(ConfigError, match="warmup_steps=9 is more than the 3 steps of epochs=1"):
        compute_num_steps(config, 10)


# -- early stopping


def _patient(patience: int) -> dict[str, Any]:
    return {"steps": 8, "eval": {"every": 1, "early_stopping": {"patience": patience, "min_delta": 99.0}}}


STOPPING = _patient(2)


def test_a_run_that_has_stopped_early_is_finished_until_it_is_to_be_more_patient(place: RunWorkspace) -> None:
    # Of three evaluations the first is the lowest. The checkpoint before the end is of step 2.
    assert place.run(kill_after=3, **STOPPING)[1] == "killed"
    output = place.run_successfully(**STOPPING)
    assert "resuming from" in output
    assert "stopped early, after 3 of 8 steps: the held-out loss has not fallen in 2 evaluations" in output
    assert [line["step"] for line in place.read_metrics()] == [1, 2, 3]
    assert place.list_steps() == [3, 2]
    assert (_summary(place)["step"], _summary(place)["num_steps"]) == (3, 8)
    assert "this run has finished" in place.run_successfully(**STOPPING)
    assert "after 5 of 8 steps" in place.run_successfully(**_patient(4))
    # More steps are no more patience.
    assert "after 5 of 9 steps" in place.run_successfully(**_patient(4) | {"steps": 9})
    assert [line["step"] for line in place.read_metrics()] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_run_that_another_has_stopped_early_is_not_started(
    place: RunWorkspace, workplace: Path, tmp_path: Path
) -> None:
    place.run_successfully(**STOPPING)
    other = RunWorkspace(workplace, tmp_path / "other")
    other.directory.mkdir()
    source = str(step_directory(place.root, 3))
    _, error, code = other.run(**STOPPING, resume=source)
    assert code == 2
    assert f"the run of {source} stopped early at step 3" in error
    assert "after 4 of 8 steps" in other.run_successfully(**_patient(3), resume=source)


# -- several sets, and the best


@pytest.mark.slow
def test_several_sets_are_evaluated_kept_and_reported(place: RunWorkspace, workplace: Path) -> None:
    data = yaml.safe_load((workplace / "run.yaml").read_text())["data"]
    data["eval_sets"] = {"news": {"files": str(workplace / "more" / "news.jsonl")}}
    changes = {"data": data, "eval": {"every": 1, "max_sequences": 3}}
    changes["checkpoint"] = {"keep_last": 1, "keep_best": {"eval_set": "news", "count": 2}}
    # Rates that make of the last steps the worst.
    changes |= {"optimizer": {"lr": 0.3}, "schedule": {"name": "constant"}}
    output = place.run_successfully(**changes)
    losses = [line["evaluations"] for line in place.read_metrics()]
    assert all(each.keys() == {"held_out", "news"} and each["held_out"] != each["news"] for each in losses)
    assert [line["held_out_loss"] for line in place.read_metrics()] == [each["held_out"] for each in losses]
    best = sorted(range(1, 9), key=lambda step: losses[step - 1]["news"])[:2]
    assert place.list_steps() == sorted({*best, 8}, reverse=True)
    summary = _summary(place)
    assert summary["evaluations"] == losses[-1]
    assert [each["step"] for each in summary["best_checkpoints"]] == best
    assert f"lowest news loss {losses[best[0] - 1]['news']:.6f}: {step_directory(place.root, best[0])}" in output
    assert f"news loss {losses[-1]['news']:.6f}" in output


def test_checkpoints_are_saved_by_the_clock(place: RunWorkspace) -> None:
    place.run_successfully(steps=3, checkpoint={"every": [200, "0.001s"], "keep_last": None})
    assert place.list_steps() == [3, 2, 1]
    for every, steps, seconds in ((500, 500, None), ("1.5h", None, 5400.0), ([".5s", 3], 3, 0.5), (None, None, None)):
        reported = load_run(place.write_run_file(checkpoint={"every": every})).checkpoint
        assert (reported.every_steps, reported.every_seconds, reported.is_enabled) == (
            steps,
            seconds,
            every is not None,
        )
    for wrong in ("0m", "20", "20d", [], [500, 600], ["1m", "2m"], 0, True, [500, "0.0s"]):
        with pytest.raises(ConfigError, match=r"checkpoint\.every"):
            load_run(place.write_run_file(checkpoint={"every": wrong}))


# -- the sample


@pytest.mark.slow
def test_a_sample_continues_a_held_out_document_unless_a_prompt_is_given(place: RunWorkspace) -> None:
    changes = {"steps": 1, "schedule": {}, "checkpoint": {}}
    config = load_run(place.write_run_file(**changes))
    plan = preflight(config, 1)
    text = load_tokenizer(plan.data.tokenizer_dir).decode(read_prompt(plan.datasets.main_eval_set)[0])
    assert 8 < len(text) < 120
    assert f"\nsample\n{text}" in place.run_successfully(**changes, sample={"max_new_tokens": 3}, overwrite=True)
    assert "\nsample\n3 is" in place.run_successfully(**changes, sample={"prompt": "3 is"}, overwrite=True)
    assert "\nsample\n" not in place.run_successfully(**changes, sample=None, overwrite=True)


# -- objectives that need more than tokens


@pytest.fixture(scope="module")
def preferences(workplace: Path) -> dict[str, Any]:
    """Data of pairs, in which the right answer is chosen; 40 of them."""
    lines = []
    for n in range(40):
        right, wrong = ("even", "odd") if n % 2 == 0 else ("odd", "even")
        lines.append({"prompt": f"{n} is ", "chosen": right, "rejected": wrong})
    path = workplace / "more" / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    run = workplace / "run.yaml"
    data: dict[str, Any] = yaml.safe_load(run.read_text())["data"]
    tokenizer = prepare_data_and_model_config(load_run(run))[0].tokenizer_dir
    sources = [{"files": str(path), "format": "preference"}]
    kept = {key: data[key] for key in ("cache_dir", "seq_len")}
    return kept | {"tokenizer": str(tokenizer), "sources": sources, "eval_fraction": 0.2}


def _reported_sums(place: RunWorkspace) -> list[dict[str, float]]:
    return [{name: value / line["num_tokens"] for name, value in line["sums"].items()} for line in place.read_metrics()]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "sizes", "ranks"), [("ddp", {}, 2), ("fsdp2", {"tp_size": 2}, 2)], ids=str)
def test_a_reference_is_the_model_at_the_beginning_also_of_a_run_that_continues(
    strategy: str, sizes: dict[str, int], ranks: int, preferences: dict[str, Any], place: RunWorkspace, tmp_path: Path
) -> None:
    reported = {"data": preferences, "objective": {"name": "dpo", "beta": 1.0}, "micro_batch_size": 2, "batch_size": 8}
    output = place.run_successfully(**reported)
    assert "computing reference log-probabilities" in output
    lines, sums = place.read_metrics(), _reported_sums(place)
    # Nothing is supervised before the first step, so that the model is its own reference.
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-12)
    assert sums[0]["rewards/margins"] == pytest.approx(0.0, abs=1e-12)
    assert abs(sums[-1]["rewards/margins"]) > 1e-3
    other = RunWorkspace(place.workplace, tmp_path / "other")
    other.directory.mkdir()
    layout = {"strategy": strategy, "nproc": ranks, **sizes}
    assert other.run(ranks=ranks, kill_after=5, **reported, **layout)[1] == "killed"
    output, error, code = other.run(ranks=ranks, **reported, **layout)
    assert code == 0, error
    assert "resuming from" in output
    assert "computing" not in output
    for one, each in zip(other.read_metrics(), lines, strict=True):
        assert one["loss"] == pytest.approx(each["loss"], abs=1e-9)
        assert one["sums"] == pytest.approx(each["sums"], abs=1e-8)
    # What was computed is not of this run any more.
    again, error, code = other.run(ranks=ranks, overwrite=True, resume="never", seed=1, **reported, **layout)
    assert code == 0, error
    assert "computing" in again


@pytest.mark.parametrize(
    ("objective", "changes", "text"),
    [
        (None, {}, "the cross entropy uses each row on its own, so rejected answers would be supervised"),
        ({"name": "grpo", "beta": 0.1}, {"corpus": True}, "needs advantages, reference_log_probs besides the tokens"),
        (
            "orpo",
            {"corpus": True},
            "objective 'orpo' takes rows 2 by 2, but the rows of these data are not grouped",
        ),
        ("orpo", {"micro_batch_size": 1}, "micro_batch_size=1 must be a multiple of 2, since 2 rows belong together"),
    ],
    ids=str,
)
def test_an_objective_that_the_data_do_not_serve_is_refused_before_anything_starts(
    objective: Any, changes: dict[str, Any], text: str, preferences: dict[str, Any], place: RunWorkspace
) -> None:
    reported: dict[str, Any] = {"micro_batch_size": 2, "batch_size": 8, "data": preferences, "objective": objective}
    if "packing" in changes:
        reported["data"] = preferences | changes
    elif "corpus" in changes:
        del reported["data"]
    else:
        reported |= changes
    _, error, code = place.run(**reported)
    assert code == 2
    assert text in error
    assert not place.out.exists()


@pytest.mark.slow
def test_columns_of_the_data_reach_the_objective_as_it_asks_for_them(
    place: RunWorkspace, workplace: Path, tmp_path: Path
) -> None:
    lines = [
        {"text": f"{n} is {'odd' if n % 2 else 'even'}, " * 8, "advantages": n % 2, "old": -1.5} for n in range(20)
    ]
    path = workplace / "more" / "advantages.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    data = yaml.safe_load((workplace / "run.yaml").read_text())["data"]
    del data["corpus"]
    source = {"files": str(path), "columns": ["advantages"]}
    data |= {"sources": [source], "packing": "none", "too_long": "truncate", "seq_len": 32, "eval_fraction": 0.2}
    model = yaml.safe_load((workplace / "run.yaml").read_text())["model"] | {"dtype": "float64"}
    place.run_successfully(data=data, objective="grpo", steps=3, model=model)
    # Without older log-probabilities the ratio is 1, and the loss minus the mean advantage.
    assert all(-1.0 <= line["loss"] <= 0.0 for line in place.read_metrics())
    assert any(line["loss"] < -0.2 for line in place.read_metrics())
