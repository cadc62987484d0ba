"""What a strategy needs to know of a model, found by structure and not by class names.

A plugin answers for a model that these rules would get wrong through the hook `model_layout`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

EMBEDDING, HEAD, OTHER = "embedding", "head", "other"
"""Parts of a model beside its blocks, as they are called to a person."""


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
        """Where a parameter is: the name of its block, or `EMBEDDING`, `HEAD` or `OTHER`.

        Args:
            name: the first that it has, so that a tied head is a part of the embedding.
        """
        blocks, steps = frozenset(self.blocks), name.split(".")
        around = [".".join(steps[:count]) for count in range(1, len(steps))]
        block = next((each for each in around if each in blocks), None)
        if block is not None:
            return block
        if self.embedding in around:
            return EMBEDDING
        return HEAD if self.head in around else OTHER


def in_order(parts: Iterable[str]) -> list[str]:
    """Each part once, as a token goes through them: blocks as they come, between embedding and head."""
    place = {EMBEDDING: 0, HEAD: 2, OTHER: 3}
    return sorted(dict.fromkeys(parts), key=lambda part: place.get(part, 1))


def layout_by_structure(model: nn.Module) -> ModelLayout:
    """Find stacks, embedding, head and tied parameters.

    A stack is an outermost ModuleList whose members all have submodules and parameters of their own: lists inside a
    block (experts) belong to the block, and lists of plain layers (projections) are no blocks. Members without any
    parameter are passed over: blocks that a stage of a pipeline does not hold.
    """
    names = {id(module): name for name, module in model.named_modules()}
    embedding = _accessor(model, "get_input_embeddings")
    head = _accessor(model, "get_output_embeddings")
    return ModelLayout(
        stacks=tuple(_stacks(model, "")),
        embedding=names.get(id(embedding)),
        head=names.get(id(head)),
        tied=_tied(model),
    )


def _accessor(model: nn.Module, name: str) -> nn.Module | None:
    """What a Hugging Face accessor returns; None where the model has none or does not implement it."""
    method = getattr(model, name, None)
    try:
        return method() if callable(method) else None
    except (NotImplementedError, AttributeError):
        return None


def _stacks(module: nn.Module, prefix: str) -> Iterator[tuple[str, ...]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        is_list = isinstance(child, nn.ModuleList)
        members = [index for index, each in enumerate(child.children()) if is_list and _has_parameters(each)]
        if members and all(_is_block(child[index]) for index in members):
            yield tuple(f"{path}.{index}" for index in members)
        else:
            yield from _stacks(child, f"{path}.")


def _is_block(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _tied(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    by_identity: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_identity.setdefault(id(parameter), []).append(name)
    return tuple(tuple(names) for names in by_identity.values() if len(names) > 1)
