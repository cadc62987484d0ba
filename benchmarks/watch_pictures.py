"""The pictures of docs/reference/watch.md: the page of `meshwright watch` in a browser, on three runs of one model.

    python benchmarks/watch_pictures.py         # three minutes, on a machine that does nothing else

It needs the extras `watch` and `dev`, and a Chromium of the system.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import yaml
from playwright.sync_api import Page, sync_playwright

from meshwright_watch import server
from meshwright_watch.run import open_runs

DOCS = Path(__file__).parents[1] / "docs"
STEPS = 240
RUN: dict[str, Any] = {
    "nproc": 2,
    "threads_per_rank": 1,
    "model": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.08,
    },
    "data": {"corpus": "stdlib", "vocab_size": 512, "seq_len": 64},
    "steps": STEPS,
    "batch_size": 16,
    "optimizer": {"lr": 4e-3},
    "schedule": {"name": "cosine", "warmup_steps": 20},
    "eval": {"every": 40, "max_sequences": 32},
    "checkpoint": {"every": 60},
    "sample": None,
}
WIDE: dict[str, Any] = {"strategy": "fsdp2", "strategy_config": {"reduce_dtype": "float64"}}
RUNS: dict[str, dict[str, Any]] = {
    "tiny-fsdp2": {**WIDE, "metrics": {"norms_every": 4, "communication_every": 40}},
    "tiny-pp2": {**WIDE, "pp_size": 2, "wrapper_config": {"pipeline": {"pp_microbatch_size": 2}}},
    "tiny-ddp": {"strategy": "ddp"},
}
WIDTH = 1280


def main() -> None:
    """Train, and draw."""
    with tempfile.TemporaryDirectory() as directory:
        for name, own in RUNS.items():
            _train(Path(directory), name, own)
            sys.stdout.write(f"trained {name}\n")
        runs = [Path(directory) / "runs" / name for name in RUNS]
        fsdp2, pp2, _ = runs
        with sync_playwright() as started:
            browser = started.chromium.launch(executable_path=_chromium(), args=["--no-sandbox"])
            for name, shown, scheme, first in (
                ("light", [pp2], "light", "body"),
                ("dark", [fsdp2, pp2], "dark", "#time"),
                ("compare", runs, "light", "body"),
            ):
                page = browser.new_context(color_scheme=scheme, viewport={"width": WIDTH, "height": 900}).new_page()
                _open(page, shown)
                last = "#steps .card:nth-child(2)" if name == "compare" else "#pipeline"
                _take(page, first, last, DOCS / "images" / f"watch_{name}.png")
            browser.close()


def _train(directory: Path, name: str, own: dict[str, Any]) -> None:
    file = directory / f"{name}.yaml"
    file.write_text(yaml.safe_dump({**RUN, **own, "output_dir": f"runs/{name}"}), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "meshwright", "train", file.name], cwd=directory, check=True)


def _chromium() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        raise SystemExit("no Chromium is installed: apt-get install chromium")
    return found


def _open(page: Page, runs: list[Path]) -> None:
    listener = server.open_listener("127.0.0.1", 0, default=0)
    threading.Thread(
        target=server.serve, args=(open_runs(runs), listener), kwargs={"host": "127.0.0.1", "token": "t"}, daemon=True
    ).start()
    page.goto(server.format_url(listener, "t"))
    page.wait_for_selector("#pipeline .plot")
    page.locator("#ranks input").first.fill("1")
    page.locator("#ranks input").first.press("Enter")
    page.wait_for_timeout(2000)
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(500)


def _take(page: Page, first: str, last: str, file: Path) -> None:
    """From the top of one element to the bottom of another."""
    top, bottom = (page.locator(each).first.bounding_box() for each in (first, last))
    assert top is not None
    assert bottom is not None
    start = max(0.0, top["y"] - 10)
    height = bottom["y"] + bottom["height"] + 12 - start
    page.screenshot(path=file, full_page=True, clip={"x": 0, "y": start, "width": WIDTH, "height": height})


if __name__ == "__main__":
    main()
