"""Where plans come from, what they may say, and that transformers' plans mean what ours do."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.caught_errors import catch_error
from support.tensor_only import assert_equal_to_single, register_strategy_and_models
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import AutoModelForSequenceClassification, LlamaConfig

from meshwright import ConfigError, MeshwrightError, ModelError, hookimpl
from meshwright.files import class_paths as imports
from meshwright.parallel.tensor import (
    STYLES,
    TensorParallel,
    get_hf_tp_shard_plan,
    translate_to_torch_parallel_style,
)
from meshwright.parallel.tensor.plan_sources import _load_corrections, find_plan
from meshwright.parallel.tensor.tp_plan import TensorParallelPlan
from meshwright.strategy.registry import Registry, model_layout
from meshwright.testing import Case
from meshwright.tracing.collectives import record_collectives
from meshwright_testing import pool
from meshwright_testing.models import TINY, build_case_model, build_tiny_model

SLOW = pytest.mark.slow
GATE = "model.layers.*.mlp.gate_proj"
ONE = {GATE: "colwise_gather_output"}


@functools.cache
def llama() -> nn.Module:
    """Not to be changed."""
    return build_tiny_model()


def found(given: Any = None, *, model: nn.Module | None = None, registry: Registry | None = None) -> TensorParallelPlan:
    model = model or llama()
    return find_plan(model, model_layout(model), given, registry=registry or Registry([]))


# -- sources


def plan_for_a_model(model: nn.Module) -> dict[str, str]:
    """A plan that a user's module offers."""
    return {f"model.layers.{index}.mlp.up_proj": "colwise_gather_output" for index in range(len(model.model.layers))}


def plan_for_all_models() -> dict[str, str]:
    """A plan that does not look at the model."""
    return ONE


def plan_of_two_things(model: nn.Module, ranks: int) -> dict[str, str]:
    return ONE


def no_plan(model: nn.Module) -> list[str]:
    return ["colwise"]


class _Hook:
    def __init__(self, answer: Mapping[str, Any] | None) -> None:
        self.answer = answer
        self.asked: list[bool] = []

    @hookimpl
    def tp_plan(self, model: nn.Module, layout: Any, sequence_parallel: bool) -> Mapping[str, Any] | None:
        self.asked.append(sequence_parallel)
        return self.answer


def _registry_with(hook: _Hook) -> Registry:
    registry = Registry([])
    registry.register(hook, name="hook")
    assert not registry.failures
    return registry


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> str:
    """This module's name, allowed for the duration of a test."""
    monkeypatch.setattr(imports, "_allowed_modules", set(imports._allowed_modules))
    imports.allow_imports(__name__)
    return __name__


def test_a_dict_or_an_import_path_of_one_or_of_a_function_goes_before_all_others(allowed: str) -> None:
    hook = _Hook({"lm_head": "colwise_gather_output"})
    by_dict = found(f"{allowed}.ONE", registry=_registry_with(hook))
    assert by_dict.module_styles == found(ONE, registry=_registry_with(hook)).module_styles
    assert set(by_dict.module_styles) == {f"model.layers.{index}.mlp.gate_proj" for index in range(3)}
    by_function = found(f"{allowed}.plan_for_a_model", registry=_registry_with(hook))
    assert set(by_function.module_styles) == {f"model.layers.{index}.mlp.up_proj" for index in range(3)}
    assert found(f"{allowed}.plan_for_all_models").module_styles == by_dict.module_styles
    assert hook.asked == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("elsewhere.ONE", "not on the allow-list"),
        (f"{__name__}.no_plan", "is a list, not a dict or a function returning one"),
        (f"{__name__}.plan_of_two_things", "needs model, ranks, but it is called with the model, or with nothing"),
        (f"{__name__}._Hook", "is not a dict or a function, but a class"),
    ],
)
def test_a_path_of_what_is_no_plan_is_refused(path: str, text: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=text):
        found(path)


def test_a_hook_goes_before_the_model_s_own_plan_and_passes_with_none() -> None:
    hook = _Hook({"model.layers.0.mlp.down_proj": "rowwise_split_input"})
    plan = find_plan(llama(), model_layout(llama()), sequence_parallel=True, registry=_registry_with(hook))
    assert plan.module_styles == hook.answer
    assert hook.asked == [True]
    assert found(registry=_registry_with(_Hook(None))).module_styles == found().module_styles


def test_the_model_s_own_plan_and_its_vocabulary_or_the_linear_layers_of_blocks() -> None:
    plan = found()
    assert plan.module_styles["model.layers.2.self_attn.o_proj"] == "rowwise"
    assert plan.module_styles["model.embed_tokens"] == "embedding_rowwise"
    assert plan.module_styles["lm_head"] == "colwise_gather_output"
    assert len(plan.module_styles) == 3 * 7 + 2
    assert all(f"{name}.weight" in plan.parameter_styles for name in plan.module_styles)
    plan = found(model=build_tiny_model("gpt2", tied=True))
    layers = {name: style for name, style in plan.module_styles.items() if ".h." in name}
    assert len(layers) == 3 * 4
    assert set(layers.values()) == {"colwise_gather_output"}
    assert plan.module_styles["transformer.wte"] == "embedding_rowwise"
    with pytest.raises(ModelError, match=r"Linear has no tensor-parallel plan.*Give a tp_plan, or set tp_size=1"):
        found(model=nn.Linear(3, 3))


