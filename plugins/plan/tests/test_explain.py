"""What `meshwright explain` says of a run is what its plan, its mesh and its run file say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.validation import validated
from meshwright.files.parsing import assigned
from meshwright_plan.explain.facts import Facts, facts_of
from meshwright_plan.explain.words import sections_of
from meshwright_run.run_file import RunConfig

RUN: dict[str, Any] = {
    "model": {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 32,
    },
    "data": {"corpus": "nothing/*.txt", "seq_len": 16},
    "steps": 100,
    "batch_size": 8,
    "micro_batch_size": 2,
    "output_dir": "out",
    "device": "cpu",
}
HOLDS, SENT = "Who holds what, of each rank", "What is sent in a step, of each rank"
RUNS, STEP, RATE = "What runs", "A step", "The learning rate"
EVALUATION, SAVED = "Evaluation", "Checkpoints, signals, and going on"
WRITTEN = "What is written down"


def config(*changes: str) -> RunConfig:
    return validated(RunConfig, assigned(RUN, changes), where="a run")


def said(facts: Facts) -> dict[str, str]:
    return {title: "\n".join(lines) for title, lines in sections_of(facts).items()}


LAYOUTS = {
    "hsdp": (
        ["strategy=fsdp2", "dp_replicate_size=2"],
        4,
        ["1/2 of the whole (148 kB), divided along dp_shard; ranks along dp_replicate have copies."],
        ["reduce-scatters among the 2 ranks of dp_shard", "all-reduces among the 2 ranks of dp_replicate"],
    ),
    "pp": (
        ["strategy=fsdp2", "pp_size=2"],
        2,
        ["rank 0: parameters", "rank 1: parameters", "divided along pp."],
        ["messages sent among the 2 ranks of pp", "messages received among the 2 ranks of pp"],
    ),
    "megatron-zero1": (
        ["strategy=megatron_fsdp", "strategy_config={zero_dp_strategy: 1}"],
        2,
        ["parameters: 149 kB, the whole.", "1/2 of the whole (296 kB), divided along dp_shard."],
        ["reduce-scatters among the 2 ranks of dp_shard", "all-gathers among the 2 ranks of dp_shard"],
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "hsdp" else [pytest.mark.slow]) for name in LAYOUTS]
)
def test_who_holds_what_and_what_is_sent_follow_the_layout(name, tmp_path, monkeypatch):
    changes, world, held, sent = LAYOUTS[name]
    monkeypatch.chdir(tmp_path)
    found = said(facts_of(config(*changes), world))
    assert not [text for text in held if text not in found[HOLDS]], found[HOLDS]
    assert not [text for text in sent if text not in found[SENT]], found[SENT]
    # Nothing is said to be divided, copied or sent along an axis that is not there.
    axes = {"dp_replicate", "dp_shard", "tp", "pp", "cp"}
    absent = [axis for axis in axes if f"{axis}=" not in found[RUNS]]
    assert not [axis for axis in absent if f"along {axis}" in found[HOLDS] or f" and {axis}" in found[HOLDS]]
    assert not [axis for axis in absent if f"ranks of {axis}," in found[SENT]]


@pytest.fixture(scope="module")
def alone() -> Facts:
    return facts_of(config("strategy=single"), 1)


def test_one_rank_holds_the_whole_and_sends_nothing(alone):
    found = said(alone)
    assert "divided" not in found[HOLDS]
    assert found[HOLDS].count("the whole.") == 3
    assert found[SENT] == "nothing."
    assert "in 4 passes of 2, whose gradients are added up" in found[STEP]


WORDS = [
    ([], SAVED, "None are saved", "goes on from"),
    ([], SAVED, "A signal ends the run at once", "exit code"),
    (["checkpoint.every=7"], SAVED, "Saved every 7 steps", "None are saved"),
    (["checkpoint.every=7"], SAVED, "On SIGTERM, SIGUSR1 and SIGINT", "at once"),
    (["checkpoint.every=7"], SAVED, "the newest 2 are kept", "all are kept"),
    (["checkpoint.every=7", "checkpoint.asynchronous=false"], SAVED, "Training waits", "Training goes on"),
    (["checkpoint={every: 7, on_signal: {exit_code: 9}}"], SAVED, "exit code 9", "143"),
    (["checkpoint={every: 7, on_signal: {signals: []}}"], SAVED, "A signal ends the run at once", "exit code"),
    (["eval.every=30"], EVALUATION, "held_out every 30 steps, and at the end", "patience"),
    (["max_grad_norm=0.5"], STEP, "brought down to 0.5", "nothing is clipped"),
    (["ema={decay: 0.99}"], STEP, "a decay of 0.99", "nothing"),
    (["objective=unlikelihood"], STEP, "What is minimized is unlikelihood", "mean over all tokens"),
    (["data.packing=none"], "The data", "padding", "cut anywhere"),
    ([], WRITTEN, "of each rank in out/ranks", "Profiles"),
    (["metrics.communication_every=9"], WRITTEN, "Exposed communication in every 9 steps", "Norms"),
    (["profile={steps: [10, 12], ranks: all}"], WRITTEN, "Profiles of steps [10, 12], of all ranks", "tells"),
    (["trackers=[tensorboard, {name: wandb}]"], WRITTEN, "tells tensorboard and wandb of the run", "Profiles"),
]


def test_words_follow_the_run_file(alone, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for changes, section, text, other in WORDS:
        found = said(replace(alone, config=config("strategy=single", *changes)))[section]
        assert text in found, (changes, found)
        assert other not in found, (changes, found)


def test_learning_rates_are_those_that_the_schedule_gives(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    facts = facts_of(config("strategy=single", "optimizer.lr=0.01", "schedule={name: linear, warmup_steps: 20}"), 1)
    assert facts.rates == pytest.approx({1: 0.0, 21: 0.01, 50: 0.01 * 51 / 80, 100: 0.01 / 80})
    assert "0.01 in step 21" in said(facts)[RATE]
    epochs = facts_of(config("strategy=single", "steps=null", "epochs=2"), 1)
    assert epochs.rates is None
    assert "2 epochs" in said(epochs)[RATE]


def test_what_becomes_of_what_is_there_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = config("strategy=single")
    assert "Nothing of a run is in out yet" in said(facts_of(run, 1))[SAVED]
    (tmp_path / "out").mkdir()
    Path("out/summary.json").write_text("{}", encoding="utf-8")
    Path("out/notes.txt").write_text("mine", encoding="utf-8")
    assert "It would be refused now" in said(facts_of(run, 1))[SAVED]
