"""From documents to rows: which share one, what a row holds, and in which order and shapes a run gets them.

Documents that share a row train as in rows of their own, whatever stands beside their positions.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshwright import BatchError, count_tokens
from meshwright.base.errors import ConfigError, DataError
from meshwright.base.types import IGNORE_INDEX, Batch
from meshwright.testing import Case
from meshwright_run.data.bin_packing import MIN_DOCUMENT_TOKENS, load_or_pack, pack_best_fit
from meshwright_run.data.documents import TokenizedDocuments
from meshwright_run.data.order import MIXTURE_BLOCK_SIZE, DataOrder, SourceMixture
from meshwright_run.data.packing import (
    ConcatChunkedDataset,
    ConcatDataset,
    PackedDataset,
    PaddedDataset,
    RowDataset,
    build_row_dataset,
)
from meshwright_run.data.train_sampler import DataShard, RunDatasets, TrainSampler, read_eval_microbatches
from meshwright_testing import pool
from meshwright_testing.parity import build_manager, full_weights

EXAMPLES = settings(deadline=None, max_examples=80)
lengths_of = st.lists(st.integers(0, 12), max_size=60)


def documents_of(lengths: list[int], *, group: int = 1, first: int = 1, **more: Any) -> TokenizedDocuments:
    """Documents whose tokens count from `first` on, so that each token tells its place."""
    total = sum(lengths)
    return TokenizedDocuments(
        np.arange(first, first + total, dtype=np.uint32), np.cumsum(lengths, dtype=np.int64), group_size=group, **more
    )


def texts(documents: TokenizedDocuments) -> list[list[int]]:
    return [part.tolist() for part in np.split(documents.tokens, documents.ends[:-1])] if len(documents) else []


# -- which documents share a row


@EXAMPLES
@given(lengths=lengths_of, seq_len=st.integers(12, 20))
def test_each_document_is_in_one_row_and_no_row_is_too_full(lengths: list[int], seq_len: int) -> None:
    packing = pack_best_fit(np.cumsum(lengths, dtype=np.int64), seq_len)
    assert sorted(packing.documents) == [index for index, length in enumerate(lengths) if length >= MIN_DOCUMENT_TOKENS]
    rows = np.split(packing.documents, packing.ends[:-1]) if len(packing) else []
    assert all(0 < sum(lengths[document] for document in row) <= seq_len for row in rows)


@EXAMPLES
@given(lengths=lengths_of, seq_len=st.integers(12, 20))
def test_rows_are_those_of_best_fit_decreasing_by_the_book(lengths: list[int], seq_len: int) -> None:
    rooms: list[int] = []
    for length in sorted((each for each in lengths if each >= MIN_DOCUMENT_TOKENS), reverse=True):
        at = bisect.bisect_left(rooms, length)
        bisect.insort(rooms, (rooms.pop(at) if at < len(rooms) else seq_len) - length)
    packing = pack_best_fit(np.cumsum(lengths, dtype=np.int64), seq_len)
    held = np.split(packing.documents, packing.ends[:-1]) if len(packing) else []
    assert sorted(seq_len - sum(lengths[each] for each in row) for row in held) == rooms


def test_a_document_longer_than_a_row_is_reported() -> None:
    with pytest.raises(DataError, match=r"document 1 has 9 tokens, more than seq_len=8"):
        PackedDataset(documents_of([3, 9, 4]), 8)
    with pytest.raises(DataError, match=r"9 tokens, more than seq_len=8"):
        PaddedDataset(documents_of([3, 9, 4]), 8)


def test_a_packing_is_kept_and_shared(tmp_path: Path) -> None:
    ends = np.cumsum([3, 5, 8, 2, 4])
    first = load_or_pack(ends, 8, tmp_path)
    (entry,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert isinstance(first.documents, np.memmap)
    assert first.documents.tolist() == pack_best_fit(ends, 8).documents.tolist()
    expected = first.documents.tolist()
    before = (entry / "documents.npy").stat().st_mtime_ns
    again = load_or_pack(ends, 8, tmp_path)
    assert (entry / "documents.npy").stat().st_mtime_ns == before
    assert again.ends.tolist() == first.ends.tolist()
    load_or_pack(ends, 9, tmp_path)
    load_or_pack(np.cumsum([3, 5, 8, 4, 2]), 8, tmp_path)
    assert sum(path.is_dir() for path in tmp_path.iterdir()) == 3
    (entry / "documents.npy").write_bytes(b"cut short")
    assert load_or_pack(ends, 8, tmp_path).documents.tolist() == expected


# -- what a row holds


def documents_in(batch: Batch) -> list[list[int]]:
    """The documents of a packed batch, by its positions; the padding has tokens of 0."""
    found = []
    for ids, positions in zip(batch["input_ids"].tolist(), batch["position_ids"].tolist(), strict=True):
        starts = [column for column, position in enumerate(positions) if position == 0] + [len(ids)]
        parts = [(ids[a:b], positions[a:b]) for a, b in itertools.pairwise(starts)]
        assert all(part == list(range(len(part))) for _, part in parts)
        found += [part for part, _ in parts if any(part)]
    return found


@EXAMPLES
@given(lengths=st.lists(st.integers(2, 12), min_size=1, max_size=40), seq_len=st.integers(12, 20), data=st.data())
def test_packed_rows_hold_each_document_whole_with_positions_and_labels_of_its_own(lengths, seq_len, data):
    labelled = np.array(data.draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths))))
    documents = documents_of(lengths, loss_mask=labelled)
    rows = PackedDataset(documents, seq_len)
    batch = rows.read_batch(range(len(rows)))
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert batch.keys() == {"input_ids", "labels", "position_ids"}
    assert sorted(documents_in(batch)) == sorted(texts(documents))
    supervised = {token for text in texts(documents) for token in text[1:] if labelled[token - 1]}
    assert set(batch["labels"][batch["labels"] != -100].tolist()) == supervised
    same = batch["labels"] != -100
    assert torch.equal(batch["labels"][same], batch["input_ids"][same])
    # Padding is one more document, in which nothing is supervised.
    for ids, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
        padding = positions[ids == 0]
        assert padding.tolist() == list(range(len(padding)))


@EXAMPLES
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=40), data=st.data())
def test_padded_rows_hold_a_document_each_and_masked_padding_behind(lengths: list[int], data: st.DataObject) -> None:
    documents = documents_of(lengths)
    rows = PaddedDataset(documents, 16)
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=6))
    longest = max(lengths[index] for index in chosen)
    assert rows.lengths(np.array(chosen)).tolist() == [lengths[index] for index in chosen]
    batch = rows.read_batch(chosen, longest + 1)
    assert batch.keys() == {"input_ids", "labels"}
    for index, ids, labels in zip(chosen, batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        text = texts(documents)[index]
        assert ids == text + [0] * (longest + 1 - len(text))
        assert labels == [-100, *text[1:]] + [-100] * (longest + 1 - len(text))
    masked = PaddedDataset(documents, 16, mask_padding=True).read_batch(chosen, longest + 1)
    assert torch.equal(masked["attention_mask"], (batch["input_ids"] > 0).long())


def test_labelled_tokens_of_a_stream_are_supervised_alone() -> None:
    labelled = np.arange(9) % 2 == 0
    batch = ConcatChunkedDataset(documents_of([4, 5], loss_mask=labelled), 4).read_batch([0, 1])
    assert batch["labels"].tolist() == [[1, -100, 3, -100], [5, -100, 7, -100]]


def test_columns_go_with_their_documents_and_tokens() -> None:
    columns = {
        "reward": np.array([0.5, 1.5, 2.5], np.float32),
        "source": np.array([7, 8, 9], np.int16),
        "old": np.arange(1, 10) / 2,
    }
    documents = documents_of([2, 3, 4], columns=columns)
    padded = PaddedDataset(documents, 8).read_batch([2, 0], 5)
    assert padded["reward"].tolist() == [2.5, 0.5]
    assert padded["source"].tolist() == [9, 7]
    assert padded["old"].tolist() == [[3.0, 3.5, 4.0, 4.5, 0.0], [0.5, 1.0, 0.0, 0.0, 0.0]]
    assert (padded["reward"].dtype, padded["source"].dtype) == (torch.float64, torch.int64)
    for rows in (PackedDataset(documents, 6), ConcatChunkedDataset(documents, 3)):
        batch = rows.read_batch(range(len(rows)))
        real = batch["input_ids"] > 0
        assert torch.equal(batch["old"][real], batch["input_ids"][real] / 2)
        of = torch.tensor(np.repeat([0, 1, 2], [2, 3, 4]))[batch["input_ids"][real] - 1]
        assert torch.equal(batch["source"][real], of + 7)
        assert torch.equal(batch["reward"][real], of + 0.5)
        assert not batch["reward"][~real].any()


def test_preferences_are_neither_packed_nor_cut() -> None:
    for kind in ("documents", "stream"):
        with pytest.raises(ConfigError, match=r"data\.packing=none"):
            build_row_dataset(documents_of([2, 2], group=2), kind, 8)  # type: ignore[arg-type]


def test_sources_that_do_not_go_together_are_reported() -> None:
    one = documents_of([2, 3], columns={"reward": np.array([1, 2])})
    with pytest.raises(DataError, match=r"columns \['reward'\].*another \[\]"):
        ConcatDataset([PaddedDataset(one, 4), PaddedDataset(documents_of([2]), 4)])
    # Whole numbers beside fractions are fractions in every batch.
    other = documents_of([2], columns={"reward": np.array([0.5])})
    joined = ConcatDataset([PaddedDataset(one, 4), PaddedDataset(other, 4)])
    assert joined.read_batch([0, 1], 4)["reward"].dtype == torch.float64
    assert joined.read_batch([2, 0], 4)["reward"].tolist() == [0.5, 1.0]


# -- shares of sources

weights_of = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5)


@EXAMPLES
@given(weights=weights_of, blocks=st.lists(st.integers(0, 10**6), min_size=1, max_size=4))
def test_sources_have_their_shares_at_every_block_and_lose_none(weights: list[float], blocks: list[int]) -> None:
    mixture = SourceMixture(weights, 0)
    for block in blocks:
        now, then = (mixture.count_by_source(number * MIXTURE_BLOCK_SIZE) for number in (block, block + 1))
        assert sum(now) == block * MIXTURE_BLOCK_SIZE
        assert all(before <= after for before, after in zip(now, then, strict=True))
        for count, weight in zip(now, weights, strict=True):
            assert abs(count - block * MIXTURE_BLOCK_SIZE * weight / sum(weights)) < len(weights)


@EXAMPLES
@given(weights=weights_of, seed=st.integers(0, 9), start=st.integers(0, 5000), count=st.integers(1, 3000))
def test_places_of_a_mixture_are_computed_alone(weights: list[float], seed: int, start: int, count: int) -> None:
    sources, ranks = SourceMixture(weights, seed).assign(0, start + count)
    own_sources, own_ranks = SourceMixture(weights, seed).assign(start, start + count)
    assert np.array_equal(sources[start:], own_sources)
    assert np.array_equal(ranks[start:], own_ranks)
    for source in range(len(weights)):
        assert ranks[sources == source].tolist() == list(range(int((sources == source).sum())))
    assert (
        SourceMixture(weights, seed).count_before(start)
        == np.bincount(sources[:start], minlength=len(weights)).tolist()
    )


def test_a_mixture_is_random_within_its_blocks() -> None:
    first, second = (SourceMixture([1, 1], seed).assign(0, MIXTURE_BLOCK_SIZE)[0] for seed in (0, 1))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, SourceMixture([1, 1], 0).assign(MIXTURE_BLOCK_SIZE, 2 * MIXTURE_BLOCK_SIZE)[0])
    # About half of the neighbours differ.
    assert 400 < (np.diff(first) != 0).sum() < 624


# -- the rows of a run


def all_rows(
    sources: list[RowDataset], steps: range, *, size: int = 1, micro: int = 2, **options: Any
) -> list[list[int]]:
    """The first tokens of the rows of each step, of all ranks."""
    feeds = [TrainSampler(sources, DataShard(rank, size, micro), **options) for rank in range(size)]
    return [
        sorted(
            int(token) for feed in feeds for batch in feed.read_microbatches(step) for token in batch["input_ids"][:, 0]
        )
        for step in steps
    ]


@settings(EXAMPLES, max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    weights=st.lists(st.floats(0.1, 9), min_size=3, max_size=3),
    seed=st.integers(0, 9),
)
def test_each_source_is_in_epochs_of_its_own_and_repeats_and_skips_nothing(sizes, weights, seed):
    sources: list[RowDataset] = [PaddedDataset(documents_of([2] * n, first=1000 * k), 4) for k, n in enumerate(sizes)]
    steps = all_rows(sources, range(12), batch_size=4, seed=seed, weights=weights[: len(sizes)])
    stream = [Counter(step) for step in steps]
    for number, size in enumerate(sizes):
        seen = [token for step in stream for token in step.elements() if token // 1000 == number]
        per_row = Counter(seen)
        # Whatever step ends, each row has come equally often, or once more.
        assert set(per_row.values()) <= {len(seen) // size, len(seen) // size + 1}
        assert len(per_row) == min(size, len(seen))


def test_sources_are_each_in_an_order_of_their_own() -> None:
    sources: list[RowDataset] = [PaddedDataset(documents_of([2] * 64, first=1000 * k), 4) for k in (1, 2)]
    feed = TrainSampler(sources, DataShard(0, 1, 64), batch_size=64, seed=0, weights=[1.0, 1.0])
    found = [
        int(token) for step in range(2) for batch in feed.read_microbatches(step) for token in batch["input_ids"][:, 0]
    ]
    one, other = ([token % 1000 for token in found if token // 1000 == k] for k in (1, 2))
    assert one[:50] != other[:50]


@pytest.mark.parametrize("weights", [None, [1.0, 3.0]])
@pytest.mark.parametrize("kind", ["documents", "stream", "none"])
def test_the_rows_of_a_step_are_the_same_on_any_mesh(kind: Any, weights: list[float] | None) -> None:
    lengths = np.random.default_rng(1).integers(2, 16, 40).tolist()
    sources = [build_row_dataset(documents_of(lengths, first=1000 * (1 + k)), kind, 16) for k in range(2)]
    options: dict[str, Any] = {"batch_size": 8, "seed": 3, "weights": weights}
    one = all_rows(sources, range(20), micro=8, **options)
    for size, micro in ((1, 2), (2, 4), (4, 1), (8, 1)):
        assert all_rows(sources, range(20), size=size, micro=micro, **options) == one
    # From the middle on, and with another batch size from there.
    assert all_rows(sources, range(7, 20), origin=(7, 56), **options) == one[7:]
    more = all_rows(sources, range(7, 10), **{**options, "batch_size": 16, "origin": (7, 56)})
    assert more == [sorted(one[step] + one[step + 1]) for step in (7, 9, 11)]


@EXAMPLES
@given(
    lengths=st.lists(st.integers(2, 30), min_size=4, max_size=40),
    data_size=st.sampled_from([1, 2, 4]),
    micro=st.sampled_from([1, 2]),
    multiple=st.sampled_from([1, 2, 4, 8]),
    one_shape=st.booleans(),
)
def test_microbatches_of_one_number_have_one_length_on_all_ranks(lengths, data_size, micro, multiple, one_shape):
    rows = PaddedDataset(documents_of(lengths), 32)
    places = [
        DataShard(rank, data_size, micro, length_multiple=multiple, uniform_length=one_shape)
        for rank in range(data_size)
    ]
    feeds = [TrainSampler([rows], place, batch_size=8, seed=0).read_microbatches(3) for place in places]
    evaluated = [read_eval_microbatches(rows, place, num_rows=None) for place in places]
    for of_ranks in (feeds, evaluated):
        shapes = [[tuple(batch["input_ids"].shape) for batch in batches] for batches in of_ranks]
        assert all(each == shapes[0] for each in shapes)
        widths = [width for _, width in shapes[0]]
        assert all(width % multiple == 0 and width <= 32 for width in widths)
        assert widths == sorted(widths, reverse=True)
        assert not one_shape or len(set(widths)) == 1
    # No longer than the longest row needs, and the rows are those of the order.
    indices = DataOrder(len(rows), 8, 0).get_indices(3)
    unit = max(2, multiple)
    widest = -(-max(lengths[index] for index in indices) // unit) * unit
    assert max(batch["input_ids"].shape[1] for batch in feeds[0]) == widest
    found = [int(token) for batches in feeds for batch in batches for token in batch["input_ids"][:, 0]]
    assert sorted(found) == sorted(int(rows.read_batch([index])["input_ids"][0, 0]) for index in indices)


def test_rows_that_no_axis_can_divide_are_so_from_the_first_step_on() -> None:
    feed = TrainSampler(
        [PaddedDataset(documents_of([2] * 8), 33)], DataShard(0, 1, 2, length_multiple=4), batch_size=4, seed=0
    )
    assert {batch["input_ids"].shape[1] for batch in feed.read_microbatches(0)} == {33}


def test_pairs_stay_together_in_every_order() -> None:
    lengths = np.random.default_rng(1).integers(2, 16, 40).tolist()
    rows = PaddedDataset(documents_of(lengths, group=2), 16)
    starts = [0, *np.cumsum(lengths)[:-1]]
    of_token = {int(start) + 1: index for index, start in enumerate(starts)}
    for size, micro in ((1, 2), (1, 8), (2, 4), (4, 2)):
        for weights in (None, [1.0]):
            seen = []
            for rank in range(size):
                feed = TrainSampler([rows], DataShard(rank, size, micro), batch_size=8, seed=0, weights=weights)
                assert (RunDatasets((rows,), None, {}).num_rows_per_epoch, feed.compute_data_position(3)) == (40, 24)
                for step in range(5):
                    for batch in feed.read_microbatches(step):
                        chosen = [of_token[int(token)] for token in batch["input_ids"][:, 0]]
                        assert all(a % 2 == 0 and b == a + 1 for a, b in zip(chosen[::2], chosen[1::2], strict=True))
                        seen += chosen
            assert sorted(seen) == list(range(40))
    with pytest.raises(ConfigError, match=r"micro_batch_size=1 must be a multiple of 2, since 2 rows belong together"):
        TrainSampler([rows], DataShard(0, 1, 1), batch_size=8, seed=0)
    with pytest.raises(ConfigError, match=r"batch_size=3 must be a multiple of 2"):
        TrainSampler([rows], DataShard(0, 1, 3), batch_size=3, seed=0)
    masked = [batch for rank in range(2) for batch in read_eval_microbatches(rows, DataShard(rank, 2, 4), num_rows=18)]
    counted = [int((labels != -100).any()) for batch in masked for labels in batch["labels"]]
    assert sum(counted) == 18
    assert all(a == b for a, b in zip(counted[::2], counted[1::2], strict=True))


LENGTHS = (6, 10)
CASE = Case(layers=2)


def documents(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, 97, (2, length), generator=generator) for length in LENGTHS]


def apart(step: int) -> list[Batch]:
    return [{"input_ids": ids, "labels": ids.clone()} for ids in documents(step)]


def packed(step: int) -> Batch:
    """The same documents, two to a row, beside an attention mask of ones."""
    ids = torch.cat(documents(step), 1)
    labels = ids.clone()
    labels[:, LENGTHS[0]] = IGNORE_INDEX
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": positions.expand(ids.shape),
        "attention_mask": torch.ones_like(ids),
    }


def _train(strategy: str, sizes: dict[str, int], config: dict[str, Any], is_packed: bool) -> tuple[list[float], Any]:
    manager = build_manager(strategy, config, sizes, CASE)
    found = []
    for step in range(3):
        mine = [packed(step)] if is_packed else apart(step)
        # Data ranks have a row each, or both.
        size, rank = manager.mesh.data_size, manager.mesh.data_rank
        mine = [{name: tensor.chunk(size)[rank] for name, tensor in batch.items()} for batch in mine]
        num_tokens = count_tokens(mine, manager.mesh)
        found.append(float(manager.eval_loss(mine, num_tokens=num_tokens)))
        found.append(float(manager.forward_backward(mine, num_tokens=num_tokens)))
        found.append(float(manager.clip_grad_norm(0.5)))
        manager.optimizer_step()
    return found, full_weights(manager)


@pytest.fixture(scope="module")
def rows_of_their_own() -> Any:
    return pool(1).run(_train, "single", {}, {}, False)[0]


@pytest.mark.parametrize(
    ("strategy", "sizes"), [("single", {}), pytest.param("fsdp2", {"cp_size": 2}, marks=pytest.mark.slow)]
)
def test_documents_in_one_row_with_a_mask_of_ones_train_as_in_rows_of_their_own(strategy, sizes, rows_of_their_own):
    expected, expected_weights = rows_of_their_own
    for found, weights in pool(1 if strategy == "single" else 2).run(_train, strategy, sizes, {}, True):
        assert found == pytest.approx(expected, rel=0, abs=1e-9)
        for name, weight in expected_weights.items():
            assert float((weights[name] - weight).abs().max()) <= 1e-9


def _losses(changes: list[dict[str, Any]]) -> list[float | str]:
    manager = build_manager("single", {}, {}, CASE)
    found: list[float | str] = []
    for change in changes:
        batch = {name: tensor for name, tensor in {**packed(0), **change}.items() if tensor is not None}
        try:
            found.append(float(manager.eval_loss([batch], num_tokens=count_tokens([batch], manager.mesh))))
        except BatchError as error:
            found.append(str(error))
    return found


def losses(*changes: dict[str, Any]) -> list[float | str]:
    return pool(1).run(_losses, list(changes))[0]


def test_a_mask_with_zeros_beside_positions_that_restart_is_refused() -> None:
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, -1] = 0
    for text in losses({"attention_mask": mask}, {"attention_mask": mask.bool()}):
        assert "microbatch 0 of 1: position_ids restart" in str(text)
        assert "Leave the mask out" in str(text)


def test_masks_that_say_something_are_kept() -> None:
    """Padding on the left and on the right, with the positions that transformers gives them; skipped positions; and a
    mask of queries and keys."""
    left, right = torch.ones(2, 16, dtype=torch.int64), torch.ones(2, 16, dtype=torch.int64)
    left[:, :4], right[:, 12:] = 0, 0
    by_mask = [(mask.cumsum(1) - 1).masked_fill(mask == 0, 1) for mask in (left, right)]
    jump = torch.arange(16) + 3 * (torch.arange(16) > 7)
    labels = packed(0)["labels"]
    cases = [
        {"attention_mask": left, "position_ids": by_mask[0], "labels": labels.masked_fill(left == 0, IGNORE_INDEX)},
        {"attention_mask": right, "position_ids": by_mask[1], "labels": labels.masked_fill(right == 0, IGNORE_INDEX)},
        {"position_ids": jump.expand(2, 16)},
    ]
    found = losses(*cases, *({**case, "attention_mask": None} for case in cases))
    assert all(isinstance(loss, float) for loss in found)
    # Without the mask each of them is another computation.
    assert all(kept != left_out for kept, left_out in zip(found[:1] + found[2:3], found[3:4] + found[5:6], strict=True))
    causal = torch.zeros(2, 1, 16, 16, dtype=torch.float64).masked_fill(torch.ones(16, 16).triu(1).bool(), -1e9)
    whole, none = losses({"attention_mask": causal}, {"attention_mask": None})
    assert whole != none
