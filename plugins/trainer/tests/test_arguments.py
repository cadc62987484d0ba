"""Each argument of a trainer acts over a mesh, or is rejected, as the list says; the list is complete."""

from __future__ import annotations

import dataclasses
import functools
import shlex
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
from transformers import Trainer, TrainingArguments
from transformers.debug_utils import DebugOption
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.training_args import OptimizerNames

import meshwright_trainer
from meshwright.base.errors import ConfigError, MeshwrightError
from meshwright.launch.open_world import open_world
from meshwright.strategy.registry import get_registry
from meshwright_testing import pool
from meshwright_trainer import MeshArguments, MeshTrainer, MeshTrainerMixin
from meshwright_trainer.arguments import (
    NEVER_CALLED,
    REPLACED_METHODS,
    apply_training_arguments,
    check_arguments,
    load_argument_rules,
    parse_mesh_options,
)

CONFIGS = (TrainingArguments, trl.SFTConfig, trl.DPOConfig, trl.RewardConfig, trl.GRPOConfig)


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of this process alone, which trainers join."""
    with open_world("cpu"):
        yield


@functools.cache
def plain(at: int, directory: Path) -> dict[str, Any]:
    """What transformers' or TRL's own trainer tells on one process, with an argument changed."""
    case = argument_cases.CASES[at]
    return argument_cases.reported(case, None, directory / f"plain-{at}", 1, is_changed=True)


@pytest.mark.parametrize(
    "at",
    [
        pytest.param(at, id=case.name, marks=[] if case in argument_cases.FEWEST else pytest.mark.slow)
        for at, case in enumerate(argument_cases.CASES)
    ],
)
def test_an_argument_that_acts_does_what_it_does_without_a_mesh(at, tmp_path, tmp_path_factory, alone):
    case = argument_cases.CASES[at]
    wanted = plain(at, tmp_path_factory.getbasetemp())
    found = argument_cases.reported(case, case.mesh or {}, tmp_path / "changed", 1, is_changed=True)
    assert not case.differences(wanted, found)
    usual = argument_cases.reported(case, case.mesh or {}, tmp_path / "usual", 1, is_changed=False)
    assert bool(case.differences(usual, found, is_usual=True)) != case.is_same


@pytest.mark.parametrize(
    ("tp_size", "cases"),
    [
        pytest.param(1, argument_cases.FEWEST[:1], id="data2-fewest"),
        pytest.param(1, argument_cases.FEW, id="data2", marks=pytest.mark.slow),
        pytest.param(2, argument_cases.FEW, id="tp2", marks=pytest.mark.slow),
    ],
)
def test_an_argument_that_acts_does_so_on_two_ranks(tp_size, cases, tmp_path, tmp_path_factory):
    mesh = {"strategy": "fsdp2", "tp_size": tp_size}
    found = pool(2).run(argument_cases.across, mesh, tmp_path, [case.name for case in cases])[0]
    wrong = {}
    for case in cases:
        wanted = plain(argument_cases.CASES.index(case), tmp_path_factory.getbasetemp())
        wrong[case.name] = case.differences(wanted, found[case.name])
    assert not {name: texts for name, texts in wrong.items() if texts}


# -- the list


def test_the_list_has_every_argument_and_no_other():
    known = load_argument_rules()
    sections = [list(known[name]) for name in ("supported", "ignored", "rejected")]
    names = [name for section in sections for name in section]
    assert len(names) == len(set(names)), "an argument is in two tables"
    listed = {name for name in names if "." not in name} - set(known["constructor"])
    fields = {field.name for config in CONFIGS for field in dataclasses.fields(config)}
    installed = Version(transformers.__version__)
    newer = {name for name, since in known["since"].items() if installed < Version(since)}
    assert not fields - listed, "say in arguments.yaml what they mean over a mesh"
    assert listed - fields == newer
    assert {name.partition(".")[0] for name in names if "." in name} <= fields
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


@pytest.mark.parametrize("name", load_argument_rules()["rejected"])
def test_a_refused_argument_is_refused_by_name_with_the_way_to_go(name, tmp_path):
    rule = load_argument_rules()["rejected"][name]
    value = BAD[name] if name in BAD else rule["values"][0]
    args, passed = arguments_with(name, value, tmp_path)
    for other, each in rule.get("only_with", {}).items():
        setattr(args, other, False)
        check_arguments(args, MeshTrainer, passed)
        setattr(args, other, each)
    with pytest.raises(ConfigError) as raised:
        check_arguments(args, MeshTrainer, passed)
    text = str(raised.value)
    assert text.startswith(f"{name}={getattr(value, 'value', value)!r}")
    assert rule["reason"] in text
    assert rule["remedy"] in text
    if rule.get("multi_rank_only"):
        args, passed = arguments_with(name, value, tmp_path, world_size=1)
        check_arguments(args, MeshTrainer, passed)


@pytest.mark.parametrize("name", [each.value for each in OptimizerNames])
def test_each_optimizer_of_transformers_is_taken_or_refused(name, tmp_path):
    args = TrainingArguments(**trainer_cases.arguments(tmp_path, 1, optim=name))
    if name not in load_argument_rules()["rejected"]["optim"]["except"]:
        with pytest.raises(ConfigError, match=f"optim='{name}' is not supported"):
            check_arguments(args, MeshTrainer)
        return
    check_arguments(args, MeshTrainer)
    cls, options = Trainer.get_optimizer_cls_and_kwargs(args, trainer_cases.model())
    assert issubclass(cls, torch.optim.Optimizer)
    assert not {"params", "model", "optimizer_dict"} & options.keys()


@pytest.mark.parametrize(
    ("cls", "config", "refused"),
    [
        (MeshTrainer, TrainingArguments, "fp16"),
        (meshwright_trainer.MeshSFTTrainer, trl.SFTConfig, "neftune_noise_alpha"),
        (meshwright_trainer.MeshDPOTrainer, trl.DPOConfig, "use_weighting"),
        (meshwright_trainer.MeshRewardTrainer, trl.RewardConfig, "activation_offloading"),
    ],
)
def test_trainers_refuse_before_they_touch_data(cls, config, refused, tmp_path):
    args = config(**trainer_cases.arguments(tmp_path, 1, **{refused: True}))
    with pytest.raises(ConfigError, match=f"{refused}=.* is not supported"):
        cls("nowhere", args=args)


@dataclasses.dataclass
class Mine(TrainingArguments):
    my_flag: str = "anything"


def test_what_a_trainer_is_called_with_is_refused_and_arguments_of_a_users_own_class_are_not(tmp_path, alone):
    args = Mine(**trainer_cases.arguments(tmp_path, 1, eval_strategy="no"), my_flag="fp16")
    check_arguments(args, MeshTrainer)
    config = transformers.BitsAndBytesConfig(load_in_4bit=True)
    with pytest.raises(ConfigError, match="quantization_config="):
        check_arguments(args, MeshTrainer, {"quantization_config": config})
    model = trainer_cases.model()
    with pytest.raises(ConfigError, match="optimizer_cls_and_kwargs"):
        MeshTrainer(model, args, optimizers=(torch.optim.SGD(model.parameters()), None))


@pytest.mark.parametrize("name", [*NEVER_CALLED, *REPLACED_METHODS])
def test_a_method_that_would_never_be_called_is_refused(name, tmp_path):
    args = TrainingArguments(**trainer_cases.arguments(tmp_path, 1))
    below = type("Below", (Trainer,), {name: lambda *_, **__: None})
    with pytest.raises(ConfigError, match=f"Below.{name} would never be called"):
        check_arguments(args, type("Mine", (MeshTrainerMixin, below), {}))
    above = type("Above", (MeshTrainer,), {name: lambda *_, **__: None})
    if name in REPLACED_METHODS:
        check_arguments(args, above)
        return
    with pytest.raises(ConfigError, match=f"Above.{name} would never be called"):
        check_arguments(args, above)


# -- what a layout takes over


def laid_out(strategy: str, directory: Path, mesh: dict[str, Any] | None = None, **further: Any) -> dict[str, Any]:
    args = TrainingArguments(**trainer_cases.arguments(directory, 1, **further))
    options = parse_mesh_options({"strategy": strategy, **(mesh or {})})
    return dict(apply_training_arguments(args, options, get_registry().get(strategy)).strategy_config)


def test_precision_and_recomputation_are_options_of_the_strategy(tmp_path):
    assert laid_out("fsdp2", tmp_path, bf16=True) == {"autocast_dtype": "bfloat16"}
    checkpointed = {"gradient_checkpointing": True}
    assert laid_out("ddp", tmp_path, **checkpointed) == {"activation_checkpointing": True}
    kwargs = {"selective": True, "use_reentrant": False, "every_n_layers": 1, "offload": False}
    selective = laid_out("fsdp2", tmp_path, **checkpointed, gradient_checkpointing_kwargs=kwargs)
    assert selective == {"activation_checkpointing": "selective"}
    given = {"strategy_config": {"activation_checkpointing": {"budget_gb": 1}}}
    assert laid_out("fsdp2", tmp_path, given, **checkpointed) == given["strategy_config"]
    with pytest.raises(ConfigError, match="bf16=True: strategy 'ddp' has no option autocast_dtype"):
        laid_out("ddp", tmp_path, bf16=True)


def test_a_layout_follows_from_a_config_object(tmp_path):
    config = get_registry().get("ddp").config_cls(bucket_cap_mb=5)
    options = parse_mesh_options({"strategy_config": config, "dp_size": 2})
    assert (options.strategy, options.strategy_config) == ("ddp", config)
    # What has its default is as if left out.
    given = {"strategy_config": config}
    found = laid_out("ddp", tmp_path, given, gradient_checkpointing=True)
    assert found == {"bucket_cap_mb": 5, "activation_checkpointing": True}
    with pytest.raises(ConfigError, match="strategy_config of 'fsdp2' takes a FSDP2Config, not a DDPConfig"):
        laid_out("fsdp2", tmp_path, given)


# -- on a command line

FLAGS = shlex.split(
    "--max_steps 4 --per_device_train_batch_size 4 --per_device_eval_batch_size 8 --gradient_accumulation_steps 2 "
    "--learning_rate 1e-2 --warmup_steps 2 --lr_scheduler_type cosine --weight_decay 0.1 --max_grad_norm 0.5 "
    "--report_to none --use_cpu --bf16 False --gradient_checkpointing False --save_strategy no --eval_strategy steps "
    "--eval_steps 2 --logging_steps 1 --seed 3 --max_length 16 --pad_to_multiple_of 8"
)
RUN_FILE = "strategy: fsdp2\ntp_size: 2\nmodel: {path: anywhere}\nbatch_size: 4\nsteps: 4\n"


def run_with(flags: list[str], run_file: str | None) -> tuple[int, list[dict[str, float]]]:
    """A script as users have it, with flags of TRL's and of the mesh: what it logs; a task of a pool."""
    args, mesh = transformers.HfArgumentParser((trl.SFTConfig, MeshArguments)).parse_args_into_dataclasses(flags)
    trainer = meshwright_trainer.MeshSFTTrainer(
        trainer_cases.model(),
        args,
        train_dataset=trainer_cases.text_of(40, 1),
        eval_dataset=trainer_cases.text_of(trainer_cases.EVALUATED, 2),
        processing_class=trainer_cases.digits(),
        mesh=run_file or mesh,
    )
    return trainer.mesh.degrees.tp, trainer_cases.history(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("is_file", [False, True], ids=["flags", "run file"])
def test_flags_or_a_run_file_beside_flags_of_trl_lay_a_model_out(is_file, tmp_path):
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    mesh = [] if is_file else ["--tp_size", "2", "--strategy_config", '{"sequence_parallel": true}']
    flags = ["--output_dir", str(tmp_path), *FLAGS, *mesh]
    tp, found = pool(2).run(run_with, flags, str(tmp_path / "run.yaml") if is_file else None)[0]
    wanted = trainer_cases.history(trainer_cases.made("sft", None, tmp_path / "plain", 1))
    assert tp == 2
    assert not trainer_cases.differences(wanted, found, 1e-5, 0.1)


def test_bad_flags_end_with_our_text_on_every_rank(tmp_path):
    for flags, text in (
        (["--strategy_config", "{nothing"], "strategy_config='{nothing' is not JSON"),
        (["--average_tokens_across_devices", "False"], "average_tokens_across_devices=False is not supported"),
    ):
        for reported in pool(2).run(refusal_with, ["--output_dir", str(tmp_path), *FLAGS, *flags]):
            assert text in reported


def refusal_with(flags: list[str]) -> str:
    with pytest.raises(MeshwrightError) as raised:
        run_with(flags, None)
    return str(raised.value)
