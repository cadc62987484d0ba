"""Averages of weights: those of one process computed by hand, under every strategy, in checkpoints and in exports."""

from __future__ import annotations

import functools
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.caught_errors import catch_error
from support.commands import write_run
from support.runs import RunWorkspace
from support.tiers import mark_mostly_slow
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import meshwright as mw
from meshwright.base.errors import MeshwrightError, StrategyError
from meshwright.checkpoint import export_checkpoint, load_checkpoint, read_manifest, save_checkpoint
from meshwright.checkpoint.index import read_index, read_tensors
from meshwright.cli import main as cli
from meshwright.launch.open_world import open_world
from meshwright.optim.config import EMAConfig
from meshwright.step.handshake import count_tokens
from meshwright.strategy.contract import StrategyManager
from meshwright.tensors.chunks import ChunkedTensor, get_local_chunks
from meshwright.testing import Case
from meshwright.training.loop.ema import EMA
from meshwright_run.run_file import OptimizerConfig, ScheduleConfig, load_run
from meshwright_testing import pool
from meshwright_testing.case import rank_microbatches
from meshwright_testing.parity import build_manager, full_weights, train_steps

EXACT = 1e-12
CASE = Case(
    sequences=4,
    steps=5,
    # Sums in another order move weights by 1e-15 where a step does not divide by a root of almost nothing.
    optimizer=OptimizerConfig(name="SGD", lr=0.5, weight_decay=0.1, options={"momentum": 0.9}),
    schedule=ScheduleConfig(name="linear", warmup_steps=1),
)
TIED = replace(CASE, tied=True)
ADAPTED = replace(CASE, tied=None, adapter={"r": 4, "lora_alpha": 8, "target_modules": "all-linear"})
SETTINGS: dict[str, dict[str, Any]] = {
    "decay": {"decay": 0.8},
    "warmup": {"decay": 0.3, "warmup": True},
    "all": {"decay": 0.25, "every": 2, "start_step": 1, "warmup": True},
}

Layout = tuple[int, str, dict[str, Any], dict[str, Any]]
ZERO1 = {"engine": "bucketed", "use_distributed_optimizer": True}
OVERLAPPED = {**ZERO1, "overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[str, Layout] = {
    "single": (1, "single", {}, {}),
    "ddp, distributed optimizer": (2, "ddp", ZERO1, {}),
    "ddp, gathers to come": (2, "ddp", OVERLAPPED, {}),
    "fsdp2": (2, "fsdp2", {}, {}),
    "megatron_fsdp": (2, "megatron_fsdp", {}, {}),
    "pipeline over ddp": (2, "ddp", {}, {"pp_size": 2}),
}


def averaged(manager: StrategyManager, ema: EMA) -> dict[str, Tensor]:
    with ema.swap():
        return full_weights(manager)


def evaluated(manager: StrategyManager, case: Case) -> float:
    microbatches = rank_microbatches(case, 50, manager.mesh.data_rank, manager.mesh.data_size)
    return float(manager.eval_loss(microbatches, num_tokens=count_tokens(microbatches, manager.mesh)))


def trained(
    strategy: str, config: dict[str, Any], sizes: dict[str, Any], case: Case, settings: dict[str, Any]
) -> tuple[dict[str, Tensor], float, float, bool]:
    """The task of one rank: the average after all steps; how the averaged and the last weights are evaluated; and
    whether training continues as if nothing had been evaluated."""
    manager = build_manager(strategy, config, sizes, case)
    ema = EMA(manager, EMAConfig(**settings))
    train_steps(manager, case, range(case.steps - 1))
    weights = full_weights(manager)
    with ema.swap():
        evaluated(manager, case)
    same = all(torch.equal(weights[name], each) for name, each in full_weights(manager).items())
    train_steps(manager, case, range(case.steps - 1, case.steps))
    last = evaluated(manager, case)
    with ema.swap():
        of_average = evaluated(manager, case)
    return averaged(manager, ema), of_average, last, same and last == evaluated(manager, case)


