"""torch's engine: its options reach torch and act, gradients are reduced once a step, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.steps import build_and_train, catch_refusal, prepare_gradient_step
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_outputs import CausalLMOutput

from meshwright import Mesh, MeshError, MeshSizes, count_tokens, open_world, resolve
from meshwright.testing import Case, assert_parity, count_collectives
from meshwright.tracing.collectives import record_collectives
from meshwright_testing import pool
from meshwright_testing.parity import build_manager, train_steps

slow = pytest.mark.slow
NO_START = {"start_powerSGD_iter": 2, "matrix_approximation_rank": 2}
FULL_RANK = {"start_powerSGD_iter": 2, "min_compression_rate": 1e6}
# Besides the gradients, a step all-reduces the loss.
OWN_REDUCTIONS = 1


def _all_reduces(config: dict[str, Any], microbatches: int) -> int:
    """Count those of the second step, when DDP has rebuilt its buckets in the order of backward."""
    case = Case(microbatches=microbatches)
    counts = count_collectives(prepare_gradient_step(build_and_train("ddp", config, {}, case), case, 1))
    return counts["all_reduce"] - OWN_REDUCTIONS


@pytest.mark.parametrize("config", [{}, pytest.param({"reduce_dtype": "float64"}, marks=slow)])
@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=slow), 3])
def test_gradients_are_reduced_once_a_step_however_many_microbatches(config: dict[str, Any], microbatches: int) -> None:
    # 50,000 float64 parameters fit one bucket of 25 MiB.
    assert pool(2).run(_all_reduces, config, microbatches) == [1, 1]


def _attributes(config: dict[str, Any]) -> tuple[Any, ...]:
    manager = build_manager("ddp", config, {}, Case())
    wrapped = manager.module
    assert isinstance(wrapped, DistributedDataParallel)
    return wrapped.static_graph, wrapped.broadcast_buffers, wrapped.bucket_bytes_cap


@slow
def test_options_reach_torch() -> None:
    assert pool(2).run(_attributes, {})[0][:2] == (False, True)
    config = {"static_graph": True, "broadcast_buffers": False, "bucket_cap_mb": 3}
    assert pool(2).run(_attributes, config) == [(True, False, 3 * 2**20)] * 2


def _views(as_views: bool) -> bool:
    manager = build_manager("ddp", {"gradient_as_bucket_view": as_views}, {}, Case())
    prepare_gradient_step(manager, Case())()
    storages = {p.grad.untyped_storage().data_ptr() for p in manager.model_parts[0].parameters()}
    return len(storages) == 1


@slow
@pytest.mark.parametrize("as_views", [True, False])
def test_gradients_share_the_bucket_when_they_are_views(as_views: bool) -> None:
    assert pool(2).run(_views, as_views) == [as_views] * 2


def _running(config: dict[str, Any]) -> float:
    """Fill a buffer of each rank with its own number, and return it as it is in forward."""
    manager = build_manager("ddp", config, {}, Case())
    mine = manager.model_parts[0].model.rotary_emb.inv_freq
    mine.fill_(float(manager.mesh.rank + 1))
    train_steps(manager, Case(), range(1))
    return float(mine[0])


@slow
@pytest.mark.parametrize(("wanted", "values"), [(True, [1.0, 1.0]), (False, [1.0, 2.0])])
def test_buffers_are_the_first_ranks_if_they_are_broadcast(wanted: bool, values: list[float]) -> None:
    assert pool(2).run(_running, {"broadcast_buffers": wanted}) == values


@slow
@pytest.mark.parametrize(
    "config",
    [
        {"broadcast_buffers": False},
        {"static_graph": True, "activation_checkpointing": "full", "gradient_as_bucket_view": True},
    ],
    ids=str,
)
def test_parity(config: dict[str, Any]) -> None:
    assert_parity("ddp", Case(tied=True, eval_after=True), world_size=4, config=config)


# -- unused parameters


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


@pytest.mark.parametrize("reduce_dtype", [pytest.param(None, marks=slow), "float64"])
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


# -- communication hooks


def _bytes(config: dict[str, Any]) -> list[tuple[str, int]]:
    case = Case(dtype="float32")
    traffic = record_collectives(prepare_gradient_step(build_and_train("ddp", config, {}, case, steps=3), case, 3))
    return [(str(each.dtype), each.nbytes) for each in traffic.filter("all_reduce") if each.nbytes > 1000]


@slow
def test_hooks_send_less() -> None:
    plain = sum(size for _, size in pool(2).run(_bytes, {})[0])
    for hook, dtype in (("fp16_compress", "torch.float16"), ("bf16_compress", "torch.bfloat16")):
        compressed = pool(2).run(_bytes, {"comm_hook": hook})[0]
        assert {each for each, _ in compressed} == {dtype}
        assert 2 * sum(size for _, size in compressed) == plain
    powers = pool(2).run(_bytes, {"comm_hook": "power_sgd", "comm_hook_options": NO_START})[0]
    assert sum(size for _, size in powers) < plain / 2


def _largest_gradient_error(config: dict[str, Any], microbatches: int) -> float:
    """Return the largest difference of a reduced gradient from the plain sum, relative to the largest gradient."""
    case = Case(microbatches=microbatches, dtype="float32", max_norm=None)
    gradients = []
    for each in ({}, config):
        manager = build_manager("ddp", each, {}, case)
        for step in range(3):
            prepare_gradient_step(manager, case, step)()
            found = torch.cat([p.grad.flatten() for p in manager.model_parts[0].parameters()])
            for parameter in manager.model_parts[0].parameters():
                parameter.grad = None
        gradients.append(found)
    return float((gradients[1] - gradients[0]).abs().max() / gradients[0].abs().max())


@pytest.mark.parametrize(
    ("config", "bound", "microbatches"),
    [
        pytest.param({"comm_hook": "fp16_compress"}, 1e-3, 2, marks=slow),
        ({"comm_hook": "bf16_compress"}, 1e-2, 2),
        pytest.param({"comm_hook": "power_sgd", "comm_hook_options": FULL_RANK}, 1e-5, 2, marks=slow),
        pytest.param({"comm_hook": "power_sgd", "comm_hook_options": {"start_powerSGD_iter": 10}}, 1e-5, 1, marks=slow),
        pytest.param({"comm_hook": "power_sgd", "comm_hook_options": NO_START}, 1.0, 1, marks=slow),
    ],
    ids=str,
)
def test_hooks_lose_precision_and_not_the_sum(config: dict[str, Any], bound: float, microbatches: int) -> None:
    errors = pool(2).run(_largest_gradient_error, config, microbatches)
    assert len(set(errors)) == 1
    assert errors[0] < bound
    # What compresses is not exact, or it has not acted.
    assert errors[0] > 0.0 or bound == 1e-5


# -- refusals


def _refusals(configs: list[dict[str, Any]], case: Case, steps: int) -> list[str]:
    return [catch_refusal("ddp", config, {}, case, steps) for config in configs]


def test_options_that_power_sgd_refuses_and_several_microbatches_in_a_static_graph_are_refused_on_all_ranks() -> None:
    cases = {
        "refused by PowerSGDState": {"rank": 3},
        "are refused by PowerSGDState": {"start_powerSGD_iter": 1},
        "comm_hook_options.use_error_feedback: Input should be a valid boolean": {"use_error_feedback": "no"},
        "matrix_approximation_rank: Input should be a valid number": {"matrix_approximation_rank": "2"},
    }
    configs = [{"comm_hook": "power_sgd", "comm_hook_options": options} for options in cases.values()]
    first, second = pool(2).run(_refusals, configs, Case(), 0)
    assert first == second
    assert all(
        text in reported and reported.startswith("ConfigError") for text, reported in zip(cases, first, strict=True)
    )
    (reported,), (other,) = pool(2).run(_refusals, [{"static_graph": True}], Case(microbatches=2), 1)
    assert reported == other
    assert "does not go with several microbatches" in reported


def test_only_replication_is_claimed_and_all_of_dp_goes_there() -> None:
    _, degrees = resolve("ddp", MeshSizes(), 4)
    assert (degrees.dp_replicate, degrees.dp_shard) == (4, 1)
    with pytest.raises(MeshError, match="tp=2, but ddp shards dp_replicate"):
        resolve("ddp", MeshSizes(tp_size=2), 4)
    with pytest.raises(MeshError, match="leave dp_replicate_size out, or set it to dp_size=4"):
        resolve("ddp", MeshSizes(dp_replicate_size=1), 4)
