"""The structure and size of a model, found from its modules and not from class names.

A plugin answers for a model that these rules would get wrong through the hook `model_layout`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..base.errors import ModelError

EMBEDDING, HEAD, OTHER = "embedding", "head", "other"
"""Parts of a model besides its blocks, as error texts and reports name them."""


@dataclass(frozen=True)
class ModelLayout:
    """Names are fully qualified names in the unwrapped Hugging Face model."""

    stacks: tuple[tuple[str, ...], ...]
    """The stacks of blocks, each a tuple of module names in the order in which they run."""
    embedding: str | None
    """The token embedding."""
    head: str | None
    """The output projection onto the vocabulary."""
    tied: tuple[tuple[str, ...], ...]
    """Groups of parameter names that are one parameter."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """The blocks of all stacks."""
        return tuple(block for stack in self.stacks for block in stack)

    def part_of(self, name: str) -> str:
        """Return the part (a block, `EMBEDDING`, `HEAD`, `OTHER`) of a parameter, given its first name."""
        blocks, steps = frozenset(self.blocks), name.split(".")
        around = [".".join(steps[:count]) for count in range(1, len(steps))]
        other = EMBEDDING if self.embedding in around else HEAD if self.head in around else OTHER
        return next((each for each in around if each in blocks), other)


def in_order(parts: Iterable[str]) -> list[str]:
    """Return each part once, in the order of a forward: the embedding, blocks as given, the head, all else."""
    place = {EMBEDDING: 0, HEAD: 2, OTHER: 3}
    return sorted(dict.fromkeys(parts), key=lambda part: place.get(part, 1))


def layout_by_structure(model: nn.Module) -> ModelLayout:
    """Find stacks, embedding, head and tied parameters.

    A stack is an outermost ModuleList whose members have submodules: lists inside a block (experts) and of plain layers
    are none. Members without parameters are passed over: blocks that a stage of a pipeline does not hold.
    """
    names = {id(module): name for name, module in model.named_modules()}
    by_identity: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_identity.setdefault(id(parameter), []).append(name)
    return ModelLayout(
        stacks=tuple(_stacks(model, "")),
        embedding=names.get(id(_accessor(model, "get_input_embeddings"))),
        head=names.get(id(_accessor(model, "get_output_embeddings"))),
        tied=tuple(tuple(group) for group in by_identity.values() if len(group) > 1),
    )


def _accessor(model: nn.Module, name: str) -> nn.Module | None:
    method = getattr(model, name, None)
    try:
        return method() if callable(method) else None
    except (NotImplementedError, AttributeError):
        return None


def _stacks(module: nn.Module, prefix: str) -> Iterator[tuple[str, ...]]:
    for name, child in module.named_children():
        members = list(enumerate(child.children())) if isinstance(child, nn.ModuleList) else []
        members = [(index, each) for index, each in members if any(True for _ in each.parameters())]
        if members and all(any(True for _ in each.children()) for _, each in members):
            yield tuple(f"{prefix}{name}.{index}" for index, _ in members)
        else:
            yield from _stacks(child, f"{prefix}{name}.")


# -- size


@dataclass(frozen=True)
class ModelSize:
    """Elements of all parameters, a tied weight counted once, and of those that train."""

    parameters: int
    trainable: int
    bytes_per_element: int


def model_size(model: nn.Module) -> ModelSize:
    parameters = list(model.parameters())
    return ModelSize(
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        bytes_per_element=parameters[0].element_size() if parameters else 0,
    )


def check_elements(model: nn.Module) -> None:
    """Refuse trainable parameters without elements: their gradients cannot be sharded."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.numel() == 0:
            raise ModelError(
                f"{name} is to be trained, but its shape {tuple(parameter.shape)} has no elements. Change the size of "
                f"the model's configuration that is 0, or freeze the parameter."
            )


# -- tied weights: with a configuration that contradicts the modules, a saved model would load as another one


def set_tied(config: Any, is_tied: bool) -> None:
    for each in (config, config.get_text_config()):
        each.tie_word_embeddings = is_tied


def note_ties(model: nn.Module) -> None:
    """Set `tie_word_embeddings` in a model's configuration to what its modules are, in place.

    Files and code may tie or untie a head. If only some of several ties hold, the configuration is unchanged.
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
    """For each pair of weights that the class ties if its configuration says so: whether they are one parameter."""
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
