"""Turn pydantic's findings into one ConfigError that names the key, the value, the rule and the nearest key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import ConfigError, nearest


class FrozenModel(BaseModel):
    """A frozen pydantic model that refuses unknown fields: nothing a user writes is dropped."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, protected_namespaces=())


ModelT = TypeVar("ModelT", bound=BaseModel)


def validated(model_cls: type[ModelT], values: Mapping[str, Any], *, where: str) -> ModelT:
    """Build `model_cls` from `values`.

    Args:
        model_cls: any pydantic model.
        values: the user's mapping.
        where: how to name the source in errors, for instance "run.yaml" or "strategy_config of 'fsdp2'".

    Raises:
        ConfigError: one line for each finding, with the nearest known key where a key is unknown.
    """
    try:
        return model_cls.model_validate(dict(values))
    except ValidationError as error:
        # Dicts keep the order; a key of a union type has one finding for each alternative, which belong on one line.
        findings: dict[str, list[str]] = {}
        for finding in error.errors():
            path, message = _finding(model_cls, finding)
            findings.setdefault(path, []).append(message)
        lines = [f"  {path}: {'; or '.join(dict.fromkeys(messages))}" for path, messages in findings.items()]
        raise ConfigError("\n".join([f"{where} is not valid:", *lines])) from None


def _finding(model_cls: type[BaseModel], finding: Any) -> tuple[str, str]:
    """The key that a finding of pydantic is about, and what is wrong with it."""
    keys, holder = _follow(model_cls, finding["loc"])
    path = ".".join(keys) or "as a whole"
    if finding["type"] == "extra_forbidden":
        known = list(holder.model_fields) if holder else []
        return path, f"unknown key.{nearest(keys[-1], known)} Allowed: {', '.join(sorted(known)) or 'none'}."
    if finding["type"] == "missing":
        return path, "required, but not given."
    # A validator of a whole model has no single value to show; its message carries what matters.
    got = f" (got {finding['input']!r:.200})" if keys and not isinstance(finding["input"], dict) else ""
    return path, finding["msg"].removeprefix("Value error, ") + got


def _follow(model_cls: type[BaseModel], location: Sequence[str | int]) -> tuple[list[str], type[BaseModel] | None]:
    """The user's keys in pydantic's location, which also names alternatives of unions; and the model of the last key.

    The model is None where the last key belongs to a plain mapping or list.
    """
    keys: list[str] = []
    holder: type[BaseModel] | None = model_cls
    inside: list[type[BaseModel]] = [model_cls]
    annotation: Any = None
    for part in location:
        if inside:
            holder = inside[0]
            field = holder.model_fields.get(str(part))
            annotation = field.annotation if field else None
            inside = _models_in(annotation)
        elif _is_union(annotation):
            # The name of an alternative, not a key.
            annotation = None
            continue
        else:
            holder = None
        if part != "[key]":
            keys.append(str(part))
    return keys, holder


def _is_union(annotation: Any) -> bool:
    if get_origin(annotation) not in (Union, UnionType):
        return False
    return len([each for each in get_args(annotation) if each is not type(None)]) > 1


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [cls for each in get_args(annotation) for cls in _models_in(each)]
