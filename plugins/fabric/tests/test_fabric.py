"""Lightning Fabric over managers: the numbers of one process under every layout, and what is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("lightning")

from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import ClusterEnvironment
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

import meshwright as mw
from meshwright.base.errors import CheckpointError, ConfigError, MeshwrightError, StrategyError, TrainingError
from meshwright.testing import Case
from meshwright_fabric import MeshStrategy
from meshwright_testing import pool
from meshwright_testing.case import Outcome, rank_microbatches
from meshwright_testing.models import build_case_model
from meshwright_testing.parity import find_max_difference, full_weights, run_reference

slow = pytest.mark.slow
README = Path(__file__).parents[1] / "README.md"
CASE = Case(microbatches=3, steps=4)
LAYOUTS = {
    "single": (1, "single", {}, {}),
    "ddp": (2, "ddp", {}, {}),
    "ddp, distributed optimizer": (2, "ddp", {"engine": "bucketed", "use_distributed_optimizer": True}, {}),
    "fsdp2": (2, "fsdp2", {}, {}),
    "strategy of the config": (2, None, mw.get_strategy("ddp").config_cls(gradient_as_bucket_view=True), {}),
    "hsdp": (4, "fsdp2", {}, {"dp_replicate_size": 2}),
    "tp": (2, "fsdp2", {}, {"tp_size": 2}),
    "cp": (2, "fsdp2", {}, {"cp_size": 2}),
    "pp": (2, "fsdp2", {}, {"pp_size": 2}),
    "pp x dp": (4, "fsdp2", {}, {"pp_size": 2}),
    "megatron_fsdp": (2, "megatron_fsdp", {}, {}),
}
Layout = tuple[int, str, Mapping[str, Any], Mapping[str, Any]]


class _Ranks(ClusterEnvironment):
    """The ranks that there are: Fabric starts none."""

    creates_processes_externally = True
    main_address, main_port = "127.0.0.1", 0

    @staticmethod
    def detect() -> bool:
        return True

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    local_rank = global_rank

    def node_rank(self) -> int:
        return 0

    def set_world_size(self, size: int) -> None: ...

    def set_global_rank(self, rank: int) -> None: ...


def _launched(layout: Layout, **options: Any) -> Fabric:
    size, strategy, config, sizes = layout
    wanted = MeshStrategy(strategy, config=config, **sizes)
    fabric = Fabric(accelerator="cpu", devices=size, strategy=wanted, plugins=[_Ranks()], **options)
    fabric.launch()
    return fabric


def _set_up(layout: Layout, *, late: bool = False) -> tuple[Fabric, Any, Any]:
    """Fabric with the case's model and an optimizer of two groups, made before the model is set up, or after."""
    fabric = _launched(layout)
    model = _new_model()

    def optimizer(model: Any) -> torch.optim.Optimizer:
        norms = [p for p in model.parameters() if p.requires_grad and p.dim() == 1]
        others = [p for p in model.parameters() if p.requires_grad and p.dim() != 1]
        groups = [{"params": others}, {"params": norms, "weight_decay": 0.0, "lr": 3e-3}]
        return torch.optim.AdamW([each for each in groups if each["params"]], lr=1e-2, weight_decay=0.1)

    if late:
        model = fabric.setup_module(model)
        return fabric, model, fabric.setup_optimizers(optimizer(model))
    return fabric, *fabric.setup(model, optimizer(model))


GROUPS = Case(microbatches=3, steps=4, group_settings=(("*norm*", 3e-3, 0.0),))


def _train(fabric: Fabric, model: Any, optimizer: Any, steps: range) -> tuple[list[float], list[float]]:
    mesh, losses, norms = fabric.strategy.mesh, [], []
    for step in steps:
        loss = model(rank_microbatches(CASE, step, mesh.data_rank, mesh.data_size))
        fabric.backward(loss)
        norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=CASE.max_norm)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, norms


