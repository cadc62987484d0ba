"""The distributed optimizer: what each rank holds, masters of half types, groups, other optimizers, state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright import (
    ConfigError,
    Mesh,
    MeshSizes,
    OptimizerConfig,
    StrategyError,
    count_tokens,
    open_world,
    optimizer_factory,
    resolve,
)
from meshwright.testing import Case, assert_parity, pool
from meshwright.testing.case import share
from meshwright.testing.memory import measure_memory
from meshwright.testing.models import tiny_model
from meshwright.testing.parity import (
    build_manager,
    difference,
    full_weights,
    reference,
    train_case,
    train_part,
    train_steps,
)
from meshwright_ddp import DDPConfig
from meshwright_ddp.bucketed import BucketedDataParallel

BUCKETED: dict[str, Any] = {"engine": "bucketed"}
ZERO1 = {**BUCKETED, "use_distributed_optimizer": True}
OVERLAP = {**ZERO1, "overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 3000}


# -- bytes


def _held(config: dict[str, Any], dtype: str) -> dict[str, int]:
    """Bytes of this rank's parameters, gradients, Adam state and masters, from a model of 102,976 parameters."""
    settings = {
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "tie_word_embeddings": False,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **settings), dtype=getattr(torch, dtype))
    world = open_world("cpu")
    stack, degrees = resolve("ddp", MeshSizes(), world.size, config=config)
    mesh = Mesh(degrees, world)
    manager: Any = stack.build(mesh)
    manager.parallelize(model)
    optimizer = manager.build_optimizer(optimizer_factory(OptimizerConfig()))
    ids = torch.arange(16).view(1, 16)
    batches = [{"input_ids": ids, "labels": ids}]
    manager.forward_backward(batches, num_tokens=count_tokens(batches, mesh))
    manager.optimizer_step()
    (buffer,) = manager.module.buffers
    parameters = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    states = [value for values in optimizer.state.values() for value in values.values() if value.dim()]
    masters = [shard.tensor for shard in manager.module.shards or () if shard.is_master]
    return {
        "param": sum(parameters.values()),
        "grad": _bytes([buffer.gradients]),
        "Adam": _bytes(states),
        "master": _bytes(masters),
    }


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize(
    ("config", "dtype", "expected"),
    [
        (BUCKETED, "float32", (411_904, 411_904, 823_808, 0)),
        (ZERO1, "float32", (412_160, 412_160, 206_080, 0)),
        ({**ZERO1, "num_distributed_optimizer_instances": 2}, "float32", (412_160, 412_160, 412_160, 0)),
        ({**ZERO1, "grad_reduce_in_fp32": True}, "bfloat16", (206_080, 412_160, 206_080, 103_040)),
    ],
    ids=str,
)
def test_each_rank_holds_the_bytes_of_the_table(
    config: dict[str, Any], dtype: str, expected: tuple[int, int, int, int]
) -> None:
    held = pool(4).run(_held, config, dtype)
    assert tuple(held[0].values()) == expected
    # The padding at the end of the last rank's part has no state.
    assert all(one[key] <= held[0][key] for one in held for key in one)
    if "use_distributed_optimizer" in config:
        copies = config.get("num_distributed_optimizer_instances", 1)
        assert sum(one["Adam"] for one in held) == copies * 2 * 4 * 102_976
        assert sum(one["master"] for one in held) == (4 * 102_976 if dtype == "bfloat16" else 0)


