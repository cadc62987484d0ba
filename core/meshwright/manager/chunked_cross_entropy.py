"""The token loss of a model without its full logits, if the model allows it.

[Note: full logits] A model is probed once: its logits for a few tokens, computed in chunks of rows, must equal those of
its forward. Otherwise the loss uses full logits. All ranks decide the same, and rank 0 warns.

Shapes: B sequences of a micro-batch, S tokens each, N rows in all, K ids for each; V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.errors import ModelError
from ..base.types import TokenStatistic
from ..files.terminal import warn
from ..mesh.world import World
from ..step.chunked_loss import HiddenRows, compute_token_loss, compute_token_statistics
from ..step.lm_head import ChunkedLogitsError, DeferredHead, DeferredLogits
from ..step.tokens import GetStatistics, sum_target_loss
from .model_setup import fork_rng

RunModel = Callable[[], Any]
"""Calls a model and returns its outputs, which have `logits`."""
CheckLogits = Callable[[torch.Size, Tensor], None]
"""Called with the shape of the logits and the targets; raises an error if their positions differ."""

_MIN_CHUNKED_LOGITS = 2**25
"""Rows x vocabulary from which logits are computed in chunks: 128 MiB in float32, of which a step would hold three."""
_MIN_VOCAB_SIZE = 2**13
"""Vocabulary size from which logits can become that large, so that a model is probed."""
_MIN_CHUNK_ROWS = 512
"""Minimum rows of a chunk. Each chunk adds to the full weight's gradient, which is slow for fewer rows."""
_NUM_PROBE_ROWS = 3


