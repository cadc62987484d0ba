"""`from_pretrained` and `from_config`: under every strategy the weights are plain transformers', and train so."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.managers import build_empty_manager
from support.tiers import mark_mostly_slow
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM

import meshwright as mw
from meshwright import ConfigError, ModelError, open_world
from meshwright.base.validation import validate_config
from meshwright.strategy.registry import get_strategy
from meshwright.testing import Case
from meshwright_testing import pool
from meshwright_testing.case import TOLERANCE, Outcome
from meshwright_testing.models import build_case_model, build_tiny_model
from meshwright_testing.parity import find_max_difference, full_weights, run_reference, train_steps

LAYOUTS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "single": ("single", 1, {}, {}),
    "ddp": ("ddp", 2, {}, {}),
    "ddp bucketed": ("ddp", 2, {"engine": "bucketed"}, {}),
    "fsdp2": ("fsdp2", 2, {}, {}),
    "fsdp2 dp3": ("fsdp2", 3, {}, {}),
    "fsdp2 tp2": ("fsdp2", 4, {}, {"tp_size": 2}),
    "hsdp": ("fsdp2", 4, {}, {"dp_replicate_size": 2}),
    "pipeline": ("fsdp2", 4, {}, {"pp_size": 2}),
    "megatron_fsdp": ("megatron_fsdp", 2, {}, {}),
}


def _trained(
    path: str, strategy: str, config: dict[str, Any], sizes: dict[str, Any], case: Case
) -> tuple[dict[str, Tensor], Outcome]:
    """Weights as they were loaded, and what training then gives."""
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    manager = mw.from_pretrained(path, strategy, config=config, device="cpu", **sizes)
    return _outcome(manager, case)


def _outcome(manager: Any, case: Case) -> tuple[dict[str, Tensor], Outcome]:
    loaded = full_weights(manager)
    manager.build_optimizer(mw.optimizer_factory(case.optimizer))
    losses, norms, eval_losses = train_steps(manager, case, range(case.steps))
    return loaded, Outcome(losses, norms, eval_losses, full_weights(manager))


def check_loaded(found: dict[str, Tensor], directory: Path) -> None:
    """Bit for bit, on one rank."""
    expected = dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters(remove_duplicate=False))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == weight.dtype, name
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize("tied", mark_mostly_slow([False, True]), ids=["untied", "tied"])
@pytest.mark.parametrize("layout", mark_mostly_slow(LAYOUTS))
def test_weights_are_the_plain_models_and_train_like_it(layout, tied, tmp_path):
    strategy, world_size, config, sizes = LAYOUTS[layout]
    case = Case(tied=tied, steps=1)
    build_tiny_model(tied=tied).save_pretrained(tmp_path, max_shard_size="60KB")
    outcomes = pool(world_size).run(_trained, str(tmp_path), strategy, config, sizes, case)
    for loaded, _ in outcomes:
        check_loaded(loaded, tmp_path)
    assert find_max_difference([outcome for _, outcome in outcomes], run_reference(case)).worst <= TOLERANCE


def _drawn_after_loading(path: str) -> float:
    torch.manual_seed(mw.open_world("cpu").rank)
    mw.from_pretrained(path, "fsdp2", device="cpu", tp_size=2)
    return float(torch.rand(()))


@pytest.mark.slow
def test_ranks_that_share_layers_share_the_random_state_of_dropout(tmp_path):
    build_tiny_model().save_pretrained(tmp_path)
    first, second = pool(2).run(_drawn_after_loading, str(tmp_path))
    assert first == second


# -- what is wrong


def _error(path: str, options: dict[str, Any]) -> str:
    try:
        mw.from_pretrained(path, device="cpu", **options)
    except mw.MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tp_sise": 2}, "ConfigError: the call is not valid:\n  tp_sise: unknown key. Did you mean 'tp_size'?"),
        ({"tp_size": 3}, "MeshError"),
        ({"dtype": "float8"}, "ModelError: dtype='float8' is not one of"),
        ({"strategy": "fsdp3"}, "UnknownStrategyError"),
        ({"config": {"reshard": 1}}, "ConfigError"),
        ({"hf_config": {"hiden_size": 1}}, "ModelError: hf_config.hiden_size is not a field"),
        ({"hf_config": {"hidden_size": 48}}, "weights of another shape than the model's"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_call_is_the_same_error_on_all_ranks(options, text, tmp_path):
    build_tiny_model().save_pretrained(tmp_path)
    errors = pool(2).run(_error, str(tmp_path), options)
    assert text in errors[0]
    assert errors[0] == errors[1]


def _error_on_own_path(paths: list[str]) -> str:
    return _error(paths[mw.open_world("cpu").rank], {})


def test_directories_that_differ_between_ranks_are_an_error(tmp_path):
    build_tiny_model().save_pretrained(tmp_path / "0")
    build_tiny_model(layers=2).save_pretrained(tmp_path / "1")
    paths = [str(tmp_path / "0"), str(tmp_path / "1")]
    for error in pool(2).run(_error_on_own_path, paths):
        assert "ranks find different weights under the same path" in error
    (tmp_path / "1" / "model.safetensors").write_bytes(b"short")
    for error in pool(2).run(_error_on_own_path, paths):
        assert "1/model.safetensors is not a whole safetensors file" in error
        assert "found on rank 1" in error


def _worlds(path: str) -> tuple[bool, bool, bool]:
    given = mw.open_world("cpu")
    joined = mw.from_pretrained(path, "fsdp2", device="cpu").mesh.world
    same = mw.from_pretrained(path, "fsdp2", world=given).mesh.world is given
    joined.close()
    return joined.owns_group, same, dist.is_initialized()


def test_a_world_that_exists_is_joined_and_left_open(tmp_path):
    build_tiny_model().save_pretrained(tmp_path)
    assert pool(2).run(_worlds, str(tmp_path)) == [(False, True, True)] * 2


def _twice(strategy: str, config: dict[str, Any], sizes: dict[str, int]) -> str:
    model = build_tiny_model()
    build_empty_manager(strategy, config, sizes).parallelize(model)
    try:
        build_empty_manager(strategy, config, sizes).parallelize(model)
    except mw.MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


# With ddp's buckets of two managers over one parameter, its gradient came back as 0.
@pytest.mark.parametrize("layout", mark_mostly_slow(["single", "ddp bucketed", "pipeline"]))
def test_a_model_of_another_manager_is_refused_on_every_rank(layout: str) -> None:
    strategy, ranks, config, sizes = LAYOUTS[layout]
    for text in pool(ranks).run(_twice, strategy, config, sizes):
        assert text.startswith("ModelError: ")
        assert "has been parallelized by another manager already" in text
        assert "Build the model again" in text


def _two_models() -> None:
    for seed in range(2):
        # All models of this type have one module for an activation.
        model = build_case_model("openai-gpt", tied=None, seed=seed, dtype=torch.float64)
        build_empty_manager("single").parallelize(model)


def test_models_that_share_modules_without_parameters_have_managers_of_their_own() -> None:
    pool(1).run(_two_models)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("fsdp2", {"autocast_dtype": "float16"}),
        ("fsdp2", {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)}),
        ("megatron_fsdp", {"main_grads_dtype": "float16"}),
    ],
    ids=str,
)
def test_options_that_would_train_in_float16_are_refused(strategy: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="float16 needs loss scaling"):
        validate_config(get_strategy(strategy).config_cls, options, where="options")


@pytest.mark.parametrize("strategy", ["single", "fsdp2"])
def test_models_that_would_be_trained_in_float16_are_refused(strategy: str) -> None:
    with (
        closing(open_world("cpu")),
        pytest.raises(ModelError, match=r"is to be trained in float16: .* Load the model in bfloat16 or float32"),
    ):
        build_empty_manager(strategy).parallelize(build_tiny_model(dtype=torch.float16))


def test_a_failed_load_leaves_no_process_group(tmp_path: Path) -> None:
    script = (
        "import torch.distributed as dist, meshwright as mw\n"
        "for load in (lambda: mw.from_pretrained('nowhere', 'fsdp2'), lambda: mw.from_config({}, 'fsdp2')):\n"
        "    try:\n        load()\n    except mw.MeshwrightError:\n        print(dist.is_initialized())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "False"], done.stderr