def _outcome(layout: Layout, late: bool) -> Outcome:
    fabric, model, optimizer = _set_up(layout, late=late)
    losses, norms = _train(fabric, model, optimizer, range(CASE.steps))
    return Outcome(losses, norms, [], full_weights(fabric.strategy.manager))


@pytest.mark.parametrize(
    ("name", "late"),
    [
        ("tp", False),
        *(pytest.param(name, False, marks=slow) for name in LAYOUTS if name != "tp"),
        *(pytest.param(name, True, marks=slow) for name in ("tp", "pp")),
    ],
)
def test_fabric_trains_as_one_process(name: str, late: bool) -> None:
    layout = LAYOUTS[name]
    found = find_max_difference(pool(layout[0]).run(_outcome, layout, late), run_reference(GROUPS))
    assert found.worst <= 1e-9, found


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "steps": lambda optimizer: MultiStepLR(optimizer, [1, 3], gamma=0.1),
    "of its start": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "of the loss": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, threshold=10.0),
}


def _scheduled(layout: Layout, kind: str, path: str, steps: range) -> tuple[list[float], dict[str, Any]]:
    """Train with two groups, of which stages have one: all steps with a checkpoint after two, or those after it."""
    fabric = _launched(layout)
    model = build_case_model("llama", tied=False, seed=steps.start, dtype=torch.float64)
    ends, *rest = model.parameters()
    groups = [{"params": [ends], "lr": 1e-3}, {"params": rest}]
    model, optimizer = fabric.setup(model, torch.optim.AdamW(groups, lr=1e-2))
    schedule = SCHEDULES[kind](optimizer)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "seen": torch.tensor(len(steps))}
    left = fabric.load(path, state) if steps.start else {}
    losses = []
    for step in steps:
        losses += _train(fabric, model, optimizer, range(step, step + 1))[0]
        schedule.step(*losses[-1:] if kind == "of the loss" else [])
        if step == 1:
            fabric.save(path, {**state, "epoch": 7})
    return losses, {**left, "seen": int(state["seen"]), "steps": fabric.strategy.global_step}


@slow
@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("fsdp2", "tp", "steps"),
        ("ddp", "single", "of its start"),
        *((before, after, kind) for before, after in (("single", "pp"), ("pp", "fsdp2")) for kind in SCHEDULES),
    ],
)
def test_a_checkpoint_continues_under_another_layout(before: str, after: str, kind: str, tmp_path: Path) -> None:
    first, second, path = LAYOUTS[before], LAYOUTS[after], str(tmp_path / "checkpoint")
    expected = pool(first[0]).run(_scheduled, first, kind, path, range(5))[0][0]
    for losses, found in pool(second[0]).run(_scheduled, second, kind, path, range(2, 5)):
        assert losses == pytest.approx(expected[2:], abs=1e-9)
        assert found == {"epoch": 7, "seen": 5, "steps": 5}


def _wants_more(layout: Layout, path: str) -> tuple[str, bool]:
    fabric, model, optimizer = _set_up(layout)
    fabric.save(path, {"model": model, "optimizer": optimizer, "epoch": 1})
    _train(fabric, model, optimizer, range(1))
    before = full_weights(fabric.strategy.manager)
    try:
        fabric.load(path, {"model": model, "optimizer": optimizer, "epochs": 0})
    except CheckpointError as error:
        after = full_weights(fabric.strategy.manager)
        return str(error), all(torch.equal(after[name], weight) for name, weight in before.items())
    return "nothing", False


@slow
def test_a_checkpoint_that_lacks_a_value_is_refused_and_nothing_is_loaded(tmp_path: Path) -> None:
    for text, is_unchanged in pool(2).run(_wants_more, LAYOUTS["fsdp2"], str(tmp_path / "checkpoint")):
        assert "has no epochs; it has ['epoch']" in text
        assert is_unchanged


def _evaluated(layout: Layout) -> tuple[float, float, bool]:
    fabric, model, _ = _set_up(layout)
    mesh = fabric.strategy.mesh
    batches = rank_microbatches(CASE, 0, mesh.data_rank, mesh.data_size)
    with torch.no_grad():
        without = model(batches)
    loss = model(batches)
    return float(without), float(loss), without.requires_grad


