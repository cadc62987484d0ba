"""The figures of docs/concepts, drawn from what the code itself says.

    python docs/pictures.py            # all of them, two minutes on two cores
    python docs/pictures.py mesh       # one of them

Each picture is made of plain data: `mesh`, `axes`, `pieces` and `gradient_rule` ask real ranks, `pipelines` asks the
schedules, `parity` reads benchmarks/results and runs strategies with planted bugs. The data are kept in
docs/concepts/figures.json, and `tests/docs/test_how_it_works_figures.py` compares them with what the code says now.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HOW = ROOT / "docs" / "concepts"
DATA = HOW / "figures.json"
for folder in ("docs", "tests"):
    if str(ROOT / folder) not in sys.path:
        sys.path.append(str(ROOT / folder))

TEXT, QUIET, LINE, PANEL = "#1c2330", "#586173", "#d5dae1", "#f4f6f8"
RANKS = ("#3f6fc4", "#d9822b", "#2f8f6b", "#a04a9c")
GOOD, BAD = "#1a7f4b", "#b3261e"


# -- what is drawn


def _supervised(count: int, seed: int) -> Any:
    """4 sequences of 16 random tokens, and their labels, of which `count` are supervised."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(131, (4, 16), generator=generator)
    # The first token of a sequence is not predicted.
    kept = (torch.randperm(60, generator=generator) < count).view(4, 15)
    labels = ids.clone()
    labels[:, 0] = -100
    labels[:, 1:][~kept] = -100
    return ids, labels


COUNTS = (60, 30, 15, 8, 4, 2)
"""Tokens of the second rank that are supervised; of the first one all 60 are."""


def gradients_on_a_rank() -> list[dict[str, Any]]:
    """On each of two ranks: how far gradients are from those of one process, by the rule and by means of means."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from meshwright.step.handshake import count_tokens
    from meshwright.testing import Case
    from meshwright_testing.models import build_tiny_model
    from meshwright_testing.parity import build_manager

    found, rank = [], dist.get_rank()
    for count in COUNTS:
        shares = [_supervised(60, seed=0), _supervised(count, seed=1)]
        alone = build_tiny_model()
        logits = [alone(input_ids=ids).logits[:, :-1].flatten(0, 1) for ids, _ in shares]
        labels = [each[:, 1:].flatten() for _, each in shares]
        sums = [torch.nn.functional.cross_entropy(*pair, reduction="sum") for pair in zip(logits, labels, strict=True)]
        (sum(sums) / (60 + count)).backward()

        ids, mine = shares[rank]
        plain = DistributedDataParallel(build_tiny_model())
        loss = torch.nn.functional.cross_entropy(
            plain(input_ids=ids).logits[:, :-1].flatten(0, 1), mine[:, 1:].flatten()
        )
        loss.backward()

        manager = build_manager("ddp", {}, {}, Case())
        batch = [{"input_ids": ids, "labels": mine}]
        total = manager.forward_backward(batch, num_tokens=count_tokens(batch, manager.mesh))

        def apart(model: torch.nn.Module, wanted: torch.nn.Module = alone) -> float:
            pairs = zip(model.parameters(), wanted.parameters(), strict=True)
            differences = [(one.grad - other.grad).norm() for one, other in pairs]
            whole = torch.stack([each.grad.norm() for each in wanted.parameters()]).norm()
            return float(torch.stack(differences).norm() / whole)

        found.append(
            {
                "tokens": [60, count],
                "mean of the rank": loss.item(),
                "loss": total.item(),
                "loss of one process": sum(sums).item() / (60 + count),
                "means of means": apart(plain.module),
                "the rule": apart(manager.model_parts[0]),
            }
        )
    return found


def gradient_rule() -> Any:
    from pictures import gradients_on_a_rank

    from meshwright_testing import pool

    first, second = pool(2).run(gradients_on_a_rank)
    return [
        {name: value for name, value in one.items() if name != "mean of the rank"}
        | {"means of the ranks": [each["mean of the rank"] for each in (one, other)]}
        for one, other in zip(first, second, strict=True)
    ]


SIZES = {"pp": 2, "dp_shard": 2, "cp": 2, "tp": 2}
PLACE = 5
"""The rank whose groups are shown."""


def mesh() -> Any:
    import torch.distributed as dist

    from meshwright.mesh.mesh import Mesh
    from meshwright.mesh.sizes import ROOT_AXES, VIEWS, Degrees
    from meshwright_plan.fake_world import fake_world

    degrees, coordinates, groups = Degrees(**SIZES), [], {}
    for rank in range(degrees.world_size):
        with fake_world(rank, degrees.world_size) as world:
            place = Mesh(degrees, world)
            axes = {axis: place.axis_rank(axis) for axis in ROOT_AXES if axis in SIZES}
            coordinates.append({**axes, "data_rank": place.data_rank})
            if rank == PLACE:
                groups = {name: dist.get_process_group_ranks(place.group(name)) for name in (*SIZES, *VIEWS)}
    return {"coordinates": coordinates, "groups": groups}


AXES = {
    "tp": ("fsdp2", {"tp_size": 4}),
    "cp": ("fsdp2", {"cp_size": 4}),
    "cp and tp": ("fsdp2", {"cp_size": 2, "tp_size": 2}),
    "rows": ("rows", {"tp_size": 4}),
}


def cells_of_a_rank() -> dict[str, list[int]]:
    """By axis, the cells of a microbatch of 4 sequences of 16 tokens that this rank's forward is given."""
    import torch
    from support import rows_axis

    from meshwright import get_registry
    from meshwright.testing import Case
    from meshwright_testing.parity import build_manager

    if "rows" not in get_registry().strategies:
        get_registry().register(rows_axis, name="rows_axis")
    found = {}
    for name, (strategy, sizes) in AXES.items():
        manager: Any = build_manager(strategy, {}, sizes, Case())
        numbers = torch.arange(64).view(4, 16)
        batch = {"input_ids": numbers, "labels": numbers}
        for axis in manager.axes:
            batch = axis.shard_batch(batch)
        found[name] = batch["input_ids"].flatten().tolist()
    return found


