"""The functions for loops written by hand, on a plain DeviceMesh."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from support.measurements import OperationCounter
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshwright import MeshwrightError, OptimizerConfig
from meshwright.model import deferred_init as deferred
from meshwright.step.tokens import sum_token_loss
from meshwright.testing import Case
from meshwright_fsdp2 import (
    apply_fsdp_sharding_recursively,
    fsdp2_strategy_parallelize,
    import_class_from_path,
    import_classes_from_paths,
    unshard_fsdp2_model,
)
from meshwright_fsdp2._compat import _find_param_groups
from meshwright_testing import pool
from meshwright_testing.case import build_global_batch, rank_microbatches
from meshwright_testing.models import build_tiny_model
from meshwright_testing.parity import run_reference

slow = pytest.mark.slow
PLAIN = MixedPrecisionPolicy()
CASE = Case(max_norm=None)


def test_signatures_are_those_of_the_reference() -> None:
    def defaults(function: Any) -> dict[str, Any]:
        return {name: p.default for name, p in inspect.signature(function).parameters.items()}

    empty = inspect.Parameter.empty
    expected = {"model": empty, "device_mesh": empty, "param_dtype": torch.bfloat16, "mp_policy": None}
    expected |= {"offload_policy": None, "sequence_parallel": False, "activation_checkpointing": False}
    expected |= {"cpu_offload": False, "tp_shard_plan": None, "dp_mesh_name": "data_parallel"}
    expected |= {"tp_mesh_name": "tensor_parallel", "dp_cp_mesh_name": "dp_cp"}
    assert list(defaults(fsdp2_strategy_parallelize).items()) == list(expected.items())
    expected = {"module": empty, "mesh": empty, "mp_policy": empty, "offload_policy": None}
    assert defaults(apply_fsdp_sharding_recursively) == expected
    assert list(defaults(unshard_fsdp2_model)) == ["model"]
    assert import_class_from_path("torch.optim.AdamW") is torch.optim.AdamW
    assert import_classes_from_paths(["torch.nn.Linear"]) == [nn.Linear]


def _train(shape: tuple[int, ...], names: tuple[str, ...], options: dict[str, Any]) -> tuple[list[float], Any, Any]:
    """A loop by hand, with the loss of each rank divided by the tokens of all."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    deferred.MIN_TRACKED_BYTES = 64
    meta, unshard = options.pop("meta", False), options.pop("unshard", False)
    with torch.device("meta" if meta else "cpu"):
        model = build_tiny_model()
    model = fsdp2_strategy_parallelize(model, mesh, **{"mp_policy": PLAIN, **options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    # Ranks along the innermost axis, if it is of tensors, have the same data.
    tp_size = shape[-1] if names[-1] == "tensor_parallel" else 1
    size, rank = mesh.size() // tp_size, mesh.get_rank() // tp_size
    losses = []
    for step in range(3):
        (batch,) = rank_microbatches(CASE, step, rank, size)
        tokens = (build_global_batch(CASE, step)["labels"][:, 1:] != -100).sum()
        output = model(input_ids=batch["input_ids"], use_cache=False)
        loss = sum_token_loss(output.logits, batch["labels"]) / tokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.distributed.all_reduce(loss.detach_())
        losses.append(float(loss) / tp_size)
        if unshard:
            with torch.no_grad():
                outside = model(input_ids=batch["input_ids"], use_cache=False).logits
            with unshard_fsdp2_model(model), torch.no_grad():
                inside = model(input_ids=batch["input_ids"], use_cache=False).logits
                gathered = {p.device_mesh.ndim for p in model.parameters() if isinstance(p, DTensor)}
            torch.testing.assert_close(inside, outside, rtol=0, atol=1e-12)
            assert gathered == ({1} if tp_size > 1 else set())
            assert all(isinstance(p, DTensor) for p in model.parameters())
    placements = {p.placements for p in model.parameters()}
    return losses, placements, output.logits.dtype


def _expected() -> list[float]:
    return run_reference(Case(max_norm=None, optimizer=OptimizerConfig(lr=1e-2))).losses


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (("data_parallel",), {"meta": True, "unshard": True, "cpu_offload": True}),
        pytest.param(("rows",), {"dp_mesh_name": "rows", "activation_checkpointing": True}, marks=slow),
        pytest.param(("dp_cp",), {"dp_mesh_name": "not there", "activation_checkpointing": "selective"}, marks=slow),
    ],
    ids=str,
)
def test_a_loop_by_hand_has_the_losses_of_one_process(names: tuple[str, ...], options: dict[str, Any]) -> None:
    for losses, placements, _ in pool(2).run(_train, (2,), names, options):
        assert losses == pytest.approx(_expected(), abs=1e-9)
        assert placements == {(Shard(0),)}


