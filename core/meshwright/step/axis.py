"""What a step asks of each axis along which ranks share a microbatch or the model.

A manager holds a list of axes and knows no axis by name. Tensor, context and expert parallelism are axes; so is what a
strategy brings of its own. What an axis does to parameters it does when it is made; here is what it does to batches,
forwards, losses and checks. The reduction of gradients over data ranks is the strategy's.

Shapes: B sequences of a microbatch, S tokens each, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..base.errors import MeshwrightError, ModelError
from ..strategy.contract import Batch
from ..tensors.state import Parts


@dataclass(frozen=True)
class Trial:
    """What an axis may try before the first step.

    Attributes:
        microbatch: of the step, whole, on any device.
        outputs: calls the model with a divided batch that has no labels and gives what it returns. Collective as the
            model's forward is.
        multiple: what the number of positions must be a multiple of, by all other axes.
    """

    microbatch: Batch
    outputs: Callable[..., Any]
    multiple: int


class Axis:
    """One axis of the mesh as a step sees it. Each method does nothing unless an axis replaces it.

    Attributes:
        divides_batches: whether `divide` does anything, so that each microbatch is checked before.
        divides_sequences: whether `divide` leaves each rank a part of every sequence, so that what the model's own code
            computes over a sequence is not known to any rank.
        sharers: ranks that have the same after `joined`, and whose losses are added up.
        divides_vocabulary: whether each rank computes a part of the logits, which are gathered only where the model, or
            who calls it, looks at them; see `meshwright.step.deferred_logits`.
    """

    divides_batches: bool = False
    divides_sequences: bool = False
    divides_vocabulary: bool = False
    sharers: int = 1

    @property
    def sequence_multiple(self) -> int:
        """What the length of a sequence must be a multiple of."""
        return 1

    # -- batches

    def check_batch(self, batch: Batch) -> None:
        """Refuse what `divide` cannot divide; no collective.

        Raises:
            BatchError: names the entry.
        """

    def divide(self, batch: Batch) -> Batch:
        """This rank's part of a microbatch; its `labels` may give way to `token_loss.TARGETS`, which were shifted."""
        return batch

    def own(self, whole: Tensor) -> Tensor:
        """This rank's positions of a tensor (B, S, ...) that has been left whole, such as an attention mask."""
        return whole

    def parted(self, whole: Tensor) -> Tensor:
        """What this rank has, once a microbatch is divided, of a tensor (B, S, ...) of the whole microbatch."""
        return self.own(whole)

    def joined(self, part: Tensor) -> Tensor:
        """The whole of a tensor of which each rank of the axis has what `parted` gives, with a gradient that is summed
        over them. Collective. Without it, an axis that divides batches takes no objective."""
        return part

    def joined_sequences(self, part: Tensor) -> Tensor:
        """What the model gives for each sequence, (B, K), where each rank of an axis that divides sequences has what it
        gives for its own positions, with a gradient that is summed over them. Collective, behind the forward.

        Raises:
            ModelError: the axis does not say.
        """
        raise ModelError(
            f"{type(self).__name__} divides sequences and brings no `joined_sequences`: it takes no model that gives "
            f"one thing for each sequence."
        )

    # -- forwards and backwards

    def around_step(self) -> AbstractContextManager[None]:
        """Around all forwards and backwards of a step or evaluation."""
        return nullcontext()

    def around_forward(self, inputs: Batch) -> AbstractContextManager[Mapping[str, Any]]:
        """Around one forward with a divided batch without labels; gives what the model is called with."""
        return nullcontext(inputs)

    def alone(self) -> AbstractContextManager[Any]:
        """Around forwards on trial, in which this rank computes without the others of the axis where it can."""
        return nullcontext()

    def check_logits(self, shape: Sequence[int], targets_BS: Tensor) -> None:
        """Refuse logits that are not those of a forward's targets.

        Args:
            shape: of the logits, (B, S, V), or of this rank's part of them.
            targets_BS: int64, the label that each position predicts.

        Raises:
            ModelError: they are of other positions.
        """

    def add_losses(self, total: Tensor) -> None:
        """Add up the losses of ranks that see different parts of a microbatch, in place; float64, 1-D. Collective.

        Those of the ranks of `dp` and `cp` are added up already.
        """

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up what the ranks of the axis have of each gradient, where the strategy's reduction does not; after the
        last backward of a step. Collective."""

    def whole(self) -> AbstractContextManager[None]:
        """Whole parameters in the modules, which compute without the others of the axis. Collective."""
        return nullcontext()

    # -- before and after the first step

    def is_open(self) -> bool:
        """Whether `try_out` has still to be called."""
        return False

    def try_out(self, trial: Trial) -> MeshwrightError | None:
        """Find out with the model, on a few tokens, what cannot be known of it otherwise; what is wrong with it."""
        return None

    def gradient_defect(self, parts: Parts) -> MeshwrightError | None:
        """What the gradients of the first step show to be wrong with how the model is divided. Collective.

        Args:
            parts: how the strategy has divided parameters further.
        """
        return None