def axes() -> Any:
    from pictures import cells_of_a_rank

    from meshwright_testing import pool

    ranks = pool(4).run(cells_of_a_rank)
    return {name: [each[name] for each in ranks] for name in AXES}


DOWN = "model.layers.0.mlp.down_proj.weight"
LAYOUTS: Mapping[str, tuple[str, dict[str, Any], dict[str, Any], str, str | None]] = {
    "ddp": ("ddp", {}, {}, DOWN, None),
    "fsdp2": ("fsdp2", {}, {}, DOWN, None),
    "fsdp2, tp 2": ("fsdp2", {}, {"tp_size": 2}, DOWN, None),
    "fsdp2, pp 2": ("fsdp2", {}, {"pp_size": 2}, DOWN, None),
    "megatron_fsdp": ("megatron_fsdp", {}, {}, "lm_head.weight", None),
    "ddp, use_distributed_optimizer": (
        "ddp",
        {"engine": "bucketed", "use_distributed_optimizer": True},
        {},
        "model.layers.0.mlp.gate_proj.weight",
        "exp_avg",
    ),
}
"""Layouts of four ranks, and a tensor that is shown of each: a weight, or what the optimizer keeps of it."""


def pieces_of_a_rank() -> dict[str, Any]:
    """By layout, the shape of a tensor, and offsets and sizes of the pieces of it that this rank holds."""
    from meshwright.testing import Case
    from meshwright_testing.parity import build_manager, train_steps

    found = {}
    for name, (strategy, config, sizes, weight, key) in LAYOUTS.items():
        manager = build_manager(strategy, config, sizes, Case())
        if key is not None:
            train_steps(manager, Case(), range(1))
        state = manager.sharded_state()
        held: Any = state.model.get(weight) if key is None else state.optimizer.tensors[weight][key]
        found[name] = {
            "tensor": weight if key is None else f"{weight}, {key}",
            "shape": list(held.shape) if held is not None else None,
            "pieces": [[each.offsets, each.sizes] for each in held.chunks] if held is not None else [],
        }
    return found


