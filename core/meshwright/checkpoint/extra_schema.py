"""Types of the values that runs store in `Manifest.extra`.

Scripts may store other values there. A checkpoint belongs to a run if `extra` has the key `identity`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

T = TypeVar("T")
Count = Annotated[int, Field(ge=0, lt=1 << 62)]


class _ExtraModel(BaseModel):
    """Base of the schemas. Fields have the names of the file; further ones are allowed."""

    model_config = ConfigDict(strict=True, protected_namespaces=())


class _RunIdentity(_ExtraModel):
    batch_size: Count
    model: dict[str, Any] = {}
    data: dict[str, Any] = {}
    order: Count = 0
    ema: dict[str, Any] | None = None


class _EarlyStoppingState(_ExtraModel):
    set: str
    lowest: float | None
    waited: Count


class _BestState(_ExtraModel):
    set: str
    values: list[Annotated[tuple[float, Count], Strict(False)]]


class _BadStepsState(_ExtraModel):
    left_out: Count = 0
    count: Count = 0
    since_good: Count = 0
    furthest: Count = 0
    losses: list[float] = []
    norms: list[float] = []


class _LoopState(_ExtraModel):
    early_stopping: _EarlyStoppingState | None = None
    best: _BestState | None = None
    bad_steps: _BadStepsState | None = None


class _RunExtra(_ExtraModel):
    identity: _RunIdentity
    run: dict[str, Any] = {}
    named: str | None = None
    position: Count = 0
    streams: list[dict[str, Any]] | None = None
    loop: _LoopState = _LoopState()
    evaluations: dict[str, float] = {}


def check_extra(extra: Mapping[str, Any]) -> None:
    """Raise ValueError if a value that runs store has the wrong type."""
    if "identity" in extra:
        validate_with(_RunExtra.model_validate, extra)


def check_loop(state: object) -> None:
    """Raise ValueError if the state of the training loop has a wrong type."""
    validate_with(_LoopState.model_validate, state)


def validate_with(validate: Callable[[Any], T], value: object) -> T:
    """Return the value as validated by pydantic. Raises ValueError with its first error, in one line."""
    try:
        return validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
