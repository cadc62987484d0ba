"""Training from Python: batches from a DataLoader, callbacks, early stopping and the best checkpoint, on real ranks."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import step_directory
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from meshwright import (
    BatchError,
    Checkpointer,
    ConfigError,
    EarlyStopping,
    Loop,
    MeshwrightError,
    StepResult,
    StopSignals,
    fit,
    load_checkpoint,
)
from meshwright.base.types import Batch
from meshwright.checkpoint.lifecycle import find_best_checkpoints
from meshwright.checkpoint.manifest import list_steps
from meshwright.checkpoint.training_state import decode_values, encode_values
from meshwright.events.step import NONDETERMINISTIC_FIELDS
from meshwright.strategy.contract import StrategyManager
from meshwright.testing import Case
from meshwright.training.loop import fit as loop_fit
from meshwright.training.loop.batches import EpochBatches, EpochEnded
from meshwright.training.loop.monitors import MetricMonitor
from meshwright.training.loop.options import collect_shared_options
from meshwright_testing import pool
from meshwright_testing.parity import build_manager, full_weights

ROOT = Path(__file__).parents[2]
ROWS, LENGTH, VOCAB = 12, 8, 131


class Rows(torch.utils.data.Dataset):
    """Rows with ragged masks; row n is made of n."""

    def __init__(self, count: int = ROWS) -> None:
        generator = torch.Generator().manual_seed(7)
        self.ids = torch.randint(VOCAB, (count, LENGTH), generator=generator)
        self.labels = torch.where(torch.rand(self.ids.shape, generator=generator) < 0.7, self.ids, -100)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def _loader(manager: StrategyManager, rows: int = 2, **more: Any) -> DataLoader:
    """A global batch of `rows` rows for each microbatch, divided among data ranks as DistributedSampler does."""
    mesh, data = manager.mesh, Rows()
    sampler = DistributedSampler(data, num_replicas=mesh.data_size, rank=mesh.data_rank, seed=3)
    return DataLoader(data, batch_size=rows // mesh.data_size, sampler=sampler, **more)


def _reported(results: list[StepResult]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in vars(each).items() if key not in {*NONDETERMINISTIC_FIELDS, "rank"}}
        for each in results
    ]


def _trained(strategy: str, sizes: dict[str, int]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    manager = build_manager(strategy, {}, sizes, Case())
    results = fit(manager, Loop(batches=_loader(manager), gradient_accumulation_steps=2, epochs=2))
    return _reported(results), full_weights(manager)


LAYOUTS: list[Any] = [
    ("ddp", {}, 2),
    pytest.param("fsdp2", {"pp_size": 2}, 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("strategy", "sizes", "ranks"), LAYOUTS, ids=str)
def test_a_data_loader_trains_alike_on_every_layout(strategy: str, sizes: dict[str, int], ranks: int) -> None:
    (expected, weights), *_ = pool(1).run(_trained, "single", {})
    # Three steps a pass, another order in each.
    assert [each["step"] for each in expected] == [1, 2, 3, 4, 5, 6]
    assert {each["num_steps"] for each in expected} == {6}
    assert expected[0]["num_tokens"] != expected[3]["num_tokens"]
    assert {each["learning_rate"] for each in expected} == {expected[0]["learning_rate"]}
    for found, others in pool(ranks).run(_trained, strategy, sizes):
        for one, other in zip(found, expected, strict=True):
            assert one["loss"] == pytest.approx(other["loss"], abs=1e-9)
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], abs=1e-9)
            assert one["num_tokens"] == other["num_tokens"]
        for name, tensor in others.items():
            torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-9)


# -- passes


def _drawn(passes: EpochBatches, steps: range) -> list[list[int]]:
    """The first id of each row of each step, drawn under the seed of that step."""
    found = []
    for step in steps:
        batches = None
        while batches is None:
            torch.manual_seed(_seed(step))
            with suppress(EpochEnded):
                batches = passes(step)
        found.append([row for batch in batches for row in batch["input_ids"][:, 0].tolist()])
    return found


def _seed(step: int) -> int:
    return 10 + step


def _ids(*numbers: int) -> list[Batch]:
    return [{"input_ids": torch.full((1, 2), n), "labels": torch.full((1, 2), n)} for n in numbers]


class _Epochs(IterableDataset):
    """Has no length, and other rows, and more of them, in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Batch]:
        return iter(_ids(*(100 * self.epoch + n for n in range(3 + self.epoch))))


