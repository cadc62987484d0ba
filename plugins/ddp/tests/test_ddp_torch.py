"""The knobs of torch's engine: each reaches torch, and does what its row in the README says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from meshwright import ConfigError, StrategyError, count_tokens
from meshwright.testing import Case, assert_parity, pool
from meshwright.testing.case import share
from meshwright.testing.collectives import measure_collectives
from meshwright.testing.parity import build_manager, compare, train_steps

NO_START = {"start_powerSGD_iter": 2, "matrix_approximation_rank": 2}
FULL_RANK = {"start_powerSGD_iter": 2, "min_compression_rate": 1e6}


def _wrapped(manager: Any) -> DistributedDataParallel:
    assert isinstance(manager.module, DistributedDataParallel)
    return manager.module


def _attributes(config: dict[str, Any], *names: str) -> list[Any]:
    wrapped = _wrapped(build_manager("ddp", config, {}, Case()))
    return [getattr(wrapped, name) for name in names]


def test_static_graph_and_buffers_reach_torch() -> None:
    assert pool(1).run(_attributes, {}, "static_graph", "broadcast_buffers") == [[False, True]]
    config = {"static_graph": True, "broadcast_buffers": False}
    assert pool(1).run(_attributes, config, "static_graph", "broadcast_buffers") == [[True, False]]


@pytest.mark.parametrize("config", [{"static_graph": True}, {"broadcast_buffers": False}], ids=str)
def test_parity(config: dict[str, Any]) -> None:
    assert_parity("ddp", Case(tied=True, eval_after=True), world_size=4, config=config)


def test_parity_with_recomputation_and_a_static_graph() -> None:
    config = {"static_graph": True, "activation_checkpointing": "full", "gradient_as_bucket_view": True}
    assert_parity("ddp", Case(tied=True), world_size=2, config=config)


def _two_microbatches(config: dict[str, Any]) -> str:
    case = Case(microbatches=2)
    manager = build_manager("ddp", config, {}, case)
    try:
        train_steps(manager, case, range(1))
    except StrategyError as error:
        return str(error)
    return "accepted"


def test_static_graph_refuses_several_microbatches_on_all_ranks() -> None:
    answers = pool(2).run(_two_microbatches, {"static_graph": True})
    assert len(set(answers)) == 1
    assert "does not go with several microbatches" in answers[0]


def _running(config: dict[str, Any]) -> float:
    """A buffer that each rank fills with its own rank, as it is in forward."""
    manager = build_manager("ddp", config, {}, Case())
    model = manager.model_parts[0]
    mine = model.model.rotary_emb.inv_freq
    mine.fill_(float(manager.mesh.rank + 1))
    train_steps(manager, Case(), range(1))
    return float(model.model.rotary_emb.inv_freq[0])


@pytest.mark.parametrize(("wanted", "values"), [(True, [1.0, 1.0]), (False, [1.0, 2.0])])
def test_buffers_are_the_first_ranks_if_they_are_broadcast(wanted: bool, values: list[float]) -> None:
    assert pool(2).run(_running, {"broadcast_buffers": wanted}) == values


def _bytes(config: dict[str, Any]) -> list[tuple[str, int]]:
    case = Case(dtype="float32")
    manager = build_manager("ddp", config, {}, case)
    train_steps(manager, case, range(3))
    batches = share(case, 3, manager.mesh.data_rank, manager.mesh.data_size)
    tokens = count_tokens(batches, manager.mesh)
    traffic = measure_collectives(lambda: manager.forward_backward(batches, num_tokens=tokens))
    return [(str(each.dtype), each.bytes) for each in traffic if each.kind == "all_reduce" and each.bytes > 1000]


@pytest.mark.parametrize(("hook", "dtype"), [("fp16_compress", "torch.float16"), ("bf16_compress", "torch.bfloat16")])
def test_compressing_hooks_halve_what_travels(hook: str, dtype: str) -> None:
    plain = pool(2).run(_bytes, {})[0]
    compressed = pool(2).run(_bytes, {"comm_hook": hook})[0]
    assert {each for each, _ in compressed} == {dtype}
    assert 2 * sum(size for _, size in compressed) == sum(size for _, size in plain)


def _largest_gradient_error(config: dict[str, Any], microbatches: int) -> float:
    """Largest difference of a reduced gradient from the plain sum, relative to the largest gradient."""
    case = Case(microbatches=microbatches, dtype="float32", max_norm=None)
    managers = [build_manager("ddp", each, {}, case) for each in ({}, config)]
    gradients = []
    for manager in managers:
        for step in range(3):
            batches = share(case, step, manager.mesh.data_rank, manager.mesh.data_size)
            manager.forward_backward(batches, num_tokens=count_tokens(batches, manager.mesh))
            found = torch.cat([p.grad.flatten() for p in manager.model_parts[0].parameters()])
            for parameter in manager.model_parts[0].parameters():
                parameter.grad = None
        gradients.append(found)
    return float((gradients[1] - gradients[0]).abs().max() / gradients[0].abs().max())


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    ("config", "bound"),
    [
        ({"comm_hook": "fp16_compress"}, 1e-3),
        ({"comm_hook": "bf16_compress"}, 1e-2),
        ({"comm_hook": "power_sgd", "comm_hook_options": FULL_RANK}, 1e-5),
        ({"comm_hook": "power_sgd", "comm_hook_options": {"start_powerSGD_iter": 10}}, 1e-5),
        ({"comm_hook": "power_sgd", "comm_hook_options": NO_START}, 1.0),
    ],
    ids=str,
)
def test_hooks_lose_precision_and_not_the_sum(config: dict[str, Any], bound: float, microbatches: int) -> None:
    errors = pool(2).run(_largest_gradient_error, config, microbatches)
    assert len(set(errors)) == 1
    assert errors[0] < bound
    # What compresses is not exact, or it has not acted.
    assert errors[0] > 0.0 or bound == 1e-5


def _compressed_elements() -> list[int]:
    config = {"comm_hook": "power_sgd", "comm_hook_options": NO_START}
    return [sum(size for _, size in _bytes(config)), sum(size for _, size in _bytes({}))]


def test_power_sgd_sends_less() -> None:
    for compressed, plain in pool(2).run(_compressed_elements):
        assert compressed < plain / 2


def _hook_options(options: dict[str, Any]) -> str:
    try:
        build_manager("ddp", {"comm_hook": "power_sgd", "comm_hook_options": options}, {}, Case())
    except ConfigError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rank": 3}, "refused by PowerSGDState"),
        ({"start_powerSGD_iter": 1}, "refused by PowerSGDState"),
        ({"use_error_feedback": "no"}, "comm_hook_options.use_error_feedback: Input should be a valid boolean"),
        ({"matrix_approximation_rank": "2"}, "matrix_approximation_rank: Input should be a valid number"),
    ],
)
def test_options_that_power_sgd_refuses_are_told(options: dict[str, Any], told: str) -> None:
    answers = pool(2).run(_hook_options, options)
    assert len(set(answers)) == 1
    assert told in answers[0]


def test_a_hook_that_rounds_trains_close_to_single_and_not_equal() -> None:
    found = compare("ddp", Case(dtype="float64"), world_size=2, config={"comm_hook": "bf16_compress"})
    assert 1e-9 < found.loss < 1e-1
