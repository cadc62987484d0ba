"""What each argument of a trainer means over a mesh: the list is whole, what is refused is, and what acts does."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import argument_cases
import arguments_page
import pytest
import torch
import trainer_cases
import transformers
import trl
from packaging.version import Version
from test_trainers import ranks
from transformers import Trainer, TrainingArguments
from transformers.debug_utils import DebugOption
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.training_args import OptimizerNames

import meshwright_trainer
from meshwright.base.errors import ConfigError
from meshwright.launch.open_world import open_world
from meshwright.strategy.registry import get_registry
from meshwright_trainer import MeshTrainer, MeshTrainerMixin
from meshwright_trainer.arguments import NEVER_CALLED, REPLACED, check_arguments, known_arguments, layout_options
from meshwright_trainer.mesh_options import mesh_options

CONFIGS = (TrainingArguments, trl.SFTConfig, trl.DPOConfig, trl.RewardConfig, trl.GRPOConfig)


def differences(wanted: Any, found: Any, tolerance: float, unlike: tuple[str, ...] = (), at: str = "") -> list[str]:
    """Where two things that runs tell are not alike."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        keys = [key for key in wanted if key not in unlike]
        if set(keys) != set(found) - set(unlike):
            return [f"{at}: {sorted(set(wanted) ^ set(found))}"]
        return [each for key in keys for each in differences(wanted[key], found[key], tolerance, unlike, f"{at}.{key}")]
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        pairs = enumerate(zip(wanted, found, strict=True))
        return [text for i, (a, b) in pairs for text in differences(a, b, tolerance, unlike, f"{at}[{i}]")]
    if isinstance(wanted, float) and isinstance(found, (int, float)):
        is_close = math.isclose(wanted, found, rel_tol=tolerance, abs_tol=tolerance * 0.1)
        return [] if is_close else [f"{at}: {found} and not {wanted}"]
    return [] if wanted == found else [f"{at}: {found!r:.200} and not {wanted!r:.200}"]


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of this process alone, which trainers join."""
    with open_world("cpu"):
        yield


def without(case: argument_cases.Case) -> tuple[str, ...]:
    return (*case.unlike, *(["final"] if "eval_loss" in case.unlike else []))


@functools.cache
def plain(at: int, directory: Path) -> dict[str, Any]:
    """What transformers' or TRL's own trainer tells on one process, with an argument changed."""
    case = argument_cases.CASES[at]
    return argument_cases.told(case, None, directory / f"plain-{at}", 1, is_changed=True)


@pytest.mark.parametrize("at", range(len(argument_cases.CASES)), ids=[case.name for case in argument_cases.CASES])
def test_an_argument_that_acts_does_what_it_does_without_a_mesh(at, tmp_path, tmp_path_factory, alone):
    case = argument_cases.CASES[at]
    wanted = plain(at, tmp_path_factory.getbasetemp())
    found = argument_cases.told(case, case.mesh or {}, tmp_path / "changed", 1, is_changed=True)
    assert not differences(wanted, found, case.allowed, without(case))
    usual = argument_cases.told(case, case.mesh or {}, tmp_path / "usual", 1, is_changed=False)
    assert bool(differences(usual, found, case.allowed)) != case.is_same


DATA, TENSOR = {"strategy": "fsdp2"}, {"strategy": "fsdp2", "tp_size": 2}
SWEEPS = [
    pytest.param(DATA, "few", id="data2"),
    pytest.param(TENSOR, "few", id="tp2"),
    pytest.param(DATA, "all", id="data2-all", marks=pytest.mark.zoo),
    pytest.param(TENSOR, "all", id="tp2-all", marks=pytest.mark.zoo),
]


@pytest.mark.parametrize(("mesh", "which"), SWEEPS)
def test_an_argument_that_acts_does_so_on_two_ranks(mesh, which, tmp_path, tmp_path_factory):
    ranks(2, "argument_cases.py", str(tmp_path), json.dumps(mesh), which)
    wrong = {}
    for case in {"few": argument_cases.FEW, "all": argument_cases.ACROSS}[which]:
        found = json.loads((tmp_path / f"{case.name}.json").read_text())
        wanted = plain(argument_cases.CASES.index(case), tmp_path_factory.getbasetemp())
        wrong[case.name] = differences(wanted, found, case.allowed, without(case))
    assert not {name: texts for name, texts in wrong.items() if texts}


# -- the list


def test_the_list_has_every_argument_and_no_other():
    known = known_arguments()
    sections = [list(known[name]) for name in ("acts", "no effect", "refused")]
    names = [name for section in sections for name in section]
    assert len(names) == len(set(names)), "an argument is in two tables"
    listed = {name for name in names if "." not in name} - set(known["outside"])
    fields = {field.name for config in CONFIGS for field in dataclasses.fields(config)}
    installed = Version(transformers.__version__)
    newer = {name for name, since in known["since"].items() if installed < Version(since)}
    assert not fields - listed, "say in arguments.yaml what they mean over a mesh"
    assert listed - fields == newer
    parents = {name.partition(".")[0] for name in names if "." in name}
    assert parents <= fields
    keys = {name.partition(".")[2] for name in names if name.startswith("accelerator_config.")}
    assert keys == {field.name for field in dataclasses.fields(AcceleratorConfig)}


def test_the_page_is_made_of_the_list():
    assert arguments_page.PAGE.read_text(encoding="utf-8") == arguments_page.page()


# -- what is refused

BAD: dict[str, Any] = {
    "deepspeed": "zero.json",
    "parallelism_config": "any",
    "fsdp": "full_shard",
    "neftune_noise_alpha": 5.0,
    "torch_empty_cache_steps": 2,
    "gradient_checkpointing_kwargs": {"context_fn": 1},
    "gradient_checkpointing_kwargs.every_n_layers": 2,
    "optim": OptimizerNames.GALORE_ADAMW,
    "debug": [DebugOption.UNDERFLOW_OVERFLOW],
    "label_names": ["labels", "start_positions"],
    "include_for_metrics": ["inputs", "loss"],
    "top_entropy_quantile": 0.2,
    "model_init_kwargs.quantization_config": {"load_in_8bit": True},
    "quantization_config": {"load_in_8bit": True},
    "model_init_kwargs.device_map": "auto",
    "model_init_kwargs.tp_plan": "auto",
    "model_init_kwargs.distributed_config": {"tp_size": 2},
}
"""A value that is refused, where the rule does not name one."""


def arguments_with(name: str, value: Any, directory: Path, world_size: int = 2) -> tuple[Any, dict[str, Any]]:
    """Arguments of the first class that has this one, and what a trainer is called with beside them."""
    parent, _, key = name.partition(".")
    config = next((each for each in CONFIGS if parent in each.__dataclass_fields__), None)
    cls = type("Args", (config or TrainingArguments,), {"world_size": property(lambda _: world_size)})
    args = cls(**trainer_cases.arguments(directory, 1))
    if config is None:
        return args, {name: value}
    if not key:
        setattr(args, parent, value)
    elif isinstance(getattr(args, parent), AcceleratorConfig):
        setattr(getattr(args, parent), key, value)
    else:
        setattr(args, parent, {key: value})
    return args, {}


@pytest.mark.parametrize("name", known_arguments()["refused"])
def test_a_refused_argument_is_refused_by_name_with_the_way_to_go(name, tmp_path):
    rule = known_arguments()["refused"][name]
    value = BAD[name] if name in BAD else rule["values"][0]
    args, passed = arguments_with(name, value, tmp_path)
    others = rule.get("together_with", {})
    if others:
        for other in others:
            setattr(args, other, False)
        check_arguments(args, MeshTrainer, passed)
    for other, each in others.items():
        setattr(args, other, each)
    with pytest.raises(ConfigError) as raised:
        check_arguments(args, MeshTrainer, passed)
    text = str(raised.value)
    assert text.startswith(f"{name}={getattr(value, 'value', value)!r}")
    assert rule["because"] in text
    assert rule["instead"] in text
    if rule.get("several_ranks"):
        check_arguments(*_on_one_rank(name, value, tmp_path))


def _on_one_rank(name: str, value: Any, directory: Path) -> tuple[Any, type, dict[str, Any]]:
    args, passed = arguments_with(name, value, directory, world_size=1)
    return args, MeshTrainer, passed


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_usual_arguments_are_not_refused(config, tmp_path):
    usual = {"num_generations": 2, "per_device_train_batch_size": 2} if config is trl.GRPOConfig else {}
    check_arguments(config(output_dir=str(tmp_path), use_cpu=True, report_to="none", **usual), MeshTrainer)


@pytest.mark.parametrize("name", [each.value for each in OptimizerNames])
def test_each_optimizer_of_transformers_is_taken_or_refused(name, tmp_path):
    args = TrainingArguments(**trainer_cases.arguments(tmp_path, 1, optim=name))
    if name not in known_arguments()["refused"]["optim"]["except"]:
        with pytest.raises(ConfigError, match=f"optim='{name}' cannot be honoured"):
            check_arguments(args, MeshTrainer)
        return
    check_arguments(args, MeshTrainer)
    cls, options = Trainer.get_optimizer_cls_and_kwargs(args, trainer_cases.model())
    assert issubclass(cls, torch.optim.Optimizer)
    assert not {"params", "model", "optimizer_dict"} & options.keys()


def test_trainers_refuse_before_they_touch_data(tmp_path):
    basic = trainer_cases.arguments(tmp_path, 1)
    with pytest.raises(ConfigError, match="fp16=True cannot"):
        meshwright_trainer.MeshTrainer(
            trainer_cases.model(), TrainingArguments(**{**basic, "fp16": True, "bf16": False})
        )
    with pytest.raises(ConfigError, match=r"neftune_noise_alpha=5\.0 cannot"):
        meshwright_trainer.MeshSFTTrainer("nowhere", trl.SFTConfig(**basic, neftune_noise_alpha=5.0))
    with pytest.raises(ConfigError, match="use_weighting=True cannot"):
        meshwright_trainer.MeshDPOTrainer("nowhere", None, trl.DPOConfig(**basic, use_weighting=True))
    with pytest.raises(ConfigError, match="activation_offloading=True cannot"):
        meshwright_trainer.MeshRewardTrainer("nowhere", args=trl.RewardConfig(**basic, activation_offloading=True))
    config = transformers.BitsAndBytesConfig(load_in_4bit=True)
    with pytest.raises(ConfigError, match="quantization_config="):
        meshwright_trainer.MeshSFTTrainer("nowhere", trl.SFTConfig(**basic), quantization_config=config)


def test_an_argument_of_a_users_own_class_is_left_alone(tmp_path):
    @dataclasses.dataclass
    class Mine(TrainingArguments):
        my_flag: str = "anything"

    check_arguments(Mine(output_dir=str(tmp_path), use_cpu=True, my_flag="fp16"), MeshTrainer)


@pytest.mark.parametrize("name", [*NEVER_CALLED, *REPLACED])
def test_a_method_that_would_never_be_called_is_refused(name, tmp_path):
    args = TrainingArguments(**trainer_cases.arguments(tmp_path, 1))
    below = type("Below", (Trainer,), {name: lambda *_, **__: None})
    with pytest.raises(ConfigError, match=f"Below.{name} would never be called"):
        check_arguments(args, type("Mine", (MeshTrainerMixin, below), {}))
    above = type("Above", (MeshTrainer,), {name: lambda *_, **__: None})
    if name in REPLACED:
        check_arguments(args, above)
        return
    with pytest.raises(ConfigError, match=f"Above.{name} would never be called"):
        check_arguments(args, above)


def test_an_optimizer_over_parameters_is_refused(tmp_path, alone):
    model = trainer_cases.model()
    args = TrainingArguments(**{**trainer_cases.arguments(tmp_path, 1), "eval_strategy": "no"})
    with pytest.raises(ConfigError, match="optimizer_cls_and_kwargs"):
        MeshTrainer(model, args, optimizers=(torch.optim.SGD(model.parameters()), None))


# -- what a layout takes over


def laid_out(strategy: str, directory: Path, mesh: dict[str, Any] | None = None, **further: Any) -> dict[str, Any]:
    args = TrainingArguments(**{**trainer_cases.arguments(directory, 1), **further})
    options = mesh_options({"strategy": strategy, **(mesh or {})})
    return dict(layout_options(args, options, get_registry().get(strategy)).strategy_config)


def test_precision_and_recomputation_are_options_of_the_strategy(tmp_path):
    assert laid_out("fsdp2", tmp_path) == {}
    assert laid_out("fsdp2", tmp_path, bf16=True) == {"autocast_dtype": "bfloat16"}
    checkpointed = {"gradient_checkpointing": True}
    for strategy in ("single", "ddp", "megatron_fsdp"):
        assert laid_out(strategy, tmp_path, **checkpointed) == {"activation_checkpointing": True}
    kwargs = {"selective": True, "use_reentrant": False, "every_n_layers": 1, "offload": False}
    selective = laid_out("fsdp2", tmp_path, **checkpointed, gradient_checkpointing_kwargs=kwargs)
    assert selective == {"activation_checkpointing": "selective"}
    given = {"strategy_config": {"activation_checkpointing": {"budget_gb": 1}}}
    assert laid_out("fsdp2", tmp_path, given, **checkpointed) == given["strategy_config"]
    with pytest.raises(ConfigError, match="bf16=True: strategy 'ddp' has no option autocast_dtype"):
        laid_out("ddp", tmp_path, bf16=True)


def test_a_layout_follows_from_a_config_object(tmp_path):
    config = get_registry().get("ddp").config_cls(bucket_cap_mb=5)
    options = mesh_options({"strategy_config": config, "dp_size": 2})
    assert (options.strategy, options.strategy_config) == ("ddp", config)
    # What has its default is as if left out.
    given = {"strategy_config": config}
    assert laid_out("ddp", tmp_path, given, gradient_checkpointing=True) == {
        "bucket_cap_mb": 5,
        "activation_checkpointing": True,
    }
    with pytest.raises(ConfigError, match="strategy_config of 'fsdp2' takes a FSDP2Config, not a DDPConfig"):
        laid_out("fsdp2", tmp_path, given)


# -- on a command line

FLAGS = [
    "--max_steps",
    "4",
    "--per_device_train_batch_size",
    "4",
    "--per_device_eval_batch_size",
    "8",
    "--gradient_accumulation_steps",
    "2",
    "--learning_rate",
    "1e-2",
    "--warmup_steps",
    "2",
    "--lr_scheduler_type",
    "cosine",
    "--weight_decay",
    "0.1",
    "--max_grad_norm",
    "0.5",
    "--report_to",
    "none",
    "--use_cpu",
    "--bf16",
    "False",
    "--gradient_checkpointing",
    "False",
    "--save_strategy",
    "no",
    "--eval_strategy",
    "steps",
    "--eval_steps",
    "2",
    "--logging_steps",
    "1",
    "--seed",
    "3",
    "--max_length",
    "16",
    "--pad_to_multiple_of",
    "8",
]


def test_flags_of_the_mesh_stand_beside_those_of_trl(tmp_path, tmp_path_factory):
    mesh = ["--strategy", "fsdp2", "--tp_size", "2", "--strategy_config", '{"sequence_parallel": true}']
    ranks(2, "command_case.py", "--output_dir", str(tmp_path), *FLAGS, *mesh)
    tp, found = json.loads((tmp_path / "found.json").read_text())
    wanted = trainer_cases.history(trainer_cases.made("sft", None, tmp_path_factory.mktemp("plain"), 1))
    assert tp == 2
    assert not differences(wanted, found, 1e-5)


def test_a_run_file_says_how_a_model_is_laid_out(tmp_path, tmp_path_factory):
    (tmp_path / "run.yaml").write_text(
        "strategy: fsdp2\ntp_size: 2\nmodel: {path: anywhere}\nbatch_size: 4\nsteps: 4\n"
    )
    ranks(2, "command_case.py", "--output_dir", str(tmp_path), *FLAGS)
    tp, found = json.loads((tmp_path / "found.json").read_text())
    wanted = trainer_cases.history(trainer_cases.made("sft", None, tmp_path_factory.mktemp("plain"), 1))
    assert tp == 2
    assert not differences(wanted, found, 1e-5)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--strategy_config", "{nothing"], "strategy_config='{nothing' is no JSON"),
        (["--strategy", "fsdp3"], "strategy 'fsdp3' is not installed"),
        (["--tp_size", "0"], "tp_size"),
        (["--average_tokens_across_devices", "False"], "average_tokens_across_devices=False cannot be honoured"),
    ],
    ids=["json", "strategy", "size", "argument"],
)
def test_bad_flags_end_with_our_text_on_every_rank(flags, text, tmp_path):
    with pytest.raises(AssertionError) as raised:
        ranks(2, "command_case.py", "--output_dir", str(tmp_path), *FLAGS, *flags)
    told = str(raised.value)
    assert text in told
    assert not (tmp_path / "found.json").exists()
