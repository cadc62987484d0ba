"""Frozen configs, and their validation errors as a ConfigError that states key, value and rule.

[Note: equal configs] Only the values of a config matter: an omitted option is the same as one that is set to its
default. Two configs are equal if their data are equal, and a config read from its own data (`to_dict`,
`model_dump_json`) equals the original. The data of an object, such as a policy or a function, is the mapping or the
import path that describes it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
)
from pydantic.fields import FieldInfo

from .errors import ConfigError, suggest_match

TRAINING_DTYPES = ("float64", "float32", "bfloat16")
"""Names of the dtypes in which models can be trained."""
DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}
"""Short names of dtypes that are accepted."""
FLOAT16_REFUSAL = "float16 needs loss scaling, which is not supported; without it, small gradients become zero"
"""Why float16 is rejected as a training dtype."""


class InvalidConfigError(ConfigError, ValueError):
    """A config was built with invalid values; also a ValueError, as pydantic's error is."""


if TYPE_CHECKING:  # Type checkers see fields as keyword arguments.
    _PositionalModel = BaseModel
else:

    class _PositionalMeta(type(BaseModel)):
        """Accept some fields by position, and raise InvalidConfigError. Validation does not call the constructor."""

        def __call__(cls, *arguments: Any, **values: Any) -> Any:
            try:
                return super().__call__(**_bind_positional(cls, arguments, values))
            except ValidationError as error:
                raise InvalidConfigError(_format_validation_errors(cls, error, where=cls.__name__)) from None

    class _PositionalModel(BaseModel, metaclass=_PositionalMeta):
        pass


