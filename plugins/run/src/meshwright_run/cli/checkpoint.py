"""`meshwright checkpoint`: what is in checkpoints, and whether they are valid; `meshwright export`: their models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.plugin import new_console, output_console, say, told

if TYPE_CHECKING:
    from meshwright.plugin import Folder

Directory = Annotated[
    str, typer.Argument(help="A checkpoint, or a directory of checkpoints; or a URL, such as s3://bucket/prefix.")
]
KeyFile = Annotated[
    str | None, typer.Option(help="The file with the key that they are signed with; others are refused.")
]


def show(directory: Directory, key_file: KeyFile = None) -> None:
    """Tell what is in a checkpoint, and whether it is whole; exits with 1 where one is not."""
    with told(traceback=False):
        from meshwright.plugin import shown

        table, all_whole = shown(_place(directory, key_file))
        output_console().print(table)
    raise typer.Exit(0 if all_whole else 1)


def verify(directory: Directory, key_file: KeyFile = None) -> None:
    """Read every byte of a checkpoint, and compare it with the manifest.

    Exits with 0 where all are whole, 1 where one is not, and 2 where there is none, or it cannot be read, or a key is
    given and one is not signed with it.
    """
    with told(traceback=False):
        from meshwright.plugin import signed, verified

        console, all_whole = new_console(soft_wrap=True, highlight=False), True
        for each in verified(_place(directory, key_file)):
            all_whole = all_whole and not each.problems
            state = "torn" if each.problems else "whole"
            if each.manifest is not None:
                state += f", {len(each.manifest.files)} files, {each.nbytes:,} bytes read, "
                state += signed(each.manifest, each.place)
            console.print(f"{each.place}: {state}")
            for problem in each.problems:
                console.print(f"  {problem}")
    raise typer.Exit(0 if all_whole else 1)


def _place(where: str, key_file: str | None) -> Folder:
    from meshwright.plugin import Access, place_of, read_key

    key = None if key_file is None else read_key(key_file, where="--key-file")
    return place_of(where, Access(key))


def export(
    checkpoint: Annotated[str, typer.Argument(help="The checkpoint: a directory, or a URL.")],
    output: Annotated[Path, typer.Argument(help="The Hugging Face directory to write: new, or empty.")],
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 ... for the weights; as they were saved otherwise.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of a file, such as 5GB; memory is bounded by it.")] = "5GB",
    ema: Annotated[
        bool, typer.Option("--ema", help="The average of the weights in their place, which the run has kept (ema).")
    ] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of adapters, or of an adapter's directory: the whole model that they make.")
    ] = False,
    trust_remote_code: Annotated[
        str | None, typer.Option(help="The digest of the model's own code, which the error without it tells.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="With --merge: where the base is, if it is not where it was in training.")
    ] = None,
    key_file: KeyFile = None,
) -> None:
    """Write the model of a checkpoint as a Hugging Face directory, with one process and no network.

    Of a checkpoint of adapters it is their directory, as peft has it; with --merge the whole model.
    """
    with told(traceback=False):
        from meshwright.plugin import ConfigError
        from meshwright.plugin import dtype as dtype_of

        chosen = None if dtype is None else dtype_of(dtype)
        if base is not None and not merge:
            raise ConfigError("--base is of --merge: what is written without it holds no base. Leave it out.")
        if trust_remote_code is not None:
            from meshwright.plugin import HUGGING_FACE, is_url, trust_code

            if is_url(checkpoint):
                raise ConfigError(
                    f"--trust-remote-code is of code that you have read, and {checkpoint} is elsewhere. Copy the "
                    f"checkpoint into a directory, and export it from there."
                )
            trust_code(Path(checkpoint) / HUGGING_FACE, trust_remote_code, commit=None, where="--trust-remote-code")
        place = _place(checkpoint, key_file)
        if merge:
            from meshwright.plugin import merge_adapter

            merge_adapter(place, output, base=base, dtype=chosen, max_shard_size=max_shard_size, average=ema)
        else:
            from meshwright.plugin import export_checkpoint

            export_checkpoint(place, output, dtype=chosen, max_shard_size=max_shard_size, average=ema)
    say(f"written {output}\n")
