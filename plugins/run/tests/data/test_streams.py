"""Sources that are read while training: blocks, state, and continuing elsewhere."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.base.errors import CheckpointError, DataError
from meshwright.base.types import Batch
from meshwright.base.validation import validate_config
from meshwright_run.data.config import DataConfig
from meshwright_run.data.prepare import prepare_data
from meshwright_run.data.tokenizer import train_tokenizer
from meshwright_run.data.train_sampler import DataShard, TrainSampler, build_datasets

run_rows = importlib.import_module("meshwright_run.data.train_sampler")
stream = importlib.import_module("meshwright_run.data.order")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital'")


def write(directory: Path, name: str, count: int, words: int = 8) -> Path:
    path = directory / name
    lines = [json.dumps({"text": f"{name} {n} " + "word " * (n % words)}) for n in range(count)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the section of a run file; blocks are of 16 records."""
    monkeypatch.setattr(stream.StreamingSource.__init__, "__kwdefaults__", {"group_size": 1, "records_per_block": 16})
    for name, count in (("a.jsonl", 70), ("b.jsonl", 30), ("eval.jsonl", 12)):
        write(tmp_path, name, count)
    texts = [json.loads(line)["text"] for line in (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()]
    train_tokenizer(texts, 300).save_pretrained(tmp_path / "tokenizer")

    def made(*sources: dict[str, Any], **values: Any) -> DataConfig:
        given = {
            "sources": [{"files": str(tmp_path / "[ab].jsonl"), "streaming": True}] if not sources else list(sources),
            "eval_sets": {"own": {"files": str(tmp_path / "eval.jsonl")}},
            "cache_dir": str(tmp_path / "cache"),
            "tokenizer": str(tmp_path / "tokenizer"),
            "seq_len": 24,
            "packing": "documents",
            "too_long": "truncate",
            **values,
        }
        if all(source.get("streaming") for source in given["sources"]):
            given["eval_fraction"] = 0
        return validate_config(DataConfig, given, where="data")

    return made


def feeds(config: DataConfig, size: int = 1, micro: int = 2, batch_size: int = 8, **options: Any) -> list[TrainSampler]:
    found = []
    for rank in range(size):
        rows = build_datasets(prepare_data(config), config)
        place = DataShard(rank, size, micro)
        found.append(
            TrainSampler(rows.train_sets, place, batch_size=batch_size, seed=3, weights=rows.weights, **options)
        )
    return found


def rows_of(batches: list[Batch]) -> list[bytes]:
    """Each row with all that is known of it."""
    return [
        b"".join(batch[name][index].numpy().tobytes() for name in sorted(batch))
        for batch in batches
        for index in range(len(batch["input_ids"]))
    ]


def read(feed: TrainSampler, count: int) -> tuple[list[list[bytes]], list[str]]:
    """The rows of the first steps, and the state before each as a checkpoint keeps it."""
    steps, states = [], []
    for step in range(count):
        states.append(json.dumps(feed.state_dict(step)))
        steps.append(rows_of(feed.read_microbatches(step)))
        if step % 2:
            # A loop has started the next step when it saves.
            states[step] = json.dumps(feed.state_dict(step))
    return steps, states


def resumed(
    config: DataConfig, feed: TrainSampler, step: int, state: str, size: int, micro: int = 2
) -> list[TrainSampler]:
    """Feeds on another mesh, which continue where one was."""
    again = feeds(config, size, micro, origin=(step, feed.compute_data_position(step)))
    for each in again:
        each.load_state_dict(json.loads(state))
    return again


def steps_of(feeds: list[TrainSampler], steps: range) -> list[list[bytes]]:
    return [[row for feed in feeds for row in rows_of(feed.read_microbatches(step))] for step in steps]


@pytest.mark.parametrize("packing", ["none", pytest.param("documents", marks=pytest.mark.slow)])
def test_a_stream_resumes_from_any_step_on_another_mesh(config: Any, packing: str) -> None:
    given = config(packing=packing)
    (whole,) = feeds(given)
    steps, states = read(whole, 30)
    for step, size, micro in ((1, 1, 2), (8, 2, 2), (13, 4, 2), (21, 2, 1), (28, 1, 8)):
        again = resumed(given, whole, step, states[step], size, micro)
        for number in range(step, 30):
            found = [row for feed in again for row in rows_of(feed.read_microbatches(number))]
            if packing == "none":
                # Rows are as long as those beside them.
                found, want = ([ids_of(row) for row in rows] for rows in (found, steps[number]))
                assert sorted(found) == sorted(want)
            else:
                assert found == steps[number]


def ids_of(row: bytes) -> tuple[int, ...]:
    """The tokens of a row of ids and labels, without padding."""
    ids = np.frombuffer(row, np.int64)
    ids = ids[: len(ids) // 2]
    return tuple(np.trim_zeros(ids, "b").tolist())


def test_each_epoch_of_a_stream_has_every_document_once_in_another_order(config: Any) -> None:
    given = config(packing="none")
    rows = build_datasets(prepare_data(given), given)
    (only,) = rows.train_sets
    feed = TrainSampler(rows.train_sets, DataShard(0, 1, 4), batch_size=4, seed=0)
    epochs = []
    for epoch in range(3):
        steps = [feed.read_microbatches(25 * epoch + step) for step in range(25)]
        epochs.append([ids_of(row) for batches in steps for row in rows_of(batches)])
    assert Counter(epochs[0]) == Counter(epochs[1]) == Counter(epochs[2])
    assert len(set(epochs[0])) == 100
    assert epochs[0] != epochs[1]
    assert rows.num_rows_per_epoch is None
    # Within an epoch it is the blocks' order, and a random one in each.
    assert Counter(epochs[0][:16]) == Counter(epochs[1][:16])
    assert only.location.endswith("[ab].jsonl")


@pytest.mark.slow
def test_a_stream_and_files_at_hand_mix_by_weight_and_continue(config: Any, tmp_path: Path) -> None:
    given = config(
        {"files": str(tmp_path / "a.jsonl"), "streaming": True, "weight": 1},
        {"files": str(tmp_path / "b.jsonl"), "weight": 3},
    )
    (whole,) = feeds(given)
    steps, states = read(whole, 40)
    again = resumed(given, whole, 17, states[17], 2)
    assert steps_of(again, range(17, 40)) == steps[17:]
    with pytest.raises(
        CheckpointError, match="1 sources are read during training, but the checkpoint has the state of 0"
    ):
        again[0].load_state_dict(None)


def test_a_stream_that_holds_nothing_is_reported(config: Any, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "long " * 90}) + "\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text("\n", encoding="utf-8")
    (feed,) = feeds(config(too_long="drop"))
    with pytest.raises(DataError, match=r"\[ab\]\.jsonl' is empty: it has no example that is short enough"):
        feed.read_microbatches(0)


def test_a_broken_line_and_a_file_that_changes_are_reported(config: Any, tmp_path: Path) -> None:
    (feed,) = feeds(config())
    feed.read_microbatches(0)
    with (tmp_path / "b.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n{")
    with pytest.raises(DataError, match=r"b\.jsonl changed while it was read"):
        steps_of([feed], range(1, 20))
    (feed,) = feeds(config())
    with pytest.raises(DataError, match=r"b\.jsonl:31"):
        steps_of([feed], range(20))


def test_preferences_are_streamed_in_pairs(config: Any, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": f"{n}", "chosen": "yes " * (n % 5 + 1), "rejected": "no " * (n % 3 + 1)} for n in range(40)]
    path.write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    given = config(
        {"files": str(path), "format": "preference", "streaming": True},
        packing="none",
        eval_sets={"own": {"files": str(path), "format": "preference"}},
    )
    (feed,) = feeds(given, micro=4)
    seen = Counter(
        (ids_of(one), ids_of(other))
        for step in range(10)
        for rows in [rows_of(feed.read_microbatches(step))]
        for one, other in zip(rows[::2], rows[1::2], strict=True)
    )
    assert set(seen.values()) == {1}
    assert len(seen) == 40
    assert all(one != other for one, other in seen)


@pytest.mark.slow
def test_a_dataset_is_streamed(config: Any, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"text": f"{n} " + "word " * (n % 8)} for n in range(100)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    given = config({"dataset": str(tmp_path / "saved"), "streaming": True})
    (whole,) = feeds(given)
    steps, states = read(whole, 12)
    for step in (1, 4, 9):
        assert steps_of(resumed(given, whole, step, states[step], 2), range(step, 12)) == steps[step:]


def test_a_dataset_that_is_broken_further_on_is_reported(config: Any, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "rows").mkdir()
    write(tmp_path / "rows", "train-0.jsonl", 60)
    (tmp_path / "rows" / "train-1.jsonl").write_text('{"text": "whole"}\n{broken\n', encoding="utf-8")
    (feed,) = feeds(config({"dataset": str(tmp_path / "rows"), "streaming": True}))
    with pytest.raises(DataError, match=r"the dataset '.*rows' cannot be read: "):
        steps_of([feed], range(20))


@pytest.mark.parametrize("kind", ["none", "of another library", "of a dataset"])
def test_a_state_of_another_source_is_reported(config: Any, kind: str) -> None:
    given = config()
    (feed,) = feeds(given)
    (state,) = feed.state_dict(0) or []
    if kind == "none":
        del state["reader"]
    elif kind == "of a dataset":
        state["reader"]["dataset_state"] = {"row": 3, "dataset": None}
    else:
        state["reader"] = {"x": 1}
    (again,) = feeds(given)
    with pytest.raises(CheckpointError, match=r"has no valid position in '.*jsonl'.* Is it from another source\?"):
        again.load_state_dict([state])


def test_random_numbers_of_a_run_stay_as_they_are(config: Any) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    (feed,) = feeds(config())
    for step in range(20):
        feed.read_microbatches(step)
    after = torch.get_rng_state()
    assert torch.equal(before, after)
