"""The page of `meshwright watch` in a real browser: what it shows, live, by keyboard, and how fast.

They need Playwright (extra `dev`) and a Chromium of the system, and are skipped where either is missing.
"""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.watched_runs import (
    build_event_line,
    build_metrics_line,
    build_start_event,
    write_lines,
    write_rank_files,
    write_run_directory,
    write_timelines,
)

from meshwright_watch import server
from meshwright_watch.run import open_runs

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
if CHROMIUM is None:
    pytest.skip("needs Chromium: apt-get install chromium", allow_module_level=True)

pytestmark = pytest.mark.slow
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
HOSTILE = "<img src=x onerror=document.title='owned'>"
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture
def opened(browser) -> Iterator[Callable[..., Any]]:
    """Opens the page on directories of runs; errors of its script fail the test."""
    errors: list[str] = []
    contexts = []

    def open_page(*directories: Path, ready: str = "#steps canvas") -> Any:
        listener = server.open_listener("127.0.0.1", 0, default=0)
        options = {"host": "127.0.0.1", "token": "t"}
        threading.Thread(
            target=server.serve, args=(open_runs(directories), listener), kwargs=options, daemon=True
        ).start()
        contexts.append(browser.new_context(color_scheme="light", viewport={"width": 1400, "height": 900}))
        page = contexts[-1].new_page()
        # Texts of charts are on a canvas.
        page.add_init_script(
            "globalThis.drawn = new Set(); const write = CanvasRenderingContext2D.prototype.fillText;"
            "CanvasRenderingContext2D.prototype.fillText = function(text, ...at) "
            "{ drawn.add(String(text)); return write.call(this, text, ...at); };"
        )
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda reported: errors.append(reported.text) if reported.type == "error" else None)
        # Nothing of elsewhere is asked for.
        page.on("request", lambda asked: errors.append(asked.url) if not asked.url.startswith(url) else None)
        url = server.format_url(listener, "").partition("?")[0]
        page.goto(server.format_url(listener, "t"))
        page.wait_for_selector(ready)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not errors


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> tuple[Path, Path]:
    """Two runs that are the same until step 200; the first has ranks, a timeline, a fault and a restart."""
    directory = tmp_path_factory.mktemp("two")
    one, other = write_run_directory(directory / HOSTILE, 300), write_run_directory(directory / "other", 300)
    lines = [build_metrics_line(step, seed=0 if step < 200 else 5) for step in range(1, 301)]
    write_lines(other / "metrics.jsonl", lines, mode="w")
    (other / "run.yaml").write_text("strategy: ddp\nsteps: 300\n", encoding="utf-8")
    write_rank_files(one, 8, slow=3)
    write_timelines(one)
    fault = build_event_line("fault", 120, rank=2, error_type="OSError", message=HOSTILE)
    write_lines(
        one / "events.jsonl",
        [fault, build_start_event(300, begin=100), build_event_line("end", 300, reason="done", seconds=3.0)],
    )
    return one, other


def _expect(locator: Any) -> Any:
    playwright.expect.set_options(timeout=PATIENCE_MS)
    return playwright.expect(locator)


def test_two_runs_side_by_side_with_ranks_and_the_step_from_which_they_differ(two, opened):
    page = opened(*two)
    page.wait_for_selector("#compare td >> text=step 200")
    said = page.locator("#compare tbody").nth(1).locator("tr")
    reported = ["strategy fsdp2 ddp", "optimizer.name AdamW (not set)", "optimizer.lr 0.001 (not set)"]
    assert [" ".join(row.split()) for row in said.all_inner_texts()] == reported
    # Names and messages are texts.
    assert page.locator("article.run h2").first.inner_text().startswith(HOSTILE)
    assert page.locator("img").count() == 0
    assert "owned" not in page.title().split("=")[0]
    assert page.locator("#events td", has_text="rank 2: OSError").count() == 1
    page.wait_for_selector("#ranks td >> text=forward backward")
    assert page.locator("#ranks table").inner_text().split("\n")[-1].split()[0] == "3"
    page.locator("#ranks td button", has_text="3").first.click()
    one = page.locator("#ranks .card", has_text="One rank over its steps")
    _expect(one.locator(".legend button")).to_have_text("rank 3: forward backward")
    one.locator("input").fill("99")
    one.locator("input").press("Enter")
    _expect(one.locator(".empty")).to_have_text("rank 99 has written nothing")
    page.locator("#pipeline select").select_option("10")
    _expect(page.locator("#pipeline .said")).to_contain_text("step 10: measured")