def _held_at_the_step(view: bool | None) -> int:
    """Bytes that a rank holds when it is about to step for the second time: ours, or torch's two engines together, with
    gradients and parameters as views of their buckets or not."""
    world = open_world("cpu")
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    if view is None:
        mesh = Mesh(MeshSizes().resolve(world.size, frozenset({"dp_replicate"})), world)
        engine: Any = BucketedDataParallel(model, DDPConfig(**ZERO1, overlap_grad_reduce=True, bucket_size=65536), mesh)
        optimizer: Any = torch.optim.AdamW([shard.tensor for shard in engine.shards])
        optimizer.register_step_post_hook(lambda *_: engine.shards_were_stepped())
    else:
        engine = DistributedDataParallel(model, bucket_cap_mb=0.25, gradient_as_bucket_view=view)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=view)

    def gradients() -> None:
        engine(torch.ones(1, 256)).sum().backward()
        if view is None:
            engine.finish_grad_sync()

    gradients()
    optimizer.step()
    optimizer.zero_grad()
    return measure_memory(gradients, [model], getattr(optimizer, "optim", optimizer)).after.total


def test_the_distributed_optimizer_holds_no_more_than_torchs() -> None:
    whole = 8 * 256 * 256 * 4
    ours, plain, views = (max(pool(4).run(_held_at_the_step, view)) for view in (None, False, True))
    # Parameters, gradients, and Adam's two over four ranks; torch by itself holds gradients twice.
    assert ours == pytest.approx(2.5 * whole, rel=1e-3)
    assert views == pytest.approx(2.5 * whole, rel=1e-3)
    assert plain == pytest.approx(3.5 * whole, rel=1e-3)


# -- masters


def _bf16(config: dict[str, Any]) -> dict[str, Tensor]:
    case = Case(dtype="bfloat16", max_norm=None, microbatches=1, sequences=8)
    manager = build_manager("ddp", config, {}, case)
    train_steps(manager, case, range(3))
    return full_weights(manager)


def _emulated(fp32_gradients: bool, ranks: int) -> dict[str, Tensor]:
    """What two ranks must get, in one process: bf16 gradients of each share, summed, and AdamW on float32 copies."""
    case = Case(dtype="bfloat16", max_norm=None, microbatches=ranks, sequences=8)
    manager = build_manager("single", {}, {}, case)
    model = manager.model_parts[0]
    masters = {name: nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
    optimizer = optimizer_factory(case.optimizer)(list(masters.items()))
    for step in range(3):
        batches = share(case, step, 0, 1)
        tokens = count_tokens(batches, manager.mesh)
        sums: dict[str, Tensor] = {}
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


@pytest.mark.parametrize("fp32_gradients", [True, False])
@pytest.mark.parametrize("overlap", [{}, OVERLAP])
def test_bf16_training_is_that_of_float32_masters_to_the_last_bit(
    fp32_gradients: bool, overlap: dict[str, Any]
) -> None:
    config = {**ZERO1, **overlap, "grad_reduce_in_fp32": fp32_gradients}
    expected = pool(1).run(_emulated, fp32_gradients, 2)[0]
    for weights in pool(2).run(_bf16, config):
        for name, weight in expected.items():
            assert torch.equal(weights[name], weight), name


def _bf16_local(patterns: tuple[str, ...]) -> Tensor:
    """The gradient of a bf16 model over many microbatches."""
    case = Case(dtype="bfloat16", microbatches=12, sequences=24, max_norm=None)
    config = {**BUCKETED, "param_name_patterns_for_fp32_local_accumulation": patterns}
    manager = build_manager("ddp", config, {}, case)
    batches = share(case, 0, manager.mesh.data_rank, manager.mesh.data_size)
    manager.forward_backward(batches, num_tokens=count_tokens(batches, manager.mesh))
    return torch.cat([p.grad.flatten().float() for p in manager.model_parts[0].parameters()])


def _bf16_in_fp32() -> Tensor:
    case = Case(dtype="bfloat16", microbatches=12, sequences=24, max_norm=None)
    manager = build_manager("ddp", {**BUCKETED, "grad_reduce_in_fp32": True}, {}, case)
    batches = share(case, 0, manager.mesh.data_rank, manager.mesh.data_size)
    manager.forward_backward(batches, num_tokens=count_tokens(batches, manager.mesh))
    return torch.cat([p.grad.flatten().float() for p in manager.model_parts[0].parameters()])


def test_local_accumulation_in_float32_is_closer_to_sums_in_float32() -> None:
    exact = pool(1).run(_bf16_in_fp32)[0]
    errors = [
        float((pool(1).run(_bf16_local, patterns)[0] - exact).norm()) for patterns in ((), ("*layers.0.*",), ("all",))
    ]
    assert errors[2] == 0.0  # rounded once, as the sum in float32 is
    assert errors[2] < errors[1] < errors[0]


# -- optimizers


@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerConfig(name="SGD", lr=0.1, weight_decay=0.1, options={"momentum": 0.9, "nesterov": True}),
        OptimizerConfig(name="Adagrad", lr=0.05),
        OptimizerConfig(name="RMSprop", lr=1e-3, options={"centered": True}),
        OptimizerConfig(name="AdamW", lr=1e-2, weight_decay=0.1, options={"amsgrad": True}),
    ],
    ids=lambda optimizer: optimizer.name,
)
def test_any_elementwise_optimizer_reaches_parity(optimizer: OptimizerConfig) -> None:
    assert_parity("ddp", Case(optimizer=optimizer, tied=True), world_size=4, config=OVERLAP)


