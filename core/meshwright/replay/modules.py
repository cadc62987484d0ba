"""Outputs of modules in two replays, put together from the files of their ranks, row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .tensors import Apart, Differences, apart, summed

Rows = dict[bytes, Tensor]
"""By what a row is of: its token ids and labels."""


@dataclass(frozen=True)
class Traced:
    """What one replay has kept.

    Attributes:
        rows: of the step, by what they are of, and how often each was there.
        outputs: by the name of the module, in the order in which they were computed.
        reason: why there are no outputs.
    """

    rows: dict[bytes, int]
    outputs: Mapping[str, Rows]
    reason: str


def traced(directory: Path) -> Traced:
    """What the ranks of a replay have left in a directory."""
    files = sorted(directory.glob("outputs-*.pt"), key=lambda path: int(path.stem.partition("-")[2]))
    ranks = [torch.load(path, weights_only=True) for path in files]
    reason = next((each["reason"] for each in ranks if each["reason"]), "")
    rows: dict[bytes, int] = {}
    outputs: dict[str, Rows] = {}
    for data_rank in sorted({each["data_rank"] for each in ranks}):
        mine = [each for each in ranks if each["data_rank"] == data_rank]
        keys = [_key(row) for row in mine[0]["rows"]]
        for key in keys:
            rows[key] = rows.get(key, 0) + 1
        lengths = [row.shape[1] for row in mine[0]["rows"]]
        for stage in sorted({each["pp"] for each in mine}):
            along_tp = sorted((each for each in mine if each["pp"] == stage), key=lambda each: each["tp"])
            for name in along_tp[0]["outputs"]:
                whole = _whole([each["outputs"].get(name) for each in along_tp], lengths)
                if whole is not None:
                    outputs.setdefault(name, {}).update(zip(keys, whole, strict=True))
    return Traced(rows, outputs, reason)


def _key(row: Tensor) -> bytes:
    """Token ids and labels without what is filled up, which is more beside longer rows: one column, again and again."""
    length = row.shape[1]
    while length > 1 and torch.equal(row[:, length - 1], row[:, length - 2]):
        length -= 1
    return row[:, :length].contiguous().numpy().tobytes()


def _whole(parts: Sequence[list[Tensor] | None], lengths: Sequence[int]) -> list[Tensor] | None:
    """The rows of an output from those of the ranks of `tp`; None where it is divided in another way."""
    found = []
    for row, length in enumerate(lengths):
        pieces = [part[row] for part in parts if part is not None and len(part) > row]
        if len(pieces) != len(parts):
            return None
        if all(piece.shape[0] == length for piece in pieces):
            # Features that are divided differ from rank to rank.
            if any(not torch.equal(piece, pieces[0]) for piece in pieces[1:]):
                return None
            found.append(pieces[0])
        elif sum(piece.shape[0] for piece in pieces) == length:
            found.append(torch.cat(pieces))
        else:
            return None
    return found


def compared(one: Traced, other: Traced, tolerance: float) -> Differences:
    """Outputs of modules that both replays have whole, in the order in which the first has computed them."""
    found: list[Apart] = []
    for name, rows in one.outputs.items():
        theirs = other.outputs.get(name)
        if theirs is None or rows.keys() != theirs.keys():
            continue
        pairs = [(rows[key], theirs[key]) for key in rows]
        if any(a.shape[1:] != b.shape[1:] for a, b in pairs):
            continue
        widths = [min(len(a), len(b)) for a, b in pairs]
        left = torch.cat([a[:width].flatten() for (a, _), width in zip(pairs, widths, strict=True)])
        right = torch.cat([b[:width].flatten() for (_, b), width in zip(pairs, widths, strict=True)])
        found.append(apart(name, left, right))
    return summed(found, tolerance)
