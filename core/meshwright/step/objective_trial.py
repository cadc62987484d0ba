"""The trial of an objective before its first step.

[Note: a sum] What an objective returns is added up over microbatches and ranks, so it must be a sum over sequences: the
values of two groups of rows must add up to that of both together. A mean over a microbatch would weigh tokens by how
many others are in it. Each objective is tried with made-up statistics of some rows, and refused if it is no sum.

Shapes: B sequences of a microbatch, S positions of each, K ids at each position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..base.errors import ConfigError, ModelError
from ..base.types import IGNORED_LABEL, Batch, TokenStatistic
from .objective import Given, called
from .token_loss import targets
from .tokens import Outputs, Recorder, Tokens


def check_head(given: Given, shape: Sequence[int], vocab_size: int | None) -> None:
    """Refuse an objective over tokens if the logits are not those of a vocabulary, with a ModelError."""
    if given.on == "tokens" and (len(shape) != 3 or shape[-1] < (vocab_size or 0)):
        raise ModelError(
            f"the {given.name} is over tokens, but the model gives logits {tuple(shape)}, which are not those of its "
            f"vocabulary. Set on = 'outputs', for an objective over what the model's head returns."
        )


def tried(given: Given, batch: Batch, features: int | None, dtype: torch.dtype) -> tuple[str, ...]:
    """Call an objective with made-up statistics of some rows; return the names of its further sums. See [Note: a sum].

    Args:
        batch: undivided, on the device of the step.
        features: for `on = "outputs"`: of a head over tokens; negative for a head over sequences.
        dtype: of statistics.

    Raises:
        ConfigError: it is no sum, or has no gradient.
    """
    if isinstance(given.objective, Recorder):
        return ()
    few = _Few(given, batch, features, dtype)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        (both, sums), (again, _) = few.called(0, 2), few.called(0, 2)
        parts = [few.called(0, 1)[0], few.called(1, 2)[0]]
    if not both.requires_grad and bool((few.targets != IGNORED_LABEL).any()):
        raise ConfigError(f"the {given.name} returns a value without a gradient: nothing would be trained.")
    values = [float(each.detach()) for each in (both, again, *parts)]
    whole, repeated, first, second = values
    # What draws numbers is another one each time; and what is not finite here may be so for made-up statistics alone.
    is_known = whole == repeated and all(abs(each) < float("inf") for each in values)
    if is_known and abs(whole - first - second) > 1e-3 * (abs(first) + abs(second)):
        raise ConfigError(
            f"the {given.name} gives {first:g} and {second:g} for two groups of sequences, and {whole:g} for both "
            f"together, so it is no sum over sequences (a mean, perhaps). Return the sum: it is divided by num_tokens."
        )
    return tuple(sorted(sums))


class _Few:
    """Two groups of rows of a microbatch; the second repeats the first if there is no other."""

    def __init__(self, given: Given, batch: Batch, features: int | None, dtype: torch.dtype) -> None:
        self._given, self._features = given, features
        labels, rows = batch["labels"], given.rows
        count, length = labels.shape
        index = torch.arange(2 * rows, device=labels.device) % min(count, 2 * rows)
        self.targets = targets(labels)[index]
        positions = batch.get("position_ids")
        self._positions = None if positions is None else positions.expand(count, length)[index]
        self._columns = {name: tensor[index] for name, tensor in given.columns(batch).items()}
        generator = torch.Generator().manual_seed(0)
        noise = torch.rand(2 * rows, length, generator=generator, dtype=torch.float64)
        self._noise = noise.to(labels.device, dtype).requires_grad_()

    def called(self, start: int, stop: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Call the objective with the groups from `start` to `stop`."""
        rows = slice(start * self._given.rows, stop * self._given.rows)
        noise_BS, positions = self._noise[rows], None if self._positions is None else self._positions[rows]

        def ask(ids_BSK: Tensor, names: Sequence[TokenStatistic]) -> Mapping[str, Tensor]:
            found: dict[str, Tensor] = dict.fromkeys(names, 1.0 + noise_BS)
            unlikely_BSK = 0.5 + noise_BS[..., None] + 3.0 * (ids_BSK * 0.618).frac()
            found["log_probs"] = torch.where(ids_BSK != IGNORED_LABEL, -unlikely_BSK, 0.0)
            found["is_top1"] = (noise_BS > 0.5) & (ids_BSK != IGNORED_LABEL).any(-1)
            return {name: found[name] for name in names}

        seen: Tokens | Outputs
        if self._given.on == "tokens":
            seen = Tokens(self.targets[rows], ask, positions_BS=positions, usual=self._given.usual)
        else:
            seen = Outputs(self.targets[rows], self._logits(noise_BS), positions_BS=positions)
        return called(self._given, seen, {name: tensor[rows] for name, tensor in self._columns.items()})

    def _logits(self, noise_BS: Tensor) -> Tensor:
        features = self._features or 1
        each_K = torch.linspace(-1.0, 1.0, abs(features), dtype=noise_BS.dtype, device=noise_BS.device)
        return noise_BS[..., None] * each_K if features > 0 else noise_BS[:, :1] * each_K
