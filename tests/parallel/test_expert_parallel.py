"""Experts over the ranks of `ep`: what is found and refused, parity with `single`, what is sent and held."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.told import told
from support.training import training_step
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from meshwright import (
    Mesh,
    MeshSizes,
    ModelError,
    OptimizerConfig,
    open_world,
    optimizer_factory,
    resolve,
)
from meshwright.parallel.expert import check_expert_parallel, find_experts
from meshwright.strategy.contract import StrategyManager
from meshwright.testing import Case, assert_parity
from meshwright.tracing.observe import Observer
from meshwright_testing import pool
from meshwright_testing.case import Outcome
from meshwright_testing.models import case_model
from meshwright_testing.parity import build_manager, difference, full_weights, train_steps
from meshwright_testing.zoo import zoo_config

EP2, EP4 = {"ep_size": 2}, {"ep_size": 4}
SLOW = pytest.mark.slow
HARD = Case(model_type="mixtral", tied=True, microbatches=2, sequences=24, eval_after=True, unshard_after=True)


def _built(sizes: Mapping[str, int], strategy: str = "fsdp2", config: Any = None) -> StrategyManager:
    world = open_world("cpu")
    stack, degrees = resolve(strategy, MeshSizes(**sizes), world.size, config=config)
    return stack.build(Mesh(degrees, world))


# -- what is found, and what is refused


def _config(model_type: str, values: Mapping[str, Any]) -> Any:
    config = zoo_config(model_type)
    for name, value in values.items():
        setattr(config, name, value)
    return config


def _on_meta(model_type: str) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(zoo_config(model_type))
    return model


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("mixtral", [f"model.layers.{index}.mlp.experts" for index in range(4)]),
        ("deepseek_v3", [f"model.layers.{index}.mlp.experts" for index in (1, 2, 3)]),
        ("jamba", ["model.layers.1.feed_forward.experts", "model.layers.3.feed_forward.experts"]),
        ("gpt_oss", [f"model.layers.{index}.mlp.experts" for index in range(4)]),
        ("nemotron_h", None),
    ],
)
def test_experts_are_found_by_structure(model_type: str, names: list[str] | None) -> None:
    model = _on_meta(model_type)
    found = find_experts(model)
    assert found
    assert {each.count for each in found} == {4}
    assert names is None or [each.name for each in found] == names
    check_expert_parallel(model, 4)


@pytest.mark.parametrize("model_type", ["llama", "jetmoe", "llama4_text", "longcat_flash", "doge"])
def test_models_without_stacked_experts_are_refused(model_type: str) -> None:
    model = _on_meta(model_type)
    assert find_experts(model) == []
    check_expert_parallel(model, 1)
    with pytest.raises(ModelError, match=r"ep_size=2 .* has none of the kind .* Use ep_size=1\."):
        check_expert_parallel(model, 2)


class _Stacked(nn.Module):
    """Experts by structure alone."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts = count
        self.weight = nn.Parameter(torch.randn(count, 8, 8))

    def forward(self, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return torch.einsum("td,tkde,tk->te", rows, self.weight[index], weights)


def test_what_experts_share_is_refused() -> None:
    model = nn.ModuleDict({"first": _Stacked(4), "second": _Stacked(4)})
    check_expert_parallel(model, 2)
    model["second"].weight = model["first"].weight
    with pytest.raises(ModelError, match=r"first\.weight and second\.weight are one parameter"):
        check_expert_parallel(model, 2)
    model = nn.ModuleDict({"first": _Stacked(4)})
    model["first"].norm = nn.LayerNorm(8)
    with pytest.raises(ModelError, match=r"first\.norm\.bias beside its stacked parameters"):
        check_expert_parallel(model, 2)


def test_what_a_plan_names_and_structure_does_not_is_refused() -> None:
    model = _on_meta("mixtral")
    del model.model.layers[1].mlp.experts.num_experts
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.experts is not of the kind"):
        check_expert_parallel(model, 2)


def _refused(model_type: str, sizes: Mapping[str, int], values: Mapping[str, Any]) -> tuple[str, bool]:
    manager, model = _built(sizes), AutoModelForCausalLM.from_config(_config(model_type, values))
    before = {name: id(p) for name, p in model.named_parameters()}
    return told(manager.parallelize, model), before == {name: id(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("model_type", "values", "text", "sizes"),
    [
        ("llama", {}, "LlamaForCausalLM has none of the kind", EP2),
        pytest.param(
            *("mixtral", {"num_local_experts": 3}, "does not divide the 3 experts of model.layers.0.mlp.experts"),
            EP2 | {"pp_size": 2, "dp_size": 2},
            marks=SLOW,
        ),
    ],
)
def test_refusals_are_equal_on_all_ranks_and_leave_the_model(model_type, values, text, sizes):
    found = pool(2 if sizes == EP2 else 4).run(_refused, model_type, sizes, values)
    assert len(set(found)) == 1
    assert text in found[0][0]
    assert found[0][1]


# -- parity

EP4_TP2, EP2_TP2, HSDP = EP4 | {"tp_size": 2}, EP2 | {"tp_size": 2}, EP2 | {"dp_replicate_size": 2}
FULL = {"activation_checkpointing": "full"}
EACH = {"defer_fsdp_grad_sync": False, "enable_fsdp2_prefetch": True, "reshard_after_forward": False}
TYPES = (("deepseek_v3", EP4), ("gpt_oss", EP2_TP2))
OFFLOADED = {"offload_policy": {"pin_memory": False}, "reshard_after_forward": True}


def test_two_ranks_train_as_one() -> None:
    assert_parity("fsdp2", Case(model_type="mixtral", tied=True, microbatches=2, steps=2), world_size=2, sizes=EP2)


@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        *(
            pytest.param(*layout, marks=SLOW)
            for layout in (
                (EP4, FULL | {"reshard_after_forward": True}),
                (EP2, EACH),
                (HSDP, {"activation_checkpointing": "selective"}),
                (EP4_TP2, {}),
                (EP2_TP2, OFFLOADED),
                # Ranks of cp have different tokens of the same sequences, and share experts.
                ({"cp_size": 2} | EP4, {}),
                ({"cp_size": 2} | EP4_TP2, FULL | {"cp_attention": "ulysses"}),
                (EP4_TP2, {"sequence_parallel": True}),
            )
        ),
        *(
            pytest.param(sizes, config, marks=pytest.mark.zoo)
            for sizes in (EP4, EP2, HSDP, EP4_TP2, EP2_TP2, {"cp_size": 2} | EP2)
            for config in ({}, FULL, {"activation_checkpointing": "selective"}, EACH, OFFLOADED)
        ),
    ],
    ids=str,
)
def test_parity_of_layouts(sizes: dict[str, int], config: dict[str, Any]) -> None:
    assert_parity("fsdp2", HARD, world_size=4, config=config, sizes=sizes)


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        pytest.param(each, sizes, marks=SLOW if (each, sizes) in TYPES else pytest.mark.zoo)
        for each in ("qwen3_moe", "deepseek_v3", "qwen2_moe", "gpt_oss", "olmoe")
        for sizes in (EP4, EP2_TP2)
    ],
)
def test_parity_of_types_that_differ(model_type: str, sizes: dict[str, int]) -> None:
    assert_parity("fsdp2", Case(model_type=model_type, tied=None), world_size=4, sizes=sizes)


