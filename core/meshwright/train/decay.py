"""Which parameters weight decay shrinks: matrices, stacks of matrices, convolutions and embeddings.

Spared are vectors, scales of norms, biases, and the decay rates of a recurrence, whatever the paths to them.

[Note: what decides] The module that owns a parameter, the shape of the whole parameter, and the last component of its
name. No other part of the path counts: `blocks.0.norm_attn_norm.attn.Wqkv.weight` is a matrix. These are the same in
every layout, so that a parameter has one decay under every strategy, in every stage and after a resume.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

_NORM_CLASS = re.compile(r"norm(gated|\dd)?$", re.IGNORECASE)
_NORM_NAME = re.compile(r"(norms?|(^|_)ln)(_?[a-z]?\d*)?$", re.IGNORECASE)
_BIAS_NAME = re.compile(r"(^|_)bias(es)?(_|$)", re.IGNORECASE)
_MAPS = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_SPARED = re.compile(r"A_log|D|time_decay|time_first|(.*_)?(sinks?|scales?)|.*bias", re.DOTALL)
"""Last components of names that are spared whatever their shape: rates and skips of a recurrence, sinks of attention,
scales, and biases, of which experts have a matrix."""


def is_decayed(name: str, shape: Sequence[int], owner: nn.Module | None = None) -> bool:
    """Whether weight decay shrinks a parameter; see [Note: what decides].

    Args:
        name: fully qualified.
        shape: of the whole parameter, not of a shard.
        owner: the module that holds it; None where it is not known, and its name stands for its class.
    """
    path, _, last = name.rpartition(".")
    if len(shape) < 2 or _SPARED.fullmatch(last):
        return False
    if last != "weight" and sum(size > 1 for size in shape) < 2:
        # A vector that is kept in the shape in which it is broadcast. A linear map may have one output.
        return False
    if owner is not None and _NORM_CLASS.search(type(owner).__name__):
        return False
    # Numbers are of lists, and `_orig_mod` and `_checkpoint_wrapped_module` of wrappers.
    module = next((each for each in reversed(path.split(".")) if each[:1].isalpha()), "")
    return not _BIAS_NAME.search(module) and (isinstance(owner, _MAPS) or not _NORM_NAME.search(module))


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern of `no_decay` selects a parameter, in any case of letters.

    Args:
        pattern: a shell pattern of the last component of a name, or, if it has a dot, of the whole name.
    """
    part = name if "." in pattern else name.rpartition(".")[2]
    return fnmatchcase(part.lower(), pattern.lower())


def decay_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float, decayed: Callable[[str], bool]
) -> list[dict[str, Any]]:
    """Split parameters into those that are decayed and those that are not.

    Without decay there is one group and no `weight_decay` key, so that optimizers which know none work too.
    """
    named = list(named_parameters)
    if not weight_decay:
        return [{"params": [parameter for _, parameter in named]}]
    groups = [
        {"params": [parameter for name, parameter in named if decayed(name) is is_one], "weight_decay": decay}
        for is_one, decay in ((True, weight_decay), (False, 0.0))
    ]
    return [group for group in groups if group["params"]]