def _acts(cases: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What a step computes and sends, and where shards lie, on two ranks of tensor parallelism."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    ids, found = torch.arange(16).expand(2, 16), []
    for options in cases:
        model = fsdp2_strategy_parallelize(build_tiny_model(), mesh, **{"mp_policy": PLAIN, **options})
        with OperationCounter() as counting:
            logits = model(input_ids=ids, use_cache=False).logits
            sum_token_loss(logits, ids).backward()
        block = model.model.layers[0]
        operators = (
            "aten._scaled_dot_product_flash_attention_for_cpu.default",
            "aten.silu.default",
            "_c10d_functional.reduce_scatter_tensor.default",
        )
        offload = type(block._get_fsdp_state()._fsdp_param_group.offload_policy)
        gate = str(block.mlp.gate_proj.weight.placements[-1])
        found.append((*(counting.counts[name] for name in operators), gate, offload.__name__, logits.dtype))
    return found


PLAN = {"model.layers.*.mlp.up_proj": "colwise_gather_output"}
ACTS: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
    ({}, (3, 3, 0, "S(0)", "OffloadPolicy", torch.float64)),
    ({"activation_checkpointing": True}, (6, 6, 0, "S(0)", "OffloadPolicy", torch.float64)),
    ({"activation_checkpointing": "selective"}, (3, 6, 0, "S(0)", "OffloadPolicy", torch.float64)),
    # Into and out of attention and the feed-forward of each block, in forward and backward.
    ({"sequence_parallel": True}, (3, 3, 4 * 3, "S(0)", "OffloadPolicy", torch.float64)),
    ({"mp_policy": None}, (3, 3, 0, "S(0)", "OffloadPolicy", torch.float32)),
    ({"cpu_offload": True}, (3, 3, 0, "S(0)", "CPUOffloadPolicy", torch.float64)),
    (
        {"offload_policy": CPUOffloadPolicy(pin_memory=False), "tp_shard_plan": PLAN},
        (3, 3, 0, "R", "CPUOffloadPolicy", torch.float64),
    ),
]


@slow
def test_each_option_acts() -> None:
    assert pool(2).run(_acts, [options for options, _ in ACTS]) == [[expected for _, expected in ACTS]] * 2


def _along(axes: tuple[str, ...], options: dict[str, Any]) -> tuple[tuple[int, ...], list[int]]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=axes)
    if "dp_cp_mesh_name" in options:
        mesh._flatten(options["dp_cp_mesh_name"])
    weight = fsdp2_strategy_parallelize(build_tiny_model(), mesh, **options).model.layers[0].mlp.gate_proj.weight
    return tuple(weight.device_mesh.shape), [each.dim for each in weight.placements]


@pytest.mark.parametrize(
    ("axes", "options", "expected"),
    [
        (("one", "two"), {"dp_mesh_name": "one", "tp_mesh_name": "two"}, ((1, 2), [0, 0])),
        (("one", "two"), {"dp_mesh_name": "two"}, ((2,), [0])),
        (("data_parallel", "two"), {"dp_cp_mesh_name": "both"}, ((2,), [0])),
    ],
    ids=str,
)
def test_each_name_of_an_axis_acts(axes: tuple[str, ...], options: dict[str, Any], expected: Any) -> None:
    assert pool(2).run(_along, axes, options) == [expected] * 2


@slow
def test_a_pair_of_axes_makes_hsdp_and_an_axis_of_one_rank_for_tensors_is_none() -> None:
    options = {"dp_mesh_name": ("replicate", "shard"), "tp_mesh_name": "tp"}
    for losses, placements, _ in pool(4).run(_train, (2, 2, 1), ("replicate", "shard", "tp"), options):
        assert losses == pytest.approx(_expected(), abs=1e-9)
        assert placements == {(Replicate(), Shard(0))}


@slow
@pytest.mark.parametrize(
    "options",
    [
        {"sequence_parallel": True, "activation_checkpointing": True},
        {"tp_shard_plan": {"model.layers.*.mlp.gate_proj": "colwise_gather_output"}, "meta": True},
    ],
    ids=str,
)
def test_a_loop_by_hand_on_two_axes(options: dict[str, Any]) -> None:
    for losses, *_ in pool(4).run(_train, (2, 2), ("data_parallel", "tensor_parallel"), {"unshard": True, **options}):
        assert losses == pytest.approx(_expected(), abs=1e-9)


@slow
def test_precision_by_default_computes_in_bfloat16_and_gives_float32() -> None:
    for losses, _, dtype in pool(2).run(_train, (2,), ("data_parallel",), {"mp_policy": None}):
        assert dtype is torch.float32
        assert losses == pytest.approx(_expected(), rel=2e-2)
        assert losses != pytest.approx(_expected(), abs=1e-9)
    (first, *_) = pool(2).run(_train, (2,), ("data_parallel",), {"mp_policy": None, "param_dtype": torch.float64})
    assert first[0] == pytest.approx(_expected(), rel=1e-5)