@SLOW
@pytest.mark.parametrize(
    "options",
    [
        {"norm_type": math.inf, "max_norm": 0.05},
        {"frozen": ("*experts*",)},
        {"frozen": ("*layers.2.mlp.experts.down_proj", "*gate.weight")},
        {"empty": 6},
        {"shares": (1, 2, 3, 6)},
        {"optimizer": OptimizerConfig(lr=1e-2, weight_decay=0.1, options={"fused": True})},
        {"max_norm": 5.0, "norm_type": 1.0},
        {"frozen": ("*layers.0*", "*layers.1*", "*embed*")},
        {"optimizer": OptimizerConfig(lr=1e-2, weight_decay=0.1, options={"foreach": True})},
    ],
    ids=lambda options: next(iter(options)),
)
def test_parity_of_cases_on_both_meshes(options: dict[str, Any]) -> None:
    assert_parity("fsdp2", Case(model_type="mixtral", **options), world_size=4, sizes=EP2)


MIXED = {"mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}


def _mixed(sizes: Mapping[str, int]) -> tuple[set[torch.dtype], Outcome]:
    """What experts compute in, and how the model trains."""
    case = Case(model_type="mixtral", dtype="float32", steps=2)
    manager = build_manager("fsdp2", MIXED, sizes, case)
    seen: set[torch.dtype] = set()
    for each in find_experts(manager.model_parts[0]):
        module = manager.model_parts[0].get_submodule(each.name)
        module.register_forward_pre_hook(lambda module, args: seen.update([args[0].dtype, module.down_proj.dtype]))
        module.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    losses, norms, eval_losses = train_steps(manager, case, range(case.steps))
    # What the optimizer steps keeps its precision.
    assert {parameter.dtype for parameter in manager.model_parts[0].parameters()} == {torch.float32}
    return seen, Outcome(losses, norms, eval_losses, full_weights(manager))


@SLOW
@pytest.mark.parametrize("sizes", [EP4, EP2], ids=str)
def test_mixed_precision_of_experts_is_that_without_expert_parallelism(sizes: dict[str, int]) -> None:
    ((_, alone),) = pool(1).run(_mixed, {})
    for seen, found in pool(4).run(_mixed, sizes):
        assert seen == {torch.bfloat16}
        assert found.losses == pytest.approx(alone.losses, rel=2e-3)
        assert found.norms == pytest.approx(alone.norms, rel=2e-2)


# -- routers that leave experts, and ranks, without tokens


def _manager(strategy: str, sizes: Mapping[str, int], config: Mapping[str, Any], case: Case) -> StrategyManager:
    """Under a router whose bias sends all tokens to experts 0 and 1."""
    manager = _built(sizes, strategy, config)
    model = case_model(case.model_type, tied=case.tied, seed=0, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        if name.endswith("router.bias"):
            parameter.data.copy_(torch.tensor([90.0, 90.5, -90.0, -90.0]))
    manager.parallelize(model)
    manager.build_optimizer(optimizer_factory(case.optimizer))
    return manager


def _train(strategy: str, sizes: Mapping[str, int], config: Mapping[str, Any], case: Case) -> Outcome:
    manager = _manager(strategy, sizes, config, case)
    losses, norms, eval_losses = train_steps(manager, case, range(case.steps))
    return Outcome(losses, norms, eval_losses, full_weights(manager))


@SLOW
@pytest.mark.parametrize(("sizes", "config"), [(EP4, {}), (EP4_TP2, FULL)], ids=str)
def test_experts_and_ranks_without_a_token_train_as_under_single(sizes: dict[str, int], config: dict[str, Any]) -> None:
    # Decayed: an expert whose gradient is zero moves, one without gradient does not.
    case = Case(model_type="gpt_oss", tied=None, eval_after=True)
    expected = pool(1).run(_train, "single", {}, {}, replace(case, microbatches=1))[0]
    assert difference(pool(4).run(_train, "fsdp2", sizes, config, case), expected).worst <= 1e-9


# -- what is sent


class _Sent(Observer):
    """Rows that go to each rank, in each exchange of rows of floating point."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[list[int], int]] = []

    def observe(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if operation.overloadpacket.__name__ == "all_to_all_single" and args[0].is_floating_point():
            rows, _, sends = args[:3]
            assert rows.shape[0] == sum(sends)
            self.rows.append((list(sends), rows.shape[1] * rows.element_size()))


def _disturbed(router: nn.Module, generator: torch.Generator) -> None:
    """Let a router see other numbers each time, as from a kernel that is not deterministic."""
    router.register_forward_pre_hook(
        lambda module, args: (args[0] + torch.randn(args[0].shape, generator=generator, dtype=args[0].dtype),)
    )


def _dispatch(case: Case, sizes: Mapping[str, int], config: Mapping[str, Any]) -> dict[str, Any]:
    manager = _built(sizes, config=config)
    model = case_model(case.model_type, tied=case.tied, seed=0, dtype=torch.float64)
    manager.parallelize(model)
    manager.build_optimizer(optimizer_factory(case.optimizer))
    routed: list[Tensor] = []
    for each in find_experts(model):
        experts = model.get_submodule(each.name)
        experts.register_forward_pre_hook(lambda module, args: routed.append(args[1].clone()))
        _disturbed(model.get_submodule(each.name.removesuffix("experts") + "gate"), torch.Generator().manual_seed(7))
    sent = _Sent()
    with sent:
        training_step(manager, case, 0)()
    return {"routed": routed, "rank": manager.mesh.expert_mesh["ep"].get_local_rank(), "sent": sent.rows}


@SLOW
@pytest.mark.parametrize(("mode", "times"), [(False, 1), ("full", 2), ("selective", 1)])
def test_rows_go_to_the_ranks_of_their_experts_and_nothing_else_does(mode: str | bool, times: int) -> None:
    case, ranks, layers, hidden = Case(model_type="mixtral"), 4, 4, 64
    found = pool(ranks).run(_dispatch, case, EP4, {"activation_checkpointing": mode})
    # rows[source][target] of each layer, in the order of forward.
    rows = [
        [torch.bincount(each["routed"][layer].flatten(), minlength=4).tolist() for each in found]
        for layer in range(layers)
    ]
    for rank, each in enumerate(found):
        assert each["rank"] == rank
        there = [rows[layer][rank] for layer in range(layers)]
        back = [[rows[layer][source][rank] for source in range(ranks)] for layer in range(layers)]
        forward = [splits for layer in range(layers) for splits in (there[layer], back[layer])]
        # Gradients of what came back leave first.
        backward = []
        for layer in reversed(range(layers)):
            backward += [there[layer], back[layer]] * times
        assert [splits for splits, _ in each["sent"]] == forward + backward
        assert {size for _, size in each["sent"]} == {hidden * 8}
        # What is computed again is not routed again.
        if mode is not False:
            again = each["routed"][layers:]
            assert all(torch.equal(a, b) for a, b in zip(each["routed"][:layers], reversed(again), strict=True))


# -- what is held


def _held(sizes: Mapping[str, int]) -> dict[str, tuple[int, int, int]]:
    """Elements of the whole, of this rank's part, and of this rank's part of the optimizer's first moment."""
    case = Case(model_type="mixtral")
    manager: Any = build_manager("fsdp2", {}, sizes, case)
    train_steps(manager, case, range(1))
    optimizer = manager.optimizer
    found = {}
    for name, parameter in manager.model_parts[0].named_parameters():
        if "experts" in name:
            assert isinstance(parameter, DTensor)
            moment = optimizer.state[parameter]["exp_avg"]
            found[name] = (parameter.numel(), parameter.to_local().numel(), moment.to_local().numel())
    return found


@SLOW
@pytest.mark.parametrize(("sizes", "part"), [(EP4, 4), (EP2_TP2, 4), (HSDP, 2)], ids=str)
def test_a_rank_holds_its_part_of_the_experts_and_of_their_optimizer_state(sizes: dict[str, int], part: int) -> None:
    for found in pool(4).run(_held, sizes):
        assert len(found) == 8
        assert all(mine == moment == whole // part for whole, mine, moment in found.values())


# -- compile


def _compiled(config: dict[str, Any], sizes: dict[str, int], case: Case) -> tuple[list[float], int, set[str]]:
    """Losses; graphs that were compiled; classes whose forwards were given to the compiler."""
    from meshwright.model import recompute as compiling

    graphs: list[Any] = []
    given: list[Any] = []
    original = compiling.compiled

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    def counted(function: Any, *, backend: Any, versions: int) -> Any:
        given.append(function)
        return original(function, backend=counting, versions=versions)

    torch.compiler.reset()
    compiling.check_compiler.cache_clear()
    compiling.compiled = counted
    try:
        manager = build_manager("fsdp2", {"enable_compile": True, **config}, sizes, case)
        losses = train_steps(manager, case, range(2))[0]
    finally:
        compiling.compiled = original
        compiling.check_compiler.cache_clear()
        torch.compiler.reset()
    return losses, len(graphs), {function.__qualname__.split(".")[0] for function in given}


def _eager(sizes: dict[str, int], case: Case) -> list[float]:
    return train_steps(build_manager("fsdp2", {}, sizes, case), case, range(2))[0]


@SLOW
@pytest.mark.parametrize("sizes", [EP2, EP2_TP2], ids=str)
def test_compile_takes_what_is_not_routed(sizes: dict[str, int]) -> None:
    case = Case(model_type="deepseek_v3", tied=None, microbatches=2)
    ranks = math.prod(sizes.values())
    expected = pool(ranks).run(_eager, sizes, case)[0]
    for losses, graphs, classes in pool(ranks).run(_compiled, {}, sizes, case):
        assert losses == pytest.approx(expected, abs=1e-9)
        assert {"DeepseekV3Attention", "DeepseekV3MLP", "DeepseekV3RMSNorm"} <= classes
        assert not {"DeepseekV3MoE", "DeepseekV3NaiveMoe"} & classes
        assert graphs > 5


def _recomputed_in_parts() -> str:
    config = {"enable_compile": True, "activation_checkpointing": True}
    return told(build_manager, "fsdp2", config, EP2, Case(model_type="mixtral", tied=None))


def test_compiled_parts_of_a_block_with_divided_experts_cannot_be_recomputed() -> None:
    first, second = pool(2).run(_recomputed_in_parts)
    assert first == second
    assert "Set activation_checkpointing=false or enable_compile=false, or use ep_size=1" in first
