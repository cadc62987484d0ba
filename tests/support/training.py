"""Steps of a case, and a model that is unsharded between two of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.step.handshake import count_tokens
from meshwright.strategy.contract import StrategyManager
from meshwright_testing.case import Case, build_global_batch, rank_microbatches
from meshwright_testing.models import build_case_model
from meshwright_testing.parity import build_manager, full_weights, train_steps


def prepare_training_step(manager: StrategyManager, case: Case, step: int) -> Callable[[], float]:
    """Return one step of the case without clipping, as a call without arguments that returns the loss."""
    microbatches = rank_microbatches(case, step, manager.mesh.data_rank, manager.mesh.data_size)
    num_tokens = count_tokens(microbatches, manager.mesh)

    def run() -> float:
        loss = manager.forward_backward(microbatches, num_tokens=num_tokens)
        manager.optimizer_step()
        return float(loss)

    return run


def unshard_between_steps(
    strategy: str, config: Mapping[str, Any], sizes: Mapping[str, Any], case: Case
) -> tuple[bool, float, bool, bool]:
    """The task of one rank: training with and without `unshard` after the first step.

    Returns whether the model had plain parameters then; how far its logits were from those of a plain model with the
    same weights; whether both generated the same; and whether training continued as without it, bit for bit.
    """
    runs = []
    for is_interrupted in (False, True):
        manager = build_manager(strategy, config, sizes, case)
        train_steps(manager, case, range(1))
        if is_interrupted:
            single = build_case_model(case.model_type, tied=case.tied, seed=0, dtype=getattr(torch, case.dtype))
            single.load_state_dict(full_weights(manager))
            options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
            with manager.unshard() as (model,), torch.no_grad():
                plain = not any(isinstance(p, DTensor) for p in model.parameters())
                ids = build_global_batch(case, 0)["input_ids"][:2]
                apart = float((model(input_ids=ids).logits - single(input_ids=ids).logits).abs().max())
                generated, expected = (each.generate(ids, **options) for each in (model, single))
                same = bool(torch.equal(generated, expected))
        runs.append((train_steps(manager, case, range(1, 3))[0], full_weights(manager)))
    (losses, weights), (again, weights_again) = runs
    is_same = losses == again and all(torch.equal(weights[name], weights_again[name]) for name in weights)
    return plain, apart, same, is_same
