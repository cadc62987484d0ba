"""Optimizers, decay groups and schedules: from a run file, in every type of model and under every strategy."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.error_assertions import raises_containing
from support.managers import build_model_manager
from support.model_types import REPRESENTATIVE_MODEL_TYPES
from support.tiers import mark_mostly_slow
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from meshwright.base.errors import ConfigError
from meshwright.optim.build import build_scheduler, choose_fused, has_fused_step, optimizer_factory, probe_optimizer
from meshwright.optim.groups import describe_params_by_name, describe_trained_params
from meshwright_run.run_file import OptimizerConfig, ScheduleConfig
from meshwright_testing.models import build_tiny_model
from meshwright_testing.workers import pool
from meshwright_testing.zoo import build_zoo_config, zoo_types, zoo_unsupported_reason


def named() -> list[tuple[str, nn.Parameter]]:
    torch.manual_seed(0)
    shapes = {"embed.weight": (4, 2), "layers.0.proj.weight": (2, 2), "layers.0.proj.bias": (2,), "norm.weight": (2,)}
    return [(name, nn.Parameter(torch.randn(shape))) for name, shape in shapes.items()]


def matrices() -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in named() if parameter.dim() == 2]


def make(name: str, parameters: list[tuple[str, nn.Parameter]] | None = None, **config: Any) -> torch.optim.Optimizer:
    return optimizer_factory(OptimizerConfig(name=name, **config))(parameters or named())


def step(optimizer: torch.optim.Optimizer, gradient: float = 1.0) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step()


# LBFGS takes a closure, SparseAdam sparse gradients.
OPTIMIZERS = {name for name, each in vars(torch.optim).items() if isinstance(each, type)} - {"LBFGS", "SparseAdam"}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS - {"Optimizer"}))
def test_every_optimizer_of_torch_is_made_by_name_and_steps(name):
    parameters = matrices() if name == "Muon" else named()
    before = [parameter.detach().clone() for _, parameter in parameters]
    optimizer = make(name, parameters, lr=1e-2)
    assert type(optimizer) is getattr(torch.optim, name)
    step(optimizer)
    assert {group["lr"] for group in optimizer.param_groups} == {1e-2}
    assert all(not old.equal(new) for old, (_, new) in zip(before, parameters, strict=True))


@pytest.mark.parametrize(
    ("config", "texts"),
    [
        ({"name": "AdmaW"}, ["'AdmaW' is not in torch.optim.", "Did you mean 'AdamW'?", "Known: ASGD, "]),
        ({"name": "LBFGS"}, ["'LBFGS' needs a closure"]),
        ({"name": "lr_scheduler"}, ["'lr_scheduler' is not in torch.optim."]),
        ({"options": {"beta": 1}}, ["takes no argument 'beta'", "Did you mean 'betas'?", "It takes: lr, betas, eps"]),
        ({"options": {"params": []}}, ["takes no argument 'params'"]),
        ({"options": {"weight_decay": 1}}, ["options holds 'weight_decay'", "set optimizer.weight_decay"]),
        ({"name": "SparseAdam", "weight_decay": 0.1}, ["'SparseAdam' takes no argument 'weight_decay'"]),
    ],
)
def test_what_an_optimizer_does_not_take_is_an_error_before_any_parameter_is_seen(config, texts):
    with raises_containing(ConfigError, *texts):
        optimizer_factory(OptimizerConfig(**config))


@pytest.mark.parametrize("config", [{"options": {"betas": [2.0, 0.9]}}, {"name": "Muon"}])
def test_arguments_that_an_optimizer_refuses_are_an_error_that_names_it(config):
    factory = optimizer_factory(OptimizerConfig(**config))
    with pytest.raises(ConfigError, match=f"optimizer '{config.get('name', 'AdamW')}' refuses"):
        factory(named())


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("AdamW", {"betas": [0.9]}, "betas: Field required"),
        ("AdamW", {"betas": [0.9, 0.9, 0.9]}, "betas: List should have at most 2 items"),
        ("AdamW", {"eps": True}, "eps: Input should be a valid number"),
        # As a word, it would be true.
        ("SGD", {"foreach": "false"}, "foreach: Input should be a valid boolean"),
        ("Rprop", {"step_sizes": ["a", 1]}, "step_sizes: Input should be a valid number"),
    ],
)
def test_no_option_is_taken_for_one_of_another_type(name, options, text):
    with pytest.raises(ConfigError, match=rf"optimizer\.options\.{text}"):
        optimizer_factory(OptimizerConfig(name=name, options=options))


def tried(optimizer: dict[str, Any], schedule: dict[str, Any], device: str = "cpu") -> None:
    probe_optimizer(OptimizerConfig(**optimizer), ScheduleConfig(**schedule), 10, device=torch.device(device))


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        ({"options": {"differentiable": True}}, "'AdamW' cannot step"),
        ({"lr": 1e300}, "'AdamW' cannot step with lr=1e[+]300"),
        ({"name": "SGD", "lr": 3e38, "weight_decay": 3e38}, "'SGD' .* infinite or NaN"),
        ({"name": "SparseAdam"}, "'SparseAdam' cannot step"),
    ],
)
def test_what_would_fail_in_a_step_is_an_error_beforehand(optimizer, text):
    with pytest.raises(ConfigError, match=text):
        tried(optimizer, {})


def test_what_only_a_cpu_refuses_is_left_to_the_ranks_of_a_gpu():
    tried({"options": {"capturable": True}}, {}, device="cuda")


def test_a_schedule_without_a_rate_after_the_last_step_is_an_error_beforehand():
    tried({}, {"name": "polynomial", "warmup_steps": 2})
    with pytest.raises(ConfigError, match=r"schedule 'polynomial' .* has no rate after step 10 of 10"):
        tried({}, {"name": "polynomial", "options": {"power": -0.5}})


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_parameters_shrink_exactly_where_decay_is_asked_for(name, weight_decay):
    parameters = named()
    before = {key: parameter.detach().clone() for key, parameter in parameters}
    step(make(name, parameters, lr=0.5, weight_decay=weight_decay), gradient=0.0)
    changed = {key for key, parameter in parameters if not parameter.equal(before[key])}
    assert changed == ({"embed.weight", "layers.0.proj.weight"} if weight_decay else set())


# -- schedules


def rates(config: ScheduleConfig, steps: int = 10) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build_scheduler(config, optimizer, steps)
    values = []
    for _ in range(steps):
        values.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return values


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"name": "constant"}, [1.0] * 10),
        ({"name": "linear", "warmup_steps": 2}, [0.0, 0.5] + [1 - n / 8 for n in range(8)]),
        ({"name": "polynomial", "options": {"power": 1.0, "lr_end": 0.5}}, [1 - n / 20 for n in range(10)]),
    ],
)
def test_schedules_follow_the_step(config, expected):
    assert rates(ScheduleConfig(**config)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("config", "texts"),
    [
        ({"name": "cosin"}, ["schedule 'cosin' is not one of", "Did you mean 'cosine'?"]),
        ({"name": "reduce_lr_on_plateau"}, ["is not one of"]),
        ({"name": "cosine", "options": {"cycles": 2}}, ["schedule 'cosine' refuses its options", "cycles"]),
        ({"name": "constant", "warmup_steps": 3}, ["'constant' knows no warm-up", "constant_with_warmup"]),
        ({"name": "constant", "options": {"power": 1}}, ["'constant' takes no options", "power"]),
        ({"name": "cosine", "options": {"num_cycles": True}}, ["schedule.options.num_cycles=True is no finite number"]),
        ({"name": "cosine_with_min_lr", "options": {"min_lr": math.nan}}, ["min_lr=nan is no finite number"]),
    ],
)
def test_a_schedule_that_would_not_be_followed_is_an_error(config, texts):
    with raises_containing(ConfigError, *texts):
        rates(ScheduleConfig(**config))


def test_an_optimizer_is_known_to_fuse_by_trying_it() -> None:
    cpu = torch.device("cpu")
    assert [has_fused_step(cls, cpu, torch.float32) for cls in (torch.optim.AdamW, torch.optim.SGD)] == [True, True]
    assert not has_fused_step(torch.optim.RMSprop, cpu, torch.float32)
    assert not has_fused_step(torch.optim.AdamW, torch.device("meta"), torch.float32)


def test_what_is_reported_the_implementation_is_respected_and_a_cpu_steps_as_torch_does(monkeypatch: Any) -> None:
    # Instead of a device that has kernels.
    monkeypatch.setattr("meshwright.optim.build.has_fused_step", lambda cls, device, dtype: device.type == "meta")
    there, here = [nn.Parameter(torch.zeros(2, device="meta"))], [nn.Parameter(torch.zeros(2))]
    assert choose_fused(torch.optim.AdamW, {}, there) == {"fused": True}
    for options, parameters in (({"foreach": True}, there), ({}, here), ({}, [*there, *here]), ({}, [])):
        assert choose_fused(torch.optim.AdamW, options, parameters) == {}


# Where patterns over whole paths went wrong, and those that keep vectors in two dims.
KINDS = [
    *REPRESENTATIVE_MODEL_TYPES,
    "dbrx",
    "roberta-prelayernorm",
    "bert",
    "rwkv",
    "gpt_oss",
    "zamba",
    "kimi_linear",
    "xlnet",
]


def decayed(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter]) -> set[str]:
    names = {id(parameter): name for name, parameter in named.items()}
    return {names[id(p)] for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}


@pytest.mark.parametrize(
    "model_type", [name for name in zoo_types() if name in KINDS and zoo_unsupported_reason(name) is None]
)
def test_matrices_are_decayed_and_norms_biases_and_vectors_are_not(model_type: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(build_zoo_config(model_type))
    named = dict(model.named_parameters())
    layout: Any = SimpleNamespace(blocks=())
    known = describe_trained_params(model, layout, list(named.items()), lambda parameter: parameter.shape)
    found = {name for name, each in known.items() if each.is_decayed}
    maps = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, Conv1D)
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in named}
    matrices = {name for name, owner in owners.items() if isinstance(owner, maps) and name.endswith(".weight")}
    experts = {name for name in named if named[name].dim() == 3 and name.rpartition(".")[2].endswith("_proj")}
    is_bias = {name for name in named if "bias" in name.rpartition(".")[2] or "bias_values" in name}
    norms = {name for name, owner in owners.items() if type(owner).__name__.lower().endswith(("norm", "normgated"))}
    vectors = {name for name in named if named[name].dim() < 2 or name.endswith((".A_log", ".D", ".sinks"))}
    assert (matrices | experts) - is_bias - found == set()
    assert (is_bias | norms | vectors) & found == set()
    # Called by hand, a factory knows names and shapes alone.
    assert {name for name, each in describe_params_by_name(named.items()).items() if each.is_decayed} == found


def decayed_under(strategy: str, config: dict[str, Any], sizes: dict[str, int]) -> set[str]:
    """What the groups of this rank's optimizer decay, under the names of the unwrapped model."""
    manager = build_model_manager(build_tiny_model(), strategy, config, sizes)
    named: dict[str, nn.Parameter] = {}

    class Noting:
        def bind_to_model(self, trained: Any) -> Any:
            made: Any = optimizer_factory(OptimizerConfig(weight_decay=0.1))

            def factory(given: Any) -> torch.optim.Optimizer:
                named.update(given)
                optimizer: torch.optim.Optimizer = made.bind_to_model(trained)(named.items())
                return optimizer

            return factory

    return decayed(manager.build_optimizer(Noting()), named)


