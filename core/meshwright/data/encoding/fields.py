"""Read the fields of a record, under the names that a run file gives them, and say what is wrong with one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from ...base.errors import ConfigError, DataError, nearest
from ..config import FIELDS, Format
from ..reading.records import Record


class Fields:
    """The names of a source's fields."""

    def __init__(self, source_format: Format, names: Mapping[str, str], columns: tuple[str, ...] = ()) -> None:
        """Take `names` as `SourceConfig.fields` gives them.

        Raises:
            ConfigError: one of them is no field of the format.
        """
        known = (*FIELDS[source_format], *columns)
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"fields: {name!r} is no field of format={source_format}. It has {', '.join(known)}."
                    f"{nearest(name, known)} Write our name first, then the source's: {{{known[0]}: its name}}."
                )
        self._names = dict(names)

    def name(self, field: str) -> str:
        """What the source calls a field."""
        return self._names.get(field, field)

    def find(self, record: Record, field: str) -> Any:
        """The value of a field; None where the record has none."""
        return record.value.get(self.name(field))

    def need(self, record: Record, field: str) -> Any:
        """The value of a field.

        Raises:
            DataError: the record has none.
        """
        name = self.name(field)
        if name not in record.value:
            present = ", ".join(sorted(map(str, record.value))) or "none"
            raise DataError(
                f"{record.where}: no field {name!r}. Fields of this line: {present}.{nearest(name, record.value)} "
                f"Say under `fields` what the source calls it, {{{field}: its name}}, or set another format."
            )
        return record.value[name]

    def text(self, record: Record, field: str) -> str:
        """The value of a field that holds text.

        Raises:
            DataError: it is missing, or no text.
        """
        value = self.need(record, field)
        if not isinstance(value, str):
            self.refuse(record, field, value, "must hold a string")
        check_text(value, record.where, f"field {self.name(field)!r}")
        return value

    def refuse(self, record: Record, field: str, value: Any, rule: str) -> NoReturn:
        """Raise DataError: the value of a field breaks a rule."""
        raise DataError(
            f"{record.where}: field {self.name(field)!r} holds {value!r:.80}, a {type(value).__name__}, but {rule}."
        )

    def mapping(self, record: Record, field: str) -> dict[str, Any]:
        """The value of a field that holds an object, or its JSON, or nothing."""
        value = self.from_json(record, field)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.refuse(record, field, value, "must hold an object, or its JSON")
        return dict(value)

    def list_of_mappings(self, record: Record, field: str) -> list[dict[str, Any]] | None:
        """The value of a field that holds a list of objects, or its JSON; None where there is none, or it is empty."""
        value = self.from_json(record, field)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
            self.refuse(record, field, value, "must hold a list of objects, or its JSON")
        return [dict(each) for each in value] or None

    def from_json(self, record: Record, field: str) -> Any:
        """A value that tables often hold as JSON, since its keys differ from row to row."""
        value = self.find(record, field)
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{record.where}: field {self.name(field)!r} holds a text that is no JSON: {error}."
            ) from None


def check_text(text: str, where: str, what: str) -> None:
    """Raise DataError where a string is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {what} holds half of a surrogate pair, {text[error.start]!r}, at character "
            f"{error.start}; that is no text. Remove or repair it."
        ) from None