def test_a_step_never_reaches_over_the_end_of_a_pass_and_each_pass_is_reported_its_number() -> None:
    assert _drawn(EpochBatches(_ids(1, 2, 3, 4, 5), gradient_accumulation_steps=2), range(5)) == [
        [1, 2],
        [3, 4],
        [5],
        [1, 2],
        [3, 4],
    ]
    found = _drawn(EpochBatches(DataLoader(_Epochs(), batch_size=None), gradient_accumulation_steps=2), range(6))
    assert found == [[0, 1], [2], [100, 101], [102, 103], [200, 201], [202, 203]]


class _Live:
    """Tells where it is by its own memory, which changes as it continues."""

    def __init__(self) -> None:
        self.place = {"next": 0}

    def __iter__(self) -> Iterator[Batch]:
        for n in range(self.place["next"], 9):
            self.place["next"] = n + 1
            yield from _ids(n)
        self.place["next"] = 0

    def state_dict(self) -> dict[str, int]:
        return self.place

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place.update(state)


MADE: dict[str, Callable[[], Any]] = {
    "live": _Live,
    "sampler": lambda: DataLoader(_ids(*range(5)), batch_size=None, sampler=_sampler()),
    "generator": lambda: DataLoader(
        _ids(*range(5)), batch_size=None, shuffle=True, generator=torch.Generator().manual_seed(1)
    ),
    "stateful": lambda: StatefulDataLoader(_ids(*range(5)), batch_size=None, sampler=_sampler()),
}


def _sampler() -> DistributedSampler[int]:
    return DistributedSampler(range(5), num_replicas=1, rank=0)


@pytest.mark.parametrize("kind", MADE)
def test_a_run_continues_at_the_microbatch_that_comes_next(kind: str) -> None:
    passes, states, whole = EpochBatches(MADE[kind](), gradient_accumulation_steps=2, seed_for_step=_seed), [None], []
    for step in range(8):
        whole += _drawn(passes, range(step, step + 1))
        states.append(passes.state_dict())
    # A state is saved after the next step has been drawn.
    states = json.loads(json.dumps(encode_values(states)))
    assert len({tuple(each) for each in whole}) > 3
    for start in range(1, 8):
        torch.manual_seed(99)
        counted = EpochBatches(MADE[kind](), gradient_accumulation_steps=2, seed_for_step=_seed)
        assert _drawn(counted, range(start, 8)) == whole[start:]
        if kind in ("stateful", "live"):
            drawn = EpochBatches(
                MADE[kind](), gradient_accumulation_steps=2, state=decode_values(states[start]), seed_for_step=_seed
            )
            assert _drawn(drawn, range(start, 8)) == whole[start:]


@pytest.mark.parametrize(
    ("batches", "text"),
    [
        ([], "the batches give nothing. Give an iterable"),
        (iter(_ids(1)), r"the batches give nothing when they are gone through again \(pass 2\)"),
        ([(torch.ones(1), torch.ones(1))], "batches give a tuple, where a microbatch is a mapping of tensors"),
        ([{"input_ids": torch.ones(1), "text": ["a"]}], r"a microbatch holds what is no tensor: text \(list\)"),
    ],
)
def test_what_gives_no_microbatches_is_reported(batches: Any, text: str) -> None:
    passes = EpochBatches(batches)
    with pytest.raises(BatchError, match=text):
        _drawn(passes, range(3))