def test_a_call_without_gradients_evaluates_and_leaves_none() -> None:
    (expected, *_) = run_reference(GROUPS).losses
    for without, loss, has_gradient in pool(2).run(_evaluated, LAYOUTS["cp"]):
        assert (without, loss) == pytest.approx((expected, expected), abs=1e-9)
        assert not has_gradient


def _objective(layout: Layout) -> tuple[float, float]:
    fabric, model, _ = _set_up(layout)
    mesh = fabric.strategy.mesh
    smoothed = mw.get_objective({"name": "cross_entropy", "label_smoothing": 0.3})
    loss = model(rank_microbatches(CASE, 0, mesh.data_rank, mesh.data_size), objective=smoothed)
    fabric.backward(loss)
    return float(loss), float(fabric.strategy.manager.clip_grad_norm(None))


@slow
def test_an_objective_is_minimized() -> None:
    ((loss, norm),) = pool(1).run(_objective, LAYOUTS["single"])
    assert abs(loss - run_reference(GROUPS).losses[0]) > 1e-4
    for found in pool(2).run(_objective, LAYOUTS["pp"]):
        assert found == pytest.approx((loss, norm), abs=1e-9)


def _rows(layout: Layout) -> list[int]:
    fabric = _launched(layout)
    loader = fabric.setup_dataloaders(DataLoader(list(range(8)), batch_size=2))
    return [int(each) for batch in loader for each in batch]


@slow
def test_ranks_that_share_a_batch_get_the_same_rows() -> None:
    assert pool(2).run(_rows, LAYOUTS["tp"]) == [list(range(8))] * 2
    assert pool(2).run(_rows, LAYOUTS["fsdp2"]) == [[0, 2, 4, 6], [1, 3, 5, 7]]


# -- what is refused


def _batches(fabric: Fabric) -> list[Any]:
    mesh = fabric.strategy.mesh
    return rank_microbatches(CASE, 0, mesh.data_rank, mesh.data_size)


def _scale_to_infinity(fabric: Fabric, model: Any, optimizer: Any) -> None:
    fabric.backward(model(_batches(fabric)))
    for parameter in model.parameters():
        parameter.grad.mul_(float("inf"))
    fabric.clip_gradients(model, optimizer, max_norm=1.0)


def _train_twice(fabric: Fabric, model: Any, optimizer: Any) -> None:
    for _ in range(2):
        fabric.backward(model(_batches(fabric)))


def _skip_reductions(fabric: Fabric, model: Any, optimizer: Any) -> None:
    for enabled in (False, True):
        with fabric.no_backward_sync(model, enabled=enabled):
            pass


def _set_up_again(
    make: Callable[[torch.nn.Module], torch.optim.Optimizer], schedule: Callable[[Any], Any] = lambda _: None
) -> Callable[..., None]:
    """Set up another model with the optimizer that `make` makes of it, and a schedule."""

    def task(*_: Any) -> None:
        fabric, model = _launched(LAYOUTS["fsdp2"]), _new_model()
        optimizer = make(model)
        fabric.setup(model, optimizer, scheduler=schedule(optimizer))

    return task


def _new_model() -> torch.nn.Module:
    return build_case_model("llama", tied=False, seed=0, dtype=torch.float64)