# -- what a plan may say


def test_a_number_goes_before_the_star_and_an_entry_for_a_parameter_before_its_module_s() -> None:
    plan = found({GATE: "colwise", "model.layers.1.mlp.gate_proj": "replicate"})
    styles = [plan.module_styles[f"model.layers.{index}.mlp.gate_proj"] for index in range(3)]
    assert styles == ["colwise", "replicate", "colwise"]
    plan = found({GATE: "colwise", f"{GATE}.weight": "replicate", "lm_head.weight": "replicate"})
    assert plan.parameter_styles["model.layers.1.mlp.gate_proj.weight"] == "replicate"
    assert plan.parameter_styles["lm_head.weight"] == "replicate"
    assert "lm_head" not in plan.module_styles


def test_styles_of_torch_stand_beside_names() -> None:
    plan = found({GATE: ColwiseParallel(), "lm_head": "colwise_gather_output"})
    assert plan.module_styles["model.layers.0.mlp.gate_proj"] == "colwise"
    assert set(plan.parameter_styles) == {f"model.layers.{index}.mlp.gate_proj.weight" for index in range(3)} | {
        "lm_head.weight"
    }
    # Layouts that shard positions turn sequence parallelism on.
    assert not plan.uses_sequence_parallel
    assert found({GATE: ColwiseParallel(input_layouts=Shard(1))}).uses_sequence_parallel
    assert found({"model.norm": SequenceParallel()}).uses_sequence_parallel


@pytest.mark.parametrize("head", ["colwise", ColwiseParallel(), ColwiseParallel(output_layouts=Shard(-1))], ids=str)
def test_a_head_gives_whole_logits(head: Any) -> None:
    """Parts of them would give another loss on each rank."""
    assert found({"lm_head": head}).module_styles == {"lm_head": "colwise_gather_output"}
    model = AutoModelForSequenceClassification.from_config(LlamaConfig(**TINY["llama"], num_labels=4))
    assert found({"score": head}, model=model).module_styles == {"score": "colwise_gather_output"}


