"""The distributed optimizer: what each rank holds, masters of half types, groups, other optimizers, state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.steps import build_and_train, catch_refusal, prepare_gradient_step
from torch import Tensor, nn

from meshwright import MeshSizes, OptimizerConfig, count_tokens, optimizer_factory, resolve
from meshwright.testing import Case, assert_parity
from meshwright_testing import pool
from meshwright_testing.case import rank_microbatches
from meshwright_testing.models import build_tiny_model
from meshwright_testing.parity import (
    build_manager,
    find_max_difference,
    full_weights,
    run_reference,
    train_case,
    train_part,
    train_steps,
)

slow = pytest.mark.slow
BUCKETED: dict[str, Any] = {"engine": "bucketed"}
ZERO1 = {**BUCKETED, "use_distributed_optimizer": True}
OVERLAP = {**ZERO1, "overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 3000}


# -- bytes


def _held(config: dict[str, Any], dtype: str) -> tuple[int, int, int, int]:
    """Elements of this rank's parameters, gradient buffer, Adam state and masters."""
    manager: Any = build_and_train("ddp", config, {}, Case(dtype=dtype))
    (buffer,) = manager.module.buffers
    storages = {p.untyped_storage().data_ptr(): p for p in manager.model_parts[0].parameters()}
    parameters = sum(p.untyped_storage().nbytes() // p.element_size() for p in storages.values())
    adam = sum(value.numel() for values in manager.optimizer.state.values() for value in values.values() if value.dim())
    masters = sum(shard.optimizer_parameter.numel() for shard in manager.module.shards or () if shard.is_master)
    return parameters, buffer.grad_data.numel(), adam, masters


@pytest.mark.parametrize(
    ("config", "dtype", "ranks", "copies"),
    [
        pytest.param(ZERO1, "float32", 2, 1, marks=slow),
        pytest.param({**ZERO1, "num_distributed_optimizer_instances": 2}, "float32", 4, 2, marks=slow),
        ({**ZERO1, "grad_reduce_in_fp32": True}, "bfloat16", 2, 1),
    ],
    ids=str,
)
def test_ranks_hold_whole_models_and_one_optimizer_together(
    config: dict[str, Any], dtype: str, ranks: int, copies: int
) -> None:
    held, numel = pool(ranks).run(_held, config, dtype), sum(p.numel() for p in build_tiny_model().parameters())
    padded = held[0][0]
    assert numel <= padded < 1.05 * numel
    assert {(parameters, gradients) for parameters, gradients, _, _ in held} == {(padded, padded)}
    # The padding at the end of the last rank's part has no state.
    assert all(adam <= 2 * padded * copies // ranks for _, _, adam, _ in held)
    assert sum(adam for _, _, adam, _ in held) == copies * 2 * numel
    assert sum(masters for *_, masters in held) == (numel if dtype == "bfloat16" else 0)


# -- masters


BF16 = Case(dtype="bfloat16", max_norm=None, microbatches=1, sequences=8)


def _bf16(config: dict[str, Any]) -> dict[str, Tensor]:
    return full_weights(build_and_train("ddp", config, {}, BF16, steps=3))


def _emulated(fp32_gradients: bool, ranks: int) -> dict[str, Tensor]:
    """What two ranks must get, in one process: bf16 gradients of each share, summed, and AdamW on float32 copies."""
    case = replace(BF16, microbatches=ranks)
    manager = build_manager("single", {}, {}, case)
    model = manager.model_parts[0]
    masters = {name: nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
    optimizer = optimizer_factory(case.optimizer)(list(masters.items()))
    for step in range(3):
        sums: dict[str, Tensor] = {}
        batches = rank_microbatches(case, step, 0, 1)
        tokens = count_tokens(batches, manager.mesh)
        for batch in batches:
            manager.forward_backward([batch], num_tokens=tokens)
            for name, parameter in model.named_parameters():
                gradient = parameter.grad.float() if fp32_gradients else parameter.grad
                sums[name] = sums[name] + gradient if name in sums else gradient
                parameter.grad = None
        for name, master in masters.items():
            master.grad = sums[name].float()
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("fp32_gradients", "config"),
    [(True, OVERLAP), pytest.param(False, OVERLAP, marks=slow), pytest.param(False, ZERO1, marks=slow)],
    ids=str,
)
def test_bf16_training_is_that_of_float32_masters_to_the_last_bit(fp32_gradients: bool, config: dict[str, Any]) -> None:
    expected = pool(1).run(_emulated, fp32_gradients, 2)[0]
    for weights in pool(2).run(_bf16, {**config, "grad_reduce_in_fp32": fp32_gradients}):
        for name, weight in expected.items():
            assert torch.equal(weights[name], weight), name


def _bf16_sum(options: dict[str, Any]) -> Tensor:
    """The gradient of a bf16 model over many microbatches."""
    case = Case(dtype="bfloat16", microbatches=12, sequences=24, max_norm=None)
    manager = build_manager("ddp", {**BUCKETED, **options}, {}, case)
    prepare_gradient_step(manager, case)()
    return torch.cat([p.grad.flatten().float() for p in manager.model_parts[0].parameters()])


@slow
def test_local_accumulation_in_float32_is_closer_to_sums_in_float32() -> None:
    exact = pool(1).run(_bf16_sum, {"grad_reduce_in_fp32": True})[0]
    name = "param_name_patterns_for_fp32_local_accumulation"
    sums = [pool(1).run(_bf16_sum, {name: patterns})[0] for patterns in ((), ("*layers.0.*",), ("all",))]
    errors = [float((each - exact).norm()) for each in sums]
    assert errors[2] == 0.0  # rounded once, as the sum in float32 is
    assert errors[2] < errors[1] < errors[0]


# -- optimizers


@slow
@pytest.mark.parametrize(("name", "options"), [("SGD", {"momentum": 0.9}), ("AdamW", {"amsgrad": True})])
def test_any_elementwise_optimizer_reaches_parity(name: str, options: dict[str, Any]) -> None:
    optimizer = OptimizerConfig(name=name, lr=1e-2, weight_decay=0.1, options=options)
    assert_parity("ddp", Case(optimizer=optimizer, tied=True), world_size=4, config=OVERLAP)


@slow
@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_optimizers_that_look_at_shapes_are_refused_on_all_ranks(name: str) -> None:
    case = Case(optimizer=OptimizerConfig(name=name, lr=1e-2))
    first, second = pool(2).run(catch_refusal, "ddp", ZERO1, {}, case)
    assert first == second
    assert first.startswith(("StrategyError", "ConfigError"))


# -- state


@slow
@pytest.mark.parametrize("config", [ZERO1, {**OVERLAP, "num_distributed_optimizer_instances": 2}], ids=str)
def test_state_goes_to_single_and_to_other_numbers_of_ranks_and_back(config: dict[str, Any]) -> None:
    case = Case(steps=4, tied=True)
    state = None
    for ranks, strategy, step in ((4, "ddp", 0), (1, "single", 1), (2, "ddp", 2), (4, "ddp", 3)):
        options = config if strategy == "ddp" else {}
        parts = pool(ranks).run(train_part, strategy, options, {}, case, range(step, step + 1), state)
        state = parts[0][1]
        assert all(part == {"model": {}, "optimizer": {}} for _, part in parts[1:])
    expected = run_reference(case)
    last = replace(expected, losses=expected.losses[-1:], norms=expected.norms[-1:])
    assert find_max_difference([part for part, _ in parts], last).worst <= 1e-9


def _bf16_part(steps: tuple[int, int], state: dict[str, Any] | None) -> tuple[Any, Any, list[str]]:
    case = Case(dtype="bfloat16")
    manager = build_manager("ddp", {**OVERLAP, "grad_reduce_in_fp32": True}, {}, case)
    if state is not None:
        manager.load_state_dict(state, full=True)
        # This rank's own state, too.
        own = manager.state_dict()
        manager = build_manager("ddp", {**OVERLAP, "grad_reduce_in_fp32": True}, {}, case, seed=7)
        manager.load_state_dict(own)
    losses, _, _ = train_steps(manager, case, range(*steps))
    saved = manager.state_dict(full=True)
    return losses, saved, sorted(saved["optimizer"].get("masters", {}))


@slow
def test_masters_are_saved_so_that_training_resumes_to_the_last_bit() -> None:
    losses, whole, _ = pool(2).run(_bf16_part, (0, 4), None)[0]
    first, state, masters = pool(2).run(_bf16_part, (0, 2), None)[0]
    assert len(masters) == len(list(build_tiny_model().named_parameters()))
    second, resumed, _ = pool(2).run(_bf16_part, (2, 4), state)[0]
    assert first + second == losses
    for name, weight in whole["model"].items():
        assert torch.equal(resumed["model"][name], weight), name
    # Without the masters, what was rounded away is lost.
    del state["optimizer"]["masters"]
    third = pool(2).run(_bf16_part, (2, 4), state)[0][1]
    assert any(not torch.equal(third["model"][name], weight) for name, weight in whole["model"].items())


def _masters_after_loading(optimizer_first: bool) -> list[str]:
    """Names of masters that are not the loaded weights, of state that holds none."""
    case = Case(dtype="bfloat16")
    other = build_manager("ddp", {}, {}, case, seed=5)
    train_steps(other, case, range(1))
    state = other.state_dict(full=True)
    stack, _ = resolve("ddp", MeshSizes(), other.mesh.world.size, config=ZERO1)
    manager = stack.build(other.mesh)
    manager.parallelize(build_tiny_model(dtype=torch.bfloat16))
    if optimizer_first:
        manager.build_optimizer(optimizer_factory(case.optimizer))
    manager.load_state_dict(state if optimizer_first else {"model": state.get("model", {})}, full=True)
    if not optimizer_first:
        manager.build_optimizer(optimizer_factory(case.optimizer))
    masters = manager.state_dict(full=True)["optimizer"].get("masters", {})
    return [name for name, master in masters.items() if not torch.equal(master, state["model"][name].float())]


@slow
@pytest.mark.parametrize("optimizer_first", [True, False])
def test_masters_take_the_weights_of_state_that_has_none(optimizer_first: bool) -> None:
    assert pool(2).run(_masters_after_loading, optimizer_first) == [[], []]


# -- sums that do not depend on their order


@pytest.mark.parametrize(
    ("dtype", "reduce_dtype", "config", "ranks"),
    [
        pytest.param("float32", "float64", BUCKETED, 4, marks=slow),
        pytest.param("float32", "float64", ZERO1, 4, marks=slow),
        ("float32", "float64", OVERLAP, 2),
        pytest.param("bfloat16", "float32", BUCKETED, 4, marks=slow),
    ],
    ids=str,
)
def test_losses_are_those_of_single_to_the_last_bit_with_wide_sums(
    dtype: str, reduce_dtype: str, config: dict[str, Any], ranks: int
) -> None:
    wide = {"reduce_dtype": reduce_dtype}
    case = Case(dtype=dtype, steps=4, microbatches=12 // ranks, tied=True)
    # The same microbatches of one sequence.
    (expected,) = pool(1).run(train_case, "single", wide, {}, replace(case, microbatches=12))
    found = find_max_difference(pool(ranks).run(train_case, "ddp", {**config, **wide}, {}, case), expected)
    assert (found.loss, found.weight) == (0.0, 0.0), found
