"""The work of each data rank in a step: done by it and by another, and compared bit for bit; or all by one process.

[Note: shares in a circle] A step is computed three times from the same parameters, and the optimizer steps in none.
First each data rank does its own share, with its own random numbers; then that of the next rank; then its own once
more. On correct hardware, a share gives the same result bits wherever it is done. Hooks see what is local: the output
of each module, and the gradient of each parameter before it is reduced, microbatch by microbatch. Logits that are made
row by row are no tensor yet, and are seen in what follows from them.

[Note: who is wrong] A rank that computes wrongly spoils two shares: its own, and that of the next rank. Of three data
ranks or more, the one that both spoilt shares have in common is named. Two have both shares in common, and then both
are named, unless one does not agree with itself. Where every rank disagrees with itself, kernels are at fault that sum
in no fixed order, and nobody is named. Of ranks that share a data rank's batch, the one that differs first, in the
order in which the parts depend on each other, is named for all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.plugin import Batch, Loop, Mesh, StrategyManager, derive_step_seed
from meshwright_run.data.train_sampler import TrainSampler
from meshwright_run.preflight import PreparedRun, needs_padding_mask

OUTPUT_PREFIX, GRADIENT_PREFIX = "output of", "gradient of"
TENSOR_TYPES = (Tensor, DTensor)  # Types of outputs that are tensors already; others are made when they are asked for
Digest = tuple[str, str]  # A name, and a hash of the bits


class AllRanksSampler:
    """Draw the shares of all data ranks in one process; see `train.assembly.build_loop`."""

    def __init__(self, plan: PreparedRun, data_size: int, seed: int) -> None:
        self.merges_microbatches = needs_padding_mask(plan.model_config)
        self._data_size, self._seed = data_size, seed
        self._step, self._num_forwards, self._microbatches_per_rank = 0, 0, 1

    def __call__(self, feed: TrainSampler, step: int) -> Sequence[Batch]:
        shares = feed.read_local_batches(step)
        self._step, self._num_forwards, self._microbatches_per_rank = step, 0, len(shares[0])
        if self.merges_microbatches:
            alike = zip(*shares, strict=True)
            return [{name: torch.cat([each[name] for each in same]) for name in same[0]} for same in alike]
        return [batch for share in shares for batch in share]

    @contextmanager
    def seed_per_rank(self, model: nn.Module) -> Iterator[None]:
        """Begin each share with the random numbers of its data rank."""

        def begin(module: nn.Module, *_: Any) -> None:
            # Not where a few tokens are tried.
            if not module.training or self.merges_microbatches:
                return
            share, first = divmod(self._num_forwards, self._microbatches_per_rank)
            if first == 0 and share < self._data_size:
                torch.manual_seed(derive_step_seed(self._seed, self._step, share))
            self._num_forwards += 1

        handle = model.register_forward_pre_hook(begin)
        try:
            yield
        finally:
            handle.remove()


class PeerSampler:
    """Draw the share of this data rank, or of the one `ahead` places after it; see `train.assembly.build_loop`."""

    def __init__(self, mesh: Mesh, seed: int) -> None:
        self._mesh, self._seed = mesh, seed
        self.rank_offset = 0
        self._drawn: tuple[int, list[list[Batch]]] = (-1, [])

    @property
    def data_rank(self) -> int:
        return (self._mesh.data_rank + self.rank_offset) % self._mesh.data_size

    def __call__(self, feed: TrainSampler, step: int) -> Sequence[Batch]:
        # A source that is read while training gives each step once.
        if self._drawn[0] != step:
            self._drawn = (step, feed.read_local_batches(step))
        return self._drawn[1][self.data_rank]

    def seed(self, step: int) -> None:
        """Draw the random numbers of the share's own rank from here on."""
        torch.manual_seed(derive_step_seed(self._seed, step, self.data_rank))


