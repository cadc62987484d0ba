"""Several optimizers in one run: who steps which parameter, at parity with one process, or refused by name.

The groups of a run file are `OptimizerGroup`.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.caught_errors import catch_error
from support.commands import write_run
from support.error_assertions import raises_containing
from support.managers import build_model_manager
from support.runs import RunWorkspace
from support.tiers import mark_mostly_slow
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon

import meshwright as mw
from meshwright import OptimizerConfig, OptimizerGroup
from meshwright.base.errors import ConfigError, StrategyError
from meshwright.launch.open_world import open_world
from meshwright.optim.build import optimizer_factory, probe_optimizer
from meshwright.optim.groups import ChainedOptimizer, ParamTraits, assign_groups, describe_trained_params
from meshwright.plugin import ScheduleConfig
from meshwright.testing import Case
from meshwright_testing import pool
from meshwright_testing.case import TOLERANCE, Outcome, rank_microbatches
from meshwright_testing.models import build_case_model
from meshwright_testing.parity import find_max_difference, train_case
from meshwright_testing.tasks import PartOutcome, find_settings_error, train_part_from_checkpoint

MUON: dict[str, Any] = {"matrices_only": True, "name": "Muon", "lr": 0.02, "options": {"momentum": 0.9}}
EMBEDDING: dict[str, Any] = {"match": ["*embed*"], "lr": 5e-3, "weight_decay": 0.3, "options": {"eps": 1e-6}}
CONFIG: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "options": {"betas": [0.8, 0.9]}}
CONFIG["groups"] = [MUON, EMBEDDING]
SCHEDULE = ScheduleConfig(name="linear", warmup_steps=1)
CASE = Case(sequences=4, steps=4, max_norm=0.5, optimizer=OptimizerConfig(**CONFIG), schedule=SCHEDULE)


def unrounded(task: Callable[..., Any], *arguments: Any) -> Any:
    """The task of one rank: another one, while Muon does not round to bfloat16, which would hide what a layout does."""
    with patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor):
        return task(*arguments)


def llama() -> Any:
    return build_case_model("llama", tied=False, seed=0, dtype=torch.float64, layers=None)


# -- who is of which group


def known(model_type: str = "llama", *, tied: bool | None = False) -> dict[str, ParamTraits]:
    model = build_case_model(model_type, tied=tied, seed=0, dtype=torch.float32, layers=None)
    return describe_trained_params(model, mw.model_layout(model), list(model.named_parameters()), lambda p: p.shape)


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("llama", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("gpt2", {"c_attn", "c_proj", "c_fc"}),
        # The experts are stacks of matrices, and a router is one.
        ("mixtral", {"q_proj", "k_proj", "v_proj", "o_proj", "gate"}),
        # A_log has two dims, and is none; nor is the convolution.
        ("mamba", {"in_proj", "x_proj", "dt_proj", "out_proj"}),
    ],
)
def test_matrices_are_the_weights_of_linear_maps_within_blocks(model_type: str, expected: set[str]) -> None:
    found = {name.split(".")[-2] for name, each in known(model_type).items() if each.is_matrix}
    assert found == expected


def numbers(*groups: dict[str, Any], trained: dict[str, ParamTraits] | None = None) -> dict[str, int]:
    config = OptimizerConfig(groups=[OptimizerGroup(**group) for group in groups])
    return assign_groups(config, trained or known())


def test_the_first_group_that_a_parameter_fits_has_it_and_the_rest_is_of_the_top_level() -> None:
    found = numbers({"match": ["*.q_proj.*", "*norm*"]}, {"match": ["*_proj.weight"], "matrices_only": True})
    assert {number: {name.split(".")[-2] for name in found if found[name] == number} for number in range(3)} == {
        0: {"q_proj", "input_layernorm", "post_attention_layernorm", "norm"},
        1: {"k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        2: {"embed_tokens", "lm_head"},
    }


@pytest.mark.parametrize(
    ("groups", "texts"),
    [
        ([{"match": ["*.q_prj.weight"]}], ["groups[0] fits no parameter", "Did you mean 'q_proj.weight'?"]),
        ([{"match": ["*"]}, {"matrices_only": True}], ["groups[1] has no parameter", "are of groups before it"]),
        ([{"match": ["*norm*"], "matrices_only": True}], ["groups[0] fits no parameter", "Set matrices_only: false"]),
    ],
)
def test_a_group_without_a_parameter_is_an_error_that_says_why(groups: list[dict[str, Any]], texts: list[str]) -> None:
    with raises_containing(ConfigError, *texts):
        numbers(*groups)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"groups": [{"lr": 1.0}]}, "give match, matrices_only: true, or both"),
        ({"groups": [{"match": []}]}, "match must have a pattern"),
        (
            {"groups": [{"matrices_only": True, "name": "nowhere.Lion"}]},
            "'nowhere.Lion' is not imported: .* allow-list",
        ),
    ],
)
def test_a_group_that_means_nothing_is_an_error_of_the_run_file(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        OptimizerConfig(**config)


@pytest.mark.parametrize(
    ("group", "text"),
    [
        ({"options": {"lr": 1.0}}, "groups[0].options holds 'lr', which has a key of its own: set optimizer.groups[0]"),
        ({"options": {"eps": "small"}}, "optimizer.groups[0].options.eps: Input should be a valid number"),
        ({"name": "torch.nn.Linear"}, "optimizer.groups[0].name='torch.nn.Linear' is no optimizer"),
        ({"name": "torch.optim.AdmW"}, "'torch.optim.AdmW' does not exist in the module torch.optim. Did you mean"),
    ],
)
def test_what_the_optimizer_of_a_group_does_not_take_is_an_error_before_any_parameter_is_seen(
    group: dict[str, Any], text: str
) -> None:
    with raises_containing(ConfigError, text):
        optimizer_factory(OptimizerConfig(weight_decay=0.1, groups=[{"matrices_only": True, **group}]))


def test_what_would_fail_in_a_step_of_a_group_is_an_error_beforehand() -> None:
    for group in ({"lr": 1e300}, {"options": {"differentiable": True}}):
        config = OptimizerConfig(groups=[{"match": ["*"], **group}])
        with pytest.raises(ConfigError, match=r"optimizer\.groups\[0\]: optimizer 'AdamW'"):
            probe_optimizer(config, ScheduleConfig(), 10, device=torch.device("cpu"))
    probe_optimizer(OptimizerConfig(**CONFIG), ScheduleConfig(), 10, device=torch.device("cpu"))


def made(config: dict[str, Any]) -> tuple[torch.optim.Optimizer, dict[int, str]]:
    model = llama()
    with closing(open_world("cpu")):
        optimizer = build_model_manager(model, optimizer=OptimizerConfig(**config)).optimizer
    return optimizer, {id(p): name for name, p in model.named_parameters()}


def test_each_group_has_its_own_settings_and_what_it_leaves_out_from_the_top_level() -> None:
    optimizer, names = made(CONFIG)
    assert isinstance(optimizer, ChainedOptimizer)
    assert [type(member) for member in optimizer.optimizers] == [Muon, AdamW, AdamW]
    keys = ("lr", "weight_decay", "momentum", "betas", "eps")
    found = [
        ({names[id(p)].split(".")[-2] for p in group["params"]}, *map(group.get, keys))
        for group in optimizer.param_groups
    ]
    matrices = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    norms = {"input_layernorm", "post_attention_layernorm", "norm"}
    assert found == [
        (matrices, 0.02, 0.1, 0.9, None, 1e-7),
        ({"embed_tokens"}, 5e-3, 0.3, None, (0.8, 0.9), 1e-6),
        ({"lm_head"}, 1e-2, 0.1, None, (0.8, 0.9), 1e-8),
        (norms, 1e-2, 0.0, None, (0.8, 0.9), 1e-8),
    ]


class Lion(torch.optim.Optimizer):
    """Of a user's own."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


