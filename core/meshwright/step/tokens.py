"""The token loss, and the first argument of an objective: `Tokens`, or `Outputs` of a model without a vocabulary head.

[Note: full sequences] An objective sees full sequences on every rank. If ranks shard a sequence (`cp`), each computes
the statistics of its own positions and all-gathers them: one number per token. So an objective may combine all
positions of a sequence. Each of these ranks computes the same sum and counts its share of it.

Shapes: B sequences of a microbatch, S positions of each, K ids at each position, D documents, V entries of the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from ..base.errors import BatchError, ConfigError
from ..base.types import IGNORE_INDEX, Batch, TokenStatistic
from .chunked_loss import HiddenRows, compute_token_statistics

TARGETS = "shift_labels"
"""Key of a sharded batch that replaces `labels`: the label that each position predicts."""


def shift_labels(labels_BS: Tensor) -> Tensor:
    """Return the label that each position predicts: the next one, `IGNORE_INDEX` for the last. int64, (B, S)."""
    return F.pad(labels_BS[:, 1:], (0, 1), value=IGNORE_INDEX)


def split_targets(batch: Batch) -> tuple[Batch, Tensor]:
    """Split a microbatch, sharded or not, into the model's inputs and the label that each position predicts, (B, S)."""
    inputs = {name: tensor for name, tensor in batch.items() if name not in ("labels", TARGETS)}
    return inputs, batch[TARGETS] if TARGETS in batch else shift_labels(batch["labels"])


def sum_token_loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Sum the cross entropy over unmasked targets [nats], in float32 or wider. Shifts the labels by one."""
    return sum_target_loss(logits_BSV, shift_labels(labels_BS))


def sum_target_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Sum the cross entropy as `sum_token_loss` does, from labels that `shift_labels` has shifted."""
    if logits_BSV.dtype in (torch.float16, torch.bfloat16):
        logits_BSV = logits_BSV.float()
    return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


GetStatistics = Callable[[Tensor, Sequence[TokenStatistic]], Mapping[str, Tensor]]
"""`get_statistics(ids_BSK, names)`: differentiable statistics by name, (B, S), float32 or float64. "log_probs" are
those of the ids, (B, S, K), and 0 where an id is `IGNORE_INDEX`."""


class Sequences:
    """The sequences and documents of a microbatch.

    Args:
        targets_BS: int64, the label that each position predicts; `IGNORE_INDEX` for none. Available as `targets`.
        positions_BS: int64, the batch's `position_ids`, (B, S) or (1, S); None: each sequence is one document.
    """

    def __init__(self, targets_BS: Tensor, positions_BS: Tensor | None = None) -> None:
        self.targets = targets_BS
        self._positions_BS = positions_BS
        self._documents: tuple[Tensor, int] | None = None

    @property
    def mask(self) -> Tensor:
        """Mask of positions that predict a label; bool, (B, S). Position s predicts label s + 1, the last one none."""
        return self.targets != IGNORE_INDEX

    def sum_by_sequence(self, values_BS: Tensor) -> Tensor:
        """Sum over each sequence, (B,); differentiable. bool values are counted as int64."""
        return values_BS.sum(1)

    def sum_by_document(self, values_BS: Tensor) -> Tensor:
        """Sum over each document, (D,), in row-major order; differentiable.

        A document starts at each row, and wherever `position_ids` do not increase. On an accelerator, this waits for
        the device.
        """
        if self._positions_BS is None:
            return self.sum_by_sequence(values_BS)
        if self._documents is None:
            positions_BS = self._positions_BS.expand(self.targets.shape)
            is_start_BS = torch.ones_like(positions_BS, dtype=torch.bool)
            is_start_BS[:, 1:] = positions_BS.diff(dim=1) <= 0
            index = is_start_BS.flatten().cumsum(0) - 1
            self._documents = index, int(index[-1]) + 1
        index, count = self._documents
        values = values_BS.flatten()
        values = values.long() if values.dtype is torch.bool else values
        return values.new_zeros(count).index_add(0, index, values)