def by_hand(case: Case, settings: dict[str, Any]) -> tuple[dict[str, Tensor], float, float]:
    """The same of one process, without what is tested: weights after each step, and an average of them."""
    manager = build_manager("single", {}, {}, case)
    config = EMAConfig(**settings)
    average, updates = {name: each.clone() for name, each in full_weights(manager).items()}, 0
    for step in range(case.steps):
        train_steps(manager, case, range(step, step + 1))
        weights = full_weights(manager)
        if step + 1 <= config.start_step:
            average = {name: each.clone() for name, each in weights.items()}
        elif (step + 1 - config.start_step) % config.every == 0:
            decay = min(config.decay, (1 + updates) / (10 + updates)) if config.warmup else config.decay
            average = {name: decay * each + (1 - decay) * weights[name] for name, each in average.items()}
            updates += 1
    last = evaluated(manager, case)
    with torch.no_grad():
        for part in manager.model_parts:
            for name, parameter in part.named_parameters():
                parameter.copy_(average[name])
    return average, evaluated(manager, case), last


@functools.lru_cache
def expected(case: Case, setting: str) -> tuple[dict[str, Tensor], float, float]:
    (found,) = pool(1).run(by_hand, case.on_one_rank(), SETTINGS[setting])
    hand: tuple[dict[str, Tensor], float, float] = found
    return hand


def worst(found: dict[str, Tensor], average: dict[str, Tensor]) -> float:
    assert found.keys() == average.keys()
    return max(float((found[name] - each).abs().max()) for name, each in average.items())


@pytest.mark.parametrize(
    ("layout", "case", "setting"),
    mark_mostly_slow(
        [
            ("fsdp2", CASE, "all"),
            *((layout, TIED if "pipeline" in layout else CASE, "all") for layout in LAYOUTS if layout != "fsdp2"),
            *(("single", CASE, setting) for setting in SETTINGS),
            ("fsdp2", ADAPTED, "decay"),
        ]
    ),
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_the_average_is_that_of_one_process_by_hand(layout: str, case: Case, setting: str) -> None:
    ranks, *rest = LAYOUTS[layout]
    average, of_average, last = expected(case, setting)
    for found, loss, loss_of_weights, is_left in pool(ranks).run(trained, *rest, case, SETTINGS[setting]):
        assert worst(found, average) <= EXACT
        assert abs(loss - of_average) <= EXACT
        assert abs(loss_of_weights - last) <= EXACT
        assert abs(of_average - last) > 1e-6
        assert is_left


# -- in checkpoints


def resumed(layout: str, case: Case, steps: range, source: str | None, target: str | None) -> dict[str, Tensor]:
    """The task of one rank: some steps of the case, from a checkpoint if there is one; the average behind them."""
    # Another seed than the other parts': what is not loaded shows.
    manager = build_manager(*LAYOUTS[layout][1:], case, seed=steps.start)
    ema = EMA(manager, EMAConfig(**SETTINGS["all"]))
    if source is not None:
        # A step of its own first, so that there is state to be replaced.
        train_steps(manager, case, range(99, 100))
        load_checkpoint(manager, source)
    train_steps(manager, case, steps)
    if target is not None:
        save_checkpoint(manager, target, step=steps.stop)
    return averaged(manager, ema)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "before", "after"),
    [(TIED, "pipeline over ddp", "megatron_fsdp"), (ADAPTED, "fsdp2", "pipeline over ddp")],
    ids=["tied", "adapters"],
)
def test_an_average_continues_in_another_layout(tmp_path: Path, case: Case, before: str, after: str) -> None:
    case, path = replace(case, schedule=None), str(tmp_path / "step")
    pool(LAYOUTS[before][0]).run(resumed, before, case, range(3), None, path)
    average = expected(case, "all")[0]
    for found in pool(LAYOUTS[after][0]).run(resumed, after, case, range(3, case.steps), path, None):
        assert worst(found, average) <= EXACT


def saved_again(layout: str, case: Case, paths: list[str]) -> None:
    """The task of one rank: what a checkpoint has, saved again."""
    manager = build_manager(*LAYOUTS[layout][1:], case, seed=7)
    EMA(manager, EMAConfig(decay=0.5))
    load_checkpoint(manager, paths[0])
    save_checkpoint(manager, paths[1], step=1)