def pieces() -> Any:
    from pictures import pieces_of_a_rank

    from meshwright_testing import pool

    ranks = pool(4).run(pieces_of_a_rank)
    # The first rank has a part of the model's first block, whatever the layout.
    return {name: {**ranks[0][name], "pieces": [each[name]["pieces"] for each in ranks]} for name in LAYOUTS}


SCHEDULES = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "ZBVZeroBubble": 2}
"""Schedules, and how many stages a rank holds under each."""


def pipelines() -> Any:
    from meshwright_pipeline.schedule.actions import bubble_fraction, compute_timeline, count_peak_live_microbatches
    from meshwright_pipeline.schedule.specs import build_schedule

    found = {}
    for name, chunks in SCHEDULES.items():
        schedule = build_schedule(name, num_ranks=4, num_stages=4 * chunks, num_microbatches=8)
        found[name] = {
            "stages": schedule.num_stages,
            "bubble": bubble_fraction(schedule),
            "live": list(count_peak_live_microbatches(schedule)),
            # A stage of half the blocks takes half the time.
            "times": [
                [
                    [each.kind.value, each.stage, each.microbatch, start / chunks, end / chunks]
                    for each, start, end in rank
                ]
                for rank in compute_timeline(schedule)
            ],
        }
    return found


BUGS = {
    "averages_gradients": "dp_shard=2-ragged_masks",
    "divides_twice": "dp_replicate=2-ragged_masks",
    "clips_by_local_norm": "dp_shard=4-norm_inf",
    "loses_microbatches": "dp_replicate=4-accumulation_2",
    "drifting_replicas": "dp_replicate=2-ragged_masks",
    "loses_steps": "one_rank-resume",
    "gathers_without_gradient_sum": "tp=2-objective",
}
"""Strategies of tests/support/buggy_strategies.py, each with one bug, and a comparison that must find it."""


def parity() -> Any:
    from meshwright_testing import conformance

    bugs = {}
    for name, wanted in BUGS.items():
        (cell,) = (each for each in conformance(name, plugin="support.buggy_strategies") if str(each) == wanted)
        bugs[name] = cell.run().worst
    return {**parity_results(), "bugs": bugs}


def parity_results() -> dict[str, Any]:
    """What is in benchmarks/results of comparisons with one process."""
    results = ROOT / "benchmarks" / "results"
    cells: dict[str, list[float]] = {}
    others, passed, left_out = [], 0, 0
    for path in sorted((results / "check").glob("*.json")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"].values():
            passed += cell["status"] == "passed"
            left_out += cell["status"] == "does not apply"
            if cell["status"] == "passed" and cell["worst"] is not None:
                if cell["case"] == "norms in float32":
                    others.append(cell["worst"])
                else:
                    cells.setdefault(path.stem, []).append(cell["worst"])
    return {
        "cells": {name: sorted(worst) for name, worst in cells.items()},
        "norms in float32": sorted(others),
        "passed": passed,
        "do not apply": left_out,
    }


PICTURES: Mapping[str, Callable[[], Any]] = {
    "gradient-rule": gradient_rule,
    "mesh": mesh,
    "parallel-axes": axes,
    "pipelines": pipelines,
    "checkpoints": pieces,
    "parity": parity,
}


# -- how it is drawn


def _figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    # The object interface draws without a display and without global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _plain(axes: Any, title: str, size: float = 10.5) -> None:
    axes.set_axis_off()
    axes.set_title(title, loc="left", fontsize=size, weight="bold", color=TEXT)


def _curve(axes: Any, title: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(color=LINE, linewidth=0.7)
    axes.tick_params(labelsize=8.5, colors=QUIET)
    axes.set_title(title, loc="left", fontsize=10.5, weight="bold", color=TEXT)


def _box(
    axes: Any, x: float, y: float, width: float, height: float, colour: str, text: str = "", **options: Any
) -> None:
    from matplotlib.patches import Rectangle

    style = {"facecolor": colour, "edgecolor": "white", "linewidth": 1.0, **options}
    axes.add_patch(Rectangle((x, y), width, height, **style))
    if text:
        ink = "white" if len(colour) == 7 else QUIET
        axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8.5, color=ink)


def _legend(figure: Any, colours: Iterable[tuple[str, str]]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in colours]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9, frameon=False)


