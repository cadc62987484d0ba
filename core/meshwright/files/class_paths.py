"""Import classes that a config names, only from an allow-list. Imports no torch.

A run file is data and must not run arbitrary code. It may name:

- Classes of a few modules of torch, transformers and meshwright. Before an option instantiates one, the class is
  checked to be a subclass of the class that the option requires (`base`).
- Classes, functions and plans of custom modules. The user, not the file, allows these modules by
  `allow_imports("my_package")` or by the environment variable MESHWRIGHT_ALLOWED_IMPORTS (separated by commas).

Names that such a module has imported from elsewhere are not allowed: `torch.optim.optimizer.os.system` is rejected.
tests/security/README.md lists the options that accept import paths.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any, Literal

from ..base.errors import ConfigError, suggest_match
from ..base.validation import DTYPE_ALIASES

ALLOWED_IMPORTS_VARIABLE = "MESHWRIGHT_ALLOWED_IMPORTS"

# Importing these modules, and those below, has no side effects.
_BUILT_IN_MODULES = (
    "torch.nn",
    "torch.optim",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models",
)
# The loss in the JSON of pipeline configs, and the plan of the reference implementation.
_allowed_functions = {
    "meshwright.step.tokens.sum_target_loss",
    "meshwright.parallel.tensor.get_hf_tp_shard_plan",
    "meshwright.parallel.tensor.plan_sources.get_hf_tp_shard_plan",
}
# Excludes the checkpoint conversion scripts next to the modeling code.
_MODELING_CLASS = re.compile(r"transformers\.models\.(\w+\.)+modeling_\w+\.\w+")
_allowed_modules: set[str] = set()

ImportKind = Literal["class", "function", "dict"]
_KIND_CHECKS: Mapping[ImportKind, Callable[[Any], bool]] = MappingProxyType(
    {"class": inspect.isclass, "function": inspect.isfunction, "dict": lambda found: isinstance(found, dict)}
)


def allow_imports(*modules: str) -> None:
    """Allow configs to name classes, functions and plans of these modules and their submodules.

    Args:
        modules: names, such as "my_package.layers".

    Raises:
        ConfigError: a name is not a module name.
    """
    _allowed_modules.update(_check_module_name(module, "allow_imports") for module in modules)


def allow_functions(*names: str) -> None:
    """Allow configs to name these functions of a plugin, by import paths. The plugin calls this on import."""
    _allowed_functions.update(_check_module_name(name, "allow_functions") for name in names)


def allowed_imports() -> list[str]:
    """Return the allowed modules: built-in ones, those of `allow_imports`, and those of the environment variable."""
    return sorted({*_BUILT_IN_MODULES, *_get_user_modules()})


def check_import(name: str) -> None:
    """Raise ConfigError if an import path is not on the allow-list. Imports nothing."""
    if not isinstance(name, str) or "." not in name or not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{name!r} is no import path. Give module and name, such as 'torch.optim.AdamW'.")
    if is_from_user_module(name):
        return
    if any(part.startswith("_") for part in name.split(".")):
        raise ConfigError(f"{name!r} is not imported: it is private. Name a public class, such as 'torch.optim.AdamW'.")
    if not _is_built_in(name):
        raise ConfigError(
            f"{name!r} is not imported: its module is not on the allow-list ({', '.join(allowed_imports())}). "
            f"If you trust it, {_format_allow_hint(name)}"
        )


def is_from_user_module(name: str) -> bool:
    """Return whether an import path is in a module that the user has allowed."""
    return _find_enclosing_module(name, _get_user_modules()) is not None


def import_class_from_path(
    name: str, *, kind: ImportKind | Sequence[ImportKind] = "class", base: type | None = None
) -> Any:
    """Import a class by its path, such as "torch.optim.AdamW".

    Args:
        name: the import path.
        kind: allowed kinds of objects. Functions and dicts must come from modules that the user has allowed.
        base: base class that a class outside of these modules must have. None: any class; the caller must then not
            instantiate it.

    Raises:
        ConfigError: the name is not on the allow-list, does not exist, or is of another kind.
    """
    check_import(name)
    kinds: Sequence[ImportKind] = (kind,) if isinstance(kind, str) else kind
    module, _, leaf = name.rpartition(".")
    value = _get_attribute(_import_module(module, name), leaf, name)
    own = next((each for each, is_one in _KIND_CHECKS.items() if is_one(value)), None)
    if own not in kinds:
        wanted = " or ".join(f"a {each}" for each in kinds)
        raise ConfigError(f"{name!r} is not {wanted}, but a {own or type(value).__name__}. Name {wanted}.")
    if own != "class" and not is_from_user_module(name) and not (own == "function" and name in _allowed_functions):
        raise ConfigError(
            f"{name!r} is a {own} of {module!r}, but each {own} must be of a module of your own. Define it in one, "
            f"call meshwright.allow_imports with that module's name, and name it there."
        )
    if isinstance(value, dict):
        return value
    # The module may have imported the object from elsewhere.
    home = f"{getattr(value, '__module__', None) or ''}.{leaf}"
    if not is_from_user_module(home) and not _is_built_in(home):
        raise ConfigError(
            f"{name!r} is defined in {home.rpartition('.')[0]!r}, which is not to be imported from. If you trust it, "
            f"name it there, and {_format_allow_hint(home)}"
        )
    if base is not None and inspect.isclass(value) and not is_from_user_module(home) and not issubclass(value, base):
        raise ConfigError(f"{name!r} is no {base.__name__}. Name a subclass of {base.__module__}.{base.__name__}.")
    return value


def import_classes_from_paths(class_paths: Sequence[str]) -> list[Any]:
    """Check all import paths, then import the classes; see `import_class_from_path`."""
    for name in class_paths:
        check_import(name)
    return [import_class_from_path(name) for name in class_paths]


def instantiate(mapping: Mapping[str, Any], *, expected: type, default: type | None = None) -> Any:
    """Create the object that a mapping describes: `{_target_: path of its class, argument: value, ...}`.

    The class must be a subclass of `expected`. Without `_target_`, it is `default` or else `expected`. A string
    argument whose name ends in `dtype` is converted to a dtype. Raises ConfigError if the class or an argument is
    invalid.
    """
    arguments = dict(mapping)
    target = arguments.pop("_target_", None)
    cls = default or expected
    if target is not None:
        cls = import_class_from_path(target)
        if not issubclass(cls, expected):
            path = f"{expected.__module__}.{expected.__name__}"
            raise ConfigError(f"_target_={target!r} is no {expected.__name__}. Name {path} or a subclass.")
    known = inspect.signature(cls).parameters
    for key in arguments:
        if key not in known:
            allowed = ", ".join(known) or "none"
            raise ConfigError(f"{cls.__name__} has no argument {key!r}.{suggest_match(key, known)} Allowed: {allowed}.")
        if key.endswith("dtype") and isinstance(arguments[key], str):
            arguments[key] = parse_dtype(arguments[key])
    try:
        return cls(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{cls.__name__} cannot be made from {dict(mapping)}: {error}") from None


def parse_dtype(name: str) -> Any:
    """Return the `torch.dtype` of a name such as "bfloat16" or "torch.bfloat16". Raises ConfigError."""
    import torch

    dtype = getattr(torch, DTYPE_ALIASES.get(name, str(name).removeprefix("torch.")), None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"{name!r} is no dtype of torch. Use a name such as 'bfloat16' or 'float32'.")
    return dtype


def _is_built_in(name: str) -> bool:
    if name in _allowed_functions:
        return True
    module = _find_enclosing_module(name, _BUILT_IN_MODULES)
    return module is not None and (module != "transformers.models" or _MODELING_CLASS.fullmatch(name) is not None)


def _format_allow_hint(name: str) -> str:
    package = name.split(".")[0]
    return f"call meshwright.allow_imports({package!r}) before, or start with {ALLOWED_IMPORTS_VARIABLE}={package}."


def _get_user_modules() -> set[str]:
    listed = map(str.strip, os.environ.get(ALLOWED_IMPORTS_VARIABLE, "").split(","))
    return _allowed_modules | {_check_module_name(name, ALLOWED_IMPORTS_VARIABLE) for name in listed if name}


def _find_enclosing_module(name: str, modules: Iterable[str]) -> str | None:
    """Return the module that contains a name; "torchevil.x" is not in "torch"."""
    return next((module for module in modules if name == module or name.startswith(f"{module}.")), None)


def _check_module_name(module: str, source: str) -> str:
    if not module or not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(
            f"{source}: {module!r} is no module name. Give one such as 'my_package' or 'my_package.plans'."
        )
    return module


def _import_module(module: str, name: str) -> Any:
    """Import a module, or the class that contains a nested name."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        parent, _, leaf = module.rpartition(".")
        # The last part may be a class. If an existing module lacks a dependency, that is an error.
        if parent and isinstance(error, ModuleNotFoundError) and error.name == module:
            holder = _get_attribute(_import_module(parent, name), leaf, name)
            if inspect.isclass(holder):
                return holder
        raise ConfigError(f"{name!r} cannot be imported: {error}.") from None


def _get_attribute(holder: Any, attribute: str, name: str) -> Any:
    try:
        return getattr(holder, attribute)
    except AttributeError:
        known = [each for each in dir(holder) if not each.startswith("_")]
        where = f"{'module' if isinstance(holder, ModuleType) else 'class'} {holder.__name__}"
        raise ConfigError(f"{name!r} does not exist in the {where}.{suggest_match(attribute, known)}") from None
