"""The functions for loops written by hand, on a plain DeviceMesh."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

import meshwright_fsdp2
from meshwright import MeshError, MeshwrightError, StrategyError
from meshwright.model import drawn_weights as deferred
from meshwright.step.token_loss import token_loss_sum
from meshwright.testing import Case, pool
from meshwright.testing.case import global_batch, share
from meshwright.testing.models import tiny_model
from meshwright.testing.observe import Counting
from meshwright.testing.parity import reference
from meshwright_fsdp2 import (
    apply_fsdp_sharding_recursively,
    fsdp2_strategy_parallelize,
    import_class_from_path,
    import_classes_from_paths,
    unshard_fsdp2_model,
)
from meshwright_fsdp2._compat import _parameter_groups

PLAIN = MixedPrecisionPolicy()
CASE = Case(max_norm=None)


def test_signatures_are_those_of_the_reference() -> None:
    def defaults(function: Any) -> dict[str, Any]:
        return {name: p.default for name, p in inspect.signature(function).parameters.items()}

    empty = inspect.Parameter.empty
    assert defaults(fsdp2_strategy_parallelize) == {
        "model": empty,
        "device_mesh": empty,
        "param_dtype": torch.bfloat16,
        "mp_policy": None,
        "offload_policy": None,
        "sequence_parallel": False,
        "activation_checkpointing": False,
        "cpu_offload": False,
        "tp_shard_plan": None,
        "dp_mesh_name": "data_parallel",
        "tp_mesh_name": "tensor_parallel",
        "dp_cp_mesh_name": "dp_cp",
    }
    assert defaults(apply_fsdp_sharding_recursively) == {
        "module": empty,
        "mesh": empty,
        "mp_policy": empty,
        "offload_policy": None,
    }
    assert list(defaults(unshard_fsdp2_model)) == ["model"]
    assert import_class_from_path("torch.optim.AdamW") is torch.optim.AdamW
    assert import_classes_from_paths(["torch.nn.Linear"]) == [nn.Linear]


def test_names_are_found_at_the_package_and_unknown_ones_are_not() -> None:
    assert all(getattr(meshwright_fsdp2, name) is not None for name in meshwright_fsdp2.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = meshwright_fsdp2.no_such_name


def _train(shape: tuple[int, ...], names: tuple[str, ...], options: dict[str, Any]) -> tuple[list[float], Any, Any]:
    """A loop by hand, with the loss of each rank divided by the tokens of all."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    deferred.LARGE_BYTES = 64
    meta, unshard = options.pop("meta", False), options.pop("unshard", False)
    with torch.device("meta" if meta else "cpu"):
        model = tiny_model()
    model = fsdp2_strategy_parallelize(model, mesh, **{"mp_policy": PLAIN, **options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    losses = []
    for step in range(3):
        (batch,) = share(CASE, step, rank, size)
        tokens = (global_batch(CASE, step)["labels"][:, 1:] != -100).sum()
        output = model(input_ids=batch["input_ids"], use_cache=False)
        loss = token_loss_sum(output.logits, batch["labels"]) / tokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.distributed.all_reduce(loss.detach_())
        losses.append(float(loss))
        if unshard:
            with unshard_fsdp2_model(model), torch.no_grad():
                assert not any(isinstance(p, DTensor) for p in model.parameters())
                model(input_ids=batch["input_ids"])
                assert not any(isinstance(p, DTensor) for p in model.parameters())
            assert all(isinstance(p, DTensor) for p in model.parameters())
    placements = {p.placements for p in model.parameters()}
    return losses, placements, output.logits.dtype


def _expected() -> list[float]:
    from meshwright.train.run_file import OptimizerConfig

    return reference(Case(max_norm=None, optimizer=OptimizerConfig(lr=1e-2))).losses


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (("data_parallel",), {}),
        (("rows",), {"dp_mesh_name": "rows", "activation_checkpointing": True}),
        (("dp_cp",), {"dp_mesh_name": "not there"}),
        (("data_parallel",), {"cpu_offload": True, "activation_checkpointing": "selective"}),
        (("data_parallel",), {"offload_policy": CPUOffloadPolicy(pin_memory=False), "unshard": True}),
        (("data_parallel",), {"meta": True}),
    ],
    ids=str,
)
def test_a_loop_by_hand_has_the_losses_of_one_process(names: tuple[str, ...], options: dict[str, Any]) -> None:
    for losses, placements, _ in pool(2).run(_train, (2,), names, options):
        assert losses == pytest.approx(_expected(), abs=1e-9)
        assert placements == {(Shard(0),)}


