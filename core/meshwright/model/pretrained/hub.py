"""Find the directory that a name stands for: itself, or what the Hugging Face hub has under it."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from pathlib import Path

from ...base.errors import ModelError
from ...mesh.world import World

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILES = [
    "*.json",
    "model*.safetensors",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "*.jinja",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
]
_PICKLES = ["pytorch_model*.bin"]
_CODE = ["*.py"]


def find_directory(
    path: str | Path, *, revision: str | None = None, allow_pickle: bool = False, code: bool = False
) -> Path:
    """The local directory of a model; what the hub has is downloaded, once, to its cache.

    Args:
        path: a directory, or a hub id such as "Qwen/Qwen3-0.6B".
        revision: branch, tag or commit on the hub.
        allow_pickle: download `.bin` files too.
        code: download `.py` files too.

    Raises:
        ModelError: no such directory, and the hub has no such model or cannot be reached.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists() or not is_hub_id(path):
        raise ModelError(
            f"{str(path)!r} is not a directory. Give a local Hugging Face model directory, or a hub id such as "
            f"'Qwen/Qwen3-0.6B'."
        )
    # What begins with a directory of the user is a path of the user, and nobody's model is to take its place.
    above = directory.parent
    if above != Path(".") and above.is_dir():
        raise ModelError(
            f"{str(path)!r} is not a directory: {above.absolute()} holds no {directory.name!r}. Name one that is "
            f"there; or, to have the model of that id from the Hugging Face hub, download it and give its "
            f"directory, since {str(above)!r} is a directory here."
        )
    from huggingface_hub import snapshot_download

    download = functools.partial(
        snapshot_download,
        str(path),
        revision=revision,
        allow_patterns=_FILES + (_PICKLES if allow_pickle else []) + (_CODE if code else []),
        ignore_patterns=["*/*"],
    )
    try:
        return Path(download())
    except Exception as error:
        # Offline, huggingface_hub 1.33 does not look for a commit in its cache; a commit cannot have changed.
        if revision is not None and _COMMIT.fullmatch(revision):
            with contextlib.suppress(Exception):
                return Path(download(local_files_only=True))
        # No network, no such model, no permission, offline mode: each has an error of its own, of several libraries.
        reason = str(error).strip().split("\n")[0]
        at = f" at revision {revision!r}" if revision else ""
        raise ModelError(
            f"{str(path)!r} is no local directory, and it cannot be had from the Hugging Face "
            f"hub{at} ({type(error).__name__}: {reason}). Give a directory that exists, or check the id, the network "
            f"and your access to the model."
        ) from error


def find_on_all(
    path: str | Path, world: World, *, revision: str | None = None, allow_pickle: bool = False, code: bool = False
) -> Path:
    """`find_directory` for all ranks: what the hub has is the same commit on all, downloaded once on each node.

    Collective.

    Raises:
        ModelError: as `find_directory`; on all ranks.
    """

    def find(at: str | None) -> Path:
        return find_directory(path, revision=at, allow_pickle=allow_pickle, code=code)

    commit = world.from_first(lambda: commit_of(path, find(revision)))
    if commit is not None:
        # Further nodes have caches of their own; the ranks of one share it.
        world.together(lambda: find(commit) if os.environ.get("LOCAL_RANK", "0") == "0" else None)
    return world.together(lambda: find(commit or revision))


def is_hub_id(path: str | Path) -> bool:
    """Whether a name could be that of a model on the hub."""
    return isinstance(path, str) and _HUB_ID.fullmatch(path) is not None


def commit_of(path: str | Path, found: Path) -> str | None:
    """The commit that `find_directory` has found in the hub's cache; None of a directory of the user."""
    is_own = Path(path).expanduser().is_dir()
    return found.name if not is_own and _COMMIT.fullmatch(found.name) else None
