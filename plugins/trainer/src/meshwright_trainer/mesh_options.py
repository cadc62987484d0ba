"""What the `mesh` of a trainer says: a strategy, its options and the sizes of axes, as a run file has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, InstanceOf

from meshwright.base.errors import ConfigError
from meshwright.base.validation import FrozenModel, validated
from meshwright.mesh.sizes import MeshSizes
from meshwright.strategy.stack import strategy_of
from meshwright.train.run.run_file import load_run


class MeshOptions(FrozenModel):
    """The keys of a run file that say how a model is laid out."""

    strategy: str = Field(default="fsdp2", description="Name of a strategy.")
    strategy_config: dict[str, Any] | InstanceOf[BaseModel] = Field(default={}, description="Its options.")
    wrapper_config: dict[str, dict[str, Any]] = Field(
        default={}, description="Options of wrapping strategies, by name."
    )
    sizes: MeshSizes = MeshSizes()


@dataclass
class MeshArguments:
    """`mesh` on a command line: `HfArgumentParser((SFTConfig, MeshArguments))` gives `--strategy fsdp2 --tp_size 2`."""

    strategy: str = field(default="fsdp2", metadata={"help": "Name of a strategy; see `meshwright strategies`."})
    strategy_config: str = field(default="{}", metadata={"help": "Options of the strategy, as JSON."})
    wrapper_config: str = field(default="{}", metadata={"help": "Options of wrapping strategies by name, as JSON."})
    dp_size: int | None = field(default=None, metadata={"help": "Data-parallel degree; left out: inferred."})
    dp_replicate_size: int | None = field(default=None, metadata={"help": "Copies of the parameters."})
    tp_size: int = field(default=1, metadata={"help": "Tensor-parallel degree."})
    pp_size: int = field(default=1, metadata={"help": "Number of pipeline ranks."})
    cp_size: int = field(default=1, metadata={"help": "Context-parallel degree."})
    ep_size: int = field(default=1, metadata={"help": "Expert-parallel degree."})


def mesh_options(given: Mapping[str, Any] | MeshArguments | MeshOptions | str | Path | None) -> MeshOptions:
    """The `mesh` of a trainer.

    Args:
        given: keys of a run file (`strategy`, `strategy_config`, `wrapper_config`, `tp_size`, ...), the path of a run
            file of which only these are read, `MeshArguments`, or None: `fsdp2` over all ranks. Where `strategy_config`
            is an object, such as a DDPConfig, the strategy follows from its class.

    Raises:
        ConfigError: a key or value is not valid.
    """
    if isinstance(given, MeshOptions):
        return given
    if isinstance(given, (str, Path)):
        run = load_run(given, [])
        given = {name: getattr(run, name) for name in ("strategy", "strategy_config", "wrapper_config")} | {
            name: getattr(run, name) for name in MeshSizes.model_fields
        }
    elif isinstance(given, MeshArguments):
        values = asdict(given)
        given = values | {name: _from_json(name, values[name]) for name in ("strategy_config", "wrapper_config")}
    elif given is not None and not isinstance(given, Mapping):
        raise ConfigError(
            f"mesh={given!r:.200} is no mapping such as {{'strategy': 'fsdp2', 'tp_size': 2}}, no path of a run file "
            f"and no MeshArguments."
        )
    keys = dict(given or {})
    if "strategy" not in keys and isinstance(keys.get("strategy_config"), BaseModel):
        keys["strategy"] = strategy_of(keys["strategy_config"])
    sizes = {name: keys.pop(name) for name in MeshSizes.model_fields if name in keys}
    return validated(MeshOptions, {**keys, "sizes": validated(MeshSizes, sizes, where="mesh")}, where="mesh")


def _from_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name}={text!r} is no JSON: {error}. Give a mapping such as '{{}}'.") from None