def _acts(options: dict[str, Any]) -> dict[str, Any]:
    """What a step computes and sends, and where shards lie, on two ranks of tensor parallelism."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    model = fsdp2_strategy_parallelize(tiny_model(), mesh, **{"mp_policy": PLAIN, **options})
    ids = torch.arange(16).expand(2, 16)
    with Counting() as counting:
        logits = model(input_ids=ids, use_cache=False).logits
        token_loss_sum(logits, ids).backward()
    block = model.model.layers[0]
    return {
        "attentions": counting.counts["aten._scaled_dot_product_flash_attention_for_cpu.default"],
        "activations": counting.counts["aten.silu.default"],
        "scatters": counting.counts["_c10d_functional.reduce_scatter_tensor.default"],
        "gate": str(block.mlp.gate_proj.weight.placements[-1]),
        "offload": type(block._get_fsdp_state()._fsdp_param_group.offload_policy).__name__,
        "logits": str(logits.dtype),
    }


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, {}),
        ({"activation_checkpointing": True}, {"attentions": 6, "activations": 6}),
        ({"activation_checkpointing": "selective"}, {"activations": 6}),
        # Into and out of attention and the feed-forward of each block, in forward and backward.
        ({"sequence_parallel": True}, {"scatters": 4 * 3}),
        ({"mp_policy": None}, {"logits": "torch.float32"}),
        ({"cpu_offload": True}, {"offload": "CPUOffloadPolicy"}),
        ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {"offload": "CPUOffloadPolicy"}),
        ({"tp_shard_plan": {"model.layers.*.mlp.up_proj": "colwise_gather_output"}}, {"gate": "R"}),
    ],
    ids=str,
)
def test_each_option_acts(options: dict[str, Any], changes: dict[str, Any]) -> None:
    plain = {"attentions": 3, "activations": 3, "scatters": 0, "gate": "S(0)"}
    plain |= {"offload": "OffloadPolicy", "logits": "torch.float64"}
    assert pool(2).run(_acts, options) == [plain | changes] * 2


def _along(axes: tuple[str, ...], options: dict[str, Any]) -> tuple[tuple[int, ...], list[int]]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=axes)
    if "dp_cp_mesh_name" in options:
        mesh._flatten(options["dp_cp_mesh_name"])
    weight = fsdp2_strategy_parallelize(tiny_model(), mesh, **options).model.layers[0].mlp.gate_proj.weight
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


def test_a_pair_of_axes_makes_hsdp_and_an_axis_of_one_rank_for_tensors_is_none() -> None:
    options = {"dp_mesh_name": ("replicate", "shard"), "tp_mesh_name": "tp"}
    for losses, placements, _ in pool(4).run(_train, (2, 2, 1), ("replicate", "shard", "tp"), options):
        assert losses == pytest.approx(_expected(), abs=1e-9)
        assert placements == {(Replicate(), Shard(0))}


def test_precision_by_default_computes_in_bfloat16_and_gives_float32() -> None:
    for losses, _, dtype in pool(2).run(_train, (2,), ("data_parallel",), {"mp_policy": None}):
        assert dtype is torch.float32
        assert losses == pytest.approx(_expected(), rel=2e-2)
        assert losses != pytest.approx(_expected(), abs=1e-9)
    (first, *_) = pool(2).run(_train, (2,), ("data_parallel",), {"mp_policy": None, "param_dtype": torch.float64})
    assert first[0] == pytest.approx(_expected(), rel=1e-5)


def _refused(names: tuple[str, ...], options: dict[str, Any]) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=names)
    with pytest.raises(MeshwrightError) as caught:
        fsdp2_strategy_parallelize(tiny_model(), mesh, **options)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("names", "options", "texts"),
    [
        (("dp",), {}, [MeshError.__name__, "'data_parallel'", "('dp',)"]),
    ],
    ids=str,
)
def test_refusals(names: tuple[str, ...], options: dict[str, Any], texts: list[str]) -> None:
    for found in pool(2).run(_refused, names, options):
        assert all(text in found for text in texts), found


def _unnamed_axis(names: tuple[str, ...]) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=names)
    try:
        fsdp2_strategy_parallelize(tiny_model(), mesh)
    except MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def test_an_axis_of_two_ranks_that_the_function_was_not_told_of_is_refused() -> None:
    for names in (("data_parallel", "context_parallel"), ("data_parallel", "tp")):
        for found in pool(2).run(_unnamed_axis, names):
            assert found.startswith("MeshError: the mesh {'data_parallel': 1, '" + names[1] + "': 2} has 2 ranks")
            assert "dp_cp_mesh_name" in found
    assert pool(2).run(_unnamed_axis, ("data_parallel", "tensor_parallel")) == ["accepted"] * 2


def _idle_tensor_options() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fsdp2_strategy_parallelize(tiny_model(), mesh, sequence_parallel=True)
    return [str(each.message) for each in caught if "on nothing here" in str(each.message)]


def test_tensor_options_act_on_nothing_at_one_rank_and_the_first_rank_says_so() -> None:
    first, second = pool(2).run(_idle_tensor_options)
    assert len(first) == 1
    assert "no axis 'tensor_parallel' has 2 or more ranks" in first[0]
    assert second == []


def _without_stack() -> bool:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    apply_fsdp_sharding_recursively(model, init_device_mesh("cpu", (1,)), None)
    return any(isinstance(p, DTensor) for p in model.parameters())


def test_a_module_without_a_stack_is_left_to_the_caller() -> None:
    assert pool(1).run(_without_stack) == [False]


def _sharded_lists() -> dict[str, list[str]]:
    """The names of the modules that are sharded in each kind of container; or the error."""
    mesh, found = init_device_mesh("cpu", (2,)), {}

    def layers(count: int = 2) -> list[nn.Module]:
        return [nn.Linear(4, 4) for _ in range(count)]

    containers: dict[str, nn.Module] = {
        "plain layers": nn.ModuleList(layers(3)),
        "a list within a model": nn.Sequential(nn.Linear(4, 4), nn.ModuleList(layers())),
        "lists of lists": nn.ModuleList([nn.ModuleList(layers()), nn.ModuleList([nn.ModuleList(layers(1))])]),
        "dicts of a list": nn.ModuleList([nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.ReLU()})]),
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
            "plain layers": ["0", "1", "2"],
            "a list within a model": ["1.0", "1.1"],
            "lists of lists": ["0.0", "0.1", "1.0.0"],
            "dicts of a list": ["0.a"],
            "a list of a dict": ["a.0", "a.1"],
        }


def _recursively_offloaded() -> list[str]:
    model = tiny_model()
    apply_fsdp_sharding_recursively(
        model, init_device_mesh("cpu", (1,)), PLAIN, offload_policy=CPUOffloadPolicy(pin_memory=False)
    )
    return [type(each._get_fsdp_state()._fsdp_param_group.offload_policy).__name__ for each in model.model.layers]


def test_offloaded_blocks() -> None:
    assert pool(1).run(_recursively_offloaded) == [["CPUOffloadPolicy"] * 3]


def _recursively() -> tuple[list[str], list[str], list[bool]]:
    mesh = init_device_mesh("cpu", (2,))
    model, stack = tiny_model(), tiny_model().model.layers
    apply_fsdp_sharding_recursively(model, mesh, None)
    apply_fsdp_sharding_recursively(stack, mesh, MixedPrecisionPolicy(torch.float32))
    names = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    left = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    freed = [group.post_forward_mesh_info is not None for block in stack for group in _parameter_groups(block)]
    return names, left, freed


def test_blocks_are_sharded_the_last_keeps_its_parameters_and_the_rest_is_left() -> None:
    for names, left, freed in pool(2).run(_recursively):
        assert names == [f"model.layers.{index}" for index in range(3)]
        assert left == ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
        assert freed == [True, True, False]


def _precise(param_dtype: torch.dtype) -> list[torch.dtype]:
    """Dtypes in which gradients are summed, and of the output."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data_parallel",))
    model = fsdp2_strategy_parallelize(tiny_model(), mesh, param_dtype=param_dtype)
    dtypes = [group.mp_policy.reduce_dtype for group in _parameter_groups(model)]
    return [*dtypes, model(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False).logits.dtype]


@pytest.mark.parametrize(
    ("given", "wide"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)]
)
def test_gradients_are_summed_in_at_least_the_dtype_of_parameters(given: torch.dtype, wide: torch.dtype) -> None:
    assert pool(2).run(_precise, given) == [[wide, wide]] * 2


def _pinned() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data_parallel",))
    with pytest.raises(StrategyError) as caught:
        fsdp2_strategy_parallelize(tiny_model(), mesh, offload_policy=CPUOffloadPolicy())
    return str(caught.value)


def test_an_offload_policy_that_pins_memory_is_refused_on_a_cpu() -> None:
    for text in pool(2).run(_pinned):
        assert "offload_policy has pin_memory=True, but the mesh is on the CPU" in text
