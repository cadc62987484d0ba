"""Pictures of plans show what the plans say: each byte, span and rank, also where not all of them are drawn."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest
from support.plan_layouts import Layout
from support.tiers import mostly_slow

from meshwright.base.errors import ConfigError
from meshwright.mesh.sizes import ROOT_AXES, Degrees, MeshSizes
from meshwright_plan.allocator import reserved
from meshwright_plan.config import Device, find_device
from meshwright_plan.meter import OWNERS, ROUND_TO
from meshwright_plan.pictures import marks
from meshwright_plan.pictures.drawings import boxes, groups, size_of
from meshwright_plan.pictures.page import page, write_page
from meshwright_plan.pictures.pngs import write_pngs
from meshwright_plan.pictures.shown import (
    BETWEEN,
    INSIDE,
    SENDS,
    Shown,
    frontier,
    hidden,
    lanes,
    memory,
    shown,
    to_plan,
    traffic,
)
from meshwright_plan.planned import plan
from meshwright_plan.time import COMPUTE, Span, Timeline, collective_seconds, members, passed
from meshwright_plan.trace import Trace

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LAYOUTS = {
    "tp": Layout("fsdp2", 4, {"tp_size": 2}, layers=2),
    "pipeline": Layout("fsdp2", 4, {"pp_size": 2}, layers=2, microbatches=3),
    "compiled on 2 ranks": Layout("fsdp2", 2, layers=2, microbatches=1),
    "compiled": Layout("single", 1, layers=2, microbatches=1),
}
"""Of the last one all tests are unmarked; of a single rank, it sends nothing."""


def _device(node: int = 2) -> Device:
    device = find_device("h100-80gb")
    return device.model_copy(update={"node": device.node.model_copy(update={"ranks": node})})


def _layouts(count: int = 40, seed: int = 0) -> list[dict[str, Any]]:
    chosen = random.Random(seed)
    return [
        {
            "label": f"layout <{number}> & more",
            "step_seconds": chosen.uniform(1, 3),
            "peak_reserved_bytes": (size := chosen.randrange(20 << 30, 200 << 30)),
            "fits": size < 78 << 30,
        }
        for number in range(count)
    ]


@functools.cache
def _subject(name: str) -> Shown:
    job, device = LAYOUTS[name].job(), _device()
    job = replace(job, is_compiled=name.startswith("compiled"))
    return shown(job, device, plan(job, device, [0]), _layouts())


@pytest.fixture(params=mostly_slow(LAYOUTS, "compiled"))
def subject(request) -> Shown:
    return _subject(request.param)


# -- memory


def _held(found: Trace) -> list[tuple[str, Counter[str]]]:
    """What each operator has left of the log, by owner: block by block."""
    blocks: Counter[int] = Counter()
    states: dict[int, tuple[str, Counter[str]]] = {}
    log, done = list(found.log), 0
    for each in found.operations:
        while done < each.logged:
            block, change = log[done]
            blocks[block] += change
            done += 1
        owners: Counter[str] = Counter()
        for block, size in blocks.items():
            owners[found.owners[block]] += size
        assert min(blocks.values()) >= 0
        is_mark = each.name.startswith("profiler.") and each.logged in states
        states[each.logged] = states[each.logged][0] if is_mark else each.name, owners
    return list(states.values())


def test_areas_of_memory_sum_to_what_is_held_at_each_moment_and_their_peak_is_that_of_the_trace(subject):
    for found, line in zip(subject.traces, subject.lines, strict=True):
        every, states = memory(found, line, most=10**9), _held(found)
        assert every.moments == len(states) == len(every.seconds)
        assert list(every.operators) == [name for name, _ in states]
        for owner in OWNERS:
            assert list(every.owners.get(owner, [0] * len(states))) == [held[owner] for _, held in states]
        assert every.totals == [held.total() for _, held in states]
        assert list(every.seconds) == sorted(every.seconds)
        assert every.seconds[-1] <= line.seconds
        few = memory(found, line, 40)
        assert len(few.seconds) <= 45 < len(every.seconds)
        moments = iter(zip(every.seconds, every.totals, every.operators, every.phases, strict=True))
        for moment in zip(few.seconds, few.totals, few.operators, few.phases, strict=True):
            assert moment in moments  # in their order
        for drawn in (few, every):
            assert max(drawn.totals) == drawn.totals[drawn.peak] == found.peak.bytes
            assert drawn.operators[drawn.peak] == found.peak.operator
            at_peak = {owner: each[drawn.peak] for owner, each in drawn.owners.items() if each[drawn.peak]}
            assert at_peak == dict(found.peak.owners)


def test_moments_are_when_their_operators_begin_to_compute_and_have_the_phase_in_which_they_run(subject):
    for found, line in zip(subject.traces, subject.lines, strict=True):
        begins: dict[int, float] = {}
        for span in line.spans:
            if span.stream == COMPUTE:
                begins.setdefault(span.logged, span.start)
        moments = sorted({each.logged for each in found.operations})
        drawn = memory(found, line, 10**9)
        known = [(at, begins[moment]) for moment, at in zip(moments, drawn.seconds, strict=True) if moment in begins]
        assert len(known) > 30
        assert all(at == begin for at, begin in known)
        names: dict[str, list[str]] = {"forward": [], "backward": [], "optimizer": []}
        for each in found.operations:
            names[each.phase].append(each.name)
        assert any("attention" in name and "backward" not in name for name in names["forward"])
        assert any("attention" in name and "backward" in name for name in names["backward"])
        assert not any("attention" in name or "mm" in name for name in names["optimizer"])
        assert any("sqrt" in name or "lerp" in name for name in names["optimizer"])


# -- the timeline


def _spans(line: Timeline) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = {COMPUTE: []}
    for span in line.spans:
        found.setdefault(span.stream, []).append(span)
    return found


@pytest.mark.parametrize("most", [40, 16_000])
def test_bars_have_the_ends_and_the_sum_of_their_spans(subject, most):
    drawn = lanes(subject.traces, subject.lines, subject.degrees, subject.device, most)
    assert [lane.rank for lane in drawn] == sorted(lane.rank for lane in drawn)
    assert sum(len(lane.bars) for lane in drawn) <= 2 * most + 20 * len(drawn)
    for line in subject.lines:
        streams, of_rank = _spans(line), {lane.stream: lane for lane in drawn if lane.rank == line.rank}
        assert streams.keys() == of_rank.keys()
        for stream, lane in of_rank.items():
            spans = sorted(streams[stream], key=lambda span: span.start)
            if most == 16_000:
                told = [(bar.name, bar.phase, bar.count, bar.start, bar.end) for bar in lane.bars]
                assert told == [(span.name, span.phase, 1, span.start, span.end) for span in spans]
            assert sum(bar.busy for bar in lane.bars) == pytest.approx(line.busy(stream), rel=1e-12)
            assert lane.bars[0].start == spans[0].start
            assert max(bar.end for bar in lane.bars) == max(span.end for span in spans)
            assert all(bar.busy <= (bar.end - bar.start) * (1 + 1e-9) for bar in lane.bars)
            assert all(one.end <= other.start for one, other in itertools.pairwise(lane.bars))
            phases: Counter[str] = Counter()
            for bar in lane.bars:
                phases[bar.phase] += bar.count
            assert phases == Counter(span.phase for span in spans)


@pytest.mark.slow
def test_streams_are_on_the_links_of_their_ranks():
    found = {(lane.rank, lane.stream): lane.link for lane in _subject("pipeline").lanes}
    # Two stages of two ranks, on nodes of two.
    assert found[0, "dp_shard"] == INSIDE
    assert found[0, "to 2"] == found[2, "to 0"] == BETWEEN
    assert found[0, COMPUTE] == found[0, "gather"] == ""


def test_what_is_hidden_is_what_runs_beside_computing():
    chosen = random.Random(3)
    ticks = 500
    work = {stream: [False] * ticks for stream in (COMPUTE, "tp")}
    spans = []
    for stream, taken in work.items():
        at = 0
        while (start := at + chosen.randrange(9)) < ticks - 10:
            at = start + chosen.randrange(1, 9)
            spans.append(Span(stream, "x", float(start), float(at)))
            taken[start:at] = [True] * (at - start)
    both = sum(map(all, zip(*work.values(), strict=True)))
    assert 50 < both == hidden(Timeline(0, float(ticks), tuple(spans)), "tp")


# -- the mesh


MESHES = [
    Degrees(dp_shard=2048, tp=8),
    Degrees(pp=4, dp_shard=2, tp=2),
    Degrees(dp_shard=128),
    Degrees(pp=16, dp_replicate=2, dp_shard=16, cp=4, tp=8),
    Degrees(dp_shard=64, tp=2, ep=16),
    Degrees(),
]


@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_groups_of_the_map_are_the_axes_of_the_mesh(degrees):
    device = find_device("h100-80gb")
    for rank in {0, degrees.world_size // 2, degrees.world_size - 1}:
        found = {each.name: each for each in groups(degrees, device, rank)}
        axes = [*ROOT_AXES, *(("ep_shard", "ep") if degrees.ep > 1 else ())]
        assert {axis for axis in axes if getattr(degrees, axis) > 1} == found.keys() & {*axes}
        for name, each in found.items():
            assert len(each.ranks) == len(set(each.ranks)) == size_of(name, degrees)
            assert each.groups * len(each.ranks) == degrees.world_size
            assert rank in each.ranks
            assert each.nodes == len({other // 8 for other in each.ranks})
            assert (each.link == INSIDE) == (each.nodes == 1)
        for axis in found.keys() & {*axes}:
            assert len(found[axis].ranks) == getattr(degrees, axis)


@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_boxes_of_the_map_stand_for_every_rank_and_lie_within_their_frames(degrees):
    drawn = boxes(degrees, find_device("h100-80gb"))
    around = drawn[0]
    assert len(drawn) <= 120
    assert around.width <= 1400
    ranks = {int(box.text) for box in drawn if box.kind == "rank"}
    for box in drawn:
        assert box.x >= 0
        assert box.x + box.width <= around.width + 1e-9
        assert box.y >= 0
        assert box.y + box.height <= around.height + 1e-9
        if box.kind == "block":
            first, last = map(int, re.findall(r"(\d+)\N{EN DASH}(\d+)", box.text)[0])
            assert not ranks & set(range(first, last + 1))
            ranks |= set(range(first, last + 1))
    assert {0, degrees.world_size - 1} <= ranks
    if not any(box.kind == "more" for box in drawn):
        assert ranks == set(range(degrees.world_size))
    leaves = [box for box in drawn if box.kind in ("rank", "block", "more")]
    for one, other in itertools.combinations(leaves, 2):
        apart = one.x + one.width <= other.x or other.x + other.width <= one.x
        assert apart or one.y + one.height <= other.y or other.y + other.height <= one.y


# -- links


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all", "send", "all_reduce", "broadcast"])
@pytest.mark.parametrize(
    "ranks",
    [range(8), range(32), range(0, 64, 8), (3, 4), (7, 8)],
    ids=["node", "nodes", "one of each node", "two of a node", "two of two nodes"],
)
def test_bytes_over_links_are_those_that_take_the_time(kind, ranks):
    node = find_device("h100-80gb").node
    if kind == "send" and len(ranks) != 2:
        pytest.skip("messages are between two")
    size = 1 << 34
    both = zip(*(passed(kind, each, ranks, node) for each in (size, 2 * size)), strict=True)
    near, away = (more - less for less, more in both)
    took = collective_seconds(kind, 2 * size, ranks, node) - collective_seconds(kind, size, ranks, node)
    assert took == pytest.approx(max(near / node.inside.rate, away / node.between.rate), rel=1e-9)


def test_traffic_is_that_of_all_collectives(subject):
    node = subject.device.node
    wanted: Counter[tuple[int, str]] = Counter()
    for found in subject.traces:
        for each in found.operations:
            if each.call is None or (call := found.collectives[each.call]).kind.startswith("recv") or call.ranks == 1:
                continue
            ranks = members(call.group, found.rank, subject.degrees, call.ranks)
            name = call.group
            if each.peer is not None:
                name, ranks = f"{SENDS}{ranks[each.peer]}", [found.rank, ranks[each.peer]]
            wanted[found.rank, name] += sum(passed(call.kind, call.bytes, ranks, node))
    told = {(each.rank, each.stream): each.inside + each.between for each in traffic(subject)}
    assert told == {key: pytest.approx(size) for key, size in wanted.items()}
    for each in traffic(subject):
        line = next(line for line in subject.lines if line.rank == each.rank)
        assert each.seconds == pytest.approx(line.busy(each.stream))
        assert 0 <= each.hidden <= 1 + 1e-9
    # Of a rank that is not in the plan the trace tells, unless it is of fewer blocks.
    without = replace(subject, plan={**subject.plan, "ranks": []})
    assert [(each.rank, each.stream) for each in traffic(without)] == list(told)
    sums = ([each.inside + each.between + each.seconds for each in traffic(of)] for of in (without, subject))
    assert (next(sums), traffic(replace(without, drawn_layers=1))) == (pytest.approx(next(sums)), [])


# -- layouts


def test_the_frontier_has_those_that_no_other_beats():
    layouts = _layouts(300, seed=7)
    fitting = [each for each in layouts if each["fits"]]
    keys = ("step_seconds", "peak_reserved_bytes")
    best = [
        each
        for each in fitting
        if not any(other is not each and all(other[key] <= each[key] for key in keys) for other in fitting)
    ]
    assert 2 < len(best) < 30
    assert frontier(layouts) == sorted(best, key=lambda each: each["step_seconds"])
    assert frontier([{**each, "fits": False} for each in layouts]) == []


# -- the page


class _Page(HTMLParser):
    EMPTY = ("meta", "link", "input", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.kinds: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.kinds[tag] += 1
        if tag not in self.EMPTY:
            self.open.append(tag)
        self.ids += [given["id"] or ""] if "id" in given else []
        for name in ("src", "href", "xlink:href", "data", "action", "aria-labelledby", "aria-describedby"):
            if given.get(name):
                self.references.append(given[name] or "")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in self.EMPTY:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _read(text: str) -> _Page:
    found = _Page()
    found.feed(text)
    found.close()
    assert found.open == []
    return found


def _data(text: str) -> dict[str, Any]:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_the_page_is_well_formed_and_refers_to_nothing_outside(subject):
    text = page(subject)
    found = _read(text)
    assert len(found.ids) == len(set(found.ids))
    for reference in found.references:
        assert reference == "data:," or reference.removeprefix("#") in found.ids
    outside = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", text)
    assert set(outside) <= {"http://www.w3.org/2000/svg"}
    for each in ("url(", "@import", "{{"):
        assert each not in text
    for image in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        assert ElementTree.fromstring(image).find("{http://www.w3.org/2000/svg}title").text
    assert found.kinds["table"] == found.kinds["caption"] >= 4


def test_the_page_holds_the_series(subject):
    told = _data(page(subject))
    assert len(told["memory"]) == len(subject.traces)
    for drawn, each in zip(subject.memories, told["memory"], strict=True):
        sizes = {owner: list(itertools.accumulate(changes)) for owner, changes in each["owners"].items()}
        assert {owner: tuple(size * ROUND_TO for size in own) for owner, own in sizes.items()} == drawn.owners
        seconds = [at * 1e-9 for at in itertools.accumulate(each["time"])]
        assert seconds == pytest.approx(drawn.seconds, abs=1e-9)
        assert [told["names"][name] for name in each["names"]] == list(drawn.operators)
    for lane, each in zip(subject.lanes, told["lanes"], strict=True):
        starts = list(itertools.accumulate(each["bars"][::6]))
        for place, bar in enumerate(lane.bars):
            _, length, busy, name, phase, count = each["bars"][6 * place : 6 * place + 6]
            assert starts[place] * 1e-9 == pytest.approx(bar.start, abs=1e-9)
            assert (length * 1e-9, busy * 1e-9) == pytest.approx((bar.end - bar.start, bar.busy), abs=1e-9)
            assert (told["names"][name], told["phases"][phase], count) == (bar.name, bar.phase, bar.count)


def test_texts_of_layouts_are_escaped():
    subject = replace(_subject("compiled"), layouts=[{**each, "label": "</script><b>"} for each in _layouts()])
    text = page(subject)
    assert "</script><b>" not in text
    assert "&lt;/script&gt;&lt;b&gt;" in text
    assert _read(text).kinds["b"] == _read(page(_subject("compiled"))).kinds["b"]


@pytest.mark.slow
def test_a_deep_model_is_drawn_with_few_blocks_and_says_so():
    job, device = Layout("fsdp2", 2, layers=40, microbatches=1).deep_job(), _device()
    subject = shown(job, device, plan(job, device, [0]))
    assert (subject.drawn_layers, subject.layers) == (10, 40)
    text = page(subject)
    assert text.count("a model of 10 blocks, not of all 40") >= 3
    # The trace's own, not that of all blocks.
    assert subject.reserved == [reserved(found, workspace=device.library_bytes) for found in subject.traces]
    assert subject.traces[0].peak.bytes < subject.plan["peak_allocated_bytes"]
    assert "not of all" not in page(_subject("compiled"))


def test_a_rank_of_each_stage_is_planned_for_pictures():
    sizes = MeshSizes(pp_size=8).resolve(32, frozenset({"dp_shard", "pp"}))
    assert to_plan(sizes, None) == [0, 4, 8, 12, 16, 20, 24, 28, 31]
    assert to_plan(sizes, [6, 5]) == [2, 5, 6, 10, 14, 18, 22, 26, 30]
    assert to_plan(MeshSizes().resolve(8, frozenset({"dp_shard"})), [3]) == [3]


PIXELS = {
    "memory": "owner-activations",
    "timeline": "phase-backward",
    "mesh": "link-inside",
    "traffic": "link-inside",
    "layouts": "fit-fits",
}


def test_pngs_are_written_with_their_colours(subject, tmp_path):
    from matplotlib import image

    written = write_pngs(tmp_path / "new", subject)
    # A single rank has no other to send to.
    assert [path.stem for path in written] == [name for name in PIXELS if name != "traffic" or traffic(subject)]
    for path in written:
        pixels = (image.imread(path)[..., :3] * 255).round().astype(int)
        assert pixels.shape[1] > 600
        light = marks.COLOURS[PIXELS[path.stem]][0]
        colour = [int(light[place : place + 2], 16) for place in (1, 3, 5)]
        assert (pixels == colour).all(-1).sum() > 50, path
    (tmp_path / "file").touch()
    for write in (lambda path: write_page(path / "page.html", subject), lambda path: write_pngs(path, subject)):
        with pytest.raises(ConfigError, match="cannot be written"):
            write(tmp_path / "file")


PRESSES = """
<script>
const press = (id, ...keys) => {
  document.getElementById(id).focus();
  const said = [];
  for (const key of keys) {
    document.getElementById(id).dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
    said.push(document.getElementById(id.replace("chart", "read")).textContent);
  }
  return said;
};
const pixels = id => {
  const canvas = document.getElementById(id), seen = new Set();
  const shown = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  for (let i = 0; i < shown.length; i += 4 * 7) seen.add(shown.slice(i, i + 3).join());
  return seen.size;
};
addEventListener("load", () => setTimeout(() => {
  const said = {
    memory: press("memory-chart", "p", "ArrowRight", "+", "-", "0", "Escape"),
    timeline: press("timeline-chart", "ArrowRight", "ArrowDown", "+", "Home"),
    rank: document.getElementById("rank-read").textContent,
    colours: [pixels("memory-chart"), pixels("timeline-chart")],
  };
  const noted = document.createElement("pre");
  noted.id = "said";
  noted.textContent = JSON.stringify(said);
  document.body.append(noted);
}, 100));
</script>
</body>"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
@pytest.mark.parametrize("name", ["pipeline", "compiled"])
def test_a_browser_opens_the_page_without_errors_and_keys_read_it(name, tmp_path):
    subject = _subject(name)
    path = tmp_path / "page.html"
    path.write_text(page(subject).replace("</body>", PRESSES), encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command += ["--virtual-time-budget=5000", f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,900"]
    # What is asked for outside of this machine is an error.
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", path.as_uri()]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "HOME": str(tmp_path)}
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    said = json.loads(re.search(r'<pre id="said">(.*?)</pre>', done.stdout, re.DOTALL)[1].replace("&amp;", "&"))
    peak, found = said["memory"][0], subject.memories[0]
    assert peak.startswith("peak, rank 0, ")
    assert found.operators[found.peak] in peak
    assert not said["memory"][1].startswith("peak")
    assert said["memory"][5].startswith("Point at")
    assert said["timeline"][0].startswith("rank 0, compute, forward: ")
    assert said["timeline"][1].startswith(f"rank 0, {subject.lanes[1].stream if name == 'pipeline' else 'compute'}")
    assert said["rank"].startswith("Rank 0 is on node 0")
    assert min(said["colours"]) >= 4