OWN = f"{__name__}.Lion"


def test_an_optimizer_of_your_own_is_named_by_its_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_ALLOWED_IMPORTS", __name__)
    optimizer, _ = made({"name": OWN, "lr": 1e-3, "options": {"betas": [0.5, 0.6]}})
    assert type(optimizer).__name__ == "Lion"
    assert optimizer.param_groups[0]["betas"] == [0.5, 0.6]
    with pytest.raises(ConfigError, match=r"takes no argument 'beta'\. Did you mean 'betas'"):
        made({"name": OWN, "options": {"beta": 1}})


# -- at parity with one process

LAYOUTS: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "fsdp2": (2, "fsdp2", {}, {}),
    "fsdp2, tp": (2, "fsdp2", {}, {"tp_size": 2}),
    "pipeline over fsdp2": (2, "fsdp2", {}, {"pp_size": 2}),
    "pipeline over ddp": (2, "ddp", {}, {"pp_size": 2}),
    "ddp, distributed optimizer": (2, "ddp", {"engine": "bucketed", "use_distributed_optimizer": True}, {}),
    "megatron_fsdp": (2, "megatron_fsdp", {}, {}),
}


def with_own(task: Callable[..., Any], *arguments: Any) -> Any:
    mw.allow_imports(__name__)
    return task(*arguments)