def stored_averages(path: str) -> dict[str, Tensor]:
    manifest = read_manifest(Path(path))
    index = read_index(Path(path), manifest)
    names = [name for name in index.metas if name.startswith("ema.")]
    values = {name: torch.empty(index.metas[name][0], dtype=index.metas[name][1]) for name in names}
    read_tensors(
        Path(path),
        manifest,
        index,
        {n: ChunkedTensor(v.shape, v.dtype, tuple(get_local_chunks(v))) for n, v in values.items()},
    )
    return values


@pytest.mark.slow
def test_averages_of_half_weights_are_wide_and_keep_all_bits_in_another_layout(tmp_path: Path) -> None:
    case, before, after = replace(CASE, dtype="bfloat16", schedule=None), "ddp, distributed optimizer", "fsdp2"
    paths = [str(tmp_path / name) for name in ("first", "second")]
    pool(LAYOUTS[before][0]).run(resumed, before, case, range(4), None, paths[0])
    pool(LAYOUTS[after][0]).run(saved_again, after, case, paths)
    first, second = map(stored_averages, paths)
    assert first.keys() == second.keys()
    assert {each.dtype for each in first.values()} == {torch.float32, torch.int64}
    assert all(torch.equal(each, second[name]) for name, each in first.items())
    counts = first.pop("ema.(counts)")
    assert counts.tolist() == [4, 1]
    # What bfloat16 could hold would not need more.
    assert any(not torch.equal(each, each.bfloat16().float()) for each in first.values())


def loaded_without(path: str) -> tuple[str, str, bool]:
    """The task of one rank: errors where there is no average, and whether one begins with what was loaded."""
    manager = build_manager("ddp", {}, {}, CASE)
    train_steps(manager, CASE, range(1))
    save_checkpoint(manager, path, step=1)
    other = build_manager("ddp", {}, {}, CASE, seed=1)
    load_checkpoint(other, path)
    ema = EMA(other, EMAConfig(decay=0.5), start_step=1)
    begins = worst(averaged(other, ema), full_weights(manager)) == 0.0
    export = catch_error(export_checkpoint, path, f"{path}-model", use_ema=True)
    return catch_error(load_checkpoint, other, path), export, begins


def test_a_checkpoint_without_an_average_is_reported_and_one_may_begin_after_it(tmp_path: Path) -> None:
    one, other = pool(2).run(loaded_without, str(tmp_path / "step"))
    assert one == other
    assert all("CheckpointError" in text and "has no average of the weights" in text for text in one[:2])
    assert one[2]
    assert [each.name for each in tmp_path.iterdir()] == ["step"]


def test_an_average_needs_an_optimizer_a_manager_that_can_and_no_other_average() -> None:
    with closing(open_world("cpu")):
        manager = build_manager("single", {}, {}, CASE)
        EMA(manager)
        with pytest.raises(StrategyError, match="keeps an average of its weights already"):
            EMA(manager)
        other = build_manager("single", {}, {}, CASE)
        with pytest.raises(StrategyError, match="keeps no average"), other.swap_ema():  # type: ignore[attr-defined]
            pass
        own = type("Own", (StrategyManager,), {"strategy": "own", **dict.fromkeys(StrategyManager.__abstractmethods__)})
        with pytest.raises(StrategyError, match="strategy 'own' keeps no averages"):
            EMA(own())
        other._optimizer = None  # type: ignore[attr-defined]
        with pytest.raises(MeshwrightError, match="build_optimizer"):
            EMA(other)


def test_options_of_an_average_that_mean_nothing_are_errors() -> None:
    for config in ({"decay": 1.0}, {"decay": -0.1}, {"every": 0}, {"start_step": -1}, {"warmup": 1}):
        with pytest.raises(ValueError, match=rf"{next(iter(config))}: Input should be"):
            EMAConfig(**config)  # type: ignore[arg-type]


