"""Code that comes with a model: refused, unless the user names the very version of it that is to run.

[Note: trust] A model on the hub may need classes that transformers has not, in files beside its weights. To run them is
to run whatever their author has written. So they run only where the run file names what has been read: a commit on the
hub, or the digest of a directory's files. What that gives is made known to transformers' auto classes in this process;
everywhere else nothing is trusted (`trust_remote_code=False`), and finds those classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..base.errors import ModelError
from ..files.parsing import json_object_or_empty, read_regular, reason

_COMMIT_LENGTH = 40
_LARGEST_CODE = 1 << 26
"""Bytes of a file of code."""


def is_commit(trusted: str | None) -> bool:
    """Whether what a user trusts is a commit on the hub, and not the digest of a directory."""
    return trusted is not None and len(trusted) == _COMMIT_LENGTH


def trust_code(directory: Path, trusted: str, *, commit: str | None, where: str = "model.trust_remote_code") -> None:
    """Run the code that comes with a model, and let transformers find its classes.

    Args:
        directory: of the model.
        trusted: what the user names.
        commit: of the model on the hub; None: the directory is the user's own.
        where: how to name it in errors.

    Raises:
        ModelError: that is not what is there, or the code cannot be run.
    """
    if is_commit(trusted) and commit is None:
        raise ModelError(
            f"{where}={trusted!r} is a commit, and {directory} is a local directory. {_how_to_trust(directory, where)}"
        )
    found = commit if is_commit(trusted) else digest_of_code(directory)
    if found != trusted:
        raise ModelError(
            f"{where}={trusted!r} is not what is there: the code in {directory} is {found}. Read it, and name that."
        )
    from transformers.utils import HF_MODULES_CACHE

    Path(HF_MODULES_CACHE).mkdir(parents=True, exist_ok=True)
    # Ranks copy the same files to one place, and import them from there.
    with FileLock(Path(HF_MODULES_CACHE) / ".meshwright.lock"):
        try:
            _register(directory)
        except ModelError:
            raise
        except Exception as error:
            # It is anybody's code.
            raise ModelError(f"the code of the model in {directory} cannot be run: {reason(error)}") from error


def check_needs_no_code(directory: Path, *, where: str = "model.trust_remote_code") -> None:
    """Refuse a model of which transformers knows no class, but which brings some of its own.

    Raises:
        ModelError: tells how to trust it.
    """
    from transformers import CONFIG_MAPPING

    values = json_object_or_empty(directory / "config.json")
    if isinstance(values.get("auto_map"), Mapping) and values.get("model_type") not in CONFIG_MAPPING:
        named = ", ".join(sorted(path.name for path in directory.glob("*.py"))) or "no file of which is there"
        raise ModelError(
            f"{directory} needs code of its own ({named}): transformers has no model type "
            f"{values.get('model_type')!r}. What comes with a model is not run. {_how_to_trust(directory, where)}"
        )


def digest_of_code(directory: Path) -> str:
    """SHA-256 of the names and contents of all Python files in a directory."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*.py")):
        try:
            content = read_regular(path, max_bytes=_LARGEST_CODE)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}. Remove it, or use a whole copy.") from None
        digest.update(f"{path.relative_to(directory).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _how_to_trust(directory: Path, where: str) -> str:
    return f"If you have read it and want it to run, say which version: {where}={digest_of_code(directory)}."


def _register(directory: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    def load(reference: str) -> Any:
        if "--" in reference:
            raise ModelError(
                f"{directory} takes code from another place, {reference!r}, of which no version is named. Use a copy "
                f"of the model that brings all of its code."
            )
        return get_class_from_dynamic_module(reference, str(directory))

    values = json_object_or_empty(directory / "config.json")
    named = values.get("auto_map") or {}
    if not {"AutoConfig", "AutoModelForCausalLM"} <= named.keys():
        raise ModelError(
            f"{directory / 'config.json'} names no code of a causal LM (auto_map: {', '.join(named) or 'none'}). Take "
            f"trust_remote_code out, if transformers has the model itself."
        )
    config_cls, model_cls = load(named["AutoConfig"]), load(named["AutoModelForCausalLM"])
    AutoConfig.register(values.get("model_type"), config_cls, exist_ok=True)
    AutoModelForCausalLM.register(config_cls, model_cls, exist_ok=True)
    # So that what is written brings the code along.
    config_cls.register_for_auto_class("AutoConfig")
    model_cls.register_for_auto_class("AutoModelForCausalLM")
    tokenizer = (json_object_or_empty(directory / "tokenizer_config.json").get("auto_map") or {}).get("AutoTokenizer")
    found = [load(each) for each in (tokenizer if isinstance(tokenizer, list) else [tokenizer]) if each]
    for tokenizer_cls in found[:1]:
        AutoTokenizer.register(config_cls, tokenizer_class=tokenizer_cls, exist_ok=True)
        tokenizer_cls.register_for_auto_class("AutoTokenizer")
