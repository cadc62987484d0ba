"""What somebody does who has never seen the project, with wheels only; how long each part takes.

    python tests/docs/newcomer.py [--json FILE] [--keep FOLDER]

Wheels of all distributions are built from this clone. Then everything happens in a folder of its own, outside of it,
with a fresh environment: install, `meshwright init`, `doctor`, `train`, `watch` (its page is fetched), `export`, and
a sentence from the exported model. Any command that fails ends the script with its words.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTRAS = "fsdp2,ddp,pipeline,watch"
ALLOWED_S = 600
SENTENCE = (
    "from transformers import pipeline; "
    "print(pipeline('text-generation', 'exported', max_new_tokens=8)('def ')[0]['generated_text'])"
)


class Newcomer:
    """Follows the steps in a folder, and keeps what each has taken.

    Args:
        folder: empty.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.seconds = folder, {}  # type: Path, dict[str, float]
        self._programs = folder / "env" / "bin"

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 1)
        print(f"{name:>10} {self.seconds[name]:7.1f} s", flush=True)

    def run(self, program: str, *arguments: str) -> str:
        """A program of the environment, in the folder; what it has said."""
        done = subprocess.run(
            [self._programs / program, *arguments],
            cwd=self.folder,
            env=self._environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(
                f"{program} {' '.join(arguments)} left with {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return done.stdout

    def _environment(self) -> dict[str, str]:
        """Nothing of the clone, and no hub."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return kept | {"HF_HUB_OFFLINE": "1"}

    def install(self, wheels: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "env"], cwd=self.folder, check=True)
        pins = ("-c", str(ROOT / "constraints.txt"), "--find-links", str(wheels))
        self.run("python", "-m", "pip", "install", "--quiet", *pins, f"meshwright[{EXTRAS}]")
        place = self.run("python", "-c", "import meshwright; print(meshwright.__file__)").strip()
        if not place.startswith(str(self.folder)):
            raise SystemExit(f"meshwright is imported from {place}, and not from what was installed.")

    def watch(self) -> None:
        """Open the page, and see that it knows the run."""
        command = [self._programs / "meshwright", "watch", "runs/first", "--no-browser", "--port", "8731"]
        server = subprocess.Popen(command, cwd=self.folder, env=self._environment(), stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 30
            while True:
                try:
                    with urllib.request.urlopen("http://127.0.0.1:8731/", timeout=5) as page:
                        text = page.read().decode()
                    break
                except OSError:
                    if time.monotonic() > deadline or server.poll() is not None:
                        raise
                    time.sleep(0.1)
        finally:
            server.terminate()
            server.wait(10)
        if "meshwright" not in text:
            raise SystemExit(f"the page of watch is {text[:500]!r}")

    def go(self, wheels: Path) -> None:
        with self.part("install"):
            self.install(wheels)
        with self.part("init"):
            self.run("meshwright", "init", "run.yaml", "--yes", "--devices", "2", "--steps", "60")
        with self.part("doctor"):
            print(self.run("meshwright", "doctor"))
        with self.part("train"):
            settings = ("output_dir=runs/first", "checkpoint.every=30")
            sets = [option for each in settings for option in ("--set", each)]
            self.run("meshwright", "train", "run.yaml", *sets)
        with self.part("watch"):
            self.watch()
        with self.part("export"):
            self.run("meshwright", "export", "runs/first/checkpoints/step-00000060", "exported")
        with self.part("use"):
            print(self.run("python", "-c", SENTENCE).strip())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the seconds here")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="do it there, and leave it")
    options = parser.parse_args()
    folder = (options.keep or Path(tempfile.mkdtemp())).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    wheels = Path(tempfile.mkdtemp())
    try:
        subprocess.run([sys.executable, "tools/release.py", "build", str(wheels)], cwd=ROOT, check=True)
        newcomer = Newcomer(folder)
        newcomer.go(wheels)
    finally:
        shutil.rmtree(wheels)
        if options.keep is None:
            shutil.rmtree(folder)
    total = sum(newcomer.seconds.values())
    print(f"{'in all':>10} {total:7.1f} s, of {ALLOWED_S}")
    if options.json is not None:
        about = {"date": date.today().isoformat(), "python": platform.python_version(), "cores": os.cpu_count()}
        report = {**about, "seconds": newcomer.seconds, "in_all": round(total, 1), "allowed": ALLOWED_S}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if total > ALLOWED_S:
        raise SystemExit("it has taken too long")


if __name__ == "__main__":
    main()
