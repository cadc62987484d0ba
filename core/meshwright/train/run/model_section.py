"""Checks of the section `model` of a run file. No torch in this module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...files.writing import check_path

_STRINGS = ("path", "model_type", "checkpoint", "dtype", "init", "revision", "trust_remote_code")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def check_model_section(value: dict[str, Any]) -> dict[str, Any]:
    """Return the section if it names one source and its keys have valid values.

    Raises:
        ValueError: what is wrong.
    """
    if sum(key in value for key in ("path", "model_type", "checkpoint")) != 1:
        raise ValueError(
            "give either model_type, to train from new weights, or path, a local model directory or a hub id, or "
            "checkpoint, to begin with the weights of one"
        )
    for key in _STRINGS:
        if not isinstance(value.get(key, ""), str):
            raise ValueError(f"{key} must be a string, not {value[key]!r}")
    for key in ("path", "checkpoint"):
        if key in value:
            check_path(value[key])
    if "://" in value.get("checkpoint", ""):
        raise ValueError(
            f"checkpoint={value['checkpoint']!r} is a URL, and weights to begin with are read from a directory; export "
            f"it first: meshwright export URL DIR, and path: DIR"
        )
    for key in ("revision", "trust_remote_code"):
        if key in value and "path" not in value:
            raise ValueError(f"{key} is of a model at path, and there is none")
    if not isinstance(value.get("allow_pickle", False), bool):
        raise ValueError(f"allow_pickle must be true or false, not {value['allow_pickle']!r}")
    if "init" in value and "model_type" not in value:
        raise ValueError("init says how new weights are drawn, and these come from a directory; leave it out")
    _check_trust(value)
    if "peft" in value:
        _check_adapter(value)
    return value


def check_model(section: Mapping[str, Any], seq_len: int) -> None:
    """Refuse a new model that transformers would refuse, before torch is imported. Others are checked later.

    Raises:
        ModelError: as `plan_run` does.
    """
    from ...model.configuration import check_model_type, model_config

    if "model_type" in section:
        # An unknown type is found without importing transformers.
        check_model_type(str(section["model_type"]))
        model_config(section, tokenizer=None, seq_len=seq_len)


def _check_trust(value: Mapping[str, Any]) -> None:
    trusted, revision = value.get("trust_remote_code"), value.get("revision")
    if trusted is None:
        return
    if not _DIGEST.fullmatch(trusted):
        raise ValueError(
            f"trust_remote_code={trusted!r} names no code. It is the commit on the hub whose code you have read, in 40 "
            f"hexadecimal digits; or of a local directory the digest that the error without it tells"
        )
    if len(trusted) == 40 and revision not in (None, trusted):
        raise ValueError(f"trust_remote_code={trusted!r} is another commit than revision={revision!r}; leave that out")


def _check_adapter(value: Mapping[str, Any]) -> None:
    section = value["peft"]
    if not isinstance(section, Mapping):
        raise ValueError(f"peft must be a mapping, such as {{type: lora, r: 16}}, not {section!r}")
    if "path" not in value:
        raise ValueError(
            "peft needs path: an adapter is of use with a base that everybody can load. New weights "
            "(model_type) are to be trained whole; a checkpoint is to be exported first: meshwright export"
        )
    for key in ("type", "adapter", "base_dtype"):
        if not isinstance(section.get(key, ""), str):
            raise ValueError(f"peft.{key} must be a string, not {section[key]!r}")
    if not section.get("type") and not section.get("adapter"):
        raise ValueError("peft has no type: give type: lora, or adapter, a directory to go on from")
    if "adapter" in section:
        check_path(section["adapter"])
