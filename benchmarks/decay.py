"""Which parameters weight decay shrinks, in every model type of the zoo.

    python benchmarks/decay.py --json benchmarks/results/decay.json

Models are made on the meta device, in a few seconds. `python tools/generated_pages.py` makes
docs/reference/proofs/weight-decay.md of it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from common import origin
from transformers import AutoModelForCausalLM

from meshwright.model.layout import ModelLayout
from meshwright.optim.groups import describe_params_by_name, describe_trained_params
from meshwright.strategy.registry import model_layout
from meshwright_testing.zoo import build_zoo_config, zoo_types, zoo_unsupported_reason

_PLAIN = re.compile(r"Linear|Embedding|Conv1[dD]|.*Experts|.*Router|.*Embeddings?$")
"""Classes of which nobody asks whether their matrices are decayed."""


def of_type(model_type: str) -> dict[str, Any]:
    """Counts, and what is spared in more than one dim or decayed outside of plain matrices."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(build_zoo_config(model_type))
    layout: ModelLayout = model_layout(model)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    known = describe_trained_params(model, layout, named, lambda parameter: parameter.shape)
    by_hand = describe_params_by_name(named)
    spared, decayed = [], []
    for name, parameter in named:
        owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
        if known[name].is_decayed and not _PLAIN.fullmatch(owner):
            decayed.append((name, owner, parameter.shape))
        if not known[name].is_decayed and parameter.dim() > 1:
            spared.append((name, owner, parameter.shape))
    return {
        "decayed": sum(each.is_decayed for each in known.values()),
        "spared": sum(not each.is_decayed for each in known.values()),
        "otherwise_by_hand": [name for name in known if known[name].is_decayed != by_hand[name].is_decayed],
        "spared_of_several_dims": _each_once(spared),
        "decayed_of_other_classes": _each_once(decayed),
    }


def _each_once(found: Iterable[tuple[str, str, torch.Size]]) -> dict[str, str]:
    """Names with stars for the numbers of lists, and the class and shape of the first."""
    once: dict[str, str] = {}
    for name, owner, shape in found:
        once.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), f"{owner} {tuple(shape)}")
    return once


def page(found: Mapping[str, Any]) -> str:
    """docs/reference/proofs/weight-decay.md."""
    types: Mapping[str, Mapping[str, Any]] = found["types"]
    versions = ", ".join(f"{each} {version}" for each, version in found["versions"].items())
    hand = [name for name, each in types.items() if each["otherwise_by_hand"]]
    lines = [
        "# Weight decay by model type",
        "",
        f"Generated from `benchmarks/results/decay.json`, which `{found['command']}` wrote",
        f"on {found['date']} ({versions}); not edited by hand.",
        "",
        "This table shows which parameters `weight_decay` applies to, for a tiny model of each type, by the rule of",
        "[optimizers](../optimizers.md). In all types, one-dimensional parameters are excluded; weights of linear "
        "layers,",
        "embeddings, experts and routers are decayed. The last two columns name the parameters that differ. A factory "
        "that",
        f"you call without the model decides differently in {len(hand)} of {len(types)} "
        f"types{': ' + ', '.join(hand) if hand else ''}.",
        "",
        "| type | decayed | excluded | excluded, several dimensions | decayed, other modules |",
        "|---|---:|---:|---|---|",
    ]
    for name, each in types.items():
        odd = [
            "; ".join(f"`{path}`: {what}" for path, what in each[key].items())
            for key in ("spared_of_several_dims", "decayed_of_other_classes")
        ]
        lines.append(f"| {name} | {each['decayed']} | {each['spared']} | {odd[0]} | {odd[1]} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    types = {name: of_type(name) for name in zoo_types() if zoo_unsupported_reason(name) is None}
    found = {"command": "python benchmarks/decay.py", **origin(), "types": types}
    text = json.dumps(found, indent=1)
    if options.json is None:
        print(text)
    else:
        options.json.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
