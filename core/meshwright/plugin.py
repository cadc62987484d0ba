"""The API for authors of strategies, axes, objectives, trackers, launchers and commands.

Plugins import names beyond `meshwright` and `meshwright.testing` from here; submodules may move between releases.
`plugin.pyi` lists the names, and docs/reference describes them. They are imported on first use, so that a plugin's
module can be loaded without torch.
"""

from __future__ import annotations

from .base.lazy import import_lazily, read_stub_names


def __getattr__(name: str) -> object:
    return import_lazily(__file__, __name__, name)


def __dir__() -> list[str]:
    return sorted(read_stub_names(__file__))
