"""Compute the shares of data ranks on other ranks, and compare them bitwise; or compute all shares in one process.

[Note: shares in a circle] A step is computed three times from the same parameters, without an optimizer step. First,
each data rank computes its own share with its own random numbers; then the share of the next rank; then its own again.
On correct hardware, a share has bitwise the same results on every rank. Hooks hash local tensors: the output of each
module, and the gradient of each parameter before reduction, for each micro-batch. The logits of a chunked loss never
exist in full, so they are compared only by what depends on them.

[Note: who is wrong] A faulty rank spoils two shares: its own, and that of the next rank. With three data ranks or more,
the rank that has computed both is named. With two, both ranks have computed both shares and are named, unless only one
is inconsistent with itself. If every rank is inconsistent with itself, kernels are nondeterministic, and no rank is
named. Of the ranks that share a data rank's batch, only the one that differs first is named, in the order in which
their parts depend on each other.
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
TENSOR_TYPES = (Tensor, DTensor)  # Exact types of outputs that have values; `DeferredLogits` has none
Digest = tuple[str, str]  # A name, and a hash of the bits


class AllRanksSampler:
    """Read the micro-batches of all data ranks in one process: a `draw_batches` of `loop_setup.build_loop`."""

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
        """Seed each share with the seed of its data rank."""

        def begin(module: nn.Module, *_: Any) -> None:
            # Probes run in evaluation mode.
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
    """Read the micro-batches of the data rank `rank_offset` after this one: a `draw_batches` of `build_loop`."""

    def __init__(self, mesh: Mesh, seed: int) -> None:
        self._mesh, self._seed = mesh, seed
        self.rank_offset = 0
        self._drawn: tuple[int, list[list[Batch]]] = (-1, [])

    @property
    def data_rank(self) -> int:
        return (self._mesh.data_rank + self.rank_offset) % self._mesh.data_size

    def __call__(self, feed: TrainSampler, step: int) -> Sequence[Batch]:
        # A streaming source returns each step only once.
        if self._drawn[0] != step:
            self._drawn = (step, feed.read_local_batches(step))
        return self._drawn[1][self.data_rank]

    def seed(self, step: int) -> None:
        """Seed this rank as the data rank whose share it computes."""
        torch.manual_seed(derive_step_seed(self._seed, step, self.data_rank))


class _TensorHasher:
    """Hash the module outputs and local gradients of this rank in one step. A context manager."""

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
        def hook_parameters(module: nn.Module, *_: Any) -> None:
            if not (module.training and torch.is_grad_enabled()):
                return
            # In the forward, parameters are unsharded, even if the strategy holds only shards between steps.
            for own, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and id(parameter) not in self._hooked_parameters:
                    self._hooked_parameters[id(parameter)] = parameter
                    full = f"{GRADIENT_PREFIX} {name}.{own}" if name else f"{GRADIENT_PREFIX} {own}"
                    self._handles.append(parameter.register_hook(partial(self._hash_tensor, full)))

        return hook_parameters

    def _make_output_hook(self, name: str) -> Any:
        def hash_output(module: nn.Module, _: Any, output: Any) -> None:
            first = get_first_output(output)
            if module.training and type(first) in TENSOR_TYPES:
                self._hash_tensor(f"{OUTPUT_PREFIX} {name or type(module).__name__}", first)

        return hash_output

    def _hash_tensor(self, name: str, tensor: Tensor) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        plain = local.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
        self.digests.append((name, hashlib.blake2b(plain.numpy().tobytes(), digest_size=16).hexdigest()))


def get_first_output(output: Any) -> Any:
    """Return the output of a module, or the first of several."""
    return output[0] if isinstance(output, tuple | list) and output else output


def compare_ranks(manager: StrategyManager, loop: Loop, step: int, sampler: PeerSampler) -> dict[str, Any]:
    """Compute a step three times, and return the result of `find_suspects`. Updates no parameters. Collective."""
    passes: list[tuple[Digest, ...]] = []
    for offset in (0, 1, 0):
        sampler.rank_offset = offset
        passes.append(_hash_pass(manager, loop, step, sampler))
    mesh = manager.mesh
    position = mesh.axis_rank("cp"), mesh.axis_rank("tp")
    mine = RankDigests(mesh.rank, mesh.data_rank, mesh.axis_rank("pp"), position, *passes)
    digests: list[Any] = [None] * mesh.world.size
    mesh.world.reduce_ints([0])
    dist.all_gather_object(digests, mine, group=mesh.world.group)
    return find_suspects(digests, mesh.data_size)


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
    """Hashes of what a rank computed in three passes; `position`: along `cp` and `tp`."""

    rank: int
    data_rank: int
    stage: int
    position: tuple[int, ...]
    own: tuple[Digest, ...]
    other: tuple[Digest, ...]
    again: tuple[Digest, ...]


def find_suspects(digests: Sequence[RankDigests], data_size: int) -> dict[str, Any]:
    """Return the ranks that compute wrong results, JSON-serializable; see [Note: who is wrong]."""
    by_position = {(each.data_rank, each.stage, each.position): each for each in digests}
    parts = sorted({(each.stage, each.position) for each in digests})
    unsteady = [each for each in digests if _first_mismatch(each.own, each.again) is not None]
    shares: dict[int, tuple[RankDigests, RankDigests, str]] = {}
    for share in range(data_size):
        pairs = [(by_position[share, *part], by_position[(share - 1) % data_size, *part]) for part in parts]
        differing = [(*pair, at) for pair in pairs if (at := _first_mismatch(pair[0].own, pair[1].other)) is not None]
        if differing:
            own, other, at = min(differing, key=lambda each: _dependency_order(each[0], each[2]))
            shares[share] = (own, other, own.own[at][0] if at < len(own.own) else "number of tensors")
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
        return {**found, "reason": "every data rank is inconsistent with itself: kernels are nondeterministic"}
    if not suspects:
        # A rank that was wrong only once has spoiled one share, which two ranks have computed.
        suspects = {share for share in shares if (share + 1) % data_size in shares} or {
            each for share in shares for each in (share, (share - 1) % data_size)
        }
    ranks = {each.rank for own, other, _ in shares.values() for each in (own, other) if each.data_rank in suspects}
    return {**found, "suspects": sorted(ranks or found["inconsistent_ranks"]), "data_ranks": sorted(suspects)}


def _first_mismatch(one: Sequence[Digest], other: Sequence[Digest]) -> int | None:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other)) if len(one) != len(other) else None


def _dependency_order(work: RankDigests, at: int) -> tuple[int, int, int]:
    """Return a sort key for how early a mismatch is: outputs flow to later stages, gradients to earlier ones."""
    is_output = at < len(work.own) and work.own[at][0].startswith(OUTPUT_PREFIX)
    return (0, work.stage, at) if is_output else (1, -work.stage, at)
