"""Parse the `mesh` of a trainer, and check its arguments: reject those that a mesh does not support.

`arguments.yaml` lists all arguments. Others belong to a user's own subclass and are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, InstanceOf
from transformers import TrainingArguments
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from meshwright.plugin import (
    ConfigError,
    FrozenModel,
    MeshSizes,
    StrategySpec,
    coerce_config,
    find_strategy_name,
    format_docs_link,
    validate_config,
)

NEVER_CALLED = ("create_optimizer", "create_optimizer_and_scheduler", "prediction_step")
"""Methods of Trainer that users override, but that are never called on a mesh."""
REPLACED_METHODS = ("training_step", "evaluation_loop", "save_model")
"""Methods that are not called if the mixin comes before the class that overrides them."""
SUPPORTED_TRL_TRAINERS = frozenset({"SFTTrainer", "DPOTrainer", "RewardTrainer", "GRPOTrainer"})
"""Supported trainers of trl."""
_MISSING = object()


@cache
def load_argument_rules() -> dict[str, dict[str, Any]]:
    """Load `arguments.yaml`: texts by name in each section, and rules by name in "rejected"."""
    text = files(__package__).joinpath("arguments.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


def find_training_arguments(values: Iterable[Any]) -> Any:
    return next((each for each in values if isinstance(each, TrainingArguments)), None)


def check_arguments(args: Any, trainer: type, constructor_arguments: Mapping[str, Any] | None = None) -> None:
    """Raise ConfigError for the first unsupported argument or overridden method, on every rank.

    Arguments are looked up in `constructor_arguments`, by name, then in `args`.
    """
    for name, rule in load_argument_rules()["rejected"].items():
        value = _get_argument((constructor_arguments or {}, args), name)
        if value is _MISSING or (rule.get("multi_rank_only") and args.world_size == 1):
            continue
        if all(getattr(args, other, None) == each for other, each in rule.get("only_with", {}).items()):
            for each in _list_elements(value):
                if (each not in rule["except"]) if "except" in rule else (each in rule["values"]):
                    condition = "".join(f" with {key}={text!r}" for key, text in rule.get("only_with", {}).items())
                    raise ConfigError(
                        f"{name}={_unwrap_enum(value)!r:.200}{condition} is not supported on a mesh: "
                        f"{rule['reason']}. {rule['remedy']}."
                    )
    _check_trainer(trainer)
    _check_methods(trainer)


def _get_argument(sources: Iterable[Any], name: str) -> Any:
    """Return an argument from the first mapping or object that has it; `parent.key` names an entry of another."""
    for each in sources:
        for key in name.split("."):
            each = each.get(key, _MISSING) if isinstance(each, Mapping) else getattr(each, key, _MISSING)
        if each is not _MISSING:
            return each
    return _MISSING


def _unwrap_enum(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _list_elements(value: Any) -> list[Any]:
    return [_unwrap_enum(each) for each in (value if isinstance(value, (list, tuple, Mapping)) else [value])]


def _check_trainer(trainer: type) -> None:
    names = [each.__name__ for each in trainer.__mro__]
    of_trl = [each.__name__ for each in trainer.__mro__ if each.__module__.startswith("trl.")]
    if of_trl and not SUPPORTED_TRL_TRAINERS & set(of_trl):
        raise ConfigError(
            f"{of_trl[0]} of trl is not supported on a mesh: its batches and models are not known here. Use one of "
            f"{', '.join(sorted(SUPPORTED_TRL_TRAINERS))}, or write its loss as an objective; see "
            f"{format_docs_link('reference/objectives.md')}"
        )
    if "GRPOTrainer" in names and "MeshGRPOMixin" not in names:
        raise ConfigError(
            "GRPOTrainer needs MeshGRPOMixin instead of MeshTrainerMixin. Put MeshGRPOMixin first among the bases."
        )


def _check_methods(trainer: type) -> None:
    names = [each.__name__ for each in trainer.__mro__]
    mixin = names.index("MeshTrainerMixin") if "MeshTrainerMixin" in names else -1
    for at, cls in enumerate(trainer.__mro__):
        if cls.__module__.partition(".")[0] in ("transformers", "trl", __package__):
            continue
        for name in (*NEVER_CALLED, *(REPLACED_METHODS if at > mixin else ())):
            if name in vars(cls):
                raise ConfigError(
                    f"{cls.__name__}.{name} would never be called on a mesh, where the manager steps, evaluates and "
                    f"saves. Pass optimizer_cls_and_kwargs=(class, options), override compute_loss, or override "
                    f"{', '.join(REPLACED_METHODS)} in a class that derives from one with MeshTrainerMixin, and call "
                    "super()."
                )


def check_model(model: Any) -> None:
    """Raise ConfigError for a model with a language-model head that does not predict the next token."""
    if not hasattr(model, "get_output_embeddings") or model.get_output_embeddings() is None:
        return
    usual = LOSS_MAPPING.get(getattr(model, "loss_type", None), ForCausalLMLoss) is ForCausalLMLoss
    if not usual or getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{type(model).__name__} is not a causal language model: its labels are not the next tokens, which a mesh "
            f"requires. Use a model of transformers' AutoModelForCausalLM."
        )


def set_router_loss_config(trainer: Any) -> None:
    """Copy TRL's router loss options to the model's configuration, where the manager reads them."""
    if hasattr(trainer, "aux_loss_enabled"):
        text = trainer.model.config.get_text_config()
        if hasattr(text, "output_router_logits"):
            text.output_router_logits = trainer.aux_loss_enabled
            text.router_aux_loss_coef = trainer.router_aux_loss_coef


def apply_training_arguments(args: Any, options: MeshOptions, spec: StrategySpec) -> MeshOptions:
    """Return the options with those that follow from a trainer's arguments: autocast and activation checkpointing."""
    config = options.strategy_config
    if isinstance(config, BaseModel):
        # A default value counts as not set.
        own = coerce_config(spec.config_cls, config, where=f"strategy_config of {spec.name!r}")
        config = {
            name: getattr(own, name)
            for name, field in type(own).model_fields.items()
            if getattr(own, name) != field.get_default(call_default_factory=True)
        }
    config = dict(config)
    wanted: dict[str, Any] = {}
    if args.bf16:
        wanted["autocast_dtype"] = ("bfloat16", "bf16=True")
    if args.gradient_checkpointing:
        selects = (args.gradient_checkpointing_kwargs or {}).get("selective")
        wanted["activation_checkpointing"] = ("selective" if selects else True, "gradient_checkpointing=True")
    for name, (value, argument) in wanted.items():
        if name not in spec.config_cls.model_fields:
            raise ConfigError(
                f"{argument}: strategy {spec.name!r} has no option {name}. Set {argument.partition('=')[0]}=False, or "
                f"use a strategy that has it, such as fsdp2."
            )
        config.setdefault(name, value)
    return options.model_copy(update={"strategy_config": config})