class FrozenModel(_PositionalModel):
    """A frozen model that rejects unknown fields and values of another type.

    `positional_fields`: fields that the constructor accepts by position. `other_names`: by unknown key, at any depth,
    the sentence of its error message that says what to write, without its full stop.
    """

    positional_fields: ClassVar[tuple[str, ...]] = ()
    other_names: ClassVar[Mapping[str, str]] = {}

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        validate_default=True,
        protected_namespaces=(),
        ser_json_inf_nan="constants",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _read_plain_value(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject a bool as a number, and read "none" as null where no text is allowed."""
        # pydantic's strict mode rejects a bool as a number, but not as a Literal of numbers, since True == 1.
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, str) and value.lower() == "none":
            types = _find_types(annotation)
            return None if type(None) in types and str not in types else value
        allowed = _get_literal_values(annotation)
        equal = [each for each in allowed if each == value]
        if isinstance(value, bool) and equal and not any(isinstance(each, bool) for each in equal):
            raise ValueError(f"must be one of {', '.join(map(repr, allowed))}")
        return value

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Yield the fields that `repr` shows: those that differ from their defaults."""
        fields = type(self).model_fields
        for name, value in super().__repr_args__():
            field = fields.get(name or "")
            if field is None or field.is_required() or value != field.get_default(call_default_factory=True):
                yield name, value

    def to_dict(self) -> dict[str, Any]:
        """Return the values by name, as a shallow copy."""
        return dict(self)

    def model_dump_json(self, **options: Any) -> str:
        """See pydantic; ConfigError if a value is, or contains, an object without an import path, such as a lambda."""
        self._check_serializable()
        return super().model_dump_json(**options)

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """See pydantic; in mode "json", raises ConfigError as `model_dump_json` does."""
        if options.get("mode") == "json":
            self._check_serializable()
        return super().model_dump(**options)

    def _check_serializable(self) -> None:
        for name, value in self._to_plain_data().items():
            try:
                TypeAdapter(Any).dump_json(value)
            except ValueError:
                raise ConfigError(
                    f"{name}={value!r:.200} cannot be written to a file: it is, or holds, an object without an import "
                    f"path. Define it at the top level of a module, or keep the config as an object (to_dict)."
                ) from None

    def __eq__(self, other: object) -> bool:
        return (
            type(self) is type(other)
            and isinstance(other, FrozenModel)
            and self._to_plain_data() == other._to_plain_data()
        )

    def __hash__(self) -> int:
        # Containers are not hashable; the other values distinguish most configs.
        return hash(
            (type(self), *(each for each in self._to_plain_data().values() if isinstance(each, str | int | float)))
        )

    @model_serializer(mode="plain", when_used="json")
    def _to_plain_data(self) -> dict[str, Any]:
        return {name: to_plain_data(value) for name, value in self}


ModelT = TypeVar("ModelT", bound=BaseModel)


def validate_config(model_cls: type[ModelT], values: Mapping[str, Any], *, where: str) -> ModelT:
    """Build `model_cls` from a mapping. ConfigError lists all errors, one key per line; `where` names the source."""
    try:
        return model_cls.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(_format_validation_errors(model_cls, error, where=where)) from None


def _format_validation_errors(model_cls: type[BaseModel], error: ValidationError, *, where: str) -> str:
    # A key of a union type has one error for each alternative; join them on one line.
    messages_by_path: dict[str, list[str]] = {}
    errors = error.errors()
    for each in errors:
        if not _is_scalar_mismatch(each, errors):
            path, message = _format_validation_error(model_cls, each)
            messages_by_path.setdefault(path, []).append(message)
    lines = []
    for path, messages in messages_by_path.items():
        text = "; or ".join(dict.fromkeys(messages))
        # A validator of several keys reports one problem a line.
        lines += [f"  {path}: {each}" for each in (text.split("\n") if path == _WHOLE else [text])]
    return "\n".join([f"{where} is not valid:", *lines])


def coerce_config(config_cls: type[ModelT], config: Any, *, where: str) -> ModelT:
    """Convert a config, or a mapping of its options, to an object of `config_cls`; ConfigError if it is invalid."""
    if config is None or isinstance(config, Mapping):
        return validate_config(config_cls, config or {}, where=where)
    if isinstance(config, BaseModel):
        try:
            # Some classes accept the values of another class, such as the reference implementation's.
            return config_cls.model_validate(config)
        except ValidationError:
            pass
    raise ConfigError(
        f"{where} takes a {config_cls.__name__}, not a {type(config).__name__}. Give one, or a mapping of its options."
    )


def _bind_positional(cls: type[FrozenModel], arguments: Sequence[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    names = cls.positional_fields
    if len(arguments) > len(names):
        listed = f": {', '.join(names)}" if names else ""
        raise TypeError(f"{cls.__name__} takes {len(names)} arguments by position{listed}; {len(arguments)} were given")
    positional = dict(zip(names, arguments, strict=False))
    duplicates = [name for name in positional if name in values]
    if duplicates:
        raise TypeError(f"{cls.__name__} got several values for {duplicates[0]!r}")
    return {**positional, **values}


def to_plain_data(value: Any) -> Any:
    """Convert a config value to JSON-serializable values; return it unchanged if that is not possible.

    A dtype becomes its name, and a class or function its import path. A dataclass becomes the mapping of its fields
    that are not None, with its class as `_target_`.
    """
    if isinstance(value, Mapping):
        return {key: to_plain_data(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain_data(each) for each in value]
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if is_dataclass(value) and not isinstance(value, type):
        arguments = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        target = {"_target_": _import_path(type(value))}
        return target | {name: to_plain_data(each) for name, each in arguments.items() if each is not None}
    return _import_path(value) if callable(value) else value


def _import_path(value: Any) -> Any:
    """Return the shortest import path of a class or function; the object itself if there is none."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return value
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        holder: Any = sys.modules.get(".".join(parts[:count]))
        for part in name.split("."):
            holder = getattr(holder, part, None)
        if holder is value:
            return ".".join([*parts[:count], name])
    return value


_WHOLE = "as a whole"
"""Path of errors in the combination of several keys."""
_MAX_LISTED_KEYS = 16
"""Number of allowed keys that an error lists although it names a similar one."""
_SCALAR_ERROR_TYPES = frozenset({"bool_type", "literal_error", "string_type", "int_type", "float_type"})


def _is_scalar_mismatch(finding: Any, found: Sequence[Any]) -> bool:
    """Return whether an error only says that a mapping is not a scalar, although the key also accepts mappings."""
    if finding["type"] not in _SCALAR_ERROR_TYPES or not isinstance(finding["input"], dict):
        return False
    depth = len(finding["loc"])
    others = [each for each in found if each["loc"][: depth - 1] == finding["loc"][:-1]]
    return any(len(each["loc"]) > depth or each["type"] not in _SCALAR_ERROR_TYPES for each in others)


def _format_validation_error(model_cls: type[BaseModel], error: Any) -> tuple[str, str]:
    keys, holder = _resolve_location(model_cls, error["loc"])
    path = ".".join(keys) or _WHOLE
    if error["type"] == "extra_forbidden":
        if (advice := getattr(model_cls, "other_names", {}).get(keys[-1])) is not None:
            return path, f"unknown key. {advice}."
        known = list(_get_fields(holder)) if holder else []
        section, *inner = keys[-1].split(".")
        if inner and section in known:
            nested = "".join(f"{{{key}: " for key in inner) + "..." + "}" * len(inner)
            return path, f"unknown key. Nest it: {section}: {nested}. Keys with dots are for --set."
        match = suggest_match(keys[-1], known)
        if match and len(known) > _MAX_LISTED_KEYS:
            return path, f"unknown key.{match}"
        return path, f"unknown key.{match} Allowed: {', '.join(sorted(known)) or 'none'}."
    if error["type"] == "missing":
        return path, "required, but not given."
    if error["type"] in ("model_type", "dict_type"):
        fields = _find_models_of_key(holder, keys[-1]) if holder is not None and keys else []
        known = [name for each in fields for name in _get_fields(each)]
        listed = f" of these keys: {', '.join(known)}" if known else ""
        hint = "; leave it out for the defaults" if error["input"] is None else ""
        return path, f"must be a mapping{listed}{hint} (got {_format_input(error['input'])})"
    # A model-level validator has no single value to show; its message contains what matters.
    got = f" (got {_format_input(error['input'])})" if keys and not isinstance(error["input"], dict) else ""
    return path, error["msg"].removeprefix("Value error, ") + got


def _format_input(value: Any) -> str:
    """Return the start of a value, as a file has it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else f"{value!r:.200}"


def _resolve_location(
    model_cls: type[BaseModel], location: Sequence[str | int]
) -> tuple[list[str], type[BaseModel] | None]:
    """Return the user's keys in pydantic's location, and the model of the last key; None if it is a mapping or list."""
    keys: list[str] = []
    holder: type[BaseModel] | None = model_cls
    inside: list[type[BaseModel]] = [model_cls]
    annotation: Any = None
    for part in location:
        if _is_union(annotation):
            # This part is the name of an alternative, not a key.
            inside = [cls for cls in inside if cls.__name__ in re.findall(r"\w+", str(part))]
            annotation = None
            continue
        holder = inside[0] if inside else None
        if holder is not None:
            field = _get_fields(holder).get(str(part))
            annotation = field.annotation if field else None
            inside = _find_models(annotation)
        if part != "[key]":
            keys.append(str(part))
    return keys, holder


def _get_fields(model_cls: type[BaseModel]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in model_cls.model_fields.items()}


def _find_models_of_key(holder: type[BaseModel], key: str) -> list[type[BaseModel]]:
    field = _get_fields(holder).get(key)
    return [] if field is None else _find_models(field.annotation)


def _find_types(annotation: Any) -> set[Any]:
    """Return the types in a union, without their metadata; the types of the values of a Literal."""
    if get_origin(annotation) is Literal:
        return {type(each) for each in get_args(annotation)}
    if get_origin(annotation) is Annotated:
        return _find_types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return {found for each in get_args(annotation) for found in _find_types(each)}
    return {annotation}


def _get_literal_values(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for each in get_args(annotation) for value in _get_literal_values(each)]


def _is_union(annotation: Any) -> bool:
    if get_origin(annotation) not in (Union, UnionType):
        return False
    return len([each for each in get_args(annotation) if each is not type(None)]) > 1


def _find_models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [cls for each in get_args(annotation) for cls in _find_models(each)]