def _built(name: str) -> str:
    try:
        build_manager("ddp", ZERO1, {}, Case(optimizer=OptimizerConfig(name=name, lr=1e-2)))
    except (StrategyError, ConfigError) as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_optimizers_that_look_at_shapes_are_refused_on_all_ranks(name: str) -> None:
    answers = pool(2).run(_built, name)
    assert len(set(answers)) == 1
    assert answers[0] != "accepted"


def _groups() -> list[tuple[float, list[str]]]:
    manager = build_manager("ddp", OVERLAP, {}, Case())
    with manager.unshard():
        pass
    optimizer: Any = manager.optimizer  # type: ignore[attr-defined]
    names: Any = manager.parameter_names  # type: ignore[attr-defined]
    return [(group["weight_decay"], [names[p] for p in group["params"]]) for group in optimizer.param_groups]


def test_groups_and_names_are_those_of_the_parameters() -> None:
    names = [name for name, _ in tiny_model().named_parameters()]
    for (decay, decayed), (none, exempt) in pool(2).run(_groups):
        assert (decay, none) == (0.1, 0.0)
        assert sorted([*decayed, *exempt]) == sorted(names)
        assert [name for name in names if name in decayed] == decayed
        assert all("norm" in name or "bias" in name for name in exempt)


# -- state


@pytest.mark.parametrize("config", [ZERO1, OVERLAP, {**OVERLAP, "num_distributed_optimizer_instances": 2}], ids=str)
def test_state_goes_to_single_and_to_other_numbers_of_ranks_and_back(config: dict[str, Any]) -> None:
    case = Case(steps=4, tied=True)
    state = None
    for ranks, strategy, step in ((4, "ddp", 0), (1, "single", 1), (2, "ddp", 2), (4, "ddp", 3)):
        options = config if strategy == "ddp" else {}
        steps = range(step, step + 1)
        parts = pool(ranks).run(train_part, strategy, options, {}, case, steps, state)
        state = parts[0][1]
        assert all(part == {"model": {}, "optimizer": {}} for _, part in parts[1:])
    expected = reference(case)
    last = expected.losses[-1:], expected.norms[-1:]
    found = difference([part for part, _ in parts], replace(expected, losses=last[0], norms=last[1]))
    assert found.worst <= 1e-9


def _bf16_part(steps: tuple[int, int], state: dict[str, Any] | None, full: bool) -> tuple[Any, Any, list[str]]:
    case = Case(dtype="bfloat16")
    manager = build_manager("ddp", {**OVERLAP, "grad_reduce_in_fp32": True}, {}, case)
    if state is not None:
        manager.load_state_dict(state, full=full)
    losses, _, _ = train_steps(manager, case, range(*steps))
    saved = manager.state_dict(full=full)
    return losses, saved, sorted(saved["optimizer"].get("masters", {}))


