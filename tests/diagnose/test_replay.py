"""A step of a run is done again: bit for bit in its layout, to rounding on one process, and by other ranks."""

from __future__ import annotations

import io
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from support.commands import LAUNCHER_VARIABLES, command, write_run
from support.runs import KillAfter, Killed
from torch import nn

from meshwright.base.errors import CheckpointError, ConfigError
from meshwright.events.step import StepResult
from meshwright.replay.order import Order
from meshwright.replay.peers import GRADIENT, OUTPUT, Work, judged
from meshwright.replay.rank import replay_rank
from meshwright.replay.record import Beginning, Recorded
from meshwright.replay.start import Replayed, replay
from meshwright.strategy.registry import get_registry
from meshwright.testing import pool
from meshwright.train.run import assembly
from meshwright.train.run.preflight import data_and_model_config
from meshwright.train.run.report import as_record
from meshwright.train.run.run_file import load_run
from meshwright.train.run.run_rank import run_rank

STEPS = 6


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("replay")
    write_run(directory)
    return directory


# -- runs and replays in the processes of a pool


@contextmanager
def _rank_of_nobody() -> Iterator[pytest.MonkeyPatch]:
    """The process group is there; there is no launcher, whose store a rank would report to."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for name in LAUNCHER_VARIABLES:
            patch.delenv(name, raising=False)
        yield patch


def _train(path: str, kill_after: int | None, fault: str) -> None:
    with _rank_of_nobody() as patch, get_registry().observing(KillAfter(kill_after)):
        FAULTS[fault](patch)
        try:
            run_rank(None, load_run(path))
        except Killed:
            return


def _replay(order: Order, fault: str) -> dict[str, Any]:
    with _rank_of_nobody() as patch:
        FAULTS[fault](patch)
        replay_rank(None, order)
    return order.found[-1]


def run_file(workplace: Path, name: str, **changes: Any) -> Path:
    """A run with dropout and checkpoints in `workplace / name`; its run file."""
    values = yaml.safe_load((workplace / "run.yaml").read_text())
    values["model"] = {**values["model"], "attention_dropout": 0.2, **changes.pop("model", {})}
    values["data"] = {**values["data"], **changes.pop("data", {})}
    values |= {"steps": STEPS, "sample": None, "eval": {"every": 3, "sequences": 4}, "strategy_config": {}}
    values |= {"checkpoint": {"every": 2, "keep_last": None}, "schedule": {"warmup_steps": 2}}
    values |= {"output_dir": str(workplace / name), **changes}
    path = workplace / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def trained(path: Path, *, kill_after: int | None = None, fault: str = "none") -> Path:
    """Where a run has left what it has come to."""
    config = load_run(path)
    assert isinstance(config.nproc, int)
    pool(config.nproc).run(_train, str(path), kill_after, fault)
    return Path(config.output_dir)


def performing(fault: str = "none") -> Callable[[Order], dict[str, Any]]:
    """What does a replay in a pool, all ranks of which come to the same."""

    def perform(order: Order) -> dict[str, Any]:
        found = pool(order.world_size).run(_replay, order, fault)
        assert all(each == found[0] for each in found)
        return found[0]

    return perform


def again(directory: Path, step: int, fault: str = "none", **options: Any) -> Replayed:
    return replay(directory, step, perform=performing(fault), **options)


def _contents(directory: Path) -> dict[str, tuple[bytes, int]]:
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


# -- hardware that computes wrongly


class _Flipped(torch.autograd.Function):
    """Flips the last bit of the first element of a gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        wrong = gradient.clone()
        wrong.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
        return wrong


def _flips(patch: pytest.MonkeyPatch, rank: int, every: int = 1) -> None:
    """On one rank, in the gradients of down projections."""
    if torch.distributed.get_rank() != rank:
        return
    plain, calls = nn.Linear.forward, [0]

    def forward(self: nn.Linear, value: torch.Tensor) -> torch.Tensor:
        if self.in_features != 24 or not torch.is_grad_enabled():
            return plain(self, value)
        calls[0] += 1
        weight = _Flipped.apply(self.weight) if calls[0] % every == 0 else self.weight
        return nn.functional.linear(value, weight, self.bias)

    patch.setattr(nn.Linear, "forward", forward)


