"""Train any Hugging Face causal LM under any parallelism strategy, chosen by name, with one loop.

Names are imported on first use, so that `import meshwright` and listing strategies do not import torch. `__init__.pyi`
lists the names.
"""

from __future__ import annotations

from .base.lazy import import_lazily, read_stub_names
from .base.version import __version__ as __version__


def __getattr__(name: str) -> object:
    if name in read_stub_names(__file__):
        from .files.versions import check_torch_version

        check_torch_version()
    return import_lazily(__file__, __name__, name)


def __dir__() -> list[str]:
    return sorted(read_stub_names(__file__))
