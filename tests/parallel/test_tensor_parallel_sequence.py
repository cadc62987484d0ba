"""Sequence parallelism: what is on a part of the positions, plans it rests on, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.caught_errors import catch_error
from support.tensor_only import assert_equal_to_single, register_strategy_and_models
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshwright import ModelError, count_tokens
from meshwright.parallel.tensor import apply_tensor_parallel
from meshwright.parallel.tensor.plan_sources import find_plan
from meshwright.parallel.tensor.sequence_parallel import plan_sequence_parallel
from meshwright.strategy.registry import Registry, model_layout
from meshwright.testing import Case
from meshwright_testing import pool
from meshwright_testing.case import rank_microbatches
from meshwright_testing.models import build_case_model, build_tiny_model
from meshwright_testing.parity import build_manager, full_weights, train_steps

BLOCK = "model.layers.*"
ATTENTION = {f"{BLOCK}.self_attn.{name}_proj": "colwise" for name in "qkv"} | {f"{BLOCK}.self_attn.o_proj": "rowwise"}
GATE, UP, DOWN = (f"{BLOCK}.mlp.{name}_proj" for name in ("gate", "up", "down"))


# -- parity where it goes beyond test_tensor_parallel.py


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "plan"),
    [
        ("eager", None),
        ("llama", ATTENTION),
        # A part that is no chain.
        ("llama", {GATE: "colwise_gather_output", UP: "colwise_rep", DOWN: "rowwise_split_input"}),
        ("llama", {"model.layers.1.mlp.up_proj": "colwise_gather_output"}),
    ],
    ids=["eager", "attention", "no-chain", "one-layer"],
)
def test_plans_of_the_user(model_type: str, plan: Mapping[str, Any] | None) -> None:
    case = Case(model_type=model_type, tied=model_type == "eager", steps=2)
    assert_equal_to_single(case, sequence_parallel=True, tp_plan=plan)


# -- what is on a part of the positions


def _lengths() -> dict[str, tuple[int, int]]:
    """Positions at entry and exit of modules, of 16."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = build_tiny_model()
    apply_tensor_parallel(model, mesh, sequence_parallel=True)
    lengths: dict[str, tuple[int, int]] = {}

    def note(name: str, module: nn.Module) -> None:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = args[0] if args else next(iter(kwargs.values()))
            output = output[0] if isinstance(output, tuple) else output
            lengths[name] = (given.shape[1], output.shape[1])

        module.register_forward_hook(hook, with_kwargs=True)

    for name in LENGTHS:
        note(name, model.get_submodule(name))
    logits = model(input_ids=torch.zeros(3, 16, dtype=torch.int64), use_cache=False).logits
    return lengths | {"logits": (16, logits.shape[1])}


LENGTHS = {
    "model.embed_tokens": (16, 16),
    "model.layers.0": (16, 8),
    "model.layers.1": (8, 8),
    "model.layers.2": (8, 16),
    "model.layers.1.input_layernorm": (8, 8),
    "model.layers.1.self_attn.q_proj": (16, 16),
    "model.layers.1.mlp.down_proj": (16, 8),
    "model.norm": (16, 16),
    "lm_head": (16, 16),
}


def test_only_the_blocks_of_a_stack_are_on_a_part_of_the_positions() -> None:
    assert pool(2).run(_lengths) == [{**LENGTHS, "logits": (16, 16)}] * 2


# -- models that it cannot have


def _refusal(model_type: str) -> tuple[str, bool]:
    """The refusal, and whether weights are as they were."""
    register_strategy_and_models()
    case, managers, before = Case(model_type=model_type, tied=None), [], {}

    def train() -> None:
        managers.append(build_manager("tensor_only", {"sequence_parallel": True}, {"tp_size": 2}, case))
        before.update(full_weights(managers[0]))
        train_steps(managers[0], case, range(1))

    text = catch_error(train)
    after = full_weights(managers[0]) if managers else {}
    return text, all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "model_type",
    ["xlm", *(pytest.param(each, marks=pytest.mark.slow) for each in ("mllama", "gemma3n_text"))],
)
def test_a_model_that_mixes_positions_elsewhere_is_refused_by_all_ranks_with_the_remedy(model_type: str) -> None:
    answers = pool(2).run(_refusal, model_type)
    for text, unchanged in answers:
        assert text.endswith("Set sequence_parallel=false.")
        assert unchanged
    assert len({text for text, _ in answers}) == 1


@pytest.mark.parametrize(
    ("model_type", "plan", "text"),
    [
        ("llama", {"lm_head": "colwise_gather_output"}, r"no stack of blocks with tensor-parallel layers \(tp_plan\)"),
        (
            *("opt", {"model.decoder.layers.*.fc1": "colwise", "model.decoder.layers.*.fc2": "rowwise"}),
            "calls the tensor-parallel layer model.decoder.layers.0.fc1 itself.*=false",
        ),
    ],
)
def test_plans_that_leave_no_part_to_the_ranks_are_refused(model_type: str, plan: dict[str, str], text: str) -> None:
    model = build_case_model(model_type, tied=None, seed=0, dtype=torch.float64)
    layout = model_layout(model)
    with pytest.raises(ModelError, match=text):
        plan_sequence_parallel(model, layout, find_plan(model, layout, plan, registry=Registry([])))


# -- lengths


def _odd_length(sequence_parallel: bool) -> tuple[str, float]:
    """The refusal of 15 positions on two ranks, and the loss of a good step after it."""
    register_strategy_and_models()
    case = Case()
    manager = build_manager("tensor_only", {"sequence_parallel": sequence_parallel}, {"tp_size": 2}, case)
    good = rank_microbatches(case, 0, 0, 1)
    odd = [{key: value[:, :15] for key, value in batch.items()} for batch in good]

    def train() -> None:
        manager.eval_loss(odd, num_tokens=count_tokens(odd, manager.mesh))
        manager.forward_backward(odd, num_tokens=count_tokens(odd, manager.mesh))
        manager.optimizer_step()

    return catch_error(train), float(manager.forward_backward(good, num_tokens=count_tokens(good, manager.mesh)))


def test_a_length_that_the_ranks_do_not_divide_is_refused_and_training_continues() -> None:
    for text, loss in pool(2).run(_odd_length, True):
        assert "sequences of 15 tokens cannot be divided among 2 ranks" in text
        assert "Pad them to a multiple of 2 with masked labels, or set sequence_parallel=false." in text
        assert loss > 0
    assert [text for text, _ in pool(2).run(_odd_length, False)] == ["", ""]
