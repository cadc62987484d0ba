"""Options along an axis of one rank act on nothing, and the first rank says so; one run file serves one and many."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from meshwright import Mesh, MeshSizes, open_world, resolve
from meshwright.testing import Case, pool
from meshwright.testing.parity import build_manager, train_steps


def _losses_and_warnings(strategy: str, config: dict[str, Any], sizes: dict[str, int]) -> tuple[list[float], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        manager = build_manager(strategy, config, sizes, Case())
    losses, _, _ = train_steps(manager, Case(), range(2))
    return losses, [
        str(each.message)
        for each in caught
        if "on nothing here" in str(each.message) or "double_buffer" in str(each.message)
    ]


PLAN = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("megatron_fsdp", marks=pytest.mark.slow)])
def test_tensor_and_context_options_act_on_nothing_at_one_rank_and_the_first_rank_says_so_once(strategy: str) -> None:
    config = {"sequence_parallel": True, "tp_plan": PLAN, "cp_attention": "ulysses"}
    idle = pool(2).run(_losses_and_warnings, strategy, config, {})
    plain = pool(2).run(_losses_and_warnings, strategy, {}, {})
    assert [losses for losses, _ in idle] == [losses for losses, _ in plain]
    assert [told for _, told in plain] == [[], []]
    tensor, context = idle[0][1]
    assert tensor == f"sequence_parallel=True and tp_plan={PLAN} act on nothing here: tp_size is 1."
    assert context == "cp_attention=ulysses acts on nothing here: cp_size is 1."
    assert idle[1][1] == []


def _built(options: dict[str, Any]) -> tuple[str, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        world = open_world("cpu")
        stack, degrees = resolve("fsdp2", MeshSizes(), world.size, **options)
        manager = stack.build(Mesh(degrees, world))
    return type(manager).__name__, [str(each.message) for each in caught]


def test_async_tensor_parallelism_and_options_of_a_pipeline_act_on_nothing_at_one_rank() -> None:
    config = {"enable_async_tensor_parallel": True, "sequence_parallel": True, "enable_compile": True}
    pipeline = {"pipeline": {"pp_schedule": "gpipe", "pp_microbatch_size": 2}}
    (name, told), (_, other) = pool(2).run(_built, {"config": config, "wrapper_config": pipeline})
    assert name == "FSDP2Manager"
    assert sorted(told) == [
        "PipelineConfig acts on nothing here: pp_size is 1.",
        "sequence_parallel=True and enable_async_tensor_parallel=True act on nothing here: tp_size is 1.",
    ]
    assert other == []


LAYERS = ["LlamaAttention", "LlamaMLP"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"calculate_per_token_loss": True}, ["calculate_per_token_loss=True acts on nothing here: the loss is per"]),
        ({"gradient_reduce_div_fusion": False}, ["gradient_reduce_div_fusion=False acts on nothing here: gradients"]),
        ({"fsdp_double_buffer": True}, []),
        (
            {"fsdp_double_buffer": True, "megatron_fsdp_unit_modules": LAYERS},
            ["fsdp_double_buffer=True serves 3 of 6 units, which are equal."],
        ),
        (
            {"fsdp_double_buffer": True, "megatron_fsdp_unit_modules": ["LlamaForCausalLM"]},
            ["fsdp_double_buffer=True acts on nothing here: the whole model is one unit."],
        ),
    ],
    ids=str,
)
def test_options_of_megatron_fsdp_without_effect_say_so_once_and_change_nothing(
    config: dict[str, Any], told: list[str]
) -> None:
    units = {"megatron_fsdp_unit_modules": config.get("megatron_fsdp_unit_modules")}
    (losses, first), (_, second) = pool(2).run(_losses_and_warnings, "megatron_fsdp", config, {})
    assert losses == pool(2).run(_losses_and_warnings, "megatron_fsdp", units, {})[0][0]
    assert [text[: len(start)] for text, start in zip(first, told, strict=True)] == told
    assert second == []


@pytest.mark.slow
def test_what_ddp_hands_over_says_the_same() -> None:
    config = {"use_megatron_fsdp": True, "gradient_reduce_div_fusion": False}
    assert [len(told) for _, told in pool(2).run(_losses_and_warnings, "ddp", config, {})] == [1, 0]
