"""The sources of the frameworks that docs/coming-from speaks of, as they were when it was written.

    python tests/docs/peers.py          # unpacks the wheels of those that are not installed into .peers

Nothing of them is run: tests/docs/test_coming_from.py looks for names.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FETCHED = ROOT / ".peers"
PEERS = {
    "accelerate": ("accelerate", "1.15.0", "accelerate"),
    "lightning": ("lightning", "2.6.6", "lightning"),
    "trainer": ("transformers", "5.23.0", "transformers"),
    "trl": ("trl", "1.16.0", "trl"),
    "torchtitan": ("torchtitan", "0.3.0", "torchtitan"),
    "automodel": ("nemo-automodel", "0.7.0", "nemo_automodel"),
    "verl": ("verl", "0.9.1", "verl"),
}
"""By page: distribution, version, package."""


def source(page: str) -> Path | None:
    """The directory of a framework's package in the version of its page: as installed, or fetched; None: neither."""
    distribution, version, package = PEERS[page]
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.submodule_search_locations and importlib.metadata.version(distribution) == version:
        return Path(next(iter(spec.submodule_search_locations)))
    fetched = FETCHED / f"{distribution}-{version}" / package
    return fetched if fetched.is_dir() else None


@cache
def words(directory: Path) -> frozenset[str]:
    """All identifiers in a package's sources, and the names of its modules."""
    found: set[str] = set()
    for path in directory.rglob("*.py"):
        found.update(path.relative_to(directory).with_suffix("").parts)
        found.update(re.findall(r"[A-Za-z_]\w*", path.read_text(encoding="utf-8")))
    return frozenset(found)


def fetch(page: str) -> None:
    """Unpack a framework's wheel."""
    distribution, version, _ = PEERS[page]
    target = FETCHED / f"{distribution}-{version}"
    command = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--dest", str(FETCHED)]
    subprocess.run([sys.executable, "-m", "pip", *command, f"{distribution}=={version}"], check=True)
    (wheel,) = FETCHED.glob(f"{distribution.replace('-', '_')}-{version}-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(target)
    wheel.unlink()


if __name__ == "__main__":
    for each in PEERS:
        if source(each) is None:
            fetch(each)
