"""Test helpers for strategy authors: worker ranks, tiny models and parity with `single`.

The names come from the plugin meshwright-testing; `testing.pyi` lists them.
"""

from __future__ import annotations

from .base.lazy import import_lazily, read_stub_names


def __getattr__(name: str) -> object:
    return import_lazily(__file__, __name__, name)


def __dir__() -> list[str]:
    return sorted(read_stub_names(__file__))
