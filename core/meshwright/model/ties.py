"""Tied weights: keep the configuration of a model consistent with its modules.

Files may hold separate weights for a head that their configuration ties to the embedding: transformers loads it untied.
Code may untie a head, or tie one. With an inconsistent configuration, a saved model would load as another one.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


def set_tied(config: Any, is_tied: bool) -> None:
    """Have a configuration say whether the output embedding of its model is the input embedding."""
    for each in (config, config.get_text_config()):
        each.tie_word_embeddings = is_tied


def note_ties(model: nn.Module) -> None:
    """Set `tie_word_embeddings` in a model's configuration to what its modules are, in place.

    The configuration is unchanged if some of several ties hold and some do not: neither value describes the modules.
    """
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(base, "get_expanded_tied_weights_keys") or not hasattr(base.config, "tie_word_embeddings"):
        return
    wanted = not base.config.tie_word_embeddings
    pairs = _ties(base)
    if pairs and all(is_one is wanted for is_one in pairs):
        set_tied(base.config, wanted)
        base.all_tied_weights_keys = base.get_expanded_tied_weights_keys(all_submodels=True)


def _ties(model: Any) -> list[bool]:
    """Of each two weights that the class ties where its configuration wants it: whether they are one."""
    config = model.config
    tied = copy.deepcopy(config)
    set_tied(tied, True)
    try:
        model.config = tied
        pairs = model.get_expanded_tied_weights_keys(all_submodels=False)
    finally:
        model.config = config
    named = dict(model.named_parameters(remove_duplicate=False))
    return [named[name] is named[other] for name, other in pairs.items() if name in named and other in named]