def draw_gradient_rule(found: Any) -> Any:
    figure, ((left, right),) = _figure(10, 3.9, 1, 2)
    shares = [f"{one} + {other}" for one, other in (each["tokens"] for each in found)]
    places = range(len(found))
    _curve(left, "Loss of the step [nats]")
    for rank, colour in enumerate(RANKS[:2]):
        own = [each["means of the ranks"][rank] for each in found]
        left.plot(places, own, "o", color=colour, label=f"mean of rank {rank}'s tokens", markersize=5)
    middle = [sum(each["means of the ranks"]) / 2 for each in found]
    left.plot(places, middle, "x--", color=BAD, label="mean of the two means", linewidth=1.4)
    left.plot(places, [each["loss of one process"] for each in found], color=LINE, linewidth=7, label="one process")
    left.plot(places, [each["loss"] for each in found], color=GOOD, linewidth=1.8, label="sums, one global count")
    left.legend(fontsize=8.5, frameon=False)
    _curve(right, "Error of the gradient, relative")
    least = 1e-17
    right.plot(places, [max(each["means of means"], least) for each in found], "x--", color=BAD)
    right.plot(places, [max(each["the rule"], least) for each in found], "o-", color=GOOD, markersize=5)
    right.set_yscale("log")
    right.set_ylim(2e-18, 10)
    right.set_yticks(
        [least, *(10.0**-n for n in range(15, -1, -3))], ["0", *(f"1e-{n}" for n in range(15, 0, -3)), "1"]
    )
    right.annotate("mean of the two means", (3, found[3]["means of means"]), (0, -16), color=BAD, **_WORDS)
    right.annotate("sums, one global count", (3, least), (0, 10), color=GOOD, **_WORDS)
    for each in (left, right):
        each.set_xticks(places, shares)
        each.set_xlabel("supervised tokens of rank 0 + of rank 1", fontsize=9, color=QUIET)
    return figure


_WORDS = {"textcoords": "offset points", "ha": "center", "fontsize": 9}


def _ranks_of_a_mesh(axes: Any, found: Any, colour: Callable[[int], str], text: Callable[[int], str]) -> None:
    """Ranks in a row of blocks: pp and dp_shard from left to right, cp downwards, tp within."""
    for rank, at in enumerate(found["coordinates"]):
        x = at["pp"] * 5 + at["dp_shard"] * 2.35 + at["tp"]
        y = 1 - at["cp"]
        _box(axes, x, y * 1.08, 0.94, 1, colour(rank), text(rank))
    axes.set(xlim=(-0.1, 9.4), ylim=(-0.1, 2.15))


def draw_mesh(found: Any) -> Any:
    from matplotlib.patches import Rectangle

    figure, grid = _figure(10, 6.1, 3, 2, gridspec_kw={"height_ratios": [1.5, 1, 1]})
    for each in grid[0]:
        each.remove()
    top = figure.add_subplot(grid[0][0].get_gridspec()[0, :])
    colours = {0: RANKS[0], 1: RANKS[1]}
    _plain(top, "16 ranks: pp 2 x dp_shard 2 x cp 2 x tp 2. Color: the batch that a rank sees (data_rank)")
    _ranks_of_a_mesh(
        top, found, lambda rank: colours[found["coordinates"][rank]["data_rank"]], lambda rank: f"rank {rank}"
    )
    for pp in (0, 1):
        top.add_patch(Rectangle((pp * 5 - 0.12, -0.1), 4.5, 2.3, fill=False, edgecolor=LINE, linewidth=1.5))
        top.text(
            pp * 5 + 2.1, 2.3, f"pp {pp}: {('the first', 'the last')[pp]} blocks", ha="center", fontsize=9, color=QUIET
        )
        for shard in (0, 1):
            for tp in (0, 1):
                x = pp * 5 + shard * 2.35 + tp + 0.47
                top.text(x, -0.2, f"tp {tp}", ha="center", va="top", fontsize=8, color=QUIET)
            top.text(
                pp * 5 + shard * 2.35 + 0.97, -0.5, f"dp_shard {shard}", ha="center", va="top", fontsize=8.5, color=TEXT
            )
    for cp in (0, 1):
        top.text(-0.25, (1 - cp) * 1.08 + 0.5, f"cp {cp}", ha="right", va="center", fontsize=8.5, color=TEXT)
    top.set(xlim=(-0.7, 9.6), ylim=(-0.75, 2.6))
    shown = {"tp": "tp", "cp": "cp", "dp_shard_cp": "dp_shard_cp, a view", "pp": "pp"}
    for axes, (name, words) in zip(grid[1:].flatten(), shown.items(), strict=True):
        group = found["groups"][name]
        _plain(axes, f"rank {PLACE}'s group of {words}: {', '.join(map(str, group))}")
        _ranks_of_a_mesh(
            axes,
            found,
            lambda rank, group=group: (RANKS[3] if rank == PLACE else RANKS[2]) if rank in group else QUIET + "30",
            str,
        )
    return figure