def _sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def _scheduled_early(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = _sgd(model)
    LambdaLR(optimizer, lambda step: 1.0)
    return optimizer


def _stepped(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    return optimizer


Task = Callable[[Fabric, Any, Any], object]
IN_PLACE = r"loss = model\(\[batch, batch\]\)"
LATE = "Make it from the optimizer that fabric.setup returns"
ALL = {"model": lambda name, value: True}
REFUSED: dict[str, tuple[Task, type[MeshwrightError], str]] = {
    "as_a_model": (lambda fabric, model, _: model(**_batches(fabric)[0]), StrategyError, IN_PLACE),
    "one_batch": (lambda fabric, model, _: model(_batches(fabric)[0]), StrategyError, IN_PLACE),
    "scaled": (lambda fabric, model, _: fabric.backward(model(_batches(fabric)) / 2), StrategyError, r"times 0\.5"),
    "no_backward": (
        lambda fabric, model, optimizer: (model(_batches(fabric)), optimizer.step()),
        *(StrategyError, "before fabric.backward"),
    ),
    "twice": (_train_twice, StrategyError, "Give all microbatches of a step in one call"),
    "no_sync": (_skip_reductions, StrategyError, "no_backward_sync has no place"),
    "values": (lambda fabric, *pair: fabric.clip_gradients(*pair, clip_val=1.0), StrategyError, "clip_val=1.0"),
    "closure": (lambda fabric, model, optimizer: optimizer.step(lambda: None), StrategyError, "closure"),
    "infinite": (_scale_to_infinity, TrainingError, "norm of the gradients is (inf|nan)"),
    "half_a_state": (
        lambda fabric, model, _: fabric.save("nowhere", {"model": model}),
        *(CheckpointError, "the optimizer is missing"),
    ),
    "filtered": (
        lambda fabric, *pair: fabric.save("nowhere", dict(zip(("model", "optimizer"), pair, strict=True)), filter=ALL),
        *(CheckpointError, "filter"),
    ),
    "second_optimizer": (lambda fabric, model, _: fabric.setup_optimizers(_sgd(model)), StrategyError, "one optimizer"),
    "second_model": (lambda fabric, *_: fabric.setup_module(_new_model()), StrategyError, "called twice"),
    "no_model": (
        lambda *_: _launched(LAYOUTS["fsdp2"]).setup_optimizers(_sgd(_new_model())),
        *(StrategyError, "no model yet"),
    ),
    "other_parameters": (
        _set_up_again(lambda model: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])),
        *(StrategyError, "not of the model"),
    ),
    "some_parameters": (
        _set_up_again(lambda model: torch.optim.SGD(list(model.parameters())[:1])),
        *(StrategyError, "lacks .*, which is trained"),
    ),
    "early_schedule": (_set_up_again(_scheduled_early), StrategyError, LATE),
    "stepped": (_set_up_again(_stepped), StrategyError, "has a state already, which would be lost"),
    "given_schedule": (_set_up_again(_sgd, lambda optimizer: LambdaLR(optimizer, float)), StrategyError, LATE),
}


def _refused(name: str, layout: Layout) -> tuple[str, str]:
    fabric, model, optimizer = _set_up(layout)
    try:
        REFUSED[name][0](fabric, model, optimizer)
    except MeshwrightError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


FAST = ("scaled", "twice", "infinite", "some_parameters")


@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=slow) for name in REFUSED])
def test_what_cannot_be_meant_is_refused_on_all_ranks(name: str) -> None:
    _, error, text = REFUSED[name]
    for kind, reported in pool(2).run(_refused, name, LAYOUTS["fsdp2"]):
        assert kind == error.__name__
        assert re.search(text, reported), reported


def _precision(layout: Layout) -> str:
    try:
        _launched(layout, precision="bf16-mixed")
    except ConfigError as error:
        return str(error)
    return "nothing"


@slow
def test_a_precision_is_refused_which_would_be_the_strategys() -> None:
    assert "precision='bf16-mixed' has no effect" in pool(1).run(_precision, LAYOUTS["single"])[0]


# -- Lightning as it is


def test_fabric_still_asks_the_strategy_how_to_skip_a_reduction() -> None:
    from lightning.fabric.strategies import DDPStrategy

    assert hasattr(DDPStrategy()._backward_sync_control, "no_backward_sync")


@slow
def test_the_script_of_the_readme_runs_on_ranks_that_fabric_starts(tmp_path: Path) -> None:
    (script,) = [block.split("```")[0] for block in README.read_text(encoding="utf-8").split("```python\n")[1:]]
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