class Tokens(Sequences):
    """The tokens of a microbatch; see [Note: full sequences]. Statistics are computed at first access and cached.

    `usual_statistics`: names requested so far, which are computed together. Newly requested names are added to it.
    """

    def __init__(
        self,
        targets_BS: Tensor,
        get_statistics: GetStatistics,
        *,
        positions_BS: Tensor | None = None,
        usual_statistics: set[TokenStatistic] | None = None,
    ) -> None:
        super().__init__(targets_BS, positions_BS)
        self._get_statistics = get_statistics
        self._usual_statistics = set() if usual_statistics is None else usual_statistics
        self._statistics: dict[str, Tensor] = {}

    @classmethod
    def from_logits(cls, logits_BSV: Tensor, labels_BS: Tensor, *, position_ids: Tensor | None = None) -> Tokens:
        """Return the tokens of existing logits. Labels are those of the model's input; they are shifted here."""
        rows = HiddenRows.from_logits(logits_BSV)

        def get_statistics(ids_BSK: Tensor, names: Sequence[TokenStatistic]) -> Mapping[str, Tensor]:
            values = compute_token_statistics(rows, ids_BSK.flatten(0, 1), names, chunk_rows=len(rows.hidden_NH))
            return {name: value.unflatten(0, ids_BSK.shape[:2]) for name, value in values.items()}

        return cls(shift_labels(labels_BS), get_statistics, positions_BS=position_ids)

    @property
    def log_probs(self) -> Tensor:
        """Log-probability of the label [nats], (B, S); 0 where there is no label."""
        return self._get_statistic("log_probs")

    @property
    def logsumexp(self) -> Tensor:
        """Log-sum-exp of all logits [nats], (B, S), also at masked positions."""
        return self._get_statistic("logsumexp")

    @property
    def entropy(self) -> Tensor:
        """Entropy of the distribution over the vocabulary [nats], (B, S), also at masked positions."""
        return self._get_statistic("entropy")

    @property
    def mean_logit(self) -> Tensor:
        """Mean of all logits, (B, S), also at masked positions."""
        return self._get_statistic("mean_logit")

    @property
    def is_top1(self) -> Tensor:
        """Whether no entry has a higher logit than the label. bool, (B, S); False without a label; no gradient."""
        return self._get_statistic("is_top1")

    def log_probs_for(self, ids_BSK: Tensor) -> Tensor:
        """Return the log-probabilities of int64 ids [nats], (B, S, K); 0 where an id is `IGNORE_INDEX`."""
        if ids_BSK.dtype is not torch.int64 or ids_BSK.dim() != 3 or ids_BSK.shape[:2] != self.targets.shape:
            raise ConfigError(
                f"log_probs_for takes int64 ids of shape (B, S, K), here {(*self.targets.shape, 'K')}, not "
                f"{ids_BSK.dtype} {tuple(ids_BSK.shape)}."
            )
        return self._get_statistics(ids_BSK, ["log_probs"])["log_probs"]

    def zero_with_grad(self) -> Tensor:
        """Return a scalar 0 whose gradient, 0, reaches every parameter that the statistics depend on."""
        return self._get_statistics(torch.full_like(self.targets, IGNORE_INDEX)[..., None], ["log_probs"])[
            "log_probs"
        ].sum()

    def _get_statistic(self, name: TokenStatistic) -> Tensor:
        if name not in self._statistics:
            self._usual_statistics.add(name)
            names: list[TokenStatistic] = sorted(self._usual_statistics - self._statistics.keys())
            ids_BSK = self.targets[..., None]
            if not {"log_probs", "is_top1"} & set(names):
                ids_BSK = ids_BSK[..., :0]
            values = dict(self._get_statistics(ids_BSK, names))
            if "log_probs" in values:
                values["log_probs"] = values["log_probs"][..., 0]
            self._statistics |= values
        return self._statistics[name]


class Outputs(Sequences):
    """The outputs of a model without a vocabulary head; see [Note: full sequences].

    Attributes:
        logits: (B, S, K) of a token head, or (B, K) of a sequence head, with K features.
    """

    def __init__(self, targets_BS: Tensor, logits: Tensor, *, positions_BS: Tensor | None = None) -> None:
        super().__init__(targets_BS, positions_BS)
        self.logits = logits

    def zero_with_grad(self) -> Tensor:
        """Return a scalar 0 whose gradient, 0, reaches every parameter that the logits depend on."""
        return (self.logits * 0.0).nan_to_num().sum()


class StatisticsRecorder:
    """An objective that records token statistics and returns 0."""

    name = "token_stats"

    def __init__(self) -> None:
        self.names: Sequence[TokenStatistic] = ()
        self.recorded: list[dict[str, Tensor]] = []

    def start(self, names: Sequence[TokenStatistic]) -> None:
        """Clear the recorded statistics and start recording `names`."""
        self.names, self.recorded = list(names), []

    def check(self, batch: Batch) -> None:
        known = get_args(TokenStatistic)
        for name in self.names:
            if name not in known:
                raise BatchError(f"there is no {name!r}; there are {', '.join(known)}.")

    def __call__(self, tokens: Tokens, columns: Any) -> Tensor:
        self.recorded.append({name: getattr(tokens, name).detach() for name in self.names})
        return torch.zeros((), device=tokens.targets.device)