def test_by_keyboard_alone(two, opened):
    page = opened(two[0])
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('plot')"):
            break
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Loss")
    said = page.locator("#steps .card").first.locator(".said")
    for key, step in (("Home", 1), ("ArrowRight", 2), ("End", 300)):
        page.keyboard.press(key)
        assert said.inner_text().startswith(f"step {step}: ")
        # The others follow.
        assert page.locator("#steps .card").nth(1).locator(".at").inner_text() == f"step {step}"
    page.keyboard.press("+")
    page.wait_for_selector("#all:visible")
    page.keyboard.press("t")
    assert 0 < page.locator("#steps .card").first.locator("tbody tr").count() < 300


def test_lines_that_are_added_are_shown_within_seconds(tmp_path, opened):
    run = tmp_path / "run"
    run.mkdir()
    page = opened(run, ready=".badge.waiting")
    steps = page.locator(".facts dd").first
    write_run_directory(run, 50, of_steps=200)
    _expect(steps).to_have_text("50 / 200")
    write_lines(run / "metrics.jsonl", [build_metrics_line(51), build_metrics_line(52, loss=123.456)])
    _expect(steps).to_have_text("52 / 200")
    _expect(page.locator("#steps .legend b").first).to_have_text("123.5")
    write_lines(run / "events.jsonl", [build_start_event(200, begin=40)])  # A run that goes back to a checkpoint
    write_lines(run / "metrics.jsonl", [build_metrics_line(41, seed=1)])
    _expect(steps).to_have_text("41 / 200")
    write_lines(run / "events.jsonl", [build_event_line("end", 41, reason="failed")])
    page.wait_for_selector(".badge.failed")


def _read_drawn(page: Any) -> set[str]:
    """Return the texts of all charts, which another theme draws again."""
    page.evaluate("drawn.clear(); document.getElementById('theme').click()")
    return set(page.evaluate("new Promise(done => setTimeout(() => done([...drawn])))"))


def test_axes_have_titles_and_round_ticks(two, opened):
    page = opened(two[1])
    texts = _read_drawn(page)
    assert {"loss", "gradient norm", "learning rate", "tokens per second", "memory", "step"} <= texts
    assert {"100", "200", "300", "5k", "1.0 GiB", "0.0010"} <= texts
    assert not [text for text in texts if re.search(r"\d\.0{3,}$", text)], texts
    ticks = page.evaluate(
        """import('/web/numbers.js').then(({KINDS: {plain, short, seconds, percent}}) => [
            plain.labels([0, 5, 25], 5), plain.labels([1, 1.5], 0.5), short.labels([5000, 20000], 5000),
            plain.labels([2e-5], 1e-5), plain.labels([12340, 12345], 5), seconds.labels([0, 60, 120], 60),
            seconds.labels([0.2], 0.1), percent.labels([0.5], 0.25),
        ])"""
    )
    assert ticks == [
        ["0", "5", "25"],
        ["1.0", "1.5"],
        ["5k", "20k"],
        ["2e-5"],
        ["12,340", "12,345"],
        ["0", "1 min", "2 min"],
        ["200 ms"],
        ["50 %"],
    ]


def test_the_x_axis_is_steps_time_or_tokens_and_a_zoom_follows_it(two, opened):
    page = opened(*two)
    page.wait_for_selector("#compare td >> text=step 200")
    loss = page.locator("#steps .card").first
    for axis, title, last in (("tokens", "tokens", "1.23M tokens"), ("time", "time since the start", "75 s")):
        page.evaluate("drawn.clear()")
        page.locator("#axis").select_option(axis)
        page.wait_for_selector(f"#steps .card[data-axis={axis}]")
        loss.locator(".plot").focus()
        page.keyboard.press("End")
        _expect(loss.locator(".at")).to_have_text(last)
        assert page.evaluate("title => drawn.has(title)", title)
        page.keyboard.press("+")
        page.wait_for_selector("#all:visible")
    # The first differing step is a step.
    page.evaluate("drawn.clear()")
    page.locator("#compare td button", has_text="step 200").first.click()
    _expect(page.locator("#axis")).to_have_value("step")
    page.wait_for_selector("#steps .card[data-axis=step]")
    assert page.evaluate("drawn.has('step')")


def test_smoothing_draws_a_moving_average_next_to_the_values(two, opened):
    page = opened(two[1])
    value = page.locator("#steps .legend b").first
    before = value.inner_text()
    page.locator("#smoothing").fill("0.9")
    _expect(value).to_have_text(re.compile(rf"{before}, smoothed \d"))
    assert "smoothed" not in page.locator("#steps .card", has_text="Learning rate").inner_text()
    page.locator("#smoothing").fill("0")
    _expect(value).to_have_text(before)