# -- what ranks must have alike


def _raised(make: str, directory: str = "") -> tuple[str, str, int]:
    """Class and text of the error that a rank meets, and the steps before it."""
    case, steps = Case(), []
    manager = build_manager("fsdp2", {}, {"tp_size": 2} if make == "tensor" else {}, case)
    rank = manager.mesh.rank
    batch = {name: tensor[None] for name, tensor in Rows()[0].items()}
    endless = itertools.repeat(batch)
    loops: dict[str, Callable[[], Loop]] = {
        "earlier": lambda: Loop(batches=itertools.islice(endless, 3 + rank), steps=9),
        "fewer": lambda: Loop(batches=itertools.islice(endless, 3 + rank), gradient_accumulation_steps=2, steps=9),
        "tensor": lambda: Loop(batches=DataLoader(Rows(), batch_size=2, shuffle=True), steps=3),
        "steps": lambda: Loop(batches=[batch], steps=3 + rank),
        "signals": lambda: Loop([batch], steps=3, signals=StopSignals(["SIGUSR1" if rank else "SIGTERM"])),
        "culprit": lambda: Loop(batches=[batch, batch, {**batch, "text": "a"} if rank else batch], steps=9),
        "callback": lambda: Loop(batches=[batch], steps=3, callbacks=[_fails] if rank else []),
        "held out": lambda: Loop(batches=[batch], steps=3, eval_sets={"a": _failing([batch]) if rank else [batch]}),
        "drawing": lambda: Loop(batches=_failing([batch] * 2) if rank else iter([batch] * 2), steps=9),
        "extra": lambda: Loop(
            batches=[batch],
            steps=3,
            checkpointer=Checkpointer(manager, directory),
            checkpoint_extra=lambda step: {"a": 1 / (1 - rank)},
        ),
    }

    def count(result: StepResult) -> None:
        steps.append(result.step)

    torch.manual_seed(rank)
    loop = loops[make]()
    try:
        fit(manager, replace(loop, callbacks=[count, *loop.callbacks]) if make != "callback" else loop)
    except (MeshwrightError, ZeroDivisionError) as error:
        return type(error).__name__, str(error), len(steps)
    raise AssertionError


def _failing(batches: list[Batch]) -> Iterator[Batch]:
    yield from batches
    raise ZeroDivisionError("no such row")


def _fails(result: StepResult) -> None:
    if result.step == 2:
        raise ZeroDivisionError("no such step")