class ChunkedCrossEntropy:
    """Token loss and token statistics of one model, from chunks of rows if `head` allows it."""

    def __init__(
        self,
        head: DeferredHead | None,
        chunk_rows: int | None,
        *,
        is_sharded: bool,
        model_name: str,
        vocab_size: int | None = None,
    ) -> None:
        self._head = head
        self._requested_chunk_rows = chunk_rows
        self._is_sharded = is_sharded
        self._model_name = model_name
        self._vocab_size = vocab_size
        head_vocab_size = head.vocab_size if head is not None else None
        self._is_requested = chunk_rows > 0 if chunk_rows is not None else (head_vocab_size or 0) >= _MIN_VOCAB_SIZE
        # A model whose head is unknown may have one without a vocabulary.
        needs_probe = self._is_requested or vocab_size is not None if head is None else self._is_requested or is_sharded
        self._is_chunked: bool | None = None if needs_probe else False
        self._dtype = torch.float32

    # -- before the first step

    @property
    def needs_probe(self) -> bool:
        return self._is_chunked is None

    def probe(self, run: RunModel, world: World) -> None:
        """Probe the model; see [Note: full logits]. Collective. Raises ModelError for logits without a vocabulary."""

        def run_reproducibly() -> Any:
            # Each run samples the same random numbers, such as hidden states with which a pipeline stage is probed.
            with fork_rng(world.device):
                return run()

        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            error = self._find_error(run_reproducibly)
        self._is_chunked = bool(world.reduce_ints([error is None], dist.ReduceOp.MIN)[0])
        if not self._is_chunked and self._is_requested and world.rank == 0:
            warn(
                f"the loss of {self._model_name} needs whole logits, rows x vocabulary "
                f"({error or 'on another rank'}): loss_chunk_rows has no effect.",
                stacklevel=2,
            )

    def _find_error(self, run: RunModel) -> str | None:
        if self._head is None:
            shape = () if self._vocab_size is None else tuple(run().logits.shape)
            if self._vocab_size is not None and (len(shape) != 3 or shape[-1] < self._vocab_size):
                raise ModelError(
                    f"{self._model_name} gives logits {shape}, which are not those of its vocabulary of "
                    f"{self._vocab_size} entries, so there is no loss over tokens. Give an objective with "
                    f"input_kind = 'outputs', which is over what its head returns, or train a causal LM."
                )
            return "which layer makes them is not known"
        full_BSV = run().logits
        # Rows are converted to the dtype that a strategy gives outputs.
        self._dtype = full_BSV.dtype
        try:
            chunked_BSV, _ = self._head.run_with_deferred_logits(run, self._compute_logits_in_chunks)
            difference = (chunked_BSV - full_BSV).abs().max().item()
        except (torch.OutOfMemoryError, dist.DistError):
            raise
        except Exception as error:
            # A model's own code may fail in any way without logits.
            return (str(error).strip().splitlines() or [type(error).__name__])[0]
        limit = torch.finfo(self._dtype).eps ** 0.5 * full_BSV.abs().max().item()
        return None if difference <= limit else f"row by row, they differ by {difference:.3g}"

    def _compute_logits_in_chunks(self, logits: DeferredLogits) -> Tensor:
        rows = self._build_rows(logits)
        chunks = rows.hidden_NH.split(_NUM_PROBE_ROWS)
        local_NL = torch.cat([rows.projection.compute_logits(rows_CH, rows.tensors) for rows_CH in chunks])
        return rows.projection.vocabulary.gather_logits(local_NL).unflatten(0, logits.shape[:-1])

    def _build_rows(self, logits: DeferredLogits) -> HiddenRows:
        if self._head is None:
            raise ChunkedLogitsError("no head is known")
        return self._head.build_rows(logits if logits.dtype == self._dtype else logits.to(self._dtype))

    # -- in a step

    def compute_token_loss(
        self, run: RunModel, targets_BS: Tensor, num_tokens: Tensor, check: CheckLogits
    ) -> tuple[Tensor, Any]:
        """Return the cross entropy of unmasked targets [nats], summed and divided by `num_tokens`, and the outputs."""
        head = self._select_head(targets_BS.numel())
        if head is None:
            outputs = run()
            check(outputs.logits.shape, targets_BS)
            return sum_target_loss(outputs.logits, targets_BS) / num_tokens, outputs

        def loss(logits: DeferredLogits) -> Tensor:
            self._check_logits(logits.shape, targets_BS, check)
            rows, targets_N = self._build_rows(logits), targets_BS.flatten()
            return compute_token_loss(
                rows,
                targets_N,
                num_tokens,
                chunk_rows=self._choose_chunk_rows(rows),
                pending_gradients=head.pending_gradients,
            )

        return self._run_with_head(head, run, loss)

    def compute_objective(
        self, run: RunModel, targets_BS: Tensor, consume: Callable[[GetStatistics], Tensor], check: CheckLogits
    ) -> tuple[Tensor, Any]:
        """Return the result of `consume`, called once in the forward with a source of statistics, and the outputs."""
        head, shape = self._select_head(targets_BS.numel()), targets_BS.shape

        def evaluate(rows: HiddenRows, chunk_rows: int) -> Tensor:
            def get_statistics(ids_BSK: Tensor, names: Sequence[TokenStatistic]) -> dict[str, Tensor]:
                statistics = compute_token_statistics(rows, ids_BSK.flatten(0, 1), names, chunk_rows=chunk_rows)
                return {name: each.unflatten(0, shape) for name, each in statistics.items()}

            with torch.autocast(targets_BS.device.type, enabled=False):
                return consume(get_statistics)

        if head is None:
            outputs = run()
            self._check_logits(outputs.logits.shape, targets_BS, check)
            return evaluate(
                HiddenRows.from_logits(outputs.logits), self._requested_chunk_rows or _MIN_CHUNK_ROWS
            ), outputs

        def evaluate_in_chunks(logits: DeferredLogits) -> Tensor:
            self._check_logits(logits.shape, targets_BS, check)
            rows = self._build_rows(logits)
            return evaluate(rows, self._choose_chunk_rows(rows))

        return self._run_with_head(head, run, evaluate_in_chunks)

    def _check_logits(self, shape: torch.Size, targets_BS: Tensor, check: CheckLogits) -> None:
        check(shape, targets_BS)
        if shape[:-1] != targets_BS.shape:
            raise ModelError(f"{self._model_name} gives logits {tuple(shape)} for targets {tuple(targets_BS.shape)}.")

    def dry_run(self, run: RunModel, num_rows: int) -> None:
        """Run the model without gradients, as for the loss of `num_rows` rows, but compute no logits if chunked."""
        if (head := self._select_head(num_rows)) is None:
            run()
        else:
            self._run_with_head(head, run, lambda logits: logits.source.hidden.new_zeros(()))

    def _select_head(self, num_rows: int) -> DeferredHead | None:
        """Return the head if logits for this many rows must be chunked, else None."""
        head = self._head
        if head is None or not self._is_chunked or head.local_vocab_size is None:
            return None
        is_large = bool(self._requested_chunk_rows) or (
            self._requested_chunk_rows is None and num_rows * head.local_vocab_size >= _MIN_CHUNKED_LOGITS
        )
        return head if is_large or self._is_sharded else None

    def _choose_chunk_rows(self, rows: HiddenRows) -> int:
        count, features = rows.hidden_NH.shape
        if self._requested_chunk_rows is not None:
            return self._requested_chunk_rows or count
        # Chunks of logits are half as large as the weight; small logits are one chunk.
        is_large = self._head is not None and count * (self._head.local_vocab_size or 0) >= _MIN_CHUNKED_LOGITS
        return max(_MIN_CHUNK_ROWS, features // 2) if is_large else count

    def _run_with_head(
        self, head: DeferredHead, run: RunModel, consume: Callable[[DeferredLogits], Tensor]
    ) -> tuple[Tensor, Any]:
        try:
            return head.run_with_deferred_logits(run, consume)
        except ChunkedLogitsError as error:
            raise ModelError(
                f"the loss of {self._model_name} was computed by rows until now, but {error}. Set loss_chunk_rows=0."
            ) from error
