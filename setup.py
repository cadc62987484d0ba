"""Let the extras of a clone install the packages that lie in it, which no index has.

`pip install -e '.[fsdp2]'` then installs plugins/fsdp2, as a copy. What is released is built without this file (see
tools/release.py), and its extras name versions. Everything else about the distribution is in pyproject.toml.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from setuptools import setup
from setuptools.command.dist_info import dist_info

PLUGINS = Path(__file__).resolve().parent / "plugins"


def in_clone(header: str) -> Iterator[str]:
    """The lines of METADATA that take the place of one."""
    found = re.fullmatch(r"Requires-Dist: meshwright-([a-z0-9-]+)==[^;]+(;.*)", header)
    if found and (place := PLUGINS / found[1].replace("-", "_")).is_dir():
        header = f"Requires-Dist: meshwright-{found[1]} @ {place.as_uri()} {found[2]}"
    yield header
    # pip before 23.3 knows an extra by the one spelling that METADATA has.
    underscored = re.sub(
        r'(?<=^Provides-Extra: ).+|(?<=extra == ")[^"]+', lambda name: name[0].replace("-", "_"), header
    )
    if underscored != header:
        yield underscored


class CloneInfo(dist_info):
    """METADATA of a clone."""

    def run(self) -> None:
        super().run()
        path = Path(self.dist_info_dir, "METADATA")
        headers, blank, readme = path.read_text(encoding="utf-8").partition("\n\n")
        lines = [line for header in headers.splitlines() for line in in_clone(header)]
        path.write_text("\n".join(lines) + blank + readme, encoding="utf-8")


setup(cmdclass={"dist_info": CloneInfo})