class _TensorHasher:
    """Context manager that hashes what this rank computes by itself in one step."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts = parts
        self.digests: list[Digest] = []
        self._handles: list[Any] = []
        self._hooked_parameters: dict[int, Tensor] = {}

    def __enter__(self) -> _TensorHasher:
        for part in self._parts:
            for name, module in part.named_modules():
                self._handles.append(module.register_forward_pre_hook(self._make_parameter_hook(name)))
                self._handles.append(module.register_forward_hook(self._make_output_hook(name)))
        return self

    def __exit__(self, *exc_info: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _make_parameter_hook(self, name: str) -> Any:
        def watch(module: nn.Module, *_: Any) -> None:
            if not (module.training and torch.is_grad_enabled()):
                return
            # Parameters as they are in the forward: unsharded, where a strategy holds a shard between steps.
            for own, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and id(parameter) not in self._hooked_parameters:
                    self._hooked_parameters[id(parameter)] = parameter
                    full = f"{GRADIENT_PREFIX} {name}.{own}" if name else f"{GRADIENT_PREFIX} {own}"
                    self._handles.append(parameter.register_hook(partial(self._hash_tensor, full)))

        return watch

    def _make_output_hook(self, name: str) -> Any:
        def note(module: nn.Module, _: Any, output: Any) -> None:
            first = get_first_output(output)
            if module.training and type(first) in TENSOR_TYPES:
                self._hash_tensor(f"{OUTPUT_PREFIX} {name or type(module).__name__}", first)

        return note

    def _hash_tensor(self, name: str, tensor: Tensor) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        plain = local.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
        self.digests.append((name, hashlib.blake2b(plain.numpy().tobytes(), digest_size=16).hexdigest()))


def get_first_output(output: Any) -> Any:
    """Return the output of a module, or the first of several."""
    return output[0] if isinstance(output, tuple | list) and output else output


def compare_ranks(manager: StrategyManager, loop: Loop, step: int, sampler: PeerSampler) -> dict[str, Any]:
    """Return what `judged` finds of a step's batches; nothing is trained. Collective."""
    passes: list[tuple[Digest, ...]] = []
    for ahead in (0, 1, 0):
        sampler.rank_offset = ahead
        passes.append(_hash_pass(manager, loop, step, sampler))
    mesh = manager.mesh
    place = mesh.axis_rank("cp"), mesh.axis_rank("tp")
    mine = RankDigests(mesh.rank, mesh.data_rank, mesh.axis_rank("pp"), place, *passes)
    found: list[Any] = [None] * mesh.world.size
    mesh.world.reduce_ints([0])
    dist.all_gather_object(found, mine, group=mesh.world.group)
    return find_suspects(found, mesh.data_size)


def _hash_pass(manager: StrategyManager, loop: Loop, step: int, sampler: PeerSampler) -> tuple[Digest, ...]:
    if not callable(batches := loop.batches):
        return ()
    microbatches = batches(step)
    num_tokens = manager.begin_step_sync(microbatches, objective=loop.objective)
    sampler.seed(step)
    with _TensorHasher(manager.model_parts) as digests:
        loss = manager.forward_backward(microbatches, num_tokens=num_tokens, objective=loop.objective)
        manager.read_scalars(loss)
    manager.optimizer.zero_grad(set_to_none=True)
    return tuple(digests.digests)


@dataclass(frozen=True)
class RankDigests:
    """What a rank has computed in three passes; `place`: along the axes other than `pp` that share a batch."""

    rank: int
    data_rank: int
    stage: int
    position: tuple[int, ...]
    own: tuple[Digest, ...]
    other: tuple[Digest, ...]
    again: tuple[Digest, ...]


def find_suspects(digests: Sequence[RankDigests], data_size: int) -> dict[str, Any]:
    """Return who computes wrongly, as values of JSON; see [Note: who is wrong]."""
    by_place = {(each.data_rank, each.stage, each.position): each for each in digests}
    parts = sorted({(each.stage, each.position) for each in digests})
    unsteady = [each for each in digests if _first_mismatch(each.own, each.again) is not None]
    shares: dict[int, tuple[RankDigests, RankDigests, str]] = {}
    for share in range(data_size):
        pairs = [(by_place[share, *part], by_place[(share - 1) % data_size, *part]) for part in parts]
        differing = [(*pair, at) for pair in pairs if (at := _first_mismatch(pair[0].own, pair[1].other)) is not None]
        if differing:
            own, other, at = min(differing, key=lambda each: _dependency_order(each[0], each[2]))
            shares[share] = (own, other, own.own[at][0] if at < len(own.own) else "what is computed")
    found: dict[str, Any] = {
        "suspects": [],
        "data_ranks": [],
        "inconsistent_ranks": sorted(each.rank for each in unsteady),
        "mismatches": {
            str(share): {"tensor": tensor, "ranks": [own.rank, other.rank]}
            for share, (own, other, tensor) in shares.items()
        },
        "reason": "",
        "num_compared": min(len(each.own) for each in digests),
    }
    if not shares and not unsteady:
        return found
    suspects = {each.data_rank for each in unsteady}
    if len(suspects) == data_size:
        return {**found, "reason": "each data rank disagrees with itself: kernels of this run sum in no fixed order"}
    if not suspects:
        # One that was wrong once only has spoilt one share, which two ranks have done.
        suspects = {share for share in shares if (share + 1) % data_size in shares} or {
            each for share in shares for each in (share, (share - 1) % data_size)
        }
    ranks = {each.rank for own, other, _ in shares.values() for each in (own, other) if each.data_rank in suspects}
    return {**found, "suspects": sorted(ranks or found["inconsistent_ranks"]), "data_ranks": sorted(suspects)}


def _first_mismatch(one: Sequence[Digest], other: Sequence[Digest]) -> int | None:
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other)) if len(one) != len(other) else None


def _dependency_order(work: RankDigests, at: int) -> tuple[int, int, int]:
    """How early a part of a share differs: later stages depend on the outputs of a stage, earlier ones on gradients."""
    is_output = at < len(work.own) and work.own[at][0].startswith(OUTPUT_PREFIX)
    return (0, work.stage, at) if is_output else (1, -work.stage, at)
