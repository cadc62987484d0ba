"""A step of a run is done again: bit for bit in its layout, to rounding on one process, and by other ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from support.commands import run_command, write_run
from support.replays import STEPS, copy_run, replay_in_pool, train_run, write_run_file

from meshwright.base.errors import CheckpointError, ConfigError
from meshwright_diagnose.replay.rank_comparison import GRADIENT_PREFIX, OUTPUT_PREFIX, RankDigests, find_suspects
from meshwright_diagnose.replay.replay import replay_step
from meshwright_run.preflight import prepare_data_and_model_config
from meshwright_run.run_file import load_run


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("replay")
    write_run(directory)
    return directory


@pytest.fixture(scope="module")
def plain(workplace: Path) -> Path:
    return train_run(write_run_file(workplace, "plain", nproc=2, checkpoint={"every": 3}))


def _contents(directory: Path) -> dict[str, tuple[bytes, int]]:
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def test_a_step_gives_the_same_result_bits_on_healthy_ranks_and_the_run_stays_as_it_is(plain: Path) -> None:
    before = _contents(plain)
    for step, started, compared in ((1, 0, None), (5, 3, 1)):
        found = replay_in_pool(plain, step, compare_rank=compared)
        assert found.start[0] == started
        assert {each.name for each in found.values} == {"num_tokens", "learning_rate", "loss", "grad_norm"}
        assert all(each.is_same for each in found.values), found.values
        assert found.exit_code == 0
    assert (
        found.rank_comparison["suspects"],
        found.rank_comparison["mismatches"],
        found.rank_comparison["inconsistent_ranks"],
    ) == (
        [],
        {},
        [],
    )
    # 21 parameters, and the outputs of all modules but the head.
    assert found.rank_comparison["num_compared"] >= 21 + 21
    assert _contents(plain) == before


def test_other_numbers_than_were_written_are_reported(plain: Path, tmp_path: Path) -> None:
    directory = copy_run(plain, tmp_path / "altered")
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    lines[4]["loss"] += 1e-6
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = replay_in_pool(directory, 5)
    assert ([each.name for each in found.values if not each.is_same], found.exit_code) == (["loss"], 1)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"strategy": "ddp"}, {"pp_size": 2}, {"nproc": 4, "tp_size": 2}], ids=str)
def test_a_step_of_another_layout_gives_the_same_result_bits(workplace, layout, request):
    directory = train_run(write_run_file(workplace, f"bits {request.node.callspec.id}", **{"nproc": 2, **layout}))
    assert all(replay_in_pool(directory, step).is_same for step in (1, 4))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"lr": 0.03}], ids=["interrupted", "changed"])
def test_steps_before_and_after_an_interruption_give_the_same_result(workplace: Path, changes: dict[str, Any]) -> None:
    name = f"interrupted {len(changes)}"
    options: dict[str, Any] = {"nproc": 2, "ema": {"decay": 0.9}, "micro_batch_size": 2, "optimizer": {"lr": 0.01}}
    path = write_run_file(workplace, name, **options)
    directory = train_run(path, kill_after=5)
    if changes:
        resume = {"from": str(directory / "checkpoints" / "step-00000004"), "allow": ["optimizer.lr"]}
        path = write_run_file(workplace, name, **{**options, "optimizer": changes, "resume": resume})
    train_run(path)
    for step in (4, 5, STEPS):
        assert replay_in_pool(directory, step).is_same


JUDGED = {
    "max_deviations": 1.2,
    "window": 20,
    "max_bad_steps": 50,
}  # Noise of a high rate leaps beyond this now and then


def _bad_steps(directory: Path) -> list[tuple[int, int | None]]:
    events = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    return [(event["step"], event["rollback_step"]) for event in events if event["event"] == "bad_step"]


@pytest.mark.slow
def test_steps_after_one_that_has_taken_the_run_back_give_the_same_result(workplace: Path) -> None:
    settings = {"nproc": 2, "steps": 40, "optimizer": {"lr": 0.003}, "on_bad_step": {"action": "rollback", **JUDGED}}
    path = write_run_file(workplace, "rewinding", **settings, checkpoint={"every": 4, "keep_last": None})
    directory = train_run(path, kill_after=30)
    train_run(path)
    once = [(step, to) for step, to in _bad_steps(directory) if to is not None]
    assert len({to for _, to in once}) > 1, "choose other settings: this run went back to one step alone"
    # The last step that was done before it went back, which was done again; and those after it.
    asked = {step - 1 for step, to in once if step - 1 > to} | {step for step, _ in once} | {to + 1 for _, to in once}
    assert {replay_in_pool(directory, step).is_same for step in sorted(asked)} == {True}
    compared = replay_in_pool(directory, once[-1][0], compare_rank=1)
    assert (compared.is_same, compared.has_consistent_ranks) == (True, True)
    assert replay_in_pool(directory, once[-1][0], single=True).is_same
    shutil.rmtree(directory / "checkpoints")
    for step in (max(step for step, _ in once), 40):
        found = replay_in_pool(directory, step)
        assert (found.start[0], found.is_same) == (0, True)


@pytest.mark.slow
def test_steps_whose_batch_was_skipped_are_skipped_again(workplace: Path) -> None:
    settings = {"nproc": 2, "steps": 40, "optimizer": {"lr": 0.003}, "on_bad_step": {"action": "skip", **JUDGED}}
    directory = train_run(write_run_file(workplace, "skipping", **settings, checkpoint={"every": 30}))
    skipped = [step for step, _ in _bad_steps(directory)]
    assert skipped, "choose other settings: no step of this run was bad"
    for step in (skipped[0], skipped[0] + 1, 40):
        assert replay_in_pool(directory, step).is_same


@pytest.mark.slow
def test_a_step_of_preferences_is_done_with_the_reference_that_the_run_had(workplace: Path) -> None:
    odd = ("odd", "even")
    lines = [{"prompt": f"{n} is ", "chosen": odd[n % 2 - 1], "rejected": odd[n % 2]} for n in range(40)]
    pairs = workplace / "pairs" / "pairs.jsonl"
    pairs.parent.mkdir()
    pairs.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    path = write_run_file(workplace, "preferences", nproc=2, objective={"name": "dpo", "beta": 1.0}, micro_batch_size=2)
    values = yaml.safe_load(path.read_text())
    tokenizer = prepare_data_and_model_config(load_run(path))[0].tokenizer_dir
    more = {"tokenizer": str(tokenizer), "sources": [{"files": str(pairs), "format": "preference"}]}
    values["data"] = {key: values["data"][key] for key in ("cache_dir", "seq_len")} | more | {"eval_fraction": 0.2}
    path.write_text(yaml.safe_dump(values))
    directory = train_run(path)
    for step in (1, STEPS):
        found = replay_in_pool(directory, step)
        assert "sum rewards/margins" in {each.name for each in found.values}
        assert found.is_same, found.values
    # What was computed when it began counts, and not what would be computed now.
    reference = directory / "reference.npz"
    with np.load(reference) as stored:
        changed = {name: each + 1.0 if each.dtype.kind == "f" else each for name, each in stored.items()}
    np.savez(reference, **changed)
    assert not replay_in_pool(directory, 4).is_same
    reference.unlink()  # where it was removed, it is computed with what the run began with
    assert replay_in_pool(directory, 4).is_same


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": "ddp", "micro_batch_size": 1, "batch_size": 8},
        {"data": {"packing": "documents"}, "objective": {"name": "cross_entropy", "label_smoothing": 0.2}},
        {"pp_size": 2, "model": {"dtype": "float64", "attention_dropout": 0.0}},
    ],
    ids=["ddp", "fsdp2", "pipeline"],
)
def test_one_process_agrees_in_float64_with_the_random_numbers_of_all_data_ranks(workplace, changes, request):
    values = {"model": {"dtype": "float64"}, "nproc": 2, **changes}
    directory = train_run(write_run_file(workplace, f"single {request.node.callspec.id}", **values))
    found = replay_in_pool(directory, 5, single=True)
    assert (found.strategy, found.tolerance) == ("single", 1e-9)
    assert max(each.relative_difference for each in found.values) < 1e-9, found.values
    assert found.exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_of_three_data_ranks_the_one_that_flips_a_bit_is_named(workplace: Path, strategy: str) -> None:
    directory = train_run(
        write_run_file(workplace, f"three {strategy}", nproc=3, batch_size=6, steps=3, strategy=strategy)
    )
    assert replay_in_pool(directory, 3, compare_rank=1).exit_code == 0
    for rank in (0, 2) if strategy == "ddp" else (1,):
        found = replay_in_pool(directory, 3, f"rank {rank} flips", compare_rank=1)
        assert (found.rank_comparison["suspects"], found.exit_code) == ([rank], 1)
        assert set(found.rank_comparison["mismatches"]) == {str(rank), str((rank + 1) % 3)}
        assert (
            found.rank_comparison["mismatches"][str(rank)]["tensor"]
            == f"{GRADIENT_PREFIX} model.layers.1.mlp.down_proj.weight"
        )


@pytest.mark.slow
def test_of_two_data_ranks_both_are_named_but_one_that_disagrees_with_itself_alone(plain: Path) -> None:
    both = replay_in_pool(plain, 2, "rank 1 flips", compare_rank=0).rank_comparison
    assert both["suspects"] == [0, 1]
    one = replay_in_pool(plain, 2, "rank 1 flips at times", compare_rank=0).rank_comparison
    assert (one["suspects"], one["inconsistent_ranks"]) == ([1], [1])


@pytest.mark.slow
def test_ranks_that_share_a_batch_compare_their_parts(workplace: Path) -> None:
    directory = train_run(write_run_file(workplace, "parts", nproc=4, tp_size=2, steps=2))
    assert replay_in_pool(directory, 2, compare_rank=1).exit_code == 0
    found = replay_in_pool(directory, 2, "rank 2 flips", compare_rank=1).rank_comparison
    # Along tp, 0 and 1 are one data rank, 2 and 3 the other; 0 and 2 have the same part.
    assert found["suspects"] == [0, 2]


def _work(rank: int, own: str, other: str, again: str = "") -> RankDigests:
    """Ranks 2 d and 2 d + 1 are the stages of data rank d."""

    def digests(bits: str) -> tuple[tuple[str, str], ...]:
        names = (f"{OUTPUT_PREFIX} a", f"{OUTPUT_PREFIX} b", f"{GRADIENT_PREFIX} b", f"{GRADIENT_PREFIX} a")
        return tuple(zip(names, bits, strict=True))

    return RankDigests(rank, rank // 2, rank % 2, (), digests(own), digests(other), digests(again or own))


@pytest.mark.parametrize(
    ("wrong", "suspects"),
    [
        ({}, []),
        # Stage 1 of data rank 1 is wrong in its forward; what it sends back spoils the gradients of stage 0.
        ({2: "0011", 3: "0111"}, [3]),
        # Stage 0 is; what it sends on spoils all of stage 1.
        ({2: "0111", 3: "1111"}, [2]),
    ],
)
def test_the_stage_where_a_share_goes_wrong_is_named(wrong: dict[int, str], suspects: list[int]) -> None:
    works = [_work(rank, wrong.get(rank, "0000"), wrong.get(rank, "0000")) for rank in range(6)]
    assert find_suspects(works, 3)["suspects"] == suspects


def test_kernels_that_sum_in_no_order_are_no_hardware_that_is_wrong() -> None:
    found = find_suspects([_work(rank, f"{rank}000", f"{rank + 7}000"[-4:], "9000") for rank in range(6)], 3)
    assert (found["suspects"], len(found["inconsistent_ranks"])) == ([], 6)
    assert "nondeterministic" in found["reason"]


def test_bad_input_is_reported_before_a_rank_is_started(plain: Path, workplace: Path, tmp_path: Path) -> None:
    def refused(text: str, directory: Path = plain, step: int = 2, **options: Any) -> None:
        with pytest.raises(ConfigError, match=text):
            replay_step(directory, step, runner=lambda order: pytest.fail("ranks were started"), **options)

    refused("step 7 is not a step of the run", step=7)
    refused("not a run directory", directory=workplace / "cache")
    refused("has no steps", directory=workplace)
    refused("not a data rank of the run. Give one of 0 to 1", compare_rank=2)
    refused("needs several", compare_rank=1, single=True)
    refused("one data rank", directory=copy_run(plain, tmp_path / "pipeline", pp_size=2), compare_rank=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "3")
        refused("ran on 2 ranks, but there are 3 here")


@pytest.mark.slow
def test_without_a_checkpoint_before_it_a_step_of_a_run_that_began_elsewhere_is_refused(workplace: Path) -> None:
    elsewhere = train_run(write_run_file(workplace, "first", nproc=2, steps=4)) / "checkpoints" / "step-00000002"
    directory = train_run(
        write_run_file(workplace, "continued", nproc=2, steps=4, resume=str(elsewhere), checkpoint={})
    )
    assert replay_in_pool(directory, 3).is_same
    elsewhere.rename(elsewhere.with_name("gone"))
    with pytest.raises(CheckpointError, match="step-00000002"):
        replay_in_pool(directory, 3)


@pytest.mark.slow
def test_other_data_than_the_run_had_are_reported(plain: Path, tmp_path: Path) -> None:
    data = yaml.safe_load((plain / "run.yaml").read_text())["data"]
    with pytest.raises(Exception, match=r"differs from that of .* data.seq_len"):
        replay_in_pool(copy_run(plain, tmp_path / "other", data={**data, "seq_len": 8}), 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", [(), ("-m", "torch.distributed.run", "--nproc-per-node", "2")], ids=["alone", "torchrun"]
)
def test_the_command_prints_and_writes_what_it_has_found(plain, tmp_path, launcher):
    file = tmp_path / "found.json"
    done = run_command(
        "replay", str(plain), "--step", "5", "--compare-rank", "1", "--json", str(file), launcher=launcher
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("The step is the same, bit for bit.") == 1
    found = json.loads(file.read_text())
    assert (found["is_same"], found["from"]["step"], found["rank_comparison"]["suspects"]) == (True, 3, [])


@pytest.mark.slow
def test_the_command_ends_with_1_where_the_step_is_another(plain: Path, tmp_path: Path) -> None:
    metrics = copy_run(plain, tmp_path / "other") / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"num_tokens": 60', '"num_tokens": 59'))
    assert run_command("replay", str(metrics.parent), "--step", "2", "--single").returncode == 1
