"""Secrets of a run file: read from the environment, and hidden in what a run writes. No torch in this module."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.plugin import ConfigError, FrozenModel, RunSection

HIDDEN = "***"
_NAME = re.compile(
    r"passw(or)?d|passphrase|(^|[_-])(token|secrets?|pwd|api_?keys?|access_?keys?(_id)?|private_?keys?|ssh_?keys?|"
    r"credentials?|auth|authorization|cookies?|netrc|dsn)([_-]|$)|pass$|(^|[_-])keys?$",
    re.IGNORECASE,
)
_VALUE = re.compile(
    # A password in a URL, or a secret in its query.
    r"[a-z][a-z0-9+.-]*://[^/@\s]*:[^/@\s]+@|[?&](\w*(token|secret|password|signature|api_?key))=[^&\s]|"
    # What services call theirs: Hugging Face, OpenAI and Anthropic, GitHub, GitLab, AWS, Slack, Google; a JSON web
    # token; a private key.
    r"\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{16,}|\bgh[opsur]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|"
    r"\bglpat-[\w-]{16,}|\b(AKIA|ASIA)[A-Z0-9]{12,}|\bxox[abprs]-[\w-]{10,}|\bAIza[\w-]{30,}|"
    r"\beyJ[\w-]{8,}\.[\w-]{8,}\.|-----BEGIN [A-Z ]*PRIVATE KEY-----",
    re.IGNORECASE,
)
_ASSIGNED = re.compile(r"""\b([A-Za-z_]\w*)=("[^"]*"|'[^']*'|[^\s;&|"'$]+)""")
"""Assignments in a line of shell."""


class FromEnvironment(FrozenModel):
    """A value of an environment variable of the process that starts the run."""

    from_env: str


def is_secret(name: str, value: str) -> bool:
    """Whether a value is a secret by its name, or by how it looks."""
    return bool(value) and (_NAME.search(name) is not None or _VALUE.search(value) is not None)


def without_assigned(line: str) -> str:
    """Hide the secrets that a line of shell assigns to variables."""
    return _ASSIGNED.sub(lambda found: f"{found[1]}={HIDDEN}" if is_secret(found[1], found[2]) else found[0], line)


def resolved(value: Any, where: str) -> Any:
    if isinstance(value, FromEnvironment):
        return resolved({"from_env": value.from_env}, where)
    if isinstance(value, Mapping):
        if value.keys() == {"from_env"} and isinstance(value["from_env"], str):
            name = value["from_env"]
            if name not in os.environ:
                raise ConfigError(
                    f"{where} is to be taken from the environment variable {name} (from_env), which is not set. Set it "
                    f"where you start the command."
                )
            return os.environ[name]
        return {key: resolved(each, f"{where}.{key}") for key, each in value.items()}
    if isinstance(value, list):
        return [resolved(each, where) for each in value]
    return value


def without_secrets(values: Mapping[str, Any], sections: Sequence[RunSection]) -> dict[str, Any]:
    """Return the values of a run file with secrets hidden, in the sections of plugins as these say."""
    # In sections of plugins and of trackers names count; elsewhere "token" is a part of a text.
    named = {"trackers", *(each.name for each in sections)}
    found: dict[str, Any] = {key: _without(key, value, named=key in named) for key, value in values.items()}
    for section in sections:
        if isinstance(values.get(section.name), Mapping):
            found[section.name] = section.without_secrets(found[section.name], values[section.name])
    return found


def _without(name: str, value: Any, *, named: bool) -> Any:
    if isinstance(value, Mapping):
        if value.keys() == {"from_env"}:
            return dict(value)
        return {key: _without(str(key), each, named=named) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without(name, each, named=named) for each in value]
    return HIDDEN if isinstance(value, str) and is_secret(name if named else "", value) else value
