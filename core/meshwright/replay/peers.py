"""The work of each data rank in a step, done by it and by another, and compared bit for bit.

[Note: shares in a circle] A step is computed three times from the same parameters, and the optimizer steps in none.
First each data rank does its own share, with its own random numbers; then each does that of the rank behind it; then
its own once more. On hardware that computes right, a share comes to the same bits wherever it is done. What is compared
is local: the output of each module, and the gradient of each parameter before it is reduced, microbatch by microbatch.
It is seen by hooks on modules and parameters, so no strategy need know of it, and each rank needs what the strategy
holds and no more. Logits that are made row by row are no tensor yet, and are seen in what follows from them.

[Note: who is wrong] A rank that computes wrongly spoils two shares: its own, and that of the rank behind it. Of three
data ranks or more, the one that both spoilt shares have in common is named. Two have both shares in common, and then
both are, unless one does not agree with itself. Where every rank disagrees with itself, kernels are at fault that sum
in no fixed order, and nobody is named.

Ranks that share a data rank's batch have parts of the same work; the one that differs first, in the order in which the
parts depend on each other, is named for all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..base.types import Batch
from ..data import Feed
from ..mesh.mesh import Mesh
from ..strategy.contract import StrategyManager
from ..train.loop.batches import step_seed
from ..train.loop.options import Loop

OUTPUT, GRADIENT = "output of", "gradient of"
PLAIN = (Tensor, DTensor)
"""Outputs that are what they seem; others are made when they are asked for."""
Digest = tuple[str, str]
"""What something is, and a hash of its bits."""


class Shared:
    """Draws the share of this data rank, or that of another; see `train.assembly.loop_of`.

    Args:
        mesh: of the ranks.
        seed: of the run.

    Attributes:
        ahead: whose share it is: of the data rank so many places behind this one.
    """

    def __init__(self, mesh: Mesh, seed: int) -> None:
        self._mesh, self._seed = mesh, seed
        self.ahead = 0
        self._drawn: tuple[int, list[list[Batch]]] = (-1, [])

    @property
    def data_rank(self) -> int:
        return (self._mesh.data_rank + self.ahead) % self._mesh.data_size

    def __call__(self, feed: Feed, step: int) -> Sequence[Batch]:
        # A source that is read while training gives each step once.
        if self._drawn[0] != step:
            self._drawn = (step, feed.shares(step))
        return self._drawn[1][self.data_rank]

    def begin(self, step: int) -> None:
        """Draw the random numbers of the share's own rank from here on."""
        torch.manual_seed(step_seed(self._seed, step, self.data_rank))


class _Digests:
    """Hashes of what this rank computes by itself in one step; a context manager.

    Args:
        parts: of the model, on this rank.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts = parts
        self.found: list[Digest] = []
        self._handles: list[Any] = []
        self._known: dict[int, Tensor] = {}

    def __enter__(self) -> _Digests:
        for part in self._parts:
            for name, module in part.named_modules():
                self._handles.append(module.register_forward_pre_hook(self._watching(name)))
                self._handles.append(module.register_forward_hook(self._noting(name)))
        return self

    def __exit__(self, *exc_info: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _watching(self, name: str) -> Any:
        def watch(module: nn.Module, *_: Any) -> None:
            if not (module.training and torch.is_grad_enabled()):
                return
            # As it is in the forward: whole, where a strategy holds a part between steps.
            for own, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and id(parameter) not in self._known:
                    self._known[id(parameter)] = parameter
                    full = f"{name}.{own}" if name else own
                    self._handles.append(parameter.register_hook(self._of(full)))

        return watch

    def _of(self, name: str) -> Any:
        def note(gradient: Tensor) -> None:
            self.found.append((f"{GRADIENT} {name}", hash_of(gradient)))

        return note

    def _noting(self, name: str) -> Any:
        def note(module: nn.Module, _: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple | list) and output else output
            if module.training and type(first) in PLAIN:
                self.found.append((f"{OUTPUT} {name or type(module).__name__}", hash_of(first)))

        return note


def hash_of(tensor: Tensor) -> str:
    """Of the bits of this rank's part of a tensor."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    plain = local.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(plain.numpy().tobytes(), digest_size=16).hexdigest()


