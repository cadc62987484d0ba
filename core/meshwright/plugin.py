"""The import surface for authors of strategies, axes, objectives, trackers, launchers and commands.

Whatever a plugin needs beyond `meshwright` and `meshwright.testing` is imported from here; modules below may move
between releases. `plugin.pyi` lists the names, and docs/reference describes them. Each is imported on first use, so
that a plugin's module can be loaded without torch.
"""

from __future__ import annotations

from .base.lazy import import_lazily, read_stub_names


def __getattr__(name: str) -> object:
    return import_lazily(__file__, __name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *read_stub_names(__file__)})
