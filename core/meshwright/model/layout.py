"""Structure and size of a model, inferred from its modules and not from class names.

For a model that these rules describe wrongly, a plugin implements the hook `model_layout`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..base.errors import ModelError

EMBEDDING, HEAD, OTHER = "embedding", "head", "other"
"""Parts of a model besides its blocks, as named in error texts and reports."""


@dataclass(frozen=True)
class ModelLayout:
    """The structure of a model. All names are fully qualified names in the unwrapped Hugging Face model."""

    stacks: tuple[tuple[str, ...], ...]
    """The stacks of blocks, each a tuple of module names in execution order."""
    embedding: str | None
    head: str | None
    """The output projection to the vocabulary."""
    tied: tuple[tuple[str, ...], ...]
    """Groups of names that refer to the same parameter."""

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(block for stack in self.stacks for block in stack)

    def find_part(self, name: str) -> str:
        """Return the part (a block, `EMBEDDING`, `HEAD` or `OTHER`) of a parameter, given its first name."""
        blocks, components = frozenset(self.blocks), name.split(".")
        ancestors = [".".join(components[:count]) for count in range(1, len(components))]
        default = EMBEDDING if self.embedding in ancestors else HEAD if self.head in ancestors else OTHER
        return next((each for each in ancestors if each in blocks), default)


def sort_parts(parts: Iterable[str]) -> list[str]:
    """Return each part once, in forward order: embedding, blocks in the given order, head, others."""
    rank = {EMBEDDING: 0, HEAD: 2, OTHER: 3}
    return sorted(dict.fromkeys(parts), key=lambda part: rank.get(part, 1))


def infer_layout(model: nn.Module) -> ModelLayout:
    """Find the stacks, embedding, head and tied parameters of a model.

    A stack is an outermost ModuleList whose members have submodules. So lists inside a block (experts) and lists of
    plain layers are not stacks. Members without parameters are skipped: they are blocks of other pipeline stages.
    """
    names: dict[Any, str] = {module: name for name, module in model.named_modules()}
    groups: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(parameter, []).append(name)

    def find_name(accessor: str) -> str | None:
        with suppress(NotImplementedError, AttributeError):
            return names.get(getattr(model, accessor)())
        return None

    return ModelLayout(
        stacks=tuple(_find_stacks(model, "")),
        embedding=find_name("get_input_embeddings"),
        head=find_name("get_output_embeddings"),
        tied=tuple(tuple(group) for group in groups.values() if len(group) > 1),
    )


def _find_stacks(module: nn.Module, prefix: str) -> Iterator[tuple[str, ...]]:
    for name, child in module.named_children():
        members = list(enumerate(child.children())) if isinstance(child, nn.ModuleList) else []
        members = [(index, each) for index, each in members if any(True for _ in each.parameters())]
        if members and all(any(True for _ in each.children()) for _, each in members):
            yield tuple(f"{prefix}{name}.{index}" for index, _ in members)
        else:
            yield from _find_stacks(child, f"{prefix}{name}.")


@dataclass(frozen=True)
class ModelSize:
    """Number of elements of all parameters, tied weights counted once, and of the trainable ones."""

    num_parameters: int
    num_trainable: int
    bytes_per_element: int


def compute_model_size(model: nn.Module) -> ModelSize:
    """Return the number of elements of a model's parameters, and the bytes of an element of the first."""
    parameters = list(model.parameters())
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    width = parameters[0].element_size() if parameters else 0
    return ModelSize(sum(p.numel() for p in parameters), trainable, width)


def check_not_empty(model: nn.Module) -> None:
    """Raise ModelError for a trainable parameter without elements."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.numel() == 0:
            raise ModelError(
                f"{name} is to be trained, but its shape {tuple(parameter.shape)} has no elements. Change the size of "
                f"the model's configuration that is 0, or freeze the parameter."
            )


# -- tied weights: if the configuration contradicts the modules, a saved model loads as a different one


def set_tie_word_embeddings(config: Any, is_tied: bool) -> None:
    for each in (config, config.get_text_config()):
        each.tie_word_embeddings = is_tied


def sync_tie_config(model: nn.Module) -> None:
    """Set `tie_word_embeddings` in the configuration to match the modules.

    It is unchanged if only some of several pairs of weights are tied.
    """
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    config: Any = base.config if hasattr(base, "get_expanded_tied_weights_keys") else None
    if not hasattr(config, "tie_word_embeddings"):
        return
    tied_config, new_value = copy.deepcopy(config), not config.tie_word_embeddings
    set_tie_word_embeddings(tied_config, True)
    try:
        # Pairs of weights that the class ties if configured to.
        base.config = tied_config
        pairs = base.get_expanded_tied_weights_keys(all_submodels=False)
    finally:
        base.config = config
    parameters = dict(base.named_parameters(remove_duplicate=False))
    is_tied = [
        parameters[name] is parameters[other]
        for name, other in pairs.items()
        if name in parameters and other in parameters
    ]
    if is_tied and all(is_one is new_value for is_one in is_tied):
        set_tie_word_embeddings(config, new_value)
        base.all_tied_weights_keys = base.get_expanded_tied_weights_keys(all_submodels=True)
