"""The structure and size of a model, found from its modules and not from class names.

A plugin answers for a model that these rules would get wrong through the hook `model_layout`.
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
"""Parts of a model besides its blocks, as error texts and reports name them."""


@dataclass(frozen=True)
class ModelLayout:
    """Fully qualified names in the unwrapped Hugging Face model."""

    stacks: tuple[tuple[str, ...], ...]
    """The stacks of blocks, each a tuple of module names in the order in which they run."""
    embedding: str | None
    head: str | None
    """The output projection onto the vocabulary."""
    tied: tuple[tuple[str, ...], ...]
    """Groups of parameter names that are one parameter."""

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(block for stack in self.stacks for block in stack)

    def find_part(self, name: str) -> str:
        """Return the part (a block, `EMBEDDING`, `HEAD`, `OTHER`) of a parameter, given its first name."""
        blocks, steps = frozenset(self.blocks), name.split(".")
        around = [".".join(steps[:count]) for count in range(1, len(steps))]
        other = EMBEDDING if self.embedding in around else HEAD if self.head in around else OTHER
        return next((each for each in around if each in blocks), other)


def sort_parts(parts: Iterable[str]) -> list[str]:
    """Return each part once, in the order of a forward: the embedding, blocks as given, the head, all else."""
    place = {EMBEDDING: 0, HEAD: 2, OTHER: 3}
    return sorted(dict.fromkeys(parts), key=lambda part: place.get(part, 1))


def infer_layout(model: nn.Module) -> ModelLayout:
    """Find stacks, embedding, head and tied parameters.

    A stack is an outermost ModuleList whose members have submodules: lists inside a block (experts) and of plain layers
    are none. Members without parameters are passed over: blocks that a stage of a pipeline does not hold.
    """
    names: dict[Any, str] = {module: name for name, module in model.named_modules()}
    groups: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(parameter, []).append(name)

    def named(accessor: str) -> str | None:
        with suppress(NotImplementedError, AttributeError):
            return names.get(getattr(model, accessor)())
        return None

    return ModelLayout(
        stacks=tuple(_find_stacks(model, "")),
        embedding=named("get_input_embeddings"),
        head=named("get_output_embeddings"),
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
    """Elements of all parameters, a tied weight counted once, and of those that train."""

    num_parameters: int
    num_trainable: int
    bytes_per_element: int


def compute_model_size(model: nn.Module) -> ModelSize:
    """Return how many elements and bytes the parameters of a model have."""
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


# -- tied weights: with a configuration that contradicts the modules, a saved model would load as another one


def set_tie_word_embeddings(config: Any, is_tied: bool) -> None:
    for each in (config, config.get_text_config()):
        each.tie_word_embeddings = is_tied


def sync_tie_config(model: nn.Module) -> None:
    """Set `tie_word_embeddings` in a configuration to what the modules are, unless only some of several are tied."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    config: Any = base.config if hasattr(base, "get_expanded_tied_weights_keys") else None
    if not hasattr(config, "tie_word_embeddings"):
        return
    tied, wanted = copy.deepcopy(config), not config.tie_word_embeddings
    set_tie_word_embeddings(tied, True)
    try:
        # Pairs of weights that the class ties if its configuration says so.
        base.config = tied
        pairs = base.get_expanded_tied_weights_keys(all_submodels=False)
    finally:
        base.config = config
    named = dict(base.named_parameters(remove_duplicate=False))
    are_one = [named[name] is named[other] for name, other in pairs.items() if name in named and other in named]
    if are_one and all(is_one is wanted for is_one in are_one):
        set_tie_word_embeddings(config, wanted)
        base.all_tied_weights_keys = base.get_expanded_tied_weights_keys(all_submodels=True)