def _refused() -> list[str]:
    found = []
    for shape, names, options in (
        ((2,), ("dp",), {}),
        ((1, 2), ("data_parallel", "context_parallel"), {}),
        ((1, 2), ("data_parallel", "tp"), {}),
        ((1, 2), ("data_parallel", "tensor_parallel"), {}),
        ((2,), ("data_parallel",), {"offload_policy": CPUOffloadPolicy()}),
    ):
        try:
            fsdp2_strategy_parallelize(
                build_tiny_model(), init_device_mesh("cpu", shape, mesh_dim_names=names), **options
            )
        except MeshwrightError as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("accepted")
    return found


def test_meshes_and_policies_that_cannot_be_used_are_refused_on_all_ranks() -> None:
    first, second = pool(2).run(_refused)
    assert first == second
    missing, context, other, accepted, pinned = first
    assert missing.startswith("MeshError: the mesh has no axis 'data_parallel'; its axes are ('dp',)")
    for name, text in (("context_parallel", context), ("tp", other)):
        assert text.startswith("MeshError: the mesh {'data_parallel': 1, '" + name + "': 2} has 2 ranks")
        assert "dp_cp_mesh_name" in text
    assert accepted == "accepted"
    assert pinned.startswith("StrategyError: offload_policy has pin_memory=True, but the mesh is on the CPU")


def _sharded_lists() -> dict[str, list[str]]:
    """The names of the modules that are sharded in each kind of container; or the error."""
    mesh, found = init_device_mesh("cpu", (2,)), {}

    def layers(count: int = 2) -> list[nn.Module]:
        return [nn.Linear(4, 4) for _ in range(count)]

    containers: dict[str, nn.Module] = {
        "no list": nn.Sequential(*layers()),
        "plain layers": nn.ModuleList(layers(3)),
        "a list within a model": nn.Sequential(nn.Linear(4, 4), nn.ModuleList(layers())),
        "lists of lists": nn.ModuleList([nn.ModuleList(layers()), nn.ModuleList([nn.ModuleList(layers(1))])]),
        "a list of a dict": nn.ModuleDict({"a": nn.ModuleList(layers()), "b": nn.Linear(4, 4)}),
        "parameters": nn.ModuleList([nn.ParameterList([nn.Parameter(torch.ones(4))])]),
    }
    for kind, container in containers.items():
        try:
            apply_fsdp_sharding_recursively(container, mesh, None)
        except MeshwrightError as error:
            found[kind] = [f"{type(error).__name__}: {error}"]
        else:
            found[kind] = [name for name, each in container.named_modules() if isinstance(each, FSDPModule)]
    return found


def test_members_of_lists_are_sharded_whatever_they_are() -> None:
    for found in pool(2).run(_sharded_lists):
        (refused,) = found.pop("parameters")
        assert refused.startswith("ModelError: blocks.0 is a ParameterList without a forward")
        assert found == {
            "no list": [],
            "plain layers": ["0", "1", "2"],
            "a list within a model": ["1.0", "1.1"],
            "lists of lists": ["0.0", "0.1", "1.0.0"],
            "a list of a dict": ["a.0", "a.1"],
        }


def _recursively() -> tuple[list[str], list[str], list[bool]]:
    mesh = init_device_mesh("cpu", (2,))
    model, stack = build_tiny_model(), build_tiny_model().model.layers
    apply_fsdp_sharding_recursively(model, mesh, None)
    offloading = CPUOffloadPolicy(pin_memory=False)
    apply_fsdp_sharding_recursively(stack, mesh, MixedPrecisionPolicy(torch.float32), offload_policy=offloading)
    names = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    left = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    groups = [group for block in stack for group in _find_param_groups(block)]
    if any(group.offload_policy is not offloading for group in groups):
        raise AssertionError("a block is not offloaded")
    return names, left, [group.post_forward_mesh_info is not None for group in groups]


def test_blocks_are_sharded_the_last_keeps_its_parameters_and_the_rest_is_left() -> None:
    for names, left, freed in pool(2).run(_recursively):
        assert names == [f"model.layers.{index}" for index in range(3)]
        assert left == ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
        assert freed == [True, True, False]


def _precise() -> list[tuple[torch.dtype, ...]]:
    """Dtypes in which gradients are summed, and of the output."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data_parallel",))
    found = []
    for given in (torch.bfloat16, torch.float32, torch.float64):
        model = fsdp2_strategy_parallelize(build_tiny_model(), mesh, param_dtype=given)
        dtypes = [group.mp_policy.reduce_dtype for group in _find_param_groups(model)]
        output = model(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False).logits
        found.append((*dtypes, output.dtype))
    return found


@slow
def test_gradients_are_summed_in_at_least_the_dtype_of_parameters() -> None:
    fp32, fp64 = (torch.float32,) * 2, (torch.float64,) * 2
    assert pool(2).run(_precise) == [[fp32, fp32, fp64]] * 2