@functools.lru_cache
def expected(case: Case) -> Outcome:
    (found,) = pool(1).run(with_own, unrounded, train_case, "single", {}, {}, case.on_one_rank())
    return found  # type: ignore[no-any-return]


def apart(case: Case, layout: tuple[int, str, dict[str, Any], dict[str, Any]]) -> float:
    ranks, *how = layout
    outcomes = pool(ranks).run(with_own, unrounded, train_case, *how, case, timeout_s=300)
    return find_max_difference(outcomes, expected(case)).worst


@pytest.mark.parametrize("layout", mark_mostly_slow(["fsdp2", "fsdp2, tp", "pipeline over fsdp2"]))
def test_muon_for_matrices_and_adamw_for_the_rest_are_at_parity(layout: str) -> None:
    assert apart(CASE, LAYOUTS[layout]) <= TOLERANCE


def refusal(config: dict[str, Any], strategy: str, options: dict[str, Any], sizes: dict[str, Any]) -> str:
    """The task of one rank: what build_optimizer raises."""
    return catch_error(build_model_manager, llama(), strategy, options, sizes, optimizer=OptimizerConfig(**config))


ONE_STAGE: dict[str, Any] = {"groups": [{"match": ["lm_head.*"], "name": "SGD"}]}
NO_STAGE: dict[str, Any] = {"groups": [{"match": ["*lm_heads.weight"], "lr": 1.0}]}


@pytest.mark.parametrize(
    ("layout", "config", "text"),
    mark_mostly_slow(
        [
            ("megatron_fsdp", CONFIG, "StrategyError.*Muon.*pieces"),
            ("ddp, distributed optimizer", CONFIG, "StrategyError.*Muon.*pieces"),
            ("pipeline over ddp", ONE_STAGE, "^$"),
            ("pipeline over ddp", NO_STAGE, "Did you mean 'lm_head.weight'?"),
        ]
    ),
    ids=["units", "pieces", "one-stage", "no-stage"],
)
def test_groups_that_no_rank_can_step_are_refused_on_all(layout: str, config: dict[str, Any], text: str) -> None:
    ranks, *rest = LAYOUTS[layout]
    (found,) = set(pool(ranks).run(refusal, config, *rest))
    assert re.search(text, found, re.DOTALL), found


def resumed(layout: str, steps: range, source: Path | None, target: Path | None) -> list[PartOutcome]:
    ranks, *how = LAYOUTS[layout]
    paths = [str(path) if path is not None else None for path in (source, target)]
    parts: list[PartOutcome] = pool(ranks).run(
        unrounded, train_part_from_checkpoint, *how, CASE, steps, *paths, timeout_s=300
    )
    return parts


@pytest.mark.slow
def test_state_and_rates_of_all_members_continue_in_another_layout(tmp_path: Path) -> None:
    whole = pool(1).run(unrounded, train_part_from_checkpoint, "single", {}, {}, CASE, range(CASE.steps), None, None)[0]
    resumed("pipeline over fsdp2", range(2), None, tmp_path / "step")
    parts = resumed("fsdp2", range(2, CASE.steps), tmp_path / "step", None)
    assert find_settings_error(parts, range(2, CASE.steps), whole) == ""
    tail = replace(whole.outcome, losses=whole.outcome.losses[2:], norms=whole.outcome.norms[2:])
    assert find_max_difference([part.outcome for part in parts], tail).worst <= TOLERANCE


