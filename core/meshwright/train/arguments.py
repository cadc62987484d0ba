"""Check the arguments that a run file passes to a function of another library. Source: pydantic.TypeAdapter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ..base.errors import ConfigError

_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)


def check_arguments(function: Callable[..., Any], values: Mapping[str, Any], *, where: str) -> None:
    """Refuse values of another type than a function or class takes: "no" would be true, and true would be 1.

    The type is that of an argument's annotation, or of its default; a list is accepted for a tuple. Arguments without a
    known type, and unknown ones, are left to the function.

    Args:
        values: by argument.
        where: how to name the source in errors, such as "optimizer.options".

    Raises:
        ConfigError: names the argument, the value and the type.
    """
    hints = get_type_hints(function.__init__ if inspect.isclass(function) else function)
    parameters = inspect.signature(function).parameters
    for name, value in values.items():
        wanted = hints.get(name, _type_of_default(parameters[name].default) if name in parameters else Any)
        try:
            TypeAdapter(wanted, config=_STRICT).validate_python(_as_tuple(value))
        except ValidationError as error:
            said = "; or ".join(dict.fromkeys(finding["msg"] for finding in error.errors()))
            # Files have lists, and no tuples.
            said = said.replace("Tuple", "List").replace("tuple", "list")
            raise ConfigError(f"{where}.{name}: {said} (got {value!r:.200})") from None


def _type_of_default(default: Any) -> Any:
    if isinstance(default, bool):
        return bool
    # A default of 0 is often written for 0.0.
    return float if isinstance(default, int | float) else Any


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value
