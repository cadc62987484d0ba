"""Turn pydantic's findings into one ConfigError that names the key, the value, the rule and the nearest key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

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
        lines = [_finding(model_cls, finding) for finding in error.errors()]
        raise ConfigError("\n".join([f"{where} is not valid:", *lines])) from None


def _finding(model_cls: type[BaseModel], finding: Any) -> str:
    path = [str(part) for part in finding["loc"]]
    if finding["type"] == "extra_forbidden":
        known = _fields_at(model_cls, path[:-1])
        return f"  {'.'.join(path)}: unknown key.{nearest(path[-1], known)} Allowed: {', '.join(sorted(known))}."
    if finding["type"] == "missing":
        return f"  {'.'.join(path)}: required, but not given."
    # A validator of a whole model has no single value to show; its message carries what matters.
    got = f" (got {finding['input']!r})" if path and not isinstance(finding["input"], dict) else ""
    message = finding["msg"].removeprefix("Value error, ")
    return f"  {'.'.join(path) or 'as a whole'}: {message}{got}"


def _fields_at(model_cls: type[BaseModel], path: list[str]) -> list[str]:
    """Field names of the model reached by following `path` through nested models."""
    for part in path:
        field = model_cls.model_fields.get(part)
        nested = next((cls for cls in _models_in(field.annotation)), None) if field else None
        if nested is None:
            return []
        model_cls = nested
    return list(model_cls.model_fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [cls for arg in getattr(annotation, "__args__", ()) for cls in _models_in(arg)]
