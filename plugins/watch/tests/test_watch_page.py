"""The page of `meshwright watch` in a real browser: what it shows, live, in both themes, by keyboard, and how fast.

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
from support.watched import event, make_ranks, make_run, make_timeline, start, step_line, write_lines

from meshwright_watch import server
from meshwright_watch.run import watched

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

    def open_page(*directories: Path, scheme: str = "light", ready: str = "#steps canvas") -> Any:
        listener = server.listening("127.0.0.1", 0, default=0)
        runs = watched(directories)
        options = {"host": "127.0.0.1", "token": "t"}
        threading.Thread(target=server.serve, args=(runs, listener), kwargs=options, daemon=True).start()
        context = browser.new_context(color_scheme=scheme, viewport={"width": 1400, "height": 900})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda told: errors.append(told.text) if told.type == "error" else None)
        # Nothing of elsewhere is asked for.
        page.on("request", lambda asked: errors.append(asked.url) if not asked.url.startswith(url) else None)
        url = server.address(listener, "").partition("?")[0]
        page.goto(server.address(listener, "t"))
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
    one, other = make_run(directory / HOSTILE, 300), make_run(directory / "other", 300)
    lines = [step_line(step, seed=0 if step < 200 else 5) for step in range(1, 301)]
    write_lines(other / "metrics.jsonl", lines, mode="w")
    (other / "run.yaml").write_text("strategy: ddp\nsteps: 300\n", encoding="utf-8")
    make_ranks(one, 8, slow=3)
    make_timeline(one)
    fault = event("fault", 120, rank=2, kind="OSError", message=HOSTILE)
    write_lines(one / "events.jsonl", [fault, start(300, begin=100), event("end", 300, reason="done", seconds=3.0)])
    return one, other


def _expect(locator: Any) -> Any:
    playwright.expect.set_options(timeout=PATIENCE_MS)
    return playwright.expect(locator)


def test_two_runs_side_by_side_with_the_step_from_which_they_differ(two, opened):
    page = opened(*two)
    page.wait_for_selector("#compare td >> text=step 200")
    assert page.locator("#compare td button", has_text="step 200").count() == 4
    said = page.locator("#compare tbody").nth(1).locator("tr")
    told = ["strategy fsdp2 ddp", "optimizer.name AdamW (not set)", "optimizer.lr 0.001 (not set)"]
    assert [" ".join(row.split()) for row in said.all_inner_texts()] == told
    # Names and messages are texts.
    assert page.locator("article.run h2").first.inner_text().startswith(HOSTILE)
    assert page.locator("img").count() == 0
    assert "owned" not in page.title().split("=")[0]
    assert page.locator("#events td", has_text="rank 2: OSError").count() == 1
    assert page.locator("#events td", has_text="restart").count() == 1
    page.keyboard.press("2")  # hiding one ends the comparison
    page.wait_for_selector("#compare", state="hidden")
    page.keyboard.press("2")  # one click away: what differs, closer
    page.locator("#compare td button", has_text="step 200").first.click()
    page.wait_for_selector("#all:visible")
    page.keyboard.press("0")
    page.wait_for_selector("#all", state="hidden")


def test_ranks_stragglers_and_timelines_are_shown(two, opened):
    page = opened(*two)
    page.wait_for_selector("#ranks td >> text=forward backward")
    assert page.locator("#ranks table").inner_text().split("\n")[-1].split()[0] == "3"
    assert page.locator("#ranks select").nth(1).input_value() == "forward_backward"
    # One of them over its steps.
    one = page.locator("#ranks .card", has_text="One rank over its steps")
    assert one.locator(".empty").inner_text() == "give the number of a rank"
    page.locator("#ranks td button", has_text="3").first.click()
    _expect(one.locator(".legend button")).to_have_text("rank 3: forward backward")
    one.locator("select").select_option("memory/allocated_peak")
    _expect(one.locator(".legend button")).to_have_text("rank 3: memory: allocated peak")
    one.locator("input").fill("99")
    one.locator("input").press("Enter")
    _expect(one.locator(".empty")).to_have_text("rank 99 has written nothing")
    one.locator("input").fill("5")
    one.locator("input").press("Enter")
    _expect(one.locator(".legend button")).to_have_text("rank 5: memory: allocated peak")
    assert one.locator(".legend b").inner_text().endswith("iB")
    timeline = page.locator("#pipeline .plot")
    assert "step 20: measured" in page.locator("#pipeline .said").inner_text()
    timeline.focus()
    timeline.press("ArrowRight")
    assert page.locator("#pipeline .said").inner_text().startswith("measured, rank 0: forward of microbatch 0, stage 0")
    timeline.press("ArrowRight")
    timeline.press("ArrowDown")
    assert page.locator("#pipeline .said").inner_text().startswith("measured, rank 1: backward of microbatch 0")
    timeline.press("ArrowDown")
    assert page.locator("#pipeline .said").inner_text().startswith("planned")
    timeline.press("t")
    assert page.locator("#pipeline tbody tr").count() == 32
    page.locator("#pipeline select").select_option("10")
    _expect(page.locator("#pipeline .said")).to_contain_text("step 10: measured")


def test_light_and_dark_by_the_system_and_by_a_switch_that_is_kept(two, opened):
    page = opened(two[0], scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = "rgb(15, 18, 22)"
    assert page.evaluate(background) == dark
    page.emulate_media(color_scheme="light")
    assert page.evaluate(background) == "rgb(255, 255, 255)"
    page.keyboard.press("d")
    page.keyboard.press("d")
    assert page.locator("#theme").inner_text() == "Theme: dark"
    assert page.evaluate(background) == dark
    page.reload()
    page.wait_for_selector("#steps canvas")
    assert page.evaluate(background) == dark
    # Pictures have the colours of the theme, too.
    ink = "getComputedStyle(document.documentElement).getPropertyValue('--run-0').trim()"
    assert page.evaluate(ink) == "#7fb0ff"


def test_by_keyboard_alone(two, opened):
    page = opened(two[0])
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    assert page.locator("#help").is_hidden()
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('plot')"):
            break
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Loss")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    said = page.locator("#steps .card").first.locator(".said")
    page.keyboard.press("Home")
    assert said.inner_text().startswith("step 1: ")
    page.keyboard.press("ArrowRight")
    assert said.inner_text().startswith("step 2: ")
    # The others follow.
    assert page.locator("#steps .card").nth(1).locator(".at").inner_text() == "step 2"
    page.keyboard.press("End")
    assert said.inner_text().startswith("step 300: ")
    page.keyboard.press("+")
    page.wait_for_selector("#all:visible")
    page.keyboard.press("Shift+ArrowLeft")
    page.keyboard.press("t")
    rows = page.locator("#steps .card").first.locator("tbody tr")
    assert 0 < rows.count() < 300
    page.keyboard.press("l")
    assert page.locator("#steps .card").first.locator("button", has_text="log").get_attribute("aria-pressed") == "true"
    # All that can be pressed says what it is.
    pressed = page.locator("button, select, input, [tabindex]").evaluate_all(
        "all => all.filter(each => !(each.textContent.trim() || each.ariaLabel)).map(each => each.outerHTML)"
    )
    assert pressed == []


def test_lines_that_are_added_are_shown_within_seconds(tmp_path, opened):
    run = tmp_path / "run"
    run.mkdir()
    page = opened(run, ready=".badge.waiting")
    make_run(run, 50, of_steps=200)
    page.wait_for_selector("#steps canvas")
    (run / ".lock.json").write_text('{"pid": 1, "host": "elsewhere"}', encoding="utf-8")
    page.wait_for_selector(".badge.running")
    assert page.locator(".facts dd").first.inner_text() == "50 / 200"
    write_lines(run / "metrics.jsonl", [step_line(51), step_line(52, loss=123.456)])
    _expect(page.locator(".facts dd").first).to_have_text("52 / 200")
    _expect(page.locator("#steps .legend b").first).to_have_text("123.5")
    write_lines(run / "events.jsonl", [start(200, begin=40)])  # A run that goes back to a checkpoint
    write_lines(run / "metrics.jsonl", [step_line(41, seed=1)])
    _expect(page.locator(".facts dd").first).to_have_text("41 / 200")
    write_lines(run / "new", [step_line(step) for step in range(1, 8)])  # A file that is replaced
    (run / "new").replace(run / "metrics.jsonl")
    _expect(page.locator(".facts dd").first).to_have_text("7 / 200")
    write_lines(run / "events.jsonl", [event("end", 7, reason="failed")])
    page.wait_for_selector(".badge.failed")


def _computed_s(client: Any) -> float:
    """Seconds that the page's main thread has computed for, on however busy a machine."""
    return next(
        each["value"] for each in client.send("Performance.getMetrics")["metrics"] if each["name"] == "TaskDuration"
    )


@pytest.mark.zoo
def test_a_thousand_ranks_and_a_hundred_thousand_steps_stay_smooth(tmp_path, opened):
    """Counted in seconds of processors, which on a machine that does nothing else are seconds of waiting at most."""
    run = make_run(tmp_path / "run", 100_000, world_size=1024)
    make_ranks(run, 1024, slow=17, last=100_000)
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

    def drag() -> None:
        page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 100)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 100, steps=5)
        page.mouse.up()
        page.wait_for_selector("#all:visible")

    moves = [
        during(lambda part=part: page.mouse.move(box["x"] + box["width"] * part / 10, box["y"] + 100))
        for part in (3, 5, 8)
    ]
    zooms = [during(drag)]
    plot.focus()
    zooms += [during(lambda key=key: plot.press(key)) for key in ("+", "ArrowRight", "Shift+ArrowLeft", "0")]
    told = f"{of_server=:.2f} {of_page=:.2f} moves={moves} zooms={zooms}"
    # A zoom draws twice, in tasks of a picture each: what is there at once, and the steps between when they have come.
    assert max(moves) < 0.1, told
    assert max(zooms) < 0.3, told