def test_masters_are_saved_so_that_training_resumes_to_the_last_bit() -> None:
    whole = pool(2).run(_bf16_part, (0, 4), None, True)
    first = pool(2).run(_bf16_part, (0, 2), None, True)
    assert len(first[0][2]) == len(list(tiny_model().named_parameters()))
    second = pool(2).run(_bf16_part, (2, 4), first[0][1], True)
    assert first[0][0] + second[0][0] == whole[0][0]
    for name, weight in whole[0][1]["model"].items():
        assert torch.equal(second[0][1]["model"][name], weight), name
    # Without the masters, what was rounded away is lost.
    del first[0][1]["optimizer"]["masters"]
    third = pool(2).run(_bf16_part, (2, 4), first[0][1], True)
    assert any(not torch.equal(third[0][1]["model"][name], whole[0][1]["model"][name]) for name in whole[0][1]["model"])


def _masters_after_loading(optimizer_first: bool) -> list[str]:
    """Names of masters that are not the loaded weights, of state that holds none."""
    case = Case(dtype="bfloat16")
    other = build_manager("ddp", {}, {}, case, seed=5)
    train_steps(other, case, range(1))
    state = other.state_dict(full=True)
    stack, _ = resolve("ddp", MeshSizes(), other.mesh.world.size, config=ZERO1)
    manager = stack.build(other.mesh)
    manager.parallelize(tiny_model(dtype=torch.bfloat16))
    if optimizer_first:
        manager.build_optimizer(optimizer_factory(case.optimizer))
    manager.load_state_dict(state if optimizer_first else {"model": state.get("model", {})}, full=True)
    if not optimizer_first:
        manager.build_optimizer(optimizer_factory(case.optimizer))
    masters = manager.state_dict(full=True)["optimizer"].get("masters", {})
    return [name for name, master in masters.items() if not torch.equal(master, state["model"][name].float())]


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_masters_take_the_weights_of_state_that_has_none(optimizer_first: bool) -> None:
    assert pool(2).run(_masters_after_loading, optimizer_first) == [[], []]


def _own_state_and_back() -> list[float]:
    case = Case(dtype="bfloat16")
    losses = []
    for resumed in (False, True):
        manager = build_manager("ddp", OVERLAP, {}, case)
        train_steps(manager, case, range(2))
        if resumed:
            state = manager.state_dict()
            manager = build_manager("ddp", OVERLAP, {}, case, seed=7)
            manager.load_state_dict(state)
        losses += train_steps(manager, case, range(2, 4))[0]
    return losses


def test_each_ranks_own_state_resumes_too() -> None:
    for losses in pool(2).run(_own_state_and_back):
        assert losses[:2] == losses[2:]


# -- sums that do not depend on their order


@pytest.mark.parametrize(
    ("dtype", "reduce_dtype", "config"),
    [
        ("float32", "float64", BUCKETED),
        ("float32", "float64", ZERO1),
        ("float32", "float64", OVERLAP),
        ("bfloat16", "float32", BUCKETED),
    ],
    ids=str,
)
def test_losses_are_those_of_single_to_the_last_bit_with_wide_sums(
    dtype: str, reduce_dtype: str, config: dict[str, Any]
) -> None:
    wide = {"reduce_dtype": reduce_dtype}
    case = Case(dtype=dtype, steps=4, microbatches=3, tied=True)
    # The same microbatches of one sequence.
    (expected,) = pool(1).run(train_case, "single", wide, {}, replace(case, microbatches=12))
    found = difference(pool(4).run(train_case, "ddp", {**config, **wide}, {}, case), expected)
    assert (found.loss, found.weight) == (0.0, 0.0), found