def test_the_settings_of_a_run_and_those_that_are_not_the_default(two, opened):
    (two[1] / "run.yaml").write_text(f"strategy: ddp\nsteps: 300\nmodel: {{path: {HOSTILE!r}}}\n", encoding="utf-8")
    page = opened(two[1])
    rows = page.locator("#settings tbody tr")
    _expect(rows).to_have_count(3)
    reported = [" ".join(row.split()) for row in rows.all_inner_texts()]
    assert reported == ["strategy ddp fsdp2", "steps 300 null", f"model.path {HOSTILE} (not set)"]
    page.locator("#settings button").click()
    _expect(rows).to_have_count(3)
    assert page.locator("img").count() == 0


def test_a_page_without_steps_or_evaluations_says_what_follows(tmp_path, opened):
    run = tmp_path / "run"
    run.mkdir()
    page = opened(run, ready=".badge.waiting")
    # Red is for failures.
    bad = page.evaluate(
        """() => {
            const badge = document.body.appendChild(document.createElement("p"));
            badge.className = "badge failed";
            return getComputedStyle(badge).color;
        }"""
    )
    for part in (".badge.waiting", ".run .why"):
        assert page.locator(part).evaluate("part => getComputedStyle(part).color") != bad, part
    note = page.locator("#steps [role=status]")
    _expect(note).to_have_text("No steps yet. The charts appear when the first step has ended.")
    assert "output_dir" in page.locator(".why").inner_text()
    _expect(page.locator("#view")).to_be_hidden()
    write_run_directory(run, 20, of_steps=200)
    (run / "run.yaml").write_text("steps: 200\neval: {every: 50}\n", encoding="utf-8")
    _expect(note).to_have_text("No evaluation yet: the first is after step 50.")
    page.locator("article.run h2 button").click()
    _expect(note).to_have_text("All runs are hidden: select one above.")


@pytest.mark.parametrize("width", [400, 800, 1600])
def test_nothing_is_wider_than_the_window_and_cards_have_one_height(width, two, tmp_path, opened):
    long = write_run_directory(tmp_path / ("long-" * 30), 60, of_steps=80)
    write_lines(long / "events.jsonl", [build_event_line("fault", 60, rank=0, error_type="E", message="word" * 200)])
    page = opened(two[0], two[1], long)
    page.set_viewport_size({"width": width, "height": 900})
    page.wait_for_selector("#settings td")
    page.wait_for_selector("#compare td >> text=step 200")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    heights = {round(card.bounding_box()["height"]) for card in page.locator("article.run").all()}
    assert width < 700 or len(heights) == 1


def _computed_s(client: Any) -> float:
    """Seconds that the page's main thread has computed for, on however busy a machine."""
    measured = client.send("Performance.getMetrics")["metrics"]
    return next(each["value"] for each in measured if each["name"] == "TaskDuration")


@pytest.mark.zoo
def test_a_thousand_ranks_and_a_hundred_thousand_steps_stay_smooth(tmp_path, opened):
    """Counted in seconds of processors, which on a machine that does nothing else are seconds of waiting at most."""
    run = write_run_directory(tmp_path / "run", 100_000, world_size=1024)
    write_rank_files(run, 1024, slow=17, last=100_000)
    began = time.process_time()
    page = opened(run)
    of_server = time.process_time() - began
    client = page.context.new_cdp_session(page)
    client.send("Performance.enable", {"timeDomain": "threadTicks"})

    def during(act: Callable[[], None]) -> float:
        """Seconds of an act, and of all that follows from it."""
        before = _computed_s(client)
        act()
        page.wait_for_timeout(1000)
        return _computed_s(client) - before

    _expect(page.locator(".facts dd").first).to_have_text("100,000 / 100,000")
    page.wait_for_selector("#ranks td >> text=forward backward")
    of_page = _computed_s(client)
    assert of_server + of_page < 3
    page.wait_for_timeout(3000)
    plot = page.locator("#steps .plot").first
    box = plot.bounding_box()

    def move(part: float) -> None:
        page.mouse.move(box["x"] + box["width"] * part, box["y"] + 100)

    def drag() -> None:
        move(0.4)
        page.mouse.down()
        move(0.6)
        page.mouse.up()
        page.wait_for_selector("#all:visible")

    moves = [during(lambda part=part: move(part)) for part in (0.3, 0.5, 0.8)]
    zooms = [during(drag)]
    plot.focus()
    zooms += [during(lambda key=key: plot.press(key)) for key in ("+", "ArrowRight", "Shift+ArrowLeft", "0")]
    reported = f"{of_server=:.2f} {of_page=:.2f} moves={moves} zooms={zooms}"
    # A zoom draws twice, in tasks of a picture each: what is there at once, and the steps between when they have come.
    assert max(moves) < 0.1, reported
    assert max(zooms) < 0.3, reported
