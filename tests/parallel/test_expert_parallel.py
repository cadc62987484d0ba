"""Experts over the ranks of `ep`: what is found and refused, parity with `single`, what is sent and held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.caught_errors import catch_error
from support.managers import build_empty_manager, build_model_manager
from support.training import prepare_training_step
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from meshwright import (
    ModelError,
)
from meshwright.parallel.expert import check_expert_parallel, find_experts
from meshwright.testing import Case, assert_parity
from meshwright_testing import pool
from meshwright_testing.case import Outcome
from meshwright_testing.models import build_case_model
from meshwright_testing.parity import build_manager, find_max_difference, full_weights, train_case, train_steps
from meshwright_testing.zoo import build_zoo_config

EP2, EP4 = {"ep_size": 2}, {"ep_size": 4}
SLOW = pytest.mark.slow
HARD = Case(model_type="mixtral", tied=True, microbatches=2, sequences=24, eval_after=True, unshard_after=True)


# -- what is found, and what is refused


def _on_meta(model_type: str) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(build_zoo_config(model_type))
    return model


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("mixtral", [f"model.layers.{index}.mlp.experts" for index in range(4)]),
        ("jamba", ["model.layers.1.feed_forward.experts", "model.layers.3.feed_forward.experts"]),
        ("gpt_oss", [f"model.layers.{index}.mlp.experts" for index in range(4)]),
    ],
)
def test_experts_are_found_by_structure(model_type: str, names: list[str]) -> None:
    model = _on_meta(model_type)
    assert [(each.name, each.num_experts) for each in find_experts(model)] == [(name, 4) for name in names]
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
    with pytest.raises(ModelError, match=r"first\.norm\.bias besides its stacked parameters"):
        check_expert_parallel(model, 2)


def test_what_a_plan_names_and_structure_does_not_is_refused() -> None:
    model = _on_meta("mixtral")
    del model.model.layers[1].mlp.experts.num_experts
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.experts is not of the kind"):
        check_expert_parallel(model, 2)


def _refused(model_type: str, sizes: Mapping[str, int], values: Mapping[str, Any]) -> tuple[str, bool]:
    config = build_zoo_config(model_type)
    vars(config).update(values)
    manager, model = build_empty_manager("fsdp2", sizes=sizes), AutoModelForCausalLM.from_config(config)
    before = {name: id(p) for name, p in model.named_parameters()}
    return catch_error(manager.parallelize, model), before == {name: id(p) for name, p in model.named_parameters()}


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
OFFLOADED = {"offload_policy": {"pin_memory": False}, "reshard_after_forward": True}


def test_two_ranks_train_as_one() -> None:
    assert_parity("fsdp2", Case(model_type="mixtral", tied=True, microbatches=2, steps=2), world_size=2, sizes=EP2)


@SLOW
@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        (EP4, FULL | {"reshard_after_forward": True}),
        (EP2, EACH),
        (HSDP, {"activation_checkpointing": "selective"}),
        (EP4_TP2, {}),
        (EP2_TP2, OFFLOADED),
        # Ranks of cp have different tokens of the same sequences, and share experts.
        ({"cp_size": 2} | EP4_TP2, FULL | {"cp_attention": "ulysses"}),
        (EP4_TP2, {"sequence_parallel": True}),
    ],
    ids=str,
)
def test_parity_of_layouts(sizes: dict[str, int], config: dict[str, Any]) -> None:
    assert_parity("fsdp2", HARD, world_size=4, config=config, sizes=sizes)


@SLOW
@pytest.mark.parametrize(("model_type", "sizes"), [("deepseek_v3", EP4), ("gpt_oss", EP2_TP2)])
def test_parity_of_types_that_differ(model_type: str, sizes: dict[str, int]) -> None:
    assert_parity("fsdp2", Case(model_type=model_type, tied=None), world_size=4, sizes=sizes)


MIXED = {"mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}


def _mixed(sizes: Mapping[str, int]) -> tuple[set[torch.dtype], Outcome]:
    """The dtypes that experts compute in, and how the model trains."""
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
def test_mixed_precision_of_experts_is_that_without_expert_parallelism() -> None:
    ((_, alone),) = pool(1).run(_mixed, {})
    for seen, found in pool(4).run(_mixed, EP2):
        assert seen == {torch.bfloat16}
        assert found.losses == pytest.approx(alone.losses, rel=2e-3)
        assert found.norms == pytest.approx(alone.norms, rel=2e-2)


# -- routers that leave experts, and ranks, without tokens


def _train(strategy: str, sizes: Mapping[str, int], config: Mapping[str, Any], case: Case) -> Outcome:
    """Train under a router whose bias sends all tokens to experts 0 and 1."""
    model = build_case_model(case.model_type, tied=case.tied, seed=0, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        if name.endswith("router.bias"):
            parameter.data.copy_(torch.tensor([90.0, 90.5, -90.0, -90.0]))
    manager = build_model_manager(model, strategy, config, sizes, optimizer=case.optimizer)
    losses, norms, eval_losses = train_steps(manager, case, range(case.steps))
    return Outcome(losses, norms, eval_losses, full_weights(manager))


@SLOW
@pytest.mark.parametrize(("sizes", "config"), [(EP4, {}), (EP4_TP2, FULL)], ids=str)
def test_experts_and_ranks_without_a_token_train_as_under_single(sizes: dict[str, int], config: dict[str, Any]) -> None:
    # Decayed: an expert whose gradient is zero moves, one without gradient does not.
    case = Case(model_type="gpt_oss", tied=None, eval_after=True)
    expected = pool(1).run(_train, "single", {}, {}, replace(case, microbatches=1))[0]
    assert find_max_difference(pool(4).run(_train, "fsdp2", sizes, config, case), expected).worst <= 1e-9


# -- recomputation


def _routed() -> list[Tensor]:
    """The experts chosen in forward and recomputation by routers that see other numbers each time they run."""
    case, generator = Case(model_type="mixtral"), torch.Generator().manual_seed(7)
    model = build_case_model(case.model_type, tied=case.tied, seed=0, dtype=torch.float64)
    manager = build_model_manager(model, "fsdp2", {"activation_checkpointing": "full"}, EP4, optimizer=case.optimizer)
    routed: list[Tensor] = []
    for each in find_experts(model):
        model.get_submodule(each.name).register_forward_pre_hook(lambda module, args: routed.append(args[1].clone()))
        model.get_submodule(each.name.removesuffix("experts") + "gate").register_forward_pre_hook(
            lambda module, args: (args[0] + torch.randn(args[0].shape, generator=generator, dtype=args[0].dtype),)
        )
    prepare_training_step(manager, case, 0)()
    return routed


@SLOW
def test_what_is_recomputed_is_not_routed_again() -> None:
    for routed in pool(4).run(_routed):
        layers = len(routed) // 2
        assert layers
        assert all(torch.equal(a, b) for a, b in zip(routed[:layers], reversed(routed[layers:]), strict=True))


# -- what is held


# -- compile


def _compiled(case: Case) -> tuple[list[float], int, set[str]]:
    """Losses; how many graphs were compiled; classes whose forwards were given to the compiler."""
    from meshwright.model import recompute as compiling

    graphs: list[Any] = []
    given: list[Any] = []
    original = compiling.compile_function

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    def counted(function: Any, *, backend: Any, max_versions: int) -> Any:
        given.append(function)
        return original(function, backend=counting, max_versions=max_versions)

    torch.compiler.reset()
    compiling.check_compiler.cache_clear()
    try:
        with patch.object(compiling, "compile_function", counted):
            manager = build_manager("fsdp2", {"enable_compile": True}, EP2, case)
            losses = train_steps(manager, case, range(2))[0]
    finally:
        compiling.check_compiler.cache_clear()
        torch.compiler.reset()
    return losses, len(graphs), {function.__qualname__.split(".")[0] for function in given}


@SLOW
def test_compile_takes_what_is_not_routed() -> None:
    case = Case(model_type="deepseek_v3", tied=None, microbatches=2)
    expected = pool(2).run(train_case, "fsdp2", {}, EP2, case)[0].losses[:2]
    for losses, graphs, classes in pool(2).run(_compiled, case):
        assert losses == pytest.approx(expected, abs=1e-9)
        assert {"DeepseekV3Attention", "DeepseekV3MLP", "DeepseekV3RMSNorm"} <= classes
        assert not {"DeepseekV3MoE", "DeepseekV3NaiveMoe"} & classes
        assert graphs > 5


def _recomputed_in_parts() -> str:
    config = {"enable_compile": True, "activation_checkpointing": True}
    return catch_error(build_manager, "fsdp2", config, EP2, Case(model_type="mixtral", tied=None))


def test_compiled_parts_of_a_block_with_divided_experts_cannot_be_recomputed() -> None:
    first, second = pool(2).run(_recomputed_in_parts)
    assert first == second
    assert "Set activation_checkpointing=false or enable_compile=false, or use ep_size=1" in first