# -- the mesh


class MeshOptions(FrozenModel):
    """Keys of a run file that define the layout of a model."""

    strategy: str = Field(default="fsdp2", description="Name of a strategy.")
    strategy_config: dict[str, Any] | InstanceOf[BaseModel] = Field(default={}, description="Options of the strategy.")
    wrapper_config: dict[str, dict[str, Any]] = Field(
        default={}, description="Options of wrapping strategies, by name."
    )
    sizes: MeshSizes = MeshSizes()


@dataclass
class MeshArguments:
    """`mesh` on a command line: `HfArgumentParser((SFTConfig, MeshArguments))` reads `--strategy fsdp2 --tp_size 2`."""

    strategy: str = field(default="fsdp2", metadata={"help": "Name of a strategy; see `meshwright strategies`."})
    strategy_config: str = field(default="{}", metadata={"help": "Options of the strategy, as JSON."})
    wrapper_config: str = field(default="{}", metadata={"help": "Options of wrapping strategies by name, as JSON."})
    dp_size: int | None = field(default=None, metadata={"help": "Data-parallel degree; inferred if left out."})
    dp_replicate_size: int | None = field(default=None, metadata={"help": "Number of copies of the parameters."})
    tp_size: int = field(default=1, metadata={"help": "Tensor-parallel degree."})
    pp_size: int = field(default=1, metadata={"help": "Number of pipeline ranks."})
    cp_size: int = field(default=1, metadata={"help": "Context-parallel degree."})
    ep_size: int = field(default=1, metadata={"help": "Expert-parallel degree."})


def parse_mesh_options(mesh: Mapping[str, Any] | MeshArguments | MeshOptions | str | Path | None) -> MeshOptions:
    """Parse the `mesh` of a trainer.

    If `strategy_config` is an object, such as a DDPConfig, its class determines the strategy.
    """
    if isinstance(mesh, MeshOptions):
        return mesh
    if isinstance(mesh, (str, Path)):
        from meshwright import load_run

        run = load_run(mesh, [])
        mesh = {name: getattr(run, name) for name in ("strategy", "strategy_config", "wrapper_config")} | {
            name: getattr(run, name) for name in MeshSizes.model_fields
        }
    elif isinstance(mesh, MeshArguments):
        values = asdict(mesh)
        mesh = values | {name: _parse_json_option(name, values[name]) for name in ("strategy_config", "wrapper_config")}
    elif mesh is not None and not isinstance(mesh, Mapping):
        raise ConfigError(
            f"mesh={mesh!r:.200} is neither a mapping such as {{'strategy': 'fsdp2', 'tp_size': 2}}, nor the path of a "
            f"run file, nor MeshArguments. Pass one of these."
        )
    keys = dict(mesh or {})
    if "strategy" not in keys and isinstance(keys.get("strategy_config"), BaseModel):
        keys["strategy"] = find_strategy_name(keys["strategy_config"])
    sizes = {name: keys.pop(name) for name in MeshSizes.model_fields if name in keys}
    return validate_config(
        MeshOptions, {**keys, "sizes": validate_config(MeshSizes, sizes, where="mesh")}, where="mesh"
    )


def _parse_json_option(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name}={text!r} is not JSON: {error}. Pass a mapping such as '{{}}'.") from None