def compare_shares(manager: StrategyManager, loop: Loop, draw: int, shared: Shared) -> dict[str, Any]:
    """What `judged` finds of a step's batches, by the number by which they are drawn, see [Note: draws] in
    `train.bad_steps` and [Note: shares in a circle]. Collective.

    Nothing is trained, and no gradient remains.
    """
    passes = []
    for ahead in (0, 1, 0):
        shared.ahead = ahead
        passes.append(_digests(manager, loop, draw, shared))
    mesh = manager.mesh
    place = {axis: mesh.axis_rank(axis) for axis in ("pp", "cp", "tp")}
    mine = Work(mesh.rank, mesh.data_rank, place["pp"], (place["cp"], place["tp"]), *map(tuple, passes))
    found: list[Any] = [None] * mesh.world.size
    mesh.world.reduce_ints([0])
    dist.all_gather_object(found, mine, group=mesh.world.group)
    return judged(found, mesh.data_size)


def _digests(manager: StrategyManager, loop: Loop, draw: int, shared: Shared) -> list[Digest]:
    if not callable(batches := loop.batches):
        return []
    microbatches = batches(draw)
    num_tokens = manager.announce(microbatches, objective=loop.objective)
    shared.begin(draw)
    with _Digests(manager.model_parts) as digests:
        loss = manager.forward_backward(microbatches, num_tokens=num_tokens, objective=loop.objective)
        manager.read(loss)
    manager.optimizer.zero_grad(set_to_none=True)
    return digests.found


# -- the verdict


@dataclass(frozen=True)
class Work:
    """What one rank has computed in three passes; see [Note: shares in a circle].

    Attributes:
        rank, data_rank, stage: of it.
        place: along the axes whose ranks share a batch, but for stages.
        own, other, again: digests of its own share, of that behind it, and of its own once more.
    """

    rank: int
    data_rank: int
    stage: int
    place: tuple[int, ...]
    own: tuple[Digest, ...]
    other: tuple[Digest, ...]
    again: tuple[Digest, ...]


def judged(works: Sequence[Work], data_size: int) -> dict[str, Any]:
    """Who computes wrongly; see [Note: who is wrong]. Values of JSON.

    Returns:
        `suspects`, ranks of the world; `data_ranks`, theirs; `shares`, by data rank what differs first in its share,
        with the ranks that have done it; `unsteady`, ranks that disagree with themselves; `why` nobody is named,
        where shares differ all the same; and `compared`, hashes of a rank.
    """
    by_place = {(each.data_rank, each.stage, each.place): each for each in works}
    parts = sorted({(each.stage, each.place) for each in works})
    unsteady = sorted(each.rank for each in works if _first(each.own, each.again) is not None)
    shares: dict[int, tuple[Work, Work, str]] = {}
    for share in range(data_size):
        differing = []
        for stage, place in parts:
            own, other = by_place[share, stage, place], by_place[(share - 1) % data_size, stage, place]
            at = _first(own.own, other.other)
            if at is not None:
                differing.append((own, other, at))
        if differing:
            own, other, at = min(differing, key=lambda each: _depth(each[0], each[2]))
            shares[share] = (own, other, own.own[at][0] if at < len(own.own) else "what is computed")
    found: dict[str, Any] = {
        "suspects": [],
        "data_ranks": [],
        "unsteady": unsteady,
        "shares": {
            str(share): {"tensor": tensor, "ranks": [own.rank, other.rank]}
            for share, (own, other, tensor) in shares.items()
        },
        "why": "",
        "compared": min(len(each.own) for each in works),
    }
    if not shares and not unsteady:
        return found
    if len({by.data_rank for by in works if by.rank in unsteady}) == data_size:
        return {**found, "why": "each data rank disagrees with itself: kernels of this run sum in no fixed order"}
    suspects = _suspects(shares, data_size, {each.data_rank for each in works if each.rank in unsteady})
    ranks = {each.rank for own, other, _ in shares.values() for each in (own, other) if each.data_rank in suspects}
    ranks = ranks or {each.rank for each in works if each.rank in unsteady}
    return {**found, "suspects": sorted(ranks), "data_ranks": sorted(suspects)}


def _suspects(shares: Mapping[int, Any], data_size: int, unsteady: set[int]) -> set[int]:
    """Data ranks; see [Note: who is wrong]."""
    if unsteady:
        return unsteady
    both = {share for share in shares if (share + 1) % data_size in shares}
    # One that was wrong once only has spoilt one share, which two ranks have done.
    return both or {each for share in shares for each in (share, (share - 1) % data_size)}


def _first(one: Sequence[Digest], other: Sequence[Digest]) -> int | None:
    """The first place in which two differ."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other)) if len(one) != len(other) else None


def _depth(work: Work, at: int) -> tuple[int, int, int]:
    """How early a part of a share differs: what a stage gives, all later ones take, and gradients go the other way."""
    is_output = at < len(work.own) and work.own[at][0].startswith(OUTPUT)
    return (0, work.stage, at) if is_output else (1, -work.stage, at)
