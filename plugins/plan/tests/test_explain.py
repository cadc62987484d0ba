"""What `meshwright explain` says of a run is what its plan, its mesh and its run file say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.base.validation import validate_config
from meshwright.files.parsing import apply_assignments
from meshwright_plan.explain.facts import RunFacts, collect_facts
from meshwright_plan.explain.sentences import build_sections
from meshwright_run.run_file import RunConfig

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 32}
RUN: dict[str, Any] = {"model": {"model_type": "llama", **SIZES}, "data": {"corpus": "nothing/*.txt", "seq_len": 16}}
RUN |= {"steps": 100, "batch_size": 8, "micro_batch_size": 2, "output_dir": "out", "device": "cpu"}
HOLDS, SENT = "Memory of each rank", "Communication of each rank in a step"
STEP, SAVED = "A step", "Checkpoints, signals and resuming"


def config(*changes: str) -> RunConfig:
    return validate_config(RunConfig, apply_assignments(RUN, changes), where="a run")


def said(facts: RunFacts) -> dict[str, str]:
    return {title: "\n".join(lines) for title, lines in build_sections(facts).items()}


def test_who_holds_what_and_what_is_sent_follow_the_layout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = said(collect_facts(config("strategy=fsdp2", "dp_replicate_size=2"), 4))
    divided = "1/2 of the full 145 KiB, sharded along dp_shard; replicated along dp_replicate."
    assert divided in found[HOLDS]
    for sent in ("reduce-scatters among the 2 ranks of dp_shard", "all-reduces among the 2 ranks of dp_replicate"):
        assert sent in found[SENT]
    # Nothing is said to be sent along an axis that is not there.
    assert not [axis for axis in ("tp", "pp", "cp") if f"ranks of {axis}," in found[SENT]]


def test_one_rank_holds_the_whole_and_sends_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alone = collect_facts(config("strategy=single"), 1)
    found = said(alone)
    assert ("along" in found[HOLDS], found[HOLDS].count("unsharded."), found[SENT]) == (False, 3, "none.")
    assert "in 4 microbatches of 2, whose gradients are accumulated" in found[STEP]
    assert "No checkpoints are saved" in found[SAVED]
    saved = said(replace(alone, config=config("strategy=single", "checkpoint.every=7")))[SAVED]
    assert ("saved every 7 steps" in saved, "No checkpoints are saved" in saved) == (True, False)


def test_learning_rates_are_those_that_the_schedule_gives(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    facts = collect_facts(
        config("strategy=single", "optimizer.lr=0.01", "schedule={name: linear, warmup_steps: 20}"), 1
    )
    assert facts.learning_rates == pytest.approx({1: 0.0, 21: 0.01, 50: 0.01 * 51 / 80, 100: 0.01 / 80})
    assert collect_facts(config("strategy=single", "steps=null", "epochs=2"), 1).learning_rates is None
