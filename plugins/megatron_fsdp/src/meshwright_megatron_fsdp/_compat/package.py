"""Import of the package megatron-fsdp. Its version is checked, since its internals change between minor versions."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import warnings
from typing import Any

from meshwright.plugin import StrategyError

TESTED_VERSIONS = ((0, 6, 1), (0, 7))
"""The first version that works, and the first that is not known to work."""


def check_version(version: str) -> None:
    """Raise StrategyError for versions outside of `TESTED_VERSIONS`, such as "0.6.0" or "0.7.0+local"."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    if not TESTED_VERSIONS[0] <= numbers < TESTED_VERSIONS[1]:
        raise StrategyError(
            f"megatron-fsdp {version} is installed, but megatron_fsdp relies on internals that were tried with 0.6.1 "
            f"up to, not including, 0.7. Install one of these: pip install 'megatron-fsdp>=0.6.1,<0.7'."
        )


@functools.cache
def import_package() -> Any:
    """Import `megatron_fsdp`; raise StrategyError if it is missing or its version is not supported."""
    try:
        check_version(importlib.metadata.version("megatron-fsdp"))
        with warnings.catch_warnings():
            # Warnings that TransformerEngine and Apex are missing do not matter on a CPU.
            warnings.simplefilter("ignore")
            return importlib.import_module("megatron_fsdp")
    except ImportError as error:
        raise StrategyError(
            f"megatron_fsdp needs the package megatron-fsdp, which cannot be imported ({error}). "
            f"Install it: pip install 'megatron-fsdp>=0.6.1,<0.7'."
        ) from None


def import_submodule(name: str) -> Any:
    """Import a private module of the package, named without `megatron_fsdp.`; raises like `import_package`."""
    import_package()
    return importlib.import_module(f"megatron_fsdp.{name}")


def has_nccl_allocator() -> bool:
    """Return whether megatron-fsdp has found an allocator for nccl_ub; without one, nccl_ub fails an assertion."""
    return getattr(import_submodule("param_and_grad_buffer"), "nccl_allocator", None) is not None
