"""What ddp does beside parity: buckets, accumulation without communication, unused parameters and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput

from meshwright import ConfigError, MeshError, MeshSizes, count_tokens, resolve
from meshwright.testing import Case, count_collectives, pool
from meshwright.testing.case import share
from meshwright.testing.parity import build_manager, train_steps

# Beside the gradients, a step all-reduces the loss.
OWN_REDUCTIONS = 1


def _all_reduces(config: dict[str, Any], microbatches: int) -> int:
    """Of the second step, when DDP has rebuilt its buckets in the order of backward."""
    case = Case(microbatches=microbatches)
    manager = build_manager("ddp", config, {}, case)
    train_steps(manager, case, range(1))
    batches = share(case, 1, manager.mesh.data_rank, manager.mesh.data_size)
    tokens = count_tokens(batches, manager.mesh)
    traffic = count_collectives(lambda: manager.forward_backward(batches, num_tokens=tokens))
    return traffic["all_reduce"] - OWN_REDUCTIONS


@pytest.mark.parametrize("config", [{}, {"reduce_dtype": "float64"}])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_gradients_are_reduced_once_a_step_however_many_microbatches(config: dict[str, Any], microbatches: int) -> None:
    # 50,000 float64 parameters fit one bucket of 25 MiB.
    assert pool(2).run(_all_reduces, config, microbatches) == [1, 1]


def _bucket_sizes(cap_mb: int) -> list[int]:
    from torch.nn.parallel import DistributedDataParallel

    manager = build_manager("ddp", {"bucket_cap_mb": cap_mb}, {}, Case())
    wrapped = manager.module
    assert isinstance(wrapped, DistributedDataParallel)
    return [wrapped.bucket_bytes_cap]


def test_bucket_cap_reaches_the_engine_in_bytes() -> None:
    assert pool(1).run(_bucket_sizes, 3) == [[3 * 2**20]]


def _views(as_views: bool) -> bool:
    case = Case()
    manager = build_manager("ddp", {"gradient_as_bucket_view": as_views}, {}, case)
    batches = share(case, 0, manager.mesh.data_rank, manager.mesh.data_size)
    manager.forward_backward(batches, num_tokens=count_tokens(batches, manager.mesh))
    storages = {p.grad.untyped_storage().data_ptr() for p in manager.model_parts[0].parameters()}
    return len(storages) == 1


@pytest.mark.parametrize("as_views", [True, False])
def test_gradients_share_the_bucket_when_they_are_views(as_views: bool) -> None:
    assert pool(2).run(_views, as_views) == [as_views] * 2


class _Skipping(torch.nn.Module):
    """Every other call leaves a layer out, so that some parameters get no gradient in a microbatch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(11, 8, dtype=torch.float64)
        self.maybe = torch.nn.Linear(8, 8, dtype=torch.float64)
        self.never = torch.nn.Linear(8, 8, dtype=torch.float64)
        self.head = torch.nn.Linear(8, 11, dtype=torch.float64)
        self.calls = 0

    def forward(self, input_ids: torch.Tensor) -> Any:
        hidden = self.embed(input_ids)
        if self.calls % 2 == 0:
            hidden = hidden + self.maybe(hidden)
        self.calls += 1
        return CausalLMOutput(logits=self.head(hidden))


def _skipping_gradients(strategy: str, config: dict[str, Any], microbatches: int) -> dict[str, torch.Tensor | None]:
    from meshwright import Mesh, open_world

    world = open_world("cpu")
    stack, degrees = resolve(strategy, MeshSizes(), world.size, config=config)
    mesh = Mesh(degrees, world)
    manager = stack.build(mesh)
    manager.parallelize(_Skipping())
    ids = torch.arange(8 * 6).view(8, 6) % 11
    mine = ids.chunk(mesh.data_size)[mesh.data_rank]
    batches = [{"input_ids": part, "labels": part} for part in mine.chunk(microbatches)]
    manager.forward_backward(batches, num_tokens=count_tokens(batches, mesh))
    return {name: None if p.grad is None else p.grad.clone() for name, p in manager.model_parts[0].named_parameters()}


@pytest.mark.parametrize("reduce_dtype", [None, "float64"])
def test_a_parameter_without_gradient_in_some_microbatches_keeps_the_gradient_of_the_others(
    reduce_dtype: str | None,
) -> None:
    """The skipped layer runs in the first of two microbatches only, on every rank."""
    config = {"find_unused_parameters": True, "reduce_dtype": reduce_dtype}
    expected = pool(1).run(_skipping_gradients, "single", {}, 4)[0]
    # One rank with four microbatches skips the second and fourth; two ranks with two each skip the same sequences.
    for found in pool(2).run(_skipping_gradients, "ddp", config, 2):
        for name, gradient in expected.items():
            if gradient is None:
                assert found[name] is None, name
            else:
                torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)


def test_only_replication_is_claimed_and_all_of_dp_goes_there() -> None:
    _, degrees = resolve("ddp", MeshSizes(), 4)
    assert (degrees.dp_replicate, degrees.dp_shard) == (4, 1)
    with pytest.raises(MeshError, match="tp=2, but ddp shards dp_replicate"):
        resolve("ddp", MeshSizes(tp_size=2), 4)
    with pytest.raises(MeshError, match="leave dp_replicate_size out, or set it to dp_size=4"):
        resolve("ddp", MeshSizes(dp_replicate_size=1), 4)


def test_unknown_options_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'bucket_cap_mb'"):
        resolve("ddp", MeshSizes(), 1, config={"bucket_cap": 5})
