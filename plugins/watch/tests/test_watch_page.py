"""The page of `meshwright watch` in a real browser: what it shows, live, by keyboard, and how fast.

They need Playwright (extra `dev`) and a Chromium of the system, and are skipped where either is missing.
"""

from __future__ import annotations

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
