"""A run and its directory: what continues, what is set aside, what is refused, and that nothing is lost."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.checkpoints import flip_file_bit, rewrite_manifest, step_directory
from support.runs import EVERY, STEPS, TOLERANCE, RunWorkspace
from transformers import AutoModelForCausalLM

from meshwright.base.errors import ConfigError
from meshwright.checkpoint.manifest import MANIFEST_FILE
from meshwright.events.step import StepResult
from meshwright.optim.build import build_scheduler, set_scheduler_step
from meshwright.optim.groups import split_by_decay
from meshwright_run.data.order import DataOrder
from meshwright_run.data.train_sampler import build_datasets
from meshwright_run.metrics_report import read_metrics, to_record
from meshwright_run.preflight import prepare_data_and_model_config
from meshwright_run.run_action import check_restarts
from meshwright_run.run_directory import RunDirectory
from meshwright_run.run_file import RunConfig, ScheduleConfig, load_run


@pytest.fixture(scope="module")
def uninterrupted(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> RunWorkspace:
    whole = RunWorkspace(workplace, tmp_path_factory.mktemp("whole"))
    whole.run_successfully()
    return whole


# -- none of the checkpoints loads


@pytest.mark.slow
def test_where_no_checkpoint_is_whole_the_run_stops_and_removes_nothing(place: RunWorkspace) -> None:
    assert place.run(kill_after=5)[1] == "killed"
    for step in place.list_steps():
        flip_file_bit(step_directory(place.root, step) / "tensors-00000.bin")
    before = place.read_contents()
    for overwrite in (False, True):
        _, error, code = place.run(overwrite=overwrite)
        assert code == 2
        for step in (2, 4):
            assert re.search(rf"step-0000000{step} is not whole: the contents of tensors-00000.bin have changed", error)
        assert "resume=never and overwrite=true" in error
        assert place.read_contents() == before
    place.run_successfully(resume="never", overwrite=True)
    assert place.list_steps() == [8, 6, 4, 2]


def test_a_newer_format_stops_the_run_and_no_older_one_is_taken(place: RunWorkspace) -> None:
    assert place.run(kill_after=5)[1] == "killed"
    manifest = step_directory(place.root, 4) / MANIFEST_FILE
    manifest.write_text(re.sub(r'"format": \d+', '"format": 99', manifest.read_text()))
    before = place.read_contents()
    _, error, code = place.run()
    assert code == 2
    assert "has format 99" in error
    assert place.read_contents() == before


@pytest.mark.slow
def test_a_incomplete_newest_one_is_set_aside_and_never_costs_a_whole_one(
    place: RunWorkspace, uninterrupted: RunWorkspace
) -> None:
    settings = {"every": EVERY, "keep_last": 1, "asynchronous": False}
    assert place.run(kill_after=7, checkpoint={**settings, "keep_last": 2})[1] == "killed"
    assert place.list_steps() == [6, 4]
    flip_file_bit(step_directory(place.root, 6) / "tensors-00000.bin")
    # At other steps than before, so that the incomplete one would count as the newest.
    assert place.run(kill_after=6, checkpoint={**settings, "every": 5})[1] == "killed"
    assert place.list_steps(place.root / "abandoned-1") == [6]
    assert place.list_steps() == [5]
    assert place.run(kill_after=7, checkpoint=settings)[1] == "killed"
    assert "after step 6" in place.run_successfully(checkpoint=settings)
    assert place.list_steps() == [8]
    assert place.read_metrics() == uninterrupted.read_metrics()


# -- back to an earlier step


def test_going_back_sets_later_checkpoints_aside_and_the_same_command_continues_with_the_branch(
    place: RunWorkspace, uninterrupted: RunWorkspace
) -> None:
    place.run_successfully()
    source = step_directory(place.root, 2)
    branch = {
        "resume": {"from": str(source), "allow": ["optimizer.lr"]},
        "optimizer": {"lr": 5e-3, "weight_decay": 0.1},
        "checkpoint": {"every": EVERY, "keep_last": 2, "asynchronous": False},
    }
    output, error, _ = place.run(kill_after=5, **branch)
    aside = place.root / "abandoned-1"
    assert error == "killed"
    assert "after step 2, with changed optimizer.lr" in output
    assert "were moved to" in output
    assert place.list_steps(aside) == [8, 6, 4]
    assert place.read_metrics(aside) == uninterrupted.read_metrics()
    assert place.list_steps() == [4, 2]
    assert [line["step"] for line in place.read_metrics()] == [1, 2, 3, 4, 5]
    # The run's own checkpoint, not the one that it began with.
    assert "after step 4" in place.run(kill_after=7, **branch)[0]
    assert place.list_steps() == [6, 4]
    # What it began with has gone since. A plain run continues with the branch, too.
    assert "after step 6" in place.run(kill_after=7, **branch)[0]
    plain = {**branch, "resume": "auto"}
    assert "after step 6" in place.run_successfully(**plain)
    metrics = place.read_metrics()
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    assert metrics[:2] == uninterrupted.read_metrics()[:2]
    for mine, other in zip(metrics[2:], uninterrupted.read_metrics()[2:], strict=True):
        assert mine["learning_rate"] == pytest.approx(other["learning_rate"] / 2)
    assert [path.name for path in place.root.glob("abandoned-*")] == ["abandoned-1"]
    # And back to what was set aside: its metrics come along.
    again = place.run_successfully(resume=str(step_directory(aside, 6)))
    assert "after step 6" in again
    assert place.read_metrics() == uninterrupted.read_metrics()
    assert place.list_steps(place.root / "abandoned-2") == [8, 6]
    assert place.list_steps() == [8]


@pytest.mark.slow
def test_a_run_that_began_with_a_checkpoint_elsewhere_continues_with_its_own(
    place: RunWorkspace, uninterrupted: RunWorkspace
) -> None:
    source = {"resume": str(step_directory(uninterrupted.root, 4))}
    before = uninterrupted.read_contents()
    assert "after step 4" in place.run(kill_after=5, **source)[0]
    _, error, code = place.run(resume="auto")
    assert (code, "started from" in error) == (2, True)
    assert "after step 4" in place.run(kill_after=7, **source)[0]
    assert "after step 6" in place.run_successfully(**source)
    assert place.read_metrics() == uninterrupted.read_metrics()[4:]
    assert "has finished" in place.run_successfully(**source)
    assert uninterrupted.read_contents() == before


def test_a_checkpoint_of_another_run_is_not_continued_from(place: RunWorkspace, uninterrupted: RunWorkspace) -> None:
    source = str(step_directory(uninterrupted.root, STEPS))
    for changes, reported in (
        ({"resume": source, "batch_size": 8, "steps": 20}, "the run differs"),
        ({"resume": source}, "Raise steps"),
        ({"resume": str(place.directory)}, "is no checkpoint"),
        ({"seed": 3, "output_dir": str(uninterrupted.out)}, "holds the results of an earlier run"),
    ):
        _, error, code = place.run(**changes)
        assert (code, reported in error) == (2, True), error
    assert not place.out.exists()


# -- finished


def test_a_finished_run_says_so_and_touches_nothing(place: RunWorkspace) -> None:
    place.run_successfully(steps=2)
    before = place.read_contents()
    for again in (False, True):
        assert "this run has finished" in place.run_successfully(overwrite=again, steps=2)
        assert place.read_contents() == before


@pytest.mark.slow
def test_a_finished_run_continues_when_steps_are_raised_at_the_rates_of_the_longer_schedule(
    place: RunWorkspace, uninterrupted: RunWorkspace
) -> None:
    place.run_successfully(steps=4)
    model = (place.out / "model" / "model.safetensors").read_bytes()
    assert "after step 4" in place.run_successfully(overwrite=True)
    rates = [line["learning_rate"] for line in place.read_metrics()]
    assert rates[4:] == [line["learning_rate"] for line in uninterrupted.read_metrics()[4:]]
    assert rates[3] != uninterrupted.read_metrics()[3]["learning_rate"]
    assert (place.out / "model" / "model.safetensors").read_bytes() != model
    _, error, code = place.run(steps=4)
    assert (code, "overwrite=true" in error) == (2, True)


@pytest.mark.slow
def test_a_finished_run_continues_although_the_warm_up_is_a_share_of_more_steps(place: RunWorkspace) -> None:
    share: dict[str, Any] = {"schedule": {"warmup_ratio": 0.3}}
    place.run_successfully(steps=4, **share)
    assert "after step 4" in place.run_successfully(steps=8, **share)
    rates = [line["learning_rate"] for line in place.read_metrics()]
    assert rates[4:] == [_cosine(1e-2, warmup=3, steps=8)(step) for step in range(4, 8)]


@pytest.mark.slow
def test_without_a_checkpoint_a_finished_run_does_not_continue(place: RunWorkspace) -> None:
    none: dict[str, Any] = {"checkpoint": {"every": None}}
    place.run_successfully(steps=2, **none)
    before = place.read_contents()
    for overwrite in (False, True):
        _, error, code = place.run(steps=4, overwrite=overwrite, **none)
        assert code == 2
        assert "left no checkpoint to resume from" in error
        assert place.read_contents() == before
    # Another run replaces it, if it is to.
    other: dict[str, Any] = {"seed": 5, **none}
    assert "overwrite=true" in place.run(steps=2, **other)[1]
    assert place.read_contents() == before
    replaced = f"a finished run (2 of 2 steps) with the model in {place.out / 'model'}"
    assert f"overwrite=true: removing {replaced}" in place.run_successfully(steps=2, overwrite=True, **other)
    assert place.read_contents()["run.yaml"] != before["run.yaml"]


@pytest.mark.slow
def test_a_run_whose_output_is_no_longer_read_continues(place: RunWorkspace) -> None:
    file = place.write_run_file(steps=4, nproc=1)
    line = f"{shlex.quote(sys.executable)} -m meshwright train {shlex.quote(str(file))} | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("Error")) == (0, 0), done.stderr
    assert len(place.read_metrics()) == 4
    assert (place.out / "model" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["n", "y"])
def test_on_a_terminal_a_run_asks_before_it_replaces_another(place: RunWorkspace, answer: str) -> None:
    place.run_successfully(steps=4)
    before = place.read_contents()
    file = place.write_run_file(steps=2, seed=5, overwrite=True, nproc=1)
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "meshwright", "train", str(file)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    output, is_answered = b"", False
    with suppress(OSError), os.fdopen(ours, "r+b", buffering=0) as terminal:
        while chunk := terminal.read(65536):
            output += chunk
            if b"Continue? [y/N]" in output and not is_answered:
                terminal.write(f"{answer}\n".encode())
                is_answered = True
    replaced = "removes a finished run (4 of 4 steps) with 2 checkpoints and the model"
    assert replaced in " ".join(output.decode().split())
    assert process.wait() == (2 if answer == "n" else 0)
    assert (b"nothing was changed" in output) == (place.read_contents() == before) == (answer == "n")
    assert len(place.read_metrics()) == (4 if answer == "n" else 2)


def test_restarts_that_could_not_continue_are_refused_at_the_first_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    saves = {"checkpoint": {"every": 2}}

    def check(restarts: str, **changes: Any) -> None:
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
        check_restarts(RunConfig(model={"model_type": "llama"}, steps=1, batch_size=1, **changes))

    check("0")
    check("3", **saves)
    with pytest.raises(ConfigError, match=r"up to 3 times \(--max-restarts\), but the run saves no checkpoints"):
        check("3")
    with pytest.raises(ConfigError, match="resume=never would start over"):
        check("3", **saves, resume="never")


# -- locked


def test_a_second_run_is_refused_with_who_holds_the_directory(place: RunWorkspace) -> None:
    with RunDirectory(place.out).lock(timeout_s=0):
        _, error, code = place.run()
    assert code == 2
    assert f"is in use by another run: process {os.getpid()} on " in error
    assert ", started 20" in error
    assert place.read_contents() == {}
    place.run_successfully(steps=1)


def test_the_system_releases_the_directory_of_a_run_that_is_killed(tmp_path: Path) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with RunDirectory(tmp_path).lock(timeout_s=0):
            os.write(write, b"x")
            time.sleep(600)
    os.read(read, 1)
    with pytest.raises(ConfigError, match=f"process {child} on"):
        with RunDirectory(tmp_path).lock(timeout_s=0.2):
            pass
    os.kill(child, signal.SIGKILL)
    with RunDirectory(tmp_path).lock(timeout_s=60):
        os.waitpid(child, 0)


# -- what may change


def _handwritten(
    path: Path, kinds: list[tuple[int, dict[str, Any]]], model: Any = None, start: int = 0
) -> tuple[list[float], dict[str, Any]]:
    """Losses and weights of a plain loop; from each step on, the settings that belong to it."""
    config = load_run(path)
    data, hf_config = prepare_data_and_model_config(config)
    (training,) = build_datasets(data, config.data).train_sets
    if model is None:
        torch.manual_seed(config.seed)
        model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float64)
    optimizer = torch.optim.AdamW(
        split_by_decay(model.named_parameters(), 0.1, lambda name: "norm" not in name), lr=1.0
    )
    losses, position = [], 0
    for step in range(start, config.steps):
        now = {}
        for since, settings in kinds:
            now |= settings if since <= step else {}
            if since == step and "seed" in settings:
                position = 0
        order = DataOrder(len(training), 1, now.get("seed", config.seed))
        rows = [int(order.get_indices(position + each)[0]) for each in range(now.get("batch_size", 4))]
        position += len(rows)
        ids = training.read_batch(rows)["input_ids"]
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), now.get("max_grad_norm", 1.0))
        for group in optimizer.param_groups:
            group["lr"] = now["rate"](step)
            group["weight_decay"] = now.get("decay", 0.1) if group["weight_decay"] else 0.0
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def _cosine(peak: float, warmup: int = 1, steps: int = STEPS) -> Any:
    def rate(step: int) -> float:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
        scheduler = build_scheduler(ScheduleConfig(warmup_steps=warmup), optimizer, steps)
        for _ in range(step):
            optimizer.step()
            scheduler.step()
        return float(scheduler.get_last_lr()[0])

    return rate


def test_a_checkpoint_with_earlier_names_of_settings_is_of_the_same_run(place: RunWorkspace) -> None:
    changes: dict[str, Any] = {"ema": {"decay": 0.9, "start_step": 2}}
    assert place.run(kill_after=5, **changes)[1] == "killed"
    directory = step_directory(place.root, 4)
    extra = json.loads((directory / MANIFEST_FILE).read_text())["extra"]
    extra["identity"]["ema"]["start"] = extra["identity"]["ema"].pop("start_step")
    rewrite_manifest(directory, extra=extra)
    refused = place.run(ema={"decay": 0.9, "start_step": 3})
    assert (refused[2], "the run differs" in refused[1], "ema.start_step" in refused[1]) == (2, True, True)
    assert "resuming from" in place.run_successfully(**changes)


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "optimizer.lr": ({"optimizer": {"lr": 3e-3, "weight_decay": 0.1}}, {"rate": _cosine(3e-3)}),
    "optimizer.weight_decay": ({"optimizer": {"lr": 1e-2}}, {"decay": 0.0}),
    "schedule": ({"schedule": {"warmup_steps": 7}}, {"rate": _cosine(1e-2, warmup=7)}),
    "batch_size": ({"batch_size": 6}, {"batch_size": 6}),
    "seed": ({"seed": 7}, {"seed": 7}),
    "max_grad_norm": ({"max_grad_norm": 0.1}, {"max_grad_norm": 0.1}),
}


def _check_change(name: str, place: RunWorkspace, layout: dict[str, Any], ranks: int) -> None:
    changes, settings = CHANGES[name]
    assert place.run(kill_after=5)[1] == "killed"
    refused = place.run(**changes)
    assert refused[2] == 2
    assert f"the run differs from that of {step_directory(place.root, 4)}: {name}" in refused[1]
    output, error, code = place.run(ranks=ranks, resume={"from": "auto", "allow": [name]}, **changes, **layout)
    assert code == 0, error
    assert f"with changed {name}" in output
    (place.out / "run.yaml").write_text(place.write_run_file().read_text())
    losses, weights = _handwritten(place.write_run_file(), [(0, {"rate": _cosine(1e-2)}), (4, settings)])
    assert [line["loss"] for line in place.read_metrics()] == pytest.approx(losses, rel=TOLERANCE)
    found = AutoModelForCausalLM.from_pretrained(place.out / "model", dtype=torch.float64).state_dict()
    for key, value in weights.items():
        torch.testing.assert_close(found[key], value, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    "name", [each if each == "optimizer.lr" else pytest.param(each, marks=pytest.mark.slow) for each in CHANGES]
)
def test_an_allowed_change_acts_as_in_a_handwritten_loop(name: str, place: RunWorkspace) -> None:
    _check_change(name, place, {}, 1)


LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {"strategy": "fsdp2"},
    "pipeline": {"strategy": "single", "pp_size": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_allowed_change_acts_under_every_strategy(layout: str, place: RunWorkspace) -> None:
    _check_change("batch_size", place, {**LAYOUTS[layout], "nproc": 2, "micro_batch_size": 1}, 2)


@pytest.mark.slow
def test_other_data_begin_at_their_start_and_the_position_is_remembered(place: RunWorkspace, workplace: Path) -> None:
    data = yaml.safe_load((workplace / "run.yaml").read_text())["data"]
    tokenizer = place.directory / "tokenizer"
    assert place.run(kill_after=3)[1] == "killed"
    other = {**data, "corpus": [str(workplace / "*.txt")]}
    allowed = {"data": other, "batch_size": 6, "resume": {"from": "auto", "allow": ["data", "batch_size"]}}
    assert place.run(data=other)[2] == 2
    assert not tokenizer.exists()
    assert place.run(kill_after=5, **allowed)[1] == "killed"
    # The change is done; the next start needs no leave.
    place.run_successfully(data=other, batch_size=6)
    manifest = json.loads((step_directory(place.root, 6) / MANIFEST_FILE).read_text())
    assert manifest["extra"]["position"] == 4 * 6
    assert [line["step"] for line in place.read_metrics()] == list(range(1, STEPS + 1))


def test_every_schedule_is_put_where_its_steps_lead() -> None:
    options = {
        "cosine_with_min_lr": {"min_lr": 1e-3},
        "cosine_warmup_with_min_lr": {"min_lr": 1e-3},
        "warmup_stable_decay": {"num_decay_steps": 3},
    }
    for name in ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "inverse_sqrt", *options):
        found = []
        for put in (False, True):
            parameters = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1e-2, 3e-2)]
            optimizer = torch.optim.AdamW(parameters, lr=2e-2)
            config = ScheduleConfig(
                name=name, warmup_steps=0 if name == "constant" else 2, options=options.get(name, {})
            )
            scheduler = build_scheduler(config, optimizer, 9)
            if put:
                set_scheduler_step(scheduler, 4)
            for _ in range(0 if put else 4):
                optimizer.step()
                scheduler.step()
            rates = [(scheduler.get_last_lr(), [group["lr"] for group in optimizer.param_groups])]
            optimizer.step()
            scheduler.step()
            found.append([*rates, (scheduler.get_last_lr(), [group["lr"] for group in optimizer.param_groups])])
        assert found[0] == found[1], name


def test_what_resume_does_not_take_is_named(place: RunWorkspace) -> None:
    for resume, reported in (
        ("{from: auto, allow: [optimizer.name]}", "resume.allow.0: Input should be 'optimizer.lr'"),
        ("{form: auto}", "resume.form: unknown key. Did you mean 'from'? Allowed: allow, from"),
    ):
        with pytest.raises(ConfigError, match=re.escape(reported)):
            load_run(place.write_run_file(), [f"resume={resume}"])


# -- weights alone


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, *LAYOUTS.values()], ids=["single", *LAYOUTS])
def test_weights_of_a_checkpoint_begin_a_new_run_under_any_strategy(
    layout: dict[str, Any], place: RunWorkspace, uninterrupted: RunWorkspace
) -> None:
    source = step_directory(uninterrupted.root, STEPS)
    data = yaml.safe_load(place.write_run_file().read_text())["data"]
    # The checkpoint brings its tokenizer along.
    del data["vocab_size"]
    changes = {"model": {"checkpoint": str(source), "dtype": "float64"}, "steps": 3, "data": data}
    ranks = 2 if layout else 1
    output, error, code = place.run(ranks=ranks, **changes, **layout, nproc=ranks, micro_batch_size=1)
    assert code == 0, error
    assert "resuming from" not in output
    model = AutoModelForCausalLM.from_pretrained(uninterrupted.out / "model", dtype=torch.float64)
    losses, _ = _handwritten(place.write_run_file(**changes), [(0, {"rate": _cosine(1e-2, steps=3)})], model)
    assert [line["loss"] for line in place.read_metrics()] == pytest.approx(losses, rel=TOLERANCE)


@pytest.mark.slow
def test_a_checkpoint_of_weights_that_the_run_would_replace_is_refused(place: RunWorkspace) -> None:
    place.run_successfully(steps=2)
    before = place.read_contents()
    model = {"checkpoint": str(step_directory(place.root, 2)), "dtype": "float64"}
    _, error, code = place.run(model=model, resume="never", overwrite=True)
    assert code == 2
    assert "which this run replaces" in error
    _, error, code = place.run(model={"checkpoint": str(place.directory)})
    assert code == 2
    assert "is no checkpoint" in error
    assert place.read_contents() == before


@pytest.mark.parametrize(
    "bad", [b"\xff\xfe\x80", b'{"step": 2, "lo', b"[1]", b'{"step": "x"}', b"[" * 5000, b'{"step": 2, "sums": -0.0}']
)
def test_a_damaged_line_of_metrics_costs_only_that_line(bad: bytes, tmp_path: Path) -> None:
    results = [StepResult(step, 4, 2.5, 1.0, 0.1, 8, 0.5, rank=0) for step in (1, 2, 3)]
    lines = [json.dumps(to_record(result)).encode() for result in results]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join([lines[0], bad, lines[2]]) + b"\n")
    with pytest.warns(UserWarning, match=r"1 lines cannot be read and are skipped: 2\."):
        assert read_metrics(path, last_step=4, num_steps=4) == [results[0], results[2]]
    # The last line of a run that was killed is nothing to be reported.
    path.write_bytes(b"\n".join([*lines[:2], bad]))
    assert read_metrics(path, last_step=4, num_steps=4) == results[:2]


def test_metrics_end_at_the_step_that_a_run_resumes_from(tmp_path: Path) -> None:
    first = [StepResult(step, 4, 2.5, 1.0, 0.1, 8, 0.5, rank=0) for step in (1, 2, 3, 4)]
    again = [StepResult(step, 4, 1.5, 1.0, 0.1, 8, 0.5, rank=0) for step in (2, 3)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(to_record(result)) + "\n" for result in first))
    assert read_metrics(path, last_step=2, num_steps=4) == first[:2]
    path.write_text("".join(json.dumps(to_record(result)) + "\n" for result in [*first, *again]))
    assert read_metrics(path, last_step=4, num_steps=4) == [first[0], *again]

    # What JSON has no number for comes back, too.
    result = StepResult(1, 4, math.nan, 1.0, 0.1, 7, 0.5, 0, sums={"correct": 3.0, "kl": math.nan}, skip_reason="why")
    path.write_text(json.dumps(to_record(result), allow_nan=False) + "\n")
    (found,) = read_metrics(path, last_step=4, num_steps=4)
    assert found.sums["correct"] == 3.0
    assert found.skip_reason == "why"
    assert math.isnan(found.sums["kl"])
    assert math.isnan(found.loss)
