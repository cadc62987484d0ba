"""What fsdp2 does beside parity: placements, communication, memory, and full parameters on demand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshwright import ConfigError, MeshSizes, OptimizerConfig, count_tokens, get_strategy, resolve
from meshwright.testing import Case, assert_parity, count_collectives, pool
from meshwright.testing.case import share
from meshwright.testing.models import tiny_model
from meshwright.testing.parity import build_manager, full_weights, train_steps
from meshwright_fsdp2 import FSDP2Config

BLOCKS = 3
UNITS = BLOCKS + 1  # and the root


def _placements(sizes: dict[str, int]) -> dict[str, Any]:
    manager = build_manager("fsdp2", {}, sizes, Case())
    parameters = dict(manager.model_parts[0].named_parameters())
    return {name: (p.placements, p.device_mesh.mesh_dim_names) for name, p in parameters.items()}


def test_every_parameter_is_sharded_over_dp_shard() -> None:
    for found in pool(4).run(_placements, {}):
        assert len(found) == len(dict(tiny_model().named_parameters()))
        assert set(found.values()) == {((Shard(0),), ("dp_shard",))}


def test_hsdp_replicates_over_the_outer_axis() -> None:
    for found in pool(4).run(_placements, {"dp_replicate_size": 2}):
        assert set(found.values()) == {((Replicate(), Shard(0)), ("dp_replicate", "dp_shard"))}


def _traffic(config: dict[str, Any], sizes: dict[str, int], microbatches: int) -> Counter[str]:
    """Collectives of the second step, when torch has settled its order."""
    case = Case(microbatches=microbatches)
    manager = build_manager("fsdp2", config, sizes, case)
    train_steps(manager, case, range(1))
    batches = share(case, 1, manager.mesh.data_rank, manager.mesh.data_size)
    tokens = count_tokens(batches, manager.mesh)
    return count_collectives(lambda: manager.forward_backward(batches, num_tokens=tokens))


# Beside the gradients, a step all-reduces the loss, with which gradients there are. Two ranks agree on it by one send.
OWN_REDUCTIONS = 1
MESSAGE = {"send": 1, "recv": 1}


@pytest.mark.parametrize(
    ("config", "gathers"),
    [
        # Forward gathers every unit; backward gathers again what was freed.
        pytest.param({}, UNITS + BLOCKS - 1, id="all-but-the-last-block"),
        pytest.param({"reshard_after_forward": True}, 2 * UNITS, id="all"),
        pytest.param({"reshard_after_forward": False}, UNITS, id="none"),
    ],
)
def test_reshard_after_forward_decides_what_backward_gathers(config: dict[str, Any], gathers: int) -> None:
    for traffic in pool(2).run(_traffic, config, {}, 1):
        assert traffic == {"all_gather": gathers, "reduce_scatter": UNITS, "all_reduce": OWN_REDUCTIONS, **MESSAGE}


@pytest.mark.parametrize(("defer", "scatters"), [(True, UNITS), (False, 3 * UNITS)])
def test_gradients_are_reduced_once_a_step_unless_told_otherwise(defer: bool, scatters: int) -> None:
    for traffic in pool(2).run(_traffic, {"defer_fsdp_grad_sync": defer}, {}, 3):
        assert traffic["reduce_scatter"] == scatters


def test_hsdp_all_reduces_each_unit_once_a_step() -> None:
    for traffic in pool(4).run(_traffic, {}, {"dp_replicate_size": 2}, 3):
        assert traffic["reduce_scatter"] == UNITS
        assert traffic["all_reduce"] == UNITS + OWN_REDUCTIONS


def _held_bytes() -> dict[str, int]:
    case = Case()
    manager = build_manager("fsdp2", {}, {}, case)
    batches = share(case, 0, manager.mesh.data_rank, manager.mesh.data_size)
    manager.forward_backward(batches, num_tokens=count_tokens(batches, manager.mesh))

    def held(tensors: list[torch.Tensor]) -> int:
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if t.dim()]
        return sum(t.numel() * t.element_size() for t in local)

    parameters = list(manager.model_parts[0].parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    optimizer = manager.optimizer
    optimizer.step()
    state = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor)]
    return {"parameters": held(parameters), "gradients": held(gradients), "optimizer": held(state)}


def test_ranks_hold_one_model_together() -> None:
    whole = 8 * sum(p.numel() for p in tiny_model().parameters())
    found = pool(3).run(_held_bytes)
    for name, expected in {"parameters": whole, "gradients": whole, "optimizer": 2 * whole}.items():
        assert sum(held[name] for held in found) == expected, name


def _unshard_between_steps(use: bool) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]:
    case = Case()
    manager = build_manager("fsdp2", {}, {}, case)
    losses = train_steps(manager, case, range(1))[0]
    seen: dict[str, Any] = {}
    if use:
        ids = share(case, 0, 0, manager.mesh.data_size)[0]["input_ids"]
        with manager.unshard() as (model,):
            seen["plain"] = not any(isinstance(p, DTensor) for p in model.parameters())
            with torch.no_grad():
                model.eval()
                seen["logits"] = model(input_ids=ids).logits
                seen["text"] = model.generate(ids[:, :4], max_new_tokens=5, do_sample=False, pad_token_id=0)
            seen["plain after forward"] = not any(isinstance(p, DTensor) for p in model.parameters())
        seen["sharded again"] = all(isinstance(p, DTensor) for p in model.parameters())
    losses += train_steps(manager, case, range(1, 3))[0]
    return losses, full_weights(manager), seen


def test_unshard_gives_full_parameters_and_training_goes_on_bit_for_bit() -> None:
    plain = pool(2).run(_unshard_between_steps, False)
    for (losses, weights, seen), (expected_losses, expected_weights, _) in zip(
        pool(2).run(_unshard_between_steps, True), plain, strict=True
    ):
        assert losses == expected_losses
        assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)
        assert (seen["plain"], seen["plain after forward"], seen["sharded again"]) == (True, True, True)
        assert seen["text"].shape[1] == 9


def _traffic_after_unshard() -> tuple[Counter[str], Counter[str]]:
    case = Case()
    manager = build_manager("fsdp2", {}, {}, case)
    train_steps(manager, case, range(1))
    batches = share(case, 1, manager.mesh.data_rank, manager.mesh.data_size)
    tokens = count_tokens(batches, manager.mesh)
    counts = []
    for _ in range(2):
        counts.append(count_collectives(lambda: manager.forward_backward(batches, num_tokens=tokens)))
        manager.optimizer_step()
        with manager.unshard():
            pass
    return counts[0], counts[1]


def test_unshard_leaves_the_reshard_policy_as_it_was() -> None:
    for before, after in pool(2).run(_traffic_after_unshard):
        assert before == after


def test_config_is_frozen_and_refuses_unknown_options_with_the_nearest() -> None:
    spec = get_strategy("fsdp")
    assert spec.config_cls is FSDP2Config
    with pytest.raises(ConfigError, match="Did you mean 'reshard_after_forward'"):
        resolve("fsdp2", MeshSizes(), 1, config={"reshard_after_foward": True})
    with pytest.raises(ConfigError, match="reduce_dtype"):
        resolve("fsdp2", MeshSizes(), 1, config={"reduce_dtype": "float8"})


NO_DECAY = OptimizerConfig(lr=1e-2)


@pytest.mark.parametrize("config", [{}, {"defer_fsdp_grad_sync": False}, {"reduce_dtype": "float64"}])
@pytest.mark.parametrize("route", ["ranks", "steps", None])
@pytest.mark.parametrize("sizes", [{}, {"dp_replicate_size": 2}])
def test_ranks_that_use_different_parameters_and_parameters_that_none_uses(
    config: dict[str, Any], route: str | None, sizes: dict[str, int]
) -> None:
    """Two branches of one shape: torch by itself adds up the gradients of one and the other, in silence."""
    case = Case(model_type="routed", route=route, microbatches=2, steps=4)
    assert_parity("fsdp2", case, world_size=4, config=config, sizes=sizes)
