"""Find the directory that a name stands for: itself, or what the Hugging Face hub has under it."""

from __future__ import annotations

import re
from pathlib import Path

from ...base.errors import ModelError

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_FILES = ["*.json", "model*.safetensors", "*.txt", "*.model", "*.jinja"]
_PICKLES = ["pytorch_model*.bin"]


def find_directory(path: str | Path, *, revision: str | None = None, allow_pickle: bool = False) -> Path:
    """The local directory of a model; what the hub has is downloaded, once, to its cache.

    Args:
        path: a directory, or a hub id such as "Qwen/Qwen3-0.6B".
        revision: branch, tag or commit on the hub.
        allow_pickle: download `.bin` files too.

    Raises:
        ModelError: no such directory, and the hub has no such model or cannot be reached.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists() or not isinstance(path, str) or not _HUB_ID.fullmatch(path):
        raise ModelError(
            f"{str(path)!r} is not a directory. Give a local Hugging Face model directory, or a hub id such as "
            f"'Qwen/Qwen3-0.6B'."
        )
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            path,
            revision=revision,
            allow_patterns=_FILES + (_PICKLES if allow_pickle else []),
            ignore_patterns=["*/*"],
        )
    except Exception as error:
        # No network, no such model, no permission, offline mode: each has an error of its own, of several libraries.
        reason = str(error).strip().split("\n")[0]
        raise ModelError(
            f"{path!r} is no local directory, and it cannot be had from the Hugging Face hub "
            f"({type(error).__name__}: {reason}). Give a directory that exists, or check the id, the network and your "
            f"access to the model."
        ) from error
    return Path(found)