@pytest.mark.parametrize(
    ("make", "kind", "text", "steps"),
    [
        ("earlier", "BatchError", "after step 3 the batches have ended on data ranks 0 of 2, and not on the others", 3),
        ("fewer", "BatchError", "ranks disagree on the number of microbatches: between 1 and 2", 1),
        ("tensor", "BatchError", "ranks that share a batch", 0),
        ("steps", "ConfigError", "ranks disagree on steps of the loop: 3 on rank 0, 4 on rank 1", 0),
        ("signals", "ConfigError", "signals of the loop: ('SIGTERM',) on rank 0, ('SIGUSR1',) on rank 1", 0),
        ("culprit", "BatchError", "a microbatch holds what is no tensor: text (str)", 2),
    ],
)
def test_what_does_not_fit_together_is_one_error_on_all_ranks(make: str, kind: str, text: str, steps: int) -> None:
    reported = pool(2).run(_raised, make)
    for found, said, done in reported:
        assert (found, done) == (kind, steps), said
        assert text in said
    assert len({said for _, said, _ in reported}) == 1 or make == "culprit"


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        ("callback", "TrainingError", "a callback fails after step 2: ZeroDivisionError: no such step"),
        ("held out", "BatchError", "the microbatches of eval_sets cannot be drawn: ZeroDivisionError: no such row"),
        # A pass that ends on the other rank is not the cause.
        ("drawing", "BatchError", "the microbatches of step 3 cannot be drawn: ZeroDivisionError: no such row"),
        ("extra", "CheckpointError", "extra of the loop fails after step 3: ZeroDivisionError: division by zero"),
    ],
)
def test_what_fails_on_one_rank_ends_all_of_them(make: str, kind: str, text: str, tmp_path: Path) -> None:
    (found, said, _), (own, _, _) = pool(2).run(_raised, make, str(tmp_path))
    assert own == "ZeroDivisionError"
    assert found == kind
    assert text in said


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"steps": 2, "epochs": 1}, "give either steps or epochs"),
        ({"epochs": 1, "batches": iter(())}, "epochs=1 needs batches that have a length, which tuple_iterator has not"),
        ({"steps": 0}, "steps of the loop must be an int, at least 1, not 0"),
        ({"steps": 2, "start_step": 3}, "the loop is to start after step 3, but has 2 steps"),
        (
            {"steps": 2, "gradient_accumulation_steps": 2, "batches": lambda step: []},
            "gradient_accumulation_steps is for batches that are iterable",
        ),
        ({"steps": 2, "early_stopping": EarlyStopping("b")}, "early_stopping looks at the set 'b'; the loop's are: a"),
        ({"steps": 2, "early_stopping": EarlyStopping("a")}, "early_stopping needs evaluations before the end"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_loop_that_cannot_be_run_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        collect_shared_options(Loop(**{"batches": [], "eval_sets": {"a": []}, **changes}))


# -- callbacks


def _stopped(asking: int) -> tuple[list[Any], list[dict[str, Any]]]:
    manager, seen = build_manager("ddp", {}, {}, Case()), []

    def first(result: StepResult) -> None:
        seen.append(("first", result.step, sorted(result.evaluations)))

    def second(result: StepResult) -> bool:
        seen.append("second")
        return manager.mesh.rank == asking and result.step == 3

    sets = {name: list(_loader(manager)) for name in ("short", "long")}
    loop = Loop(batches=_loader(manager), epochs=3, callbacks=[first, second], eval_sets=sets, eval_every=2)
    return seen, _reported(fit(manager, loop))


def test_callbacks_are_called_in_order_see_evaluations_and_any_rank_may_stop_all() -> None:
    expected = [("first", 1, []), "second", ("first", 2, ["long", "short"]), "second", ("first", 3, []), "second"]
    for seen, results in pool(2).run(_stopped, 1):
        assert seen == expected
        assert [each["step"] for each in results] == [1, 2, 3]


# -- early stopping, and the best checkpoint


def _course(directory: str, strategy: str, sizes: dict[str, int], changes: dict[str, Any], start: int | None) -> Any:
    """A run whose loss on a set falls and then rises again; or its end, from a checkpoint on."""
    manager = build_manager(strategy, {}, sizes, Case())
    held_out = {"other": list(_loader(manager)), "held_out": list(_loader(manager))[:1]}
    # Rates that rise until the model forgets what it has supervised.
    scheduler = torch.optim.lr_scheduler.LambdaLR(manager.optimizer, lambda step: 1.0 if step < 4 else 40.0)
    saving = {key: changes[key] for key in ("keep_last", "keep_best", "best_eval_set") if key in changes}
    with Checkpointer(manager, directory, **{"keep_last": 1, **saving}) as checkpointer:
        loop = Loop(
            batches=_loader(manager),
            steps=12,
            scheduler=scheduler,
            eval_sets=held_out,
            eval_every=1,
            checkpointer=checkpointer,
            early_stopping=changes.get("early_stopping"),
            save_every=changes.get("save_every"),
        )
        if start is not None:
            manifest = load_checkpoint(manager, step_directory(Path(directory), start), scheduler=scheduler)
            loop = loop.resume_from(manifest)
        results = fit(manager, loop)
    return _reported(results), sorted(step for step, _ in list_steps(Path(directory)))


STOPPING = {"early_stopping": EarlyStopping("other", patience=3), "save_every": 1, "keep_last": None}


def _lowest(results: list[dict[str, Any]], name: str, count: int) -> list[int]:
    ordered = sorted(results, key=lambda each: (each["evaluations"][name], each["step"]))
    return [each["step"] for each in ordered[:count]]


def test_a_run_stops_early_on_any_layout_and_remembers_its_patience(tmp_path: Path) -> None:
    (whole, steps), *_ = pool(1).run(_course, str(tmp_path / "1"), "single", {}, STOPPING, None)
    (best,) = _lowest(whole, "other", 1)
    assert 1 < best < 8
    assert [each["step"] for each in whole] == steps == list(range(1, best + 4))
    for found, saved in pool(2).run(_course, str(tmp_path / "2"), "fsdp2", {"tp_size": 2}, STOPPING, None):
        assert saved == steps
        for one, other in zip(found, whole, strict=True):
            assert one["evaluations"] == pytest.approx(other["evaluations"], abs=1e-8)
    # In the middle of its patience, and when it has ended.
    for start in (best + 1, best + 3):
        ((rest, _),) = pool(1).run(_course, str(tmp_path / "1"), "single", {}, STOPPING, start)
        assert rest == whole[start:]
    for rest, _ in pool(2).run(_course, str(tmp_path / "2"), "ddp", {}, STOPPING, best + 2):
        assert [each["step"] for each in rest] == [best + 3]


@pytest.mark.slow
def test_the_best_checkpoints_are_saved_and_never_removed_also_after_an_interruption(tmp_path: Path) -> None:
    changes = {"keep_best": 2, "best_eval_set": "other"}
    for results, steps in pool(2).run(_course, str(tmp_path / "a"), "ddp", {}, changes, None):
        best = _lowest(results, "other", 2)
        assert steps == sorted({*best, 12})
        assert max(best) < 9
    found = find_best_checkpoints([path for _, path in list_steps(tmp_path / "a")], "other", 2)
    assert [step for _, step, _ in found] == best
    assert [loss for loss, _, _ in found] == [results[step - 1]["evaluations"]["other"] for step in best]
    # What was the best before the run continued stays the best.
    shutil.rmtree(step_directory(tmp_path / "a", 12))
    for rest, steps in pool(2).run(_course, str(tmp_path / "a"), "ddp", {}, changes, max(best)):
        assert rest == results[max(best) :]
        assert steps == sorted({*best, 12})


class _Lowest:
    """As much of a checkpointer as a watch looks at."""

    keep_best, best_eval_set = 2, "a"


def _watched(values: Sequence[float], state: Any = None, **stopping: Any) -> tuple[list[bool], MetricMonitor]:
    watch = MetricMonitor(EarlyStopping("a", **stopping), _Lowest(), state)  # type: ignore[arg-type]
    first = int((state or {}).get("steps", 0))
    results = [
        StepResult(first + n, 9, 1.0, 1.0, 1.0, 1, 1.0, 0, evaluations={"a": v}) for n, v in enumerate(values, 1)
    ]
    return [watch.update(result) for result in results], watch


@pytest.mark.parametrize(
    ("values", "best", "stops"),
    [
        ([3, 2, 1, 0.5], [True] * 4, False),
        ([3, 2, 2, 2], [True, True, True, False], True),
        ([3, 2, 1.95, 1.92], [True] * 4, True),
        ([3, 2, 2.5, 1.8], [True, True, True, True], False),
        ([math.nan, math.nan], [False, False], True),
        ([1, math.nan, math.inf], [True, False, False], True),
    ],
)
def test_only_a_loss_that_is_lower_by_enough_renews_patience(
    values: list[float], best: list[bool], stops: bool
) -> None:
    found, watch = _watched(values, patience=2, min_delta=0.1)
    assert (found, watch.should_stop) == (best, stops)
    # The same, interrupted after each.
    for cut in range(1, len(values)):
        _, before = _watched(values[:cut], patience=2, min_delta=0.1)
        state = {**json.loads(json.dumps(before.state_dict())), "steps": cut}
        rest, after = _watched(values[cut:], state, patience=2, min_delta=0.1)
        assert (rest, after.should_stop, after.state_dict()) == (best[cut:], stops, watch.state_dict())


def test_patience_with_one_set_is_none_with_another() -> None:
    _, watch = _watched([1, 2, 3], patience=2)
    assert not MetricMonitor(EarlyStopping("b", patience=2), None, watch.state_dict()).should_stop
    assert not MetricMonitor(EarlyStopping("a", patience=3), None, watch.state_dict()).should_stop
    assert MetricMonitor(EarlyStopping("a", patience=2), None, watch.state_dict()).should_stop


# -- checkpoints by the clock, and of a loader's state


def _by_the_clock(directory: str) -> list[int]:
    manager = build_manager("ddp", {}, {}, Case())
    # That of the first rank counts, 10 seconds a look; the other runs ahead.
    clock = itertools.count(0, 10 if manager.mesh.rank == 0 else 1000).__next__
    with Checkpointer(manager, directory) as checkpointer, pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_fit, "clock", clock)
        loop = Loop(batches=_loader(manager), steps=10, checkpointer=checkpointer, save_every_s=25)
        fit(manager, loop)
    return [step for step, _ in list_steps(Path(directory))]