def two() -> tuple[ChainedOptimizer, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.full((2, 2), float(value))) for value in range(1, 4)]
    return ChainedOptimizer([AdamW(parameters[:2], lr=0.1), SGD(parameters[2:], lr=0.2, momentum=0.9)]), parameters


def stepped(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_several_as_one_keep_the_state_of_each_and_load_it_again() -> None:
    first, parameters = two()
    stepped(first, parameters)
    assert [set(first.state[p]) for p in parameters] == [{"step", "exp_avg", "exp_avg_sq"}] * 2 + [{"momentum_buffer"}]
    assert len(first.state) == len(list(first.state)) == 3
    saved = copy.deepcopy(first.state_dict())
    second, others = two()
    for own, other in zip(parameters, others, strict=True):
        other.data.copy_(own.data)
    second.load_state_dict(saved)
    for optimizer, trained in ((first, parameters), (second, others)):
        stepped(optimizer, trained)
        optimizer.zero_grad()
    assert all(own.equal(other) for own, other in zip(parameters, others, strict=True))
    assert all(p.grad is None for p in parameters)
    assert nn.Parameter(torch.ones(1)) not in first.state


def test_what_several_as_one_cannot_do_is_refused() -> None:
    optimizer, parameters = two()
    for text, work in (
        ("does not say to which", lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})),
        ("cannot be replaced as a list", lambda: setattr(optimizer, "param_groups", [{"params": parameters}])),
        ("their own", lambda: setattr(optimizer, "state", {parameters[0]: {}})),
        ("have the same parameter", lambda: ChainedOptimizer([SGD(parameters, lr=1.0), SGD(parameters[:1], lr=1.0)])),
    ):
        with pytest.raises(StrategyError, match=text):
            work()


@pytest.mark.slow
def test_groups_that_do_not_fit_the_model_of_a_run_are_errors_before_it_starts(tmp_path: Path) -> None:
    write_run(tmp_path)
    _, error, code = RunWorkspace(tmp_path, tmp_path).run(optimizer={"groups": [{"match": ["*norm*"], "name": "Muon"}]})
    assert code == 2
    assert "optimizer.groups[0]: optimizer 'Muon' refuses" in error
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def trained_by_hand(case: Case) -> list[Tensor]:
    """Two optimizers and a loop of plain torch."""
    model = llama()
    named = dict(model.named_parameters())
    muon = [p for name, p in named.items() if name.split(".")[-2].endswith("_proj")]
    norms = [p for name, p in named.items() if "norm" in name]
    adamw = {"lr": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.0}
    optimizers = [
        Muon(muon, lr=0.02, weight_decay=0.1, momentum=0.9),
        AdamW([named["model.embed_tokens.weight"]], **{**adamw, "lr": 5e-3, "weight_decay": 0.3, "eps": 1e-6}),
        AdamW([{"params": [named["lm_head.weight"]], "weight_decay": 0.1}, {"params": norms}], **adamw),
    ]
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    for step in range(case.steps):
        factor = [0.0, 1.0, 2 / 3, 1 / 3][step]
        for optimizer, bases in zip(optimizers, rates, strict=True):
            for group, base in zip(optimizer.param_groups, bases, strict=True):
                group["lr"] = base * factor
        (batch,) = rank_microbatches(case, step, 0, 1)
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
        targets = batch["labels"][:, 1:].flatten()
        loss = nn.functional.cross_entropy(logits, targets, reduction="sum") / (targets != -100).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), case.max_norm or 0.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2", "ddp, distributed optimizer"])
def test_an_optimizer_of_your_own_beside_others_is_at_parity(layout: str) -> None:
    groups = [{"match": ["*_proj.weight"], "name": OWN, "lr": 1e-3}, {"match": ["*head*"], "name": "SGD"}]
    with patch.dict("os.environ", MESHWRIGHT_ALLOWED_IMPORTS=__name__):
        case = replace(CASE, optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1, groups=groups))
    assert apart(case, LAYOUTS[layout]) <= TOLERANCE


@pytest.mark.slow
def test_in_one_process_they_are_two_optimizers_of_plain_torch() -> None:
    (by_hand,) = pool(1).run(unrounded, trained_by_hand, CASE)
    for found, weight in zip(by_hand, expected(CASE).weights.values(), strict=True):
        assert float((found - weight).abs().max()) <= TOLERANCE