@pytest.mark.parametrize(
    ("plan", "error", "text"),
    [
        ({GATE: "colwize"}, ConfigError, r"unknown style 'colwize'. Did you mean 'colwise'\? Known: colwise, "),
        (
            {"model.layers.*.mlp.gate": "colwise"},
            ConfigError,
            r"names 'model.layers.\*.mlp.gate', which is no module or parameter of LlamaForCausalLM."
            r" Did you mean 'model.layers.\*.mlp\.?.*'\? `\*` stands",
        ),
        ({GATE: 2}, ConfigError, "a int, not a style's name or a ParallelStyle"),
        ({"model.layers.*.mlp": "colwise"}, ModelError, r"model.layers.0.mlp \(LlamaMLP\) the style 'colwise'"),
        ({GATE: "embedding_rowwise"}, ModelError, r"\(Linear\).*needs a module with num_embeddings. Change the plan"),
        ({"model.norm": "rowwise"}, ModelError, "model.norm"),
        ({"lm_head.weight": "colwise"}, ConfigError, "but the layer 'lm_head' none.*Give the style to 'lm_head'"),
        ({GATE: RowwiseParallel(output_layouts=Shard(-1))}, ConfigError, "which no style of meshwright is equal to"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_what_cannot_be_is_refused(plan: Mapping[str, Any], error: type[MeshwrightError], text: str) -> None:
    with pytest.raises(error, match=text):
        found(plan)


# -- what does not fit the number of ranks is refused before anything happens


def _refused(model_type: str, tied: bool | None, plan: Mapping[str, Any] | None) -> tuple[str, int, bool]:
    """The refusal, collectives before it, and whether the model is as it was."""
    register_strategy_and_models()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    model = build_case_model(model_type, tied=tied, seed=0, dtype=torch.float64)
    parameters, forwards = dict(model.named_parameters()), [module.forward for module in model.modules()]
    texts: list[str] = []
    build = lambda: TensorParallel(model, model_layout(model), mesh, plan=plan).apply()  # noqa: E731
    traffic = record_collectives(lambda: texts.append(catch_error(build)))
    after = dict(model.named_parameters())
    same = all(after[name] is parameter for name, parameter in parameters.items()) and len(after) == len(parameters)
    return texts[0], len(traffic), same and [module.forward for module in model.modules()] == forwards


@pytest.mark.parametrize(
    ("ranks", "model_type", "tied", "plan", "text"),
    [
        pytest.param(4, "six_heads", False, None, r"self_attn has 6 attention heads, .* 1, 2, 3, 6\.", marks=SLOW),
        pytest.param(
            *(4, "llama", False, {GATE: "packed_colwise"}),
            r"model.layers.0.mlp.gate_proj.weight holds 2 packed parts of 26 features each, which tp_size=4 does not",
            marks=SLOW,
        ),
        (
            *(2, "llama", True, {"model.embed_tokens": "embedding_colwise", "lm_head": "colwise_gather_output"}),
            r"are one parameter, but the plan \(tp_plan\) shards them in different ways: .*Give them styles that agree",
        ),
    ],
    ids=["heads", "packed-parts", "tied"],
)
def test_refusals_come_before_any_collective_and_leave_the_model_as_it_was(ranks, model_type, tied, plan, text):
    answers = pool(ranks).run(_refused, model_type, tied, plan)
    assert len({said for said, _, _ in answers}) == 1
    for said, collectives, same in answers:
        assert re.search(text, said), said
        assert (collectives, same) == (0, True)


# -- transformers' plans


def test_every_style_of_transformers_is_known() -> None:
    styles: set[str] = set()
    for path in Path(transformers.__file__).parent.glob("models/*/*.py"):
        for text in re.findall(r"_tp_plan = (\{[^}]*\})$", path.read_text(encoding="utf-8"), re.MULTILINE):
            styles |= {*ast.literal_eval(text).values()}
    assert {"colwise", "rowwise", "colwise_gather_output", "rowwise_split_input", "moe_tp_experts"} <= styles
    assert styles <= STYLES.keys()


TRANSLATED = {"colwise", "rowwise", "colwise_rep", "colwise_gather_output", "rowwise_rep", "rowwise_split_input"}
TRANSLATED |= {"embedding_rowwise", "embedding_colwise", "sequence_parallel"}


def test_every_style_has_an_equal_in_torch_or_is_refused_by_name() -> None:
    for style in TRANSLATED:
        assert isinstance(translate_to_torch_parallel_style(style), ParallelStyle)
    for style in STYLES.keys() - TRANSLATED:
        with pytest.raises(ConfigError, match=f"style '{style}' has no equal in torch.*by its name in a tp_plan"):
            translate_to_torch_parallel_style(style)
    for unknown, text in (("row_wise", r"'row_wise'\. Did you mean 'rowwise'\?"), ([7], r"\[7\]. Known: colwise")):
        with pytest.raises(ConfigError, match=f"unknown tensor-parallel style {text}"):
            translate_to_torch_parallel_style(unknown)  # type: ignore[arg-type]


def test_models_that_torch_s_styles_cannot_shard_are_refused() -> None:
    with pytest.raises(ModelError, match="GPT2LMHeadModel has no tensor-parallel plan of its own"):
        get_hf_tp_shard_plan(build_tiny_model("gpt2"))
    plan = get_hf_tp_shard_plan(build_case_model("mixtral", tied=None, seed=0, dtype=torch.float64))
    experts = plan["model.layers.*.mlp.experts"]
    with pytest.raises(ConfigError, match=r"'moe_tp_experts' of meshwright.*or leave this entry out"):
        experts._apply(llama(), None)


@pytest.mark.parametrize(
    ("model_type", "is_inside"),
    [
        ("llama", False),
        ("apertus", True),
        *(pytest.param(each, False, marks=SLOW) for each in ("mixtral", "doge", "llama4_text")),
        pytest.param("deepseek_v2", True, marks=SLOW),
    ],
)
def test_the_model_s_plan_in_styles_of_torch_is_the_one_that_is_used_without_any(model_type, is_inside):
    model = build_case_model(model_type, tied=None, seed=0, dtype=torch.float64)
    if is_inside:
        model = nn.Sequential(model)
    plan, own = found(get_hf_tp_shard_plan(model), model=model), found(model=model)
    assert (plan.module_styles, plan.parameter_styles) == (own.module_styles, own.parameter_styles)
    assert "colwise" in plan.module_styles.values()


def test_plans_of_the_class_and_of_inner_models_are_merged() -> None:
    model = build_tiny_model()
    model.tp_plan = {"lm_head": "colwise_gather_output"}
    model.model.tp_plan = {"layers.*.mlp.up_proj": "colwise_gather_output"}
    plan = get_hf_tp_shard_plan(model)
    assert plan.keys() == {"model.embed_tokens", "lm_head", "model.layers.*.mlp.up_proj"}


def _by_torch() -> tuple[float, int]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ids_BS = torch.arange(32).view(2, 16)
    whole, model = build_tiny_model(), build_tiny_model()
    parallelize_module(model, mesh, get_hf_tp_shard_plan(model))
    with torch.no_grad():
        apart = (model(input_ids=ids_BS).logits - whole(input_ids=ids_BS).logits).abs().max()
    local = [each.to_local() if isinstance(each, DTensor) else each for each in model.parameters()]
    return float(apart), sum(each.numel() for each in local)


def test_torch_parallelizes_a_llama_by_it() -> None:
    whole = sum(parameter.numel() for parameter in llama().parameters())
    for apart, held in pool(2).run(_by_torch):
        assert apart < 1e-12
        assert held < 0.52 * whole


# -- corrections of transformers' plans


@SLOW
@pytest.mark.parametrize("model_type", sorted(_load_corrections()))
def test_corrections_are_enough(model_type: str) -> None:
    assert_equal_to_single(Case(model_type=model_type, tied=None, steps=2))