def _freezes_rates(patch: pytest.MonkeyPatch) -> None:
    """A run that goes on keeps the rate that it had reached."""

    def frozen(scheduler: Any, step: int) -> None:
        rates = [base * factor(step) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
        scheduler.lr_lambdas = [lambda _, factor=factor: factor(step) for factor in scheduler.lr_lambdas]
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler.last_epoch, scheduler._last_lr = step, rates

    patch.setattr(assembly, "set_schedule", frozen)


def _halves_gradients(patch: pytest.MonkeyPatch) -> None:
    """Gradients of one layer are summed with another scale."""
    from meshwright_fsdp2.manager import FSDP2Manager

    plain = FSDP2Manager.check_gradients

    def check_gradients(self: FSDP2Manager) -> Any:
        found = plain(self)
        for name, parameter in self.named_trainable():
            if "layers.1.mlp.up_proj" in name and parameter.grad is not None:
                parameter.grad.mul_(0.5)
        return found

    patch.setattr(FSDP2Manager, "check_gradients", check_gradients)


def _doubles_activations(patch: pytest.MonkeyPatch) -> None:
    """One module gives something else."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain = LlamaMLP.forward
    patch.setattr(LlamaMLP, "forward", lambda self, value: plain(self, value) * 1.25)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "none": lambda patch: None,
    "rank 0 flips": lambda patch: _flips(patch, 0),
    "rank 1 flips": lambda patch: _flips(patch, 1),
    "rank 2 flips": lambda patch: _flips(patch, 2),
    "rank 1 flips at times": lambda patch: _flips(patch, 1, every=3),
    "rates freeze": _freezes_rates,
    "gradients are halved": _halves_gradients,
    "activations are more": _doubles_activations,
}


# -- in the same layout

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {"nproc": 2},
    "ddp": {"nproc": 2, "strategy": "ddp"},
    "pipeline": {"nproc": 2, "pp_size": 2},
    "tensor parallelism": {"nproc": 4, "tp_size": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_comes_to_the_same_bits_and_the_run_stays_as_it_is(workplace: Path, layout: str) -> None:
    directory = trained(run_file(workplace, f"bits {layout}", **LAYOUTS[layout]))
    before = _contents(directory)
    for step, begun in ((1, 0), (4, 2), (STEPS, 4)):
        found = again(directory, step)
        assert found.beginning[0] == begun
        assert {each.name for each in found.values} == {"num_tokens", "learning_rate", "loss", "grad_norm"}
        assert all(each.is_same for each in found.values), found.values
        assert found.exit_code == 0
    assert _contents(directory) == before


def test_steps_before_and_behind_an_interruption_come_to_the_same(workplace: Path) -> None:
    path = run_file(workplace, "interrupted", nproc=2, ema={"decay": 0.9}, micro_batch_size=2)
    directory = trained(path, kill_after=5)
    trained(path)
    for step in (3, 5, STEPS):
        assert again(directory, step).is_same


def test_a_step_of_an_earlier_sitting_is_done_by_its_own_run_file(workplace: Path) -> None:
    before = run_file(workplace, "changed", nproc=2, optimizer={"lr": 0.01})
    trained(before, kill_after=5)
    changed = {"from": str(workplace / "changed" / "checkpoints" / "step-00000004"), "allow": ["optimizer.lr"]}
    directory = trained(run_file(workplace, "changed", nproc=2, optimizer={"lr": 0.03}, resume=changed))
    for step in (4, 5, STEPS):
        assert again(directory, step).is_same


JUDGED = {"deviations": 1.2, "window": 20, "limit": 50}
"""Noise of a high rate leaps beyond this now and then."""


def _bad_steps(directory: Path) -> list[tuple[int, int | None]]:
    """The steps that were bad, and where the run went back to."""
    events = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    return [(event["step"], event["back_to"]) for event in events if event["event"] == "bad step"]


def test_steps_behind_one_that_has_taken_the_run_back_come_to_the_same(workplace: Path) -> None:
    """From checkpoints before it went back and behind, after a kill in between, and where no checkpoint is left."""
    settings = {"nproc": 2, "steps": 40, "optimizer": {"lr": 0.003}, "on_bad_step": {"do": "rewind", **JUDGED}}
    path = run_file(workplace, "rewinding", **settings, checkpoint={"every": 4, "keep_last": None})
    directory = trained(path, kill_after=30)
    trained(path)
    bad = _bad_steps(directory)
    assert len({to for _, to in bad}) > 1, "choose other settings: this run went back to one step alone"
    once = [(step, to) for step, to in bad if to is not None]
    # The last step that was done before it went back, which was done again; and those behind.
    asked = {step - 1 for step, to in once if step - 1 > to} | {step for step, _ in once} | {to + 1 for _, to in once}
    assert {again(directory, step).is_same for step in sorted(asked)} == {True}
    compared = again(directory, once[-1][0], compare_rank=1)
    assert (compared.is_same, compared.is_sound) == (True, True)
    alone = again(directory, once[-1][0], single=True)
    assert alone.is_same, alone.values
    shutil.rmtree(directory / "checkpoints")
    for step in (max(step for step, _ in once), 40):
        found = again(directory, step)
        assert (found.beginning[0], found.is_same) == (0, True)


def test_steps_whose_batch_was_skipped_are_skipped_again(workplace: Path) -> None:
    settings = {"nproc": 2, "steps": 40, "optimizer": {"lr": 0.003}, "on_bad_step": {"do": "skip", **JUDGED}}
    directory = trained(run_file(workplace, "skipping", **settings, checkpoint={"every": 30}))
    skipped = [step for step, _ in _bad_steps(directory)]
    assert skipped, "choose other settings: no step of this run was bad"
    for step in (skipped[0], skipped[0] + 1, 40):
        assert again(directory, step).is_same


def test_a_step_of_preferences_is_done_beside_the_reference_that_the_run_had(workplace: Path) -> None:
    odd = ("odd", "even")
    lines = [{"prompt": f"{n} is ", "chosen": odd[n % 2 - 1], "rejected": odd[n % 2]} for n in range(40)]
    pairs = workplace / "pairs" / "pairs.jsonl"
    pairs.parent.mkdir()
    pairs.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    path = run_file(workplace, "preferences", nproc=2, objective={"name": "dpo", "beta": 1.0}, micro_batch_size=2)
    values = yaml.safe_load(path.read_text())
    tokenizer = data_and_model_config(load_run(path))[0].tokenizer_dir
    kept = {key: values["data"][key] for key in ("cache_dir", "seq_len")}
    sources = [{"files": str(pairs), "format": "preference"}]
    values["data"] = kept | {"tokenizer": str(tokenizer), "sources": sources, "eval_fraction": 0.2}
    path.write_text(yaml.safe_dump(values))
    directory = trained(path)
    for step in (1, 4, STEPS):
        found = again(directory, step)
        assert "sum rewards/margins" in {each.name for each in found.values}
        assert found.is_same, found.values
    # What was computed when it began is what counts, and not what would be computed now.
    reference = directory / "reference.npz"
    with np.load(reference) as stored:
        changed = {name: each + 1.0 if each.dtype.kind == "f" else each for name, each in stored.items()}
    np.savez(reference, **changed)
    assert not again(directory, 4).is_same
    # Where it has gone, it is computed with what the run began with.
    reference.unlink()
    assert again(directory, 4).is_same
    assert not reference.exists()


def test_where_the_run_went_back_is_read_in_the_order_of_its_sittings(workplace: Path) -> None:
    directory = workplace / "told"
    directory.mkdir()
    shutil.copy(workplace / "run.yaml", directory)
    result = StepResult(1, 9, 1.0, 1.0, 1e-3, 10, 0.1, 0, ended=5.0)
    (directory / "metrics.jsonl").write_text(json.dumps(as_record(result)) + "\n")
    done: list[dict[str, Any]] = [
        {"event": "start", "start": 0},
        {"event": "bad step", "step": 9, "back_to": 6},
        {"event": "bad step", "step": 12, "back_to": None},
        {"event": "bad step", "step": 10, "back_to": 3},
        {"event": "bad step", "step": 8, "back_to": 6},
        {"event": "bad step", "step": 20, "back_to": 15},
        # What was done behind step 12 is forgotten.
        {"event": "start", "start": 12},
        {"event": "bad step", "step": 14, "back_to": 12},
    ]
    (directory / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in done) + '{"event": "bad')
    run = Recorded(directory)
    assert run.sittings == (0, 12)
    told = {begin: [(each.to, each.batches) for each in run.went_back(Beginning(begin, None))] for begin in (0, 6, 12)}
    assert told == {0: [(3, 3), (3, 7), (6, 2), (12, 2)], 6: [(6, 2), (12, 2)], 12: [(12, 2)]}


def test_other_numbers_than_were_written_are_told(workplace: Path) -> None:
    directory = trained(run_file(workplace, "altered", nproc=2))
    metrics = directory / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines[4]["loss"] += 1e-6
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = again(directory, 5)
    assert [each.name for each in found.values if not each.is_same] == ["loss"]
    assert found.exit_code == 1
    assert found.as_values()["values"]["loss"]["written"] == lines[4]["loss"]


# -- on one process


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": "ddp", "micro_batch_size": 1, "batch_size": 8},
        {"data": {"packing": "documents"}, "objective": {"name": "cross_entropy", "label_smoothing": 0.2}},
        {"pp_size": 2, "model": {"dtype": "float64", "attention_dropout": 0.0}},
    ],
    ids=["ddp", "fsdp2", "pipeline"],
)
def test_one_process_agrees_in_float64_with_the_random_numbers_of_all_data_ranks(
    workplace: Path, changes: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    values = {"model": {"dtype": "float64"}, "nproc": 2, **changes}
    directory = trained(run_file(workplace, f"single {request.node.callspec.id}", **values))
    found = again(directory, 5, single=True)
    assert (found.strategy, found.tolerance) == ("single", 1e-9)
    assert max(each.apart for each in found.values) < 1e-9, found.values
    assert found.exit_code == 0


# -- by other ranks


@pytest.fixture(scope="module")
def three(workplace: Path) -> dict[str, Path]:
    each = {"nproc": 3, "batch_size": 6, "steps": 3}
    return {
        name: trained(run_file(workplace, f"three {name}", **each, **more))
        for name, more in (("ddp", {"strategy": "ddp"}), ("fsdp2", {}))
    }


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_of_three_data_ranks_the_one_that_flips_a_bit_is_named(
    three: dict[str, Path], strategy: str, rank: int
) -> None:
    found = again(three[strategy], 3, f"rank {rank} flips", compare_rank=1)
    assert found.shares is not None
    assert found.shares["suspects"] == [rank]
    assert set(found.shares["shares"]) == {str(rank), str((rank + 1) % 3)}
    assert found.shares["shares"][str(rank)]["tensor"] == f"{GRADIENT} model.layers.1.mlp.down_proj.weight"
    assert found.exit_code == 1


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_healthy_ranks_give_no_alarm(three: dict[str, Path], strategy: str) -> None:
    found = again(three[strategy], 3, compare_rank=1)
    assert found.shares is not None
    assert (found.shares["suspects"], found.shares["shares"], found.shares["unsteady"]) == ([], {}, [])
    # Of each of two microbatches: 21 parameters, and the outputs of all modules but the head.
    assert found.shares["compared"] >= 2 * (21 + 21)
    assert found.exit_code == 0


def test_of_two_data_ranks_both_are_named_but_one_that_disagrees_with_itself_alone(workplace: Path) -> None:
    directory = trained(run_file(workplace, "two", nproc=2, steps=2))
    healthy = again(directory, 2, compare_rank=0)
    assert healthy.exit_code == 0
    both = again(directory, 2, "rank 1 flips", compare_rank=0).shares
    assert both is not None
    assert both["suspects"] == [0, 1]
    one = again(directory, 2, "rank 1 flips at times", compare_rank=0).shares
    assert one is not None
    assert (one["suspects"], one["unsteady"]) == ([1], [1])


def test_ranks_that_share_a_batch_compare_their_parts(workplace: Path) -> None:
    directory = trained(run_file(workplace, "parts", nproc=4, tp_size=2, steps=2))
    assert again(directory, 2, compare_rank=1).exit_code == 0
    found = again(directory, 2, "rank 2 flips", compare_rank=1).shares
    assert found is not None
    # Along tp, 0 and 1 are one data rank, 2 and 3 the other; 0 and 2 have the same part.
    assert found["suspects"] == [0, 2]


def _work(rank: int, stage: int, own: str, other: str, again: str = "") -> Work:
    def digests(bits: str) -> tuple[tuple[str, str], ...]:
        names = (f"{OUTPUT} a", f"{OUTPUT} b", f"{GRADIENT} b", f"{GRADIENT} a")
        return tuple(zip(names, bits, strict=True))

    return Work(rank, rank // 2, stage, (), digests(own), digests(other), digests(again or own))


def test_the_stage_where_a_share_goes_wrong_is_named_and_not_those_that_take_what_it_gives() -> None:
    # Ranks 2 d and 2 d + 1 are the stages of data rank d.
    right = [_work(rank, rank % 2, "0000", "0000") for rank in range(6)]
    assert judged(right, 3)["suspects"] == []
    # Stage 1 of data rank 1 is wrong in its forward; what it sends back spoils the gradients of stage 0.
    wrong = {2: _work(2, 0, "0011", "0011"), 3: _work(3, 1, "0111", "0111")}
    assert judged([wrong.get(each.rank, each) for each in right], 3)["suspects"] == [3]
    # Stage 0 is; what it sends on spoils all of stage 1.
    wrong = {2: _work(2, 0, "0111", "0111"), 3: _work(3, 1, "1111", "1111")}
    assert judged([wrong.get(each.rank, each) for each in right], 3)["suspects"] == [2]


def test_kernels_that_sum_in_no_order_are_no_hardware_that_is_wrong() -> None:
    works = [_work(rank, rank % 2, f"{rank}000", f"{rank + 7}000"[-4:], "9000") for rank in range(6)]
    found = judged(works, 3)
    assert (found["suspects"], len(found["unsteady"])) == ([], 6)
    assert "no fixed order" in found["why"]


# -- what cannot be done again


@pytest.fixture(scope="module")
def plain(workplace: Path) -> Path:
    return trained(run_file(workplace, "plain", nproc=2, checkpoint={"every": 3}))


def test_bad_input_is_told_before_a_rank_is_started(plain: Path, workplace: Path) -> None:
    def refused(text: str, directory: Path = plain, step: int = 2, **options: Any) -> None:
        with pytest.raises(ConfigError, match=text):
            replay(directory, step, perform=lambda order: pytest.fail("ranks were started"), **options)

    refused("step 7 is none of the run", step=7)
    refused("no directory of a run", directory=workplace / "cache")
    refused("tells of no step", directory=workplace)
    refused("none of the data ranks of the run, 0 to 1", compare_rank=2)
    refused("no other to compare a rank with", compare_rank=1, single=True)
    one = trained(run_file(workplace, "one rank", nproc=2, pp_size=2, steps=2))
    refused("one data rank", directory=one, compare_rank=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "3")
        refused("was done on 2 ranks, and there are 3 here")


def test_without_a_checkpoint_before_it_a_step_of_a_run_that_began_elsewhere_is_refused(workplace: Path) -> None:
    first = trained(run_file(workplace, "first", nproc=2, steps=4))
    elsewhere = first / "checkpoints" / "step-00000002"
    path = run_file(workplace, "went on", nproc=2, steps=4, resume=str(elsewhere), checkpoint={})
    directory = trained(path)
    assert again(directory, 3).is_same
    elsewhere.rename(elsewhere.with_name("gone"))
    with pytest.raises(CheckpointError, match="step-00000002"):
        again(directory, 3)


def test_other_data_than_the_run_had_are_told(plain: Path, workplace: Path) -> None:
    settings = yaml.safe_load((plain / "run.yaml").read_text())
    kept = (plain / "run.yaml").read_bytes()
    settings["data"]["seq_len"] = 8
    (plain / "run.yaml").write_text(yaml.safe_dump(settings))
    try:
        with pytest.raises(Exception, match=r"differs from the one .* data.seq_len"):
            again(plain, 5)
    finally:
        (plain / "run.yaml").write_bytes(kept)


# -- the command


@pytest.mark.parametrize(
    "launcher", [(), ("-m", "torch.distributed.run", "--nproc-per-node", "2")], ids=["alone", "torchrun"]
)
def test_the_command_tells_and_writes_what_it_has_found(plain: Path, tmp_path: Path, launcher: tuple[str, ...]) -> None:
    file = tmp_path / "found.json"
    done = command("replay", str(plain), "--step", "5", "--compare-rank", "1", "--json", str(file), launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("The step is the same, bit for bit.") == 1
    assert "No rank is suspect." in done.stdout
    found = json.loads(file.read_text())
    assert found["is_same"]
    assert found["from"]["step"] == 3
    assert found["shares"]["compared"] > 0


def test_the_command_ends_with_1_where_the_step_is_another(plain: Path) -> None:
    kept = (plain / "metrics.jsonl").read_text()
    (plain / "metrics.jsonl").write_text(kept.replace('"num_tokens": 60', '"num_tokens": 59'))
    try:
        done = command("replay", str(plain), "--step", "2", "--single")
    finally:
        (plain / "metrics.jsonl").write_text(kept)
    assert done.returncode == 1, done.stderr
    assert "The step is not the same" in done.stdout
    bad = command("replay", str(plain), "--step", "77")
    assert bad.returncode == 2
    assert "step 77 is none of the run" in bad.stderr
