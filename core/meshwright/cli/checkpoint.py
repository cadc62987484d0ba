"""`meshwright checkpoint`: what is in checkpoints, and whether they are whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..files.terminal import new_console
from .errors import told

if TYPE_CHECKING:
    from ..checkpoint.places import Folder

Directory = Annotated[
    str, typer.Argument(help="A checkpoint, or a directory of checkpoints; or a URL, such as s3://bucket/prefix.")
]
KeyFile = Annotated[
    str | None, typer.Option(help="The file with the key that they are signed with; others are refused.")
]


def show(directory: Directory, key_file: KeyFile = None) -> None:
    """Tell what is in a checkpoint, and whether it is whole; exits with 1 where one is not."""
    with told(traceback=False):
        from ..checkpoint.verifying import shown

        table, all_whole = shown(place_given(directory, key_file))
        console = new_console()
        if not console.is_terminal:
            console.width = 10_000  # a file cuts nothing off
        console.print(table)
    raise typer.Exit(0 if all_whole else 1)


def verify(directory: Directory, key_file: KeyFile = None) -> None:
    """Read every byte of a checkpoint, and compare it with the manifest.

    Exits with 0 where all are whole, 1 where one is not, and 2 where there is none, or it cannot be read, or a key is
    given and one is not signed with it.
    """
    with told(traceback=False):
        from ..checkpoint.verifying import signed, verified

        console, all_whole = new_console(soft_wrap=True, highlight=False), True
        for each in verified(place_given(directory, key_file)):
            all_whole = all_whole and not each.problems
            state = "torn" if each.problems else "whole"
            if each.manifest is not None:
                state += f", {len(each.manifest.files)} files, {each.nbytes:,} bytes read, "
                state += signed(each.manifest, each.place)
            console.print(f"{each.place}: {state}")
            for problem in each.problems:
                console.print(f"  {problem}")
    raise typer.Exit(0 if all_whole else 1)


def place_given(where: str, key_file: str | None) -> Folder:
    """The place that a command is told of.

    Raises:
        ConfigError: the key cannot be read, or the URL cannot be used.
    """
    from ..checkpoint.keys import read_key
    from ..checkpoint.places import Access
    from ..checkpoint.remote import place_of

    key = None if key_file is None else read_key(key_file, where="--key-file")
    return place_of(where, Access(key))
