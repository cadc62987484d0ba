"""Optimizers, decay groups and schedules from a run file."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.base.errors import ConfigError
from meshwright.optim.build import build_scheduler, can_fuse, fused_where_it_pays, optimizer_factory, try_optimization
from meshwright_run.run_file import OptimizerConfig, ScheduleConfig


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


TAKES_CLOSURE = {"LBFGS"}
TAKES_SPARSE_GRADIENTS = {"SparseAdam"}
OPTIMIZERS = sorted(
    name
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
)


@pytest.mark.parametrize("name", sorted({*OPTIMIZERS} - TAKES_CLOSURE - TAKES_SPARSE_GRADIENTS))
def test_every_optimizer_of_torch_is_made_by_name_and_steps(name):
    parameters = matrices() if name == "Muon" else named()
    before = [parameter.detach().clone() for _, parameter in parameters]
    optimizer = make(name, parameters, lr=1e-2)
    assert type(optimizer) is getattr(torch.optim, name)
    step(optimizer)
    assert {group["lr"] for group in optimizer.param_groups} == {1e-2}
    assert all(not old.equal(new) for old, (_, new) in zip(before, parameters, strict=True))


def test_an_optimizer_that_needs_a_closure_is_refused():
    with pytest.raises(ConfigError, match="'LBFGS' needs a closure"):
        optimizer_factory(OptimizerConfig(name="LBFGS"))


@pytest.mark.parametrize(
    ("config", "texts"),
    [
        ({"name": "AdmaW"}, ["'AdmaW' is not in torch.optim.", "Did you mean 'AdamW'?", "Known: ASGD, "]),
        ({"name": "Optimizer"}, ["'Optimizer' is not in torch.optim."]),
        ({"name": "lr_scheduler"}, ["'lr_scheduler' is not in torch.optim."]),
        ({"options": {"beta": 1}}, ["takes no argument 'beta'", "Did you mean 'betas'?", "It takes: lr, betas, eps"]),
        ({"options": {"params": []}}, ["takes no argument 'params'"]),
        ({"options": {"lr": 1}}, ["options holds 'lr'", "set optimizer.lr"]),
        ({"options": {"weight_decay": 1}}, ["options holds 'weight_decay'", "set optimizer.weight_decay"]),
        ({"name": "SparseAdam", "weight_decay": 0.1}, ["'SparseAdam' takes no argument 'weight_decay'"]),
    ],
)
def test_what_an_optimizer_does_not_take_is_an_error_before_any_parameter_is_seen(config, texts):
    with pytest.raises(ConfigError) as caught:
        optimizer_factory(OptimizerConfig(**config))
    for text in texts:
        assert text in str(caught.value)


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
        ("AdamW", {"betas": 0.9}, "betas: Input should be a valid list"),
        ("AdamW", {"eps": "small"}, "eps: Input should be a valid number"),
        ("AdamW", {"eps": True}, "eps: Input should be a valid number"),
        # As words, all of them would be true.
        ("AdamW", {"maximize": "no"}, "maximize: Input should be a valid boolean"),
        ("AdamW", {"amsgrad": 0}, "amsgrad: Input should be a valid boolean"),
        ("SGD", {"foreach": "false"}, "foreach: Input should be a valid boolean"),
        ("ASGD", {"t0": "a"}, "t0: Input should be a valid number"),
        ("Rprop", {"step_sizes": ["a", 1]}, "step_sizes: Input should be a valid number"),
    ],
)
def test_no_option_is_taken_for_one_of_another_type(name, options, text):
    with pytest.raises(ConfigError, match=rf"optimizer\.options\.{text}"):
        optimizer_factory(OptimizerConfig(name=name, options=options))


def tried(optimizer: dict[str, Any], schedule: dict[str, Any], device: str = "cpu") -> None:
    try_optimization(OptimizerConfig(**optimizer), ScheduleConfig(**schedule), 10, device=torch.device(device))


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


@pytest.mark.parametrize("power", [-3, -0.5])
def test_a_schedule_without_a_rate_after_the_last_step_is_an_error_beforehand(power):
    with pytest.raises(ConfigError, match=r"schedule 'polynomial' .* has no rate after step 10 of 10"):
        tried({}, {"name": "polynomial", "options": {"power": power}})


@pytest.mark.parametrize("name", ["linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt"])
def test_schedules_that_have_rates_pass(name):
    tried({}, {"name": name, "warmup_steps": 2})


def test_options_reach_the_optimizer():
    optimizer = make("SGD", lr=0.5, options={"momentum": 0.9, "nesterov": True})
    assert (optimizer.defaults["momentum"], optimizer.defaults["nesterov"]) == (0.9, True)


# -- decay


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
        ({"name": "constant_with_warmup", "warmup_steps": 2}, [0.0, 0.5] + [1.0] * 8),
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
        ({"name": "greedy"}, ["is not one of"]),
        ({"name": "cosine", "options": {"cycles": 2}}, ["schedule 'cosine' refuses its options", "cycles"]),
        ({"name": "warmup_stable_decay"}, ["schedule 'warmup_stable_decay' refuses its options"]),
        ({"name": "constant", "warmup_steps": 3}, ["'constant' knows no warm-up", "constant_with_warmup"]),
        ({"name": "constant", "options": {"power": 1}}, ["'constant' takes no options", "power"]),
        ({"name": "constant_with_warmup", "options": {"power": 1}}, ["takes no options", "power"]),
        ({"name": "cosine", "options": {"num_cycles": True}}, ["schedule.options.num_cycles=True is no finite number"]),
        ({"name": "cosine_with_min_lr", "options": {"min_lr": math.nan}}, ["min_lr=nan is no finite number"]),
        ({"name": "cosine_with_min_lr", "options": {"min_lr": math.inf}}, ["min_lr=inf is no finite number"]),
    ],
)
def test_a_schedule_that_would_not_be_followed_is_an_error(config, texts):
    with pytest.raises(ConfigError) as caught:
        rates(ScheduleConfig(**config))
    for text in texts:
        assert text in str(caught.value)


def test_an_optimizer_is_known_to_fuse_by_trying_it() -> None:
    cpu = torch.device("cpu")
    assert [can_fuse(cls, cpu, torch.float32) for cls in (torch.optim.AdamW, torch.optim.SGD)] == [True, True]
    assert not can_fuse(torch.optim.RMSprop, cpu, torch.float32)
    assert not can_fuse(torch.optim.AdamW, torch.device("meta"), torch.float32)


def test_what_is_told_of_the_implementation_is_heeded_and_a_cpu_steps_as_torch_does(monkeypatch: Any) -> None:
    from meshwright.optim import build as optim

    parameters = [torch.nn.Parameter(torch.zeros(2, device="meta")), torch.nn.Parameter(torch.zeros(3, device="meta"))]
    here = [torch.nn.Parameter(torch.zeros(2))]
    # In the place of a device that has kernels.
    monkeypatch.setattr(optim, "can_fuse", lambda cls, device, dtype: device.type == "meta")
    adamw = torch.optim.AdamW
    assert fused_where_it_pays(adamw, {}, parameters) == {"fused": True}
    assert fused_where_it_pays(adamw, {"foreach": True}, parameters) == {}
    assert fused_where_it_pays(adamw, {}, here) == {}
    assert fused_where_it_pays(adamw, {}, [*parameters, *here]) == {}
    assert fused_where_it_pays(adamw, {}, []) == {}
    monkeypatch.setattr(optim, "can_fuse", lambda *kind: False)
    assert fused_where_it_pays(adamw, {}, parameters) == {}