def test_a_checkpoint_is_saved_when_the_clock_of_the_first_rank_says_so(tmp_path: Path) -> None:
    # The beginning and each save are a look, too.
    assert pool(2).run(_by_the_clock, str(tmp_path)) == [[10, 9, 6, 3]] * 2


def _stateful(directory: str, strategy: str, start: int | None) -> tuple[list[Any], int]:
    manager, data = build_manager(strategy, {}, {}, Case()), _Counted()
    mesh = manager.mesh
    sampler = DistributedSampler(data, num_replicas=mesh.data_size, rank=mesh.data_rank)
    loader = StatefulDataLoader(data, batch_size=1, sampler=sampler)
    with Checkpointer(manager, directory, keep_last=None) as checkpointer:
        loop = Loop(batches=loader, gradient_accumulation_steps=2, steps=8, checkpointer=checkpointer, save_every=1)
        if start is not None:
            loop = loop.resume_from(load_checkpoint(manager, step_directory(Path(directory), start)))
        return _reported(fit(manager, loop)), data.read


class _Counted(Rows):
    read = 0

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read += 1
        return super().__getitem__(index)


def test_the_state_of_a_loader_is_in_the_checkpoint_and_no_row_is_read_again(tmp_path: Path) -> None:
    whole = pool(2).run(_stateful, str(tmp_path), "ddp", None)
    for start in (2, 3):
        # A pass has three steps, of 2 rows on each rank.
        for (results, _), (rest, read) in zip(whole, pool(2).run(_stateful, str(tmp_path), "ddp", start), strict=True):
            assert rest == results[start:]
            assert read == 2 * (8 - start)
    with pytest.raises(MeshwrightError, match="states of the batches of 2 data ranks, and there are 1"):
        pool(1).run(_stateful, str(tmp_path), "single", 2)


# -- the example


@pytest.mark.slow
def test_the_example_learns_stops_and_continues(tmp_path: Path) -> None:
    def run(epochs: int) -> list[str]:
        command = [sys.executable, ROOT / "examples" / "finetune.py", "--out", tmp_path, "--epochs", str(epochs)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
        return done.stdout.splitlines()

    first = run(2)
    assert [line.split()[1] for line in first[:-1]] == ["12", "24"]
    losses = [float(line.split()[-1]) for line in first[:-1]]
    assert losses[1] < losses[0] < 5.0
    assert first[-1].startswith("trained 24 steps, of 24;")
    again = run(3)
    assert [line.split()[1] for line in again[:-1]] == ["36"]
    assert again[-1].startswith("trained 12 steps, of 36;")
