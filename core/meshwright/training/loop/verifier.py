"""Detect silent data corruption: bits that flip without a write, and replicas that differ (`verify_every`).

[Note: silent corruption] A flipped bit, or a core that sometimes returns wrong results, raises no error, and the next
reduction spreads it to all ranks. Two checks detect it and name the rank:
- Memory that nothing writes to must not change: parameters and optimizer state between optimizer steps, and gradients
  between clipping and the step. Each rank compares fingerprints of its own memory at each step, without communication.
- Replicas must be equal. Every `verify_every` steps, rank 0 compares the fingerprints of chunks that several ranks
  hold. The majority is assumed correct; if only two differ, both are named.
Both checks also run before each save, so that no checkpoint contains a corrupted state. Wrong results that only one
rank computes are not detected here: `meshwright replay --compare-rank` recomputes them on another rank.

Sources: Hochschild et al. 2021, Cores that don't count (HotOS); The Llama 3 Herd of Models, arXiv:2407.21783, section
3.3.4, where 1.4 % of interruptions were silent data corruption.
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
    """The region that a fingerprint covers: a rectangle of an unsharded tensor."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def stable_hash(self) -> int:
        """A 63-bit hash that is the same on all ranks."""
        digest = hashlib.blake2b(repr(tuple(self)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


class Verifier(LoopExtension):
    """Check a rank's memory between optimizer steps, and compare replicas; see [Note: silent corruption]."""

    def __init__(self, manager: StrategyManager, every: int) -> None:
        self._manager, self._every = manager, every
        self._baseline: dict[ChunkKey, int] = {}
        self._clipped_fingerprints: list[int] = []
        self._changes: list[str] = []
        self.reset_baseline()
        manager.optimizer.register_step_pre_hook(lambda *_: self._check_before_step())
        manager.optimizer.register_step_post_hook(lambda *_: self.reset_baseline())

    def reset_baseline(self) -> None:
        """Use the current state as the baseline, after it was computed or loaded."""
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
        """Compare the chunks that several ranks hold, after a step. Collective.

        Raises:
            TrainingError: memory has changed without a write, or replicas differ (on all ranks).
        """
        world, fingerprints = self._manager.mesh.world, self._fingerprint_state()
        # Nothing may have written to the state since the optimizer's last step.
        self._record_changes(fingerprints)
        numbers = {key.stable_hash: (key.name, value) for key, value in fingerprints.items()}
        local = self._changes, {key_hash: value for key_hash, (_, value) in numbers.items()}, socket.gethostname()
        by_rank: list[Any] = [None] * world.size
        dist.gather_object(local, by_rank if world.rank == 0 else None, group=world.group, group_dst=0)
        result: list[Any] = [None]
        if world.rank == 0:
            outliers, key_hash = find_outlier_ranks([values for _, values, _ in by_rank])
            changed = [(rank, host, names) for rank, (names, _, host) in enumerate(by_rank) if names]
            if changed or outliers:
                result = [(changed, outliers, key_hash, [host for *_, host in by_rank])]
        dist.broadcast_object_list(result, group=world.group, group_src=0)
        if result[0] is None:
            return
        changed, outliers, key_hash, hosts = result[0]
        names: list[Any] = [None] * world.size
        dist.all_gather_object(names, numbers[key_hash][0] if key_hash in numbers else "", group=world.group)
        raise TrainingError(_format_corruption(step, changed, outliers, next(filter(None, names), ""), hosts))

    def _check_before_step(self) -> None:
        self._record_changes(self._fingerprint_state())
        if self._clipped_fingerprints and self._fingerprint_gradients() != self._clipped_fingerprints:
            self._changes.append("a gradient between clipping and the optimizer's step")

    def _record_changes(self, found: Mapping[ChunkKey, int]) -> None:
        for key, value in self._baseline.items():
            if found.get(key, value) != value:
                self._changes.append(f"{key.name} between two steps of the optimizer")

    def _fingerprint_state(self) -> dict[ChunkKey, int]:
        chunks = {
            ChunkKey(name, tuple(chunk.offsets), tuple(chunk.sizes)): chunk.tensor
            for name, chunked in flatten_state(self._manager.sharded_state()).items()
            for chunk in chunked.chunks
        }
        return dict(zip(chunks, _fingerprint_all([*chunks.values()]), strict=True))

    def _fingerprint_gradients(self) -> list[int]:
        groups = self._manager.optimizer.param_groups
        gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        return _fingerprint_all([each.to_local() if isinstance(each, DTensor) else each for each in gradients])


def _fingerprint_all(tensors: Sequence[Tensor]) -> list[int]:
    """Return fingerprints in one device synchronization."""
    fingerprints: list[int] = torch.stack([fingerprint(each) for each in tensors]).tolist() if tensors else []
    return fingerprints


def find_outlier_ranks(fingerprints_by_rank: Sequence[Mapping[int, int]]) -> tuple[list[int], int]:
    """Return ranks whose fingerprint of a chunk is not the majority's, and the chunk's key; [] and 0 if all agree."""
    holders: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, fingerprints in enumerate(fingerprints_by_rank):
        for key, value in fingerprints.items():
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
        lines.append(f"  rank {rank} on {host}: bits have changed on their own in {names[0]}{more}")
    if outlier_ranks:
        ranks = " and ".join(f"rank {rank} on {hosts[rank]}" for rank in outlier_ranks)
        verb = "hold" if outlier_ranks[1:] else "holds"
        lines.append(f"  {ranks} {verb} other bits of {name} than the other replicas")
    lines.append(
        "Nothing of this was saved. Take the machine out, and start the same command again: it resumes from the "
        "newest checkpoint, which was verified before it was saved. `meshwright replay --compare-rank` tries a rank's "
        "arithmetic."
    )
    return "\n".join(lines)
