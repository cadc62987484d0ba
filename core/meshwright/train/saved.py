"""Where the checkpoints of a run are, and how they are reached."""

from __future__ import annotations

from pathlib import Path

from ..base.errors import ConfigError
from ..checkpoint.keys import read_key
from ..checkpoint.places import Access, Folder
from ..checkpoint.remote import is_url, place_of
from ..mesh.world import World
from .files import CHECKPOINTS
from .run_file import RunConfig


def access_of(config: RunConfig) -> Access:
    """How places are reached by a run.

    Raises:
        ConfigError: its key cannot be read.
    """
    section = config.checkpoint
    key = None if section.key_file is None else read_key(section.key_file, where="checkpoint.key_file")
    return Access(key, section.retries)


def saved_by(config: RunConfig) -> Folder:
    """The place of the checkpoints of a run.

    Raises:
        ConfigError: it cannot be one.
    """
    return place_of(_where(config), access_of(config))


def is_elsewhere(config: RunConfig) -> bool:
    """Whether checkpoints go elsewhere than into the output directory."""
    return config.checkpoint.to is not None


def named_place(config: RunConfig, source: str) -> Folder:
    """The place of a checkpoint that the run file names."""
    where = source if is_url(source) else Path(source).expanduser().resolve()
    return place_of(where, access_of(config))


def check_place(config: RunConfig, ranks: int) -> None:
    """Refuse a place that cannot serve a run, without looking at what is there.

    Raises:
        ConfigError: it is of an unknown kind, or of one that ranks do not share; or the key cannot be read.
    """
    folder = saved_by(config)
    if str(folder).startswith("memory:") and ranks > 1:
        raise ConfigError(
            f"checkpoint.to={config.checkpoint.to!r} is in the memory of one process, and the run has {ranks} ranks. "
            f"Give what all of them reach: a directory, or s3://bucket/prefix."
        )


def check_same_key(config: RunConfig, world: World) -> None:
    """Refuse ranks that have other keys. Collective.

    Raises:
        ConfigError: a rank has another key, or none that can be read; on all ranks.
    """
    key = world.together(lambda: access_of(config)).key
    number = 0 if key is None else key.fingerprint
    highest, lowest = world.exchange((), (number, -number))[1]
    if highest != -lowest:
        world.raise_together(
            ConfigError(
                f"checkpoint.key_file={config.checkpoint.key_file!r} holds another key on some nodes than on others. "
                f"Give all of them the same file."
            )
        )


def _where(config: RunConfig) -> str | Path:
    to = config.checkpoint.to
    if to is None:
        return Path(config.output_dir) / CHECKPOINTS
    return to if is_url(to) else Path(to).expanduser()
