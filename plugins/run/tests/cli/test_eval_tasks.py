"""`meshwright eval --task`: the metrics of the lm-eval harness, as its own model computes them in one process."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support.commands import run_command, write_run

lm_eval = pytest.importorskip("lm_eval")

QUESTIONS = [{"text": f"{n} is", "choices": ["odd", "even", "a number"], "answer": n % 2} for n in range(11)]
TASKS = {
    "parity": {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    },
    "target": {
        "output_type": "loglikelihood",
        "doc_to_target": " {{choices[answer]}}",
        "metric_list": [{"metric": "perplexity"}],
    },
    "words": {
        "output_type": "loglikelihood_rolling",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "continued": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": [","], "max_gen_toks": 4, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run in `out`, and task files in `tasks` on a file of questions."""
    path = tmp_path_factory.mktemp("tasks")
    found = run_command("train", str(write_run(path)))
    assert found.returncode == 0, found.stderr
    (path / "questions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    (path / "tasks").mkdir()
    for name, task in TASKS.items():
        files = {"test": str(path / "questions.jsonl")}
        values: dict[str, Any] = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": files}}
        values |= {"test_split": "test", "doc_to_text": "" if name == "words" else "{{text}}", "num_fewshot": 0}
        (path / "tasks" / f"{name}.yaml").write_text(json.dumps({**values, **task}))
    return path


def evaluate(directory: Path, names: Iterable[str], *arguments: str) -> dict[str, dict[str, float]]:
    tasks = [each for name in names for each in ("--task", name)]
    options = ["--task-dir", str(directory / "tasks"), "--trust-task-code", "--json", "-", *arguments]
    found = run_command("eval", str(directory / "out"), *tasks, *options)
    assert found.returncode == 0, found.stderr
    metrics: dict[str, dict[str, float]] = json.loads(found.stdout)["tasks"]
    return metrics


@pytest.fixture(scope="module")
def expected(directory: Path) -> dict[str, dict[str, float]]:
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(pretrained=str(directory / "out" / "model"), device="cpu", dtype="float32", batch_size=1)
    manager = TaskManager(include_path=str(directory / "tasks"))
    found = lm_eval.simple_evaluate(model=model, tasks=[*TASKS], task_manager=manager, bootstrap_iters=0)
    return {name: found["results"][name] for name in TASKS}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["nproc=2", "nproc=2 tp_size=2", "nproc=2 pp_size=2", "nproc=2 cp_size=2", "nproc=3 strategy=fsdp2"]
)
def test_tasks_have_the_metrics_of_the_harness_in_any_layout(
    directory: Path, expected: dict[str, dict[str, float]], layout: str
) -> None:
    options = [each for value in layout.split() for each in ("--set", value)]
    metrics = {"parity": "acc", "target": "perplexity", "words": "word_perplexity", "continued": "exact_match"}
    if "pp" in layout or "cp" in layout:
        del metrics["continued"]  # it generates
    found = evaluate(directory, metrics, *options)
    for name, metric in metrics.items():
        assert found[name][metric] == pytest.approx(expected[name][f"{metric},none"], rel=1e-5), name
    assert 0 < found["parity"]["acc"] < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "parity", "--task-dir", "{tasks}"], "task files run code"),
        (["--task", "nothing-of-this-name"], "no task of that name in lm-eval"),
        (["--limit", "3"], "belong to tasks. Name one: --task NAME"),
        (["--task", "parity", "--data", "x.txt"], "give one of them"),
        (
            [
                "--task",
                "continued",
                "--task-dir",
                "{tasks}",
                "--trust-task-code",
                "--set",
                "nproc=2",
                "--set",
                "cp_size=2",
            ],
            "needs pp_size=1 and cp_size=1",
        ),
    ],
)
def test_what_cannot_be_run_is_one_line(directory: Path, arguments: list[str], message: str) -> None:
    tasks = str(directory / "tasks")
    found = run_command("eval", str(directory / "out"), *(each.format(tasks=tasks) for each in arguments))
    assert (found.returncode, message in found.stderr) == (2, True), found.stderr
    assert "Traceback" not in found.stderr
