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
    """Base of the schemas. Further fields are allowed. An alias is the field's name in the file."""

    model_config = ConfigDict(strict=True, protected_namespaces=())


class _RunIdentity(_ExtraModel):
    batch_size: Count
    model: dict[str, Any] = {}
    data: dict[str, Any] = {}
    order_version: Count = Field(default=0, alias="order")
    ema: dict[str, Any] | None = None


class _EarlyStoppingState(_ExtraModel):
    eval_set: str = Field(alias="set")
    lowest: float | None
    num_bad_evaluations: Count = Field(alias="waited")


class _BestState(_ExtraModel):
    eval_set: str = Field(alias="set")
    values: list[Annotated[tuple[float, Count], Strict(False)]]


class _BadStepsState(_ExtraModel):
    num_skipped_batches: Count = Field(default=0, alias="left_out")
    num_bad_steps: Count = Field(default=0, alias="count")
    num_since_good: Count = Field(default=0, alias="since_good")
    last_good_step: Count = Field(default=0, alias="furthest")
    losses: list[float] = []
    norms: list[float] = []


class _LoopState(_ExtraModel):
    early_stopping: _EarlyStoppingState | None = None
    best: _BestState | None = None
    bad_steps: _BadStepsState | None = None


class _RunExtra(_ExtraModel):
    identity: _RunIdentity
    run: dict[str, Any] = {}
    resumed_from: str | None = Field(default=None, alias="named")
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