@pytest.mark.slow
def test_an_export_of_the_average_is_the_averaged_model_in_the_dtype_of_the_weights(tmp_path: Path) -> None:
    case = replace(TIED, dtype="bfloat16", schedule=None)
    with closing(open_world("cpu")):
        manager = build_manager("single", {}, {}, case)
        ema = EMA(manager, EMAConfig(decay=0.5))
        train_steps(manager, case, range(2))
        save_checkpoint(manager, tmp_path / "step", step=2)
        average = averaged(manager, ema)
    for name, options in (("half", []), ("wide", ["--dtype", "float32"])):
        args = ["export", str(tmp_path / "step"), str(tmp_path / name), "--ema", *options]
        assert CliRunner().invoke(cli.app, args).exit_code == 0
    half, wide = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("half", "wide"))
    stored = stored_averages(str(tmp_path / "step"))
    assert {each.dtype for each in half.values()} == {torch.bfloat16}
    for name, value in average.items():
        assert torch.equal(half[name], value)
    assert all(torch.equal(wide[name.removeprefix("ema.")], each) for name, each in stored.items() if "(" not in name)
    assert any(not torch.equal(wide[name], value.float()) for name, value in average.items())


# -- in loops and runs


def fitted(settings: dict[str, Any]) -> tuple[dict[str, float], dict[str, float], str]:
    """The task of one rank: evaluations of the last step; the same by hand; and the error for a name taken twice."""
    manager = build_manager("fsdp2", {}, {}, CASE)
    ema = EMA(manager, EMAConfig(decay=0.5, **settings))
    place = manager.mesh.data_rank, manager.mesh.data_size
    sets = {name: rank_microbatches(CASE, step, *place) for name, step in (("held_out", 50), ("other", 51))}
    loop = mw.Loop(batches=lambda step: rank_microbatches(CASE, step, *place), steps=3, eval_sets=sets, ema=ema)
    results = mw.fit(manager, loop)
    by_hand = {}
    with ema.swap():
        for name, batches in sets.items():
            tokens = count_tokens(batches, manager.mesh)
            by_hand[f"{name}_ema"] = float(manager.eval_loss(batches, num_tokens=tokens))
    text = catch_error(mw.fit, manager, replace(loop, eval_sets={"a": sets["other"], "a_ema": sets["other"]}))
    return dict(results[-1].evaluations), by_hand, text


@pytest.mark.slow
def test_a_loop_evaluates_the_average_beside_the_weights() -> None:
    for found, by_hand, text in pool(2).run(fitted, {}):
        assert {name: found[name] for name in by_hand} == by_hand
        assert found.keys() == {"held_out", "other", "held_out_ema", "other_ema"}
        assert all(found[name] != found[f"{name}_ema"] for name in ("held_out", "other"))
        assert "'a_ema'" in text
    for found, _, text in pool(2).run(fitted, {"evaluate": False}):
        assert found.keys() == {"held_out", "other"}
        assert not text


@pytest.mark.slow
def test_a_run_keeps_its_average_through_an_interruption_and_writes_it_beside_the_model(tmp_path: Path) -> None:
    write_run(tmp_path)
    options: dict[str, Any] = {"ema": {"decay": 0.7, "warmup": True}, "strategy": "fsdp2"}
    options["eval"] = {"every": 2, "max_sequences": 2}
    whole, incomplete = (RunWorkspace(tmp_path, tmp_path / name) for name in ("whole", "incomplete"))
    for place in (whole, incomplete):
        place.directory.mkdir()
    with pytest.raises(MeshwrightError, match=r"ema\.start_step=8, so no weights are averaged in steps=8"):
        load_run(whole.write_run_file(ema={"start_step": 8}))
    whole.run_successfully(ranks=2, **options)
    assert incomplete.run(ranks=2, kill_after=5, **options)[2] == 137
    incomplete.run_successfully(**{**options, "strategy": "single"})
    losses = [
        [line.get("evaluations", {}).get("held_out_ema") for line in each.read_metrics()]
        for each in (whole, incomplete)
    ]
    assert [loss is not None for loss in losses[0]] == [False, True] * 4
    assert [each or 0 for each in losses[0]] == pytest.approx([each or 0 for each in losses[1]], rel=1e-9)
    models = [AutoModelForCausalLM.from_pretrained(whole.out / name).state_dict() for name in ("model", "model-ema")]
    again = AutoModelForCausalLM.from_pretrained(incomplete.out / "model-ema").state_dict()
    for name, value in models[1].items():
        assert not torch.equal(value, models[0][name])
        assert torch.allclose(value, again[name], rtol=0, atol=1e-9)
