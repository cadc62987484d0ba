"""Secrets of a run file: read from the environment, and redacted in files that a run writes. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.plugin import ConfigError, FrozenModel, RunSection

REDACTED = "***"
_SECRET_NAME = re.compile(
    r"passw(or)?d|passphrase|(^|[_-])(token|secrets?|pwd|api_?keys?|access_?keys?(_id)?|private_?keys?|ssh_?keys?|"
    r"credentials?|auth|authorization|cookies?|netrc|dsn)([_-]|$)|pass$|(^|[_-])keys?$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    # A password in a URL, or a secret in its query.
    r"[a-z][a-z0-9+.-]*://[^/@\s]*:[^/@\s]+@|[?&](\w*(token|secret|password|signature|api_?key))=[^&\s]|"
    # Tokens of Hugging Face, OpenAI and Anthropic, GitHub, GitLab, AWS, Slack, Google; a JSON web token; a private
    # key.
    r"\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{16,}|\bgh[opsur]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|"
    r"\bglpat-[\w-]{16,}|\b(AKIA|ASIA)[A-Z0-9]{12,}|\bxox[abprs]-[\w-]{10,}|\bAIza[\w-]{30,}|"
    r"\beyJ[\w-]{8,}\.[\w-]{8,}\.|-----BEGIN [A-Z ]*PRIVATE KEY-----",
    re.IGNORECASE,
)
_SHELL_ASSIGNMENT = re.compile(r"""\b([A-Za-z_]\w*)=("[^"]*"|'[^']*'|[^\s;&|"'$]+)""")
"""Matches an assignment in a line of shell code."""


class FromEnvironment(FrozenModel):
    """A value that is read from an environment variable of the process that starts the run."""

    from_env: str


def is_secret(name: str, value: str) -> bool:
    """Return whether a value is a secret, judged by its name or its format."""
    return bool(value) and (_SECRET_NAME.search(name) is not None or _SECRET_VALUE.search(value) is not None)


def redact_assignments(line: str) -> str:
    """Redact the secrets that a line of shell code assigns to variables."""
    return _SHELL_ASSIGNMENT.sub(
        lambda match: f"{match[1]}={REDACTED}" if is_secret(match[1], match[2]) else match[0], line
    )


def resolve_environment(value: Any, option: str) -> Any:
    if isinstance(value, FromEnvironment):
        return resolve_environment({"from_env": value.from_env}, option)
    if isinstance(value, Mapping):
        if value.keys() == {"from_env"} and isinstance(value["from_env"], str):
            name = value["from_env"]
            if name not in os.environ:
                raise ConfigError(
                    f"{option} is read from the environment variable {name} (from_env), which is not set. Set it where "
                    "you start the command."
                )
            return os.environ[name]
        return {key: resolve_environment(each, f"{option}.{key}") for key, each in value.items()}
    if isinstance(value, list):
        return [resolve_environment(each, option) for each in value]
    return value


def redact_run_file(values: Mapping[str, Any], sections: Sequence[RunSection]) -> dict[str, Any]:
    """Return the values of a run file with secrets redacted. Plugin sections apply their own `redact` as well."""
    # Names are checked in sections of plugins and trackers only. Elsewhere, "token" is a token of text.
    checked = {"trackers", *(each.name for each in sections)}
    redacted: dict[str, Any] = {
        key: _redact_value(key, value, check_names=key in checked) for key, value in values.items()
    }
    for section in sections:
        if isinstance(values.get(section.name), Mapping):
            redacted[section.name] = section.redact(redacted[section.name], values[section.name])
    return redacted


def _redact_value(name: str, value: Any, *, check_names: bool) -> Any:
    if isinstance(value, Mapping):
        if value.keys() == {"from_env"}:
            return dict(value)
        return {key: _redact_value(str(key), each, check_names=check_names) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_redact_value(name, each, check_names=check_names) for each in value]
    return REDACTED if isinstance(value, str) and is_secret(name if check_names else "", value) else value
