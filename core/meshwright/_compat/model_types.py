"""The model types of transformers, read from its sources: importing what has them imports torch."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_FILES = ("auto_mappings.py", "configuration_auto.py")
_ENTRY = re.compile(r"""["']([\w.-]+)["']\s*[,:]\s*["']\w+Config["']""")


def model_types() -> list[str]:
    """The keys of transformers' `CONFIG_MAPPING`, in any order.

    Private because there is no public list of them without torch; that it stands in these files, and how, is not
    promised. What is not as expected, or may have types of the user's own, is asked instead.
    """
    loaded: Any = sys.modules.get("transformers.models.auto.configuration_auto")
    found = [] if loaded else _read()
    if not found:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        found = list(CONFIG_MAPPING.keys())
    return found


def _read() -> list[str]:
    package = find_spec("transformers")
    if package is None or package.origin is None:
        return []
    files = [Path(package.origin).parent / "models" / "auto" / name for name in _FILES]
    if not all(file.is_file() for file in files):
        return []
    texts = [file.read_text(encoding="utf-8").partition("\n__all__")[0] for file in files]
    return list(dict.fromkeys(name for text in texts for name in _ENTRY.findall(text)))