def draw_axes(found: Any) -> Any:
    figure, grid = _figure(10, 4.6, 4, len(found))
    words = {
        "tp": "tp 4: every rank has all tokens;\nlayers are sharded instead",
        "cp": "cp 4: an early and a late part\nof each sequence, equal work",
        "cp and tp": "cp 2 x tp 2: tokens are sharded\nalong one axis, then the other",
        "rows": "rows 4: every fourth sequence,\nan axis from a test",
    }
    for column, (name, ranks) in enumerate(found.items()):
        for rank, cells in enumerate(ranks):
            axes = grid[rank][column]
            held = set(cells)
            for cell in range(64):
                colour, edge = (RANKS[rank], "white") if cell in held else (PANEL, LINE)
                _box(axes, cell % 16, 3 - cell // 16, 1, 1, colour, linewidth=0.6, edgecolor=edge)
            axes.set(xlim=(-0.2, 16.2), ylim=(-0.2, 4.2))
            _plain(axes, words[name] if rank == 0 else "", size=8.5)
            if column == 0:
                axes.text(-0.7, 2, f"rank {rank}", ha="right", va="center", fontsize=9, color=TEXT)
    return figure


KINDS = {
    "F": ("forward", "#4c78c8"),
    "B": ("backward", "#2f9e6e"),
    "I": ("backward for inputs", "#35a0a8"),
    "W": ("backward for weights", "#d9902f"),
}


def draw_pipelines(found: Any) -> Any:
    figure, grid = _figure(10, 7.2, len(found), 1, sharex=True)
    for axes, (name, each) in zip(grid.flatten(), found.items(), strict=True):
        end = max(rank[-1][4] for rank in each["times"])
        for row, actions in enumerate(each["times"]):
            _box(axes, 0, -row - 0.45, end, 0.9, "#e4e7ec", linewidth=0)
            for kind, stage, microbatch, start, stop in actions:
                second = stage >= len(each["times"])
                _box(
                    axes,
                    start,
                    -row - 0.45,
                    stop - start,
                    0.9,
                    KINDS[kind][1],
                    linewidth=0.7,
                    alpha=0.72 if second else 1,
                )
                axes.text((start + stop) / 2, -row, microbatch, ha="center", va="center", fontsize=6.5, color="white")
        chunks = each["stages"] // len(each["times"])
        on = "one stage" if chunks == 1 else f"{chunks} stages (the second is paler)"
        _curve(axes, f"{name}: {on} per rank; bubble {each['bubble']:.1%} of the time")
        axes.grid(visible=False)
        axes.spines["left"].set_visible(False)
        axes.set_yticks([0, -1, -2, -3], [f"rank {rank}" for rank in range(4)])
        axes.tick_params(axis="y", length=0)
        axes.set(xlim=(0, 34), ylim=(-3.6, 0.6))
    axes.set_xlabel("time, in forwards of one of four stages; numbers are microbatches", fontsize=9, color=QUIET)
    _legend(figure, KINDS.values())
    return figure


def draw_pieces(found: Any) -> Any:
    figure, grid = _figure(10, 5.6, 2, 3)
    for axes, (name, each) in zip(grid.flatten(), found.items(), strict=True):
        rows, columns = each["shape"]
        axes.set_anchor("W")
        _plain(axes, name)
        holders: dict[tuple[int, ...], list[int]] = {}
        for rank, held in enumerate(each["pieces"]):
            for offsets, sizes in held:
                holders.setdefault((*offsets, *sizes), []).append(rank)
        for (top, left, height, width), own in holders.items():
            part = width / len(own)
            for number, rank in enumerate(own):
                text = f"rank {rank}" if height > rows / 12 and part > columns / 12 else ""
                _box(axes, left + number * part, rows - top - height, part, height, RANKS[rank], text, linewidth=0.9)
        lacking = [str(rank) for rank, held in enumerate(each["pieces"]) if not held]
        copies = max(map(len, holders.values()))
        words = "each element once" if copies == 1 else f"{copies} replicas, one on each rank"
        words += f"; none on {' and '.join(lacking)}" * bool(lacking)
        under = f"{each['tensor']}\n{rows} x {columns}: {words}"
        axes.text(0, -0.03, under, transform=axes.transAxes, va="top", fontsize=8, color=QUIET, linespacing=1.4)
        axes.set(xlim=(0, columns), ylim=(0, rows))
    return figure


def draw_parity(found: Any) -> Any:
    figure, ((axes,),) = _figure(10, 4.2)
    names = [*found["cells"], "planted bugs"]
    total = sum(map(len, found["cells"].values()))
    _curve(axes, f"{total:,} comparisons with one process in float64, and {len(found['bugs'])} with a planted bug")
    least = 1e-17
    for row, worst in enumerate(found["cells"].values()):
        # Spread over the row, so that many alike are seen as many.
        heights = [-row + 0.32 * ((place * 0.618034) % 1 * 2 - 1) for place in range(len(worst))]
        axes.scatter([max(each, least) for each in worst], heights, s=7, color=RANKS[0], alpha=0.45, linewidths=0)
    last = 1 - len(names)
    axes.scatter(found["bugs"].values(), [last] * len(found["bugs"]), marker="x", s=32, color=BAD)
    places = sorted((worst, name) for name, worst in found["bugs"].items())
    for worst, name in (places[0], places[-1]):
        axes.annotate(name.replace("_", " "), (worst, last), (0, 8), color=BAD, **_WORDS)
    axes.axvline(1e-9, color=BAD, linewidth=1.4)
    limit = "limit: a larger difference fails"
    axes.annotate(limit, (1e-9, 0.4), (5, 0), textcoords="offset points", color=BAD, fontsize=9, va="top")
    axes.set_xscale("log")
    ticks = [least, *(10.0**-n for n in range(15, 0, -2))]
    axes.set_xticks(ticks, ["0", *(f"1e-{n}" for n in range(15, 0, -2))])
    axes.set(xlim=(5e-18, 8), ylim=(last - 0.55, 0.55))
    axes.set_yticks([-row for row in range(len(names))], names)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("largest absolute difference of losses, norms and every rank's weights", fontsize=9, color=QUIET)
    return figure


DRAWN: Mapping[str, Callable[[Any], Any]] = {
    "gradient-rule": draw_gradient_rule,
    "mesh": draw_mesh,
    "parallel-axes": draw_axes,
    "pipelines": draw_pipelines,
    "checkpoints": draw_pieces,
    "parity": draw_parity,
}


def write(names: Iterable[str], directory: Path = HOW) -> None:
    """Ask the code for the data of some pictures, keep them, and draw the pictures."""
    kept = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    for name in names:
        kept[name] = json.loads(json.dumps(PICTURES[name]()))
        draw(name, kept, directory)
    texts = ",\n".join(f"{json.dumps(name)}: {json.dumps(kept[name])}" for name in PICTURES if name in kept)
    (directory / DATA.name).write_text(f"{{{texts}}}\n", encoding="utf-8")


def draw(name: str, kept: Mapping[str, Any], directory: Path) -> Path:
    """Draw one picture of data that are there."""
    from PIL import Image

    path = directory / f"{name}.png"
    DRAWN[name](kept[name]).savefig(path, dpi=110)
    # So few colours are in none of them that more would be seen.
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
    return path


if __name__ == "__main__":
    write(sys.argv[1:] or PICTURES)