@pytest.mark.parametrize(
    ("strategy", "config", "sizes"),
    mark_mostly_slow(
        [
            ("ddp", {}, {}),
            ("ddp", {"engine": "bucketed", "use_distributed_optimizer": True}, {}),
            ("fsdp2", {"activation_checkpointing": "full"}, {}),
            ("megatron_fsdp", {}, {}),
            ("fsdp2", {}, {"tp_size": 2}),
            ("fsdp2", {}, {"pp_size": 2}),
        ]
    ),
    ids=str,
)
def test_every_strategy_decays_the_same_parameters(strategy, config, sizes) -> None:
    matrices = {name for name, parameter in build_tiny_model().named_parameters() if parameter.dim() == 2}
    assert set.union(*pool(2).run(decayed_under, strategy, config, sizes)) == matrices


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("layers.0._checkpoint_wrapped_module.q_norm.weight", (4, 8), False),
        ("q_norm._orig_mod.weight", (4, 8), False),
        ("base_model.model.q_proj.lora_A.default.weight", (1, 32), True),
        ("q_proj.ia3_l.default", (32, 1), False),
        ("shared_expert_gate.weight", (1, 32), True),
        ("norms.0.weight", (4, 8), False),
        ("norm_attn_norm.attn.Wqkv.weight", (4, 8), True),
    ],
)
def test_names_of_wrappers_and_adapters_say_nothing(name: str, shape: tuple[int, ...], expected: bool) -> None:
    parameter = nn.Parameter(torch.ones(shape))
    optimizer = optimizer_factory(OptimizerConfig(weight_decay=0.1))([(name, parameter)])
    assert bool(optimizer.param_groups[0]["weight_decay"]) is expected


def test_a_pattern_that_matches_nothing_is_an_error_that_names_the_rule() -> None:
    named = list(build_tiny_model().named_parameters())
    texts = ("'*Norm*' matches no parameter", "last component", "such as 'model.layers.0.input_layernorm.weight'")
    with raises_containing(ConfigError, *texts):
        optimizer_factory(OptimizerConfig(weight_decay=0.1, no_decay=["*Norm*"]))(named)
