"""Look for bits that have changed by themselves, and for replicas that differ: `verify_every`.

[Note: silent corruption] A flipped bit, or a core that sometimes computes wrongly, raises no error, and spreads to all
ranks with the next reduction. Two checks find it and name the rank:
- Memory that nobody writes to must not change: parameters and the optimizer's state between its steps, and gradients
  between clipping and the step. Each rank compares fingerprints of its own memory at each step, without a message.
- Replicas must be equal. Every so many steps the first rank compares the fingerprints of what several ranks hold. The
  majority is right; of two that differ, both are named.
Both are also done before a checkpoint is saved, so that none holds a corrupted state. Wrong results of what only one
rank computes are not found here: `meshwright replay --compare-rank` computes it again elsewhere.

Sources: Hochschild et al. 2021, Cores that don't count (HotOS); The Llama 3 Herd of Models, arXiv:2407.21783, section
3.3.4, of which 1.4 % of interruptions were silent data corruption.
"""

from __future__ import annotations

import hashlib
import socket
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...base.errors import TrainingError
from ...checkpoint.training_state import flatten_state
from ...events.step import StepResult
from ...strategy.contract import StrategyManager
from ...tensors.ops import fingerprint
from .extension import GradientStage, LoopExtension


class ChunkKey(NamedTuple):
    """What a fingerprint is of: a rectangle of an unsharded tensor."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def stable_hash(self) -> int:
        """A hash that is the same on all ranks, in 63 bits."""
        digest = hashlib.blake2b(repr(tuple(self)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


class Verifier(LoopExtension):
    """Compares the memory of a rank between steps of the optimizer, and replicas; see [Note: silent corruption]."""

    def __init__(self, manager: StrategyManager, every: int) -> None:
        self._manager, self._every = manager, every
        self._baseline: dict[ChunkKey, int] = {}
        self._clipped_fingerprints: list[int] = []
        self._changes: list[str] = []
        self.reset_baseline()
        manager.optimizer.register_step_pre_hook(lambda *_: self._check_before_step())
        manager.optimizer.register_step_post_hook(lambda *_: self.reset_baseline())

    def reset_baseline(self) -> None:
        """Take the current state as right: it was just computed or loaded."""
        self._baseline, self._clipped_fingerprints = self._fingerprint_state(), []

    def on_gradients(self, stage: GradientStage) -> None:
        if stage == "clipped":
            self._clipped_fingerprints = self._fingerprint_gradients()

    def process_result(self, result: StepResult) -> StepResult:
        if result.step % self._every == 0:
            self.verify(result.step)
        return result

    def before_save(self, step: int, state: Mapping[str, Any]) -> None:
        self.verify(step)

    def on_rollback(self, step: int) -> None:
        self.reset_baseline()

    def verify(self, step: int) -> None:
        """Compare what several ranks hold after a step. Collective."""
        world, found = self._manager.mesh.world, self._fingerprint_state()
        # Since the last step of the optimizer nothing may have written there, either.
        self._record_changes(found)
        numbers = {key.stable_hash: (key.name, value) for key, value in found.items()}
        told = self._changes, {number: value for number, (_, value) in numbers.items()}, socket.gethostname()
        every: list[Any] = [None] * world.size
        dist.gather_object(told, every if world.rank == 0 else None, group=world.group, group_dst=0)
        box: list[Any] = [None]
        if world.rank == 0:
            odd, number = find_outlier_ranks([values for _, values, _ in every])
            changed = [(rank, host, names) for rank, (names, _, host) in enumerate(every) if names]
            if changed or odd:
                box = [(changed, odd, number, [host for *_, host in every])]
        dist.broadcast_object_list(box, group=world.group, group_src=0)
        if box[0] is None:
            return
        changed, odd, number, hosts = box[0]
        names: list[Any] = [None] * world.size
        dist.all_gather_object(names, numbers[number][0] if number in numbers else "", group=world.group)
        raise TrainingError(_format_corruption(step, changed, odd, next(filter(None, names), ""), hosts))

    def _check_before_step(self) -> None:
        self._record_changes(self._fingerprint_state())
        if self._clipped_fingerprints and self._fingerprint_gradients() != self._clipped_fingerprints:
            self._changes.append("a gradient between clipping and the optimizer's step")

    def _record_changes(self, found: Mapping[ChunkKey, int]) -> None:
        for key, value in self._baseline.items():
            if found.get(key, value) != value:
                self._changes.append(f"{key.name} between two steps of the optimizer")

    def _fingerprint_state(self) -> dict[ChunkKey, int]:
        pieces = {
            ChunkKey(name, tuple(piece.offsets), tuple(piece.sizes)): piece.tensor
            for name, sharded in flatten_state(self._manager.sharded_state()).items()
            for piece in sharded.chunks
        }
        return dict(zip(pieces, _fingerprint_all([*pieces.values()]), strict=True))

    def _fingerprint_gradients(self) -> list[int]:
        groups = self._manager.optimizer.param_groups
        gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        return _fingerprint_all([each.to_local() if isinstance(each, DTensor) else each for each in gradients])


def _fingerprint_all(tensors: Sequence[Tensor]) -> list[int]:
    """Return fingerprints, with one wait for the device."""
    found: list[int] = torch.stack([fingerprint(each) for each in tensors]).tolist() if tensors else []
    return found


def find_outlier_ranks(fingerprints_by_rank: Sequence[Mapping[int, int]]) -> tuple[list[int], int]:
    """Find the ranks whose fingerprints differ from the majority's."""
    holders: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, found in enumerate(fingerprints_by_rank):
        for key, value in found.items():
            holders[key][rank] = value
    for key, values in holders.items():
        if len(set(values.values())) > 1:
            (most, count), *others = Counter(values.values()).most_common()
            is_clear = count > others[0][1]
            return sorted(rank for rank, value in values.items() if value != most or not is_clear), key
    return [], 0


def _format_corruption(
    step: int,
    changed: Sequence[tuple[int, str, Sequence[str]]],
    outlier_ranks: Sequence[int],
    name: str,
    hosts: Sequence[str],
) -> str:
    lines = [f"silent corruption, found after step {step}:"]
    for rank, host, names in changed:
        more = f" and {len(names) - 1} more" if names[1:] else ""
        lines.append(f"  rank {rank} on {host}: bits have changed by themselves in {names[0]}{more}")
    if outlier_ranks:
        ranks = " and ".join(f"rank {rank} on {hosts[rank]}" for rank in outlier_ranks)
        verb = "hold" if outlier_ranks[1:] else "holds"
        lines.append(f"  {ranks} {verb} other bits of {name} than the other replicas")
    lines.append(
        "Nothing of this was saved. Take the machine out, and start the same command again: it goes on from the "
        "newest checkpoint, which was verified before it was saved. `meshwright replay --compare-rank` tries a rank's "
        "arithmetic."
    )
    return "\n".join(lines)
