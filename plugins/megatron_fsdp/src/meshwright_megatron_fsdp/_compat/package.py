"""The package megatron-fsdp itself: which version is installed, and its modules.

Its internals change between minor versions, so others than those that were tried are refused. What is done with its
modules is the affair of the other files here.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import warnings
from typing import Any

from meshwright.base.errors import StrategyError

TESTED = ((0, 6, 1), (0, 7))
"""The first version that works and the first that is not known to."""


def check_version(version: str) -> None:
    """Refuse versions of megatron-fsdp that are not known to work.

    Args:
        version: as in the package's metadata, "0.6.1" or "0.6.1+local", say.

    Raises:
        StrategyError: below the first of `TESTED`, or from the second on.
    """
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    if not TESTED[0] <= numbers < TESTED[1]:
        raise StrategyError(
            f"megatron-fsdp {version} is installed, but megatron_fsdp relies on internals that were tried with 0.6.1 "
            f"up to, not including, 0.7. Install one of these: pip install 'megatron-fsdp>=0.6.1,<0.7'."
        )


@functools.cache
def package() -> Any:
    """The module `megatron_fsdp`.

    Raises:
        StrategyError: it is not installed, or in a version that is not known to work.
    """
    try:
        check_version(importlib.metadata.version("megatron-fsdp"))
        with warnings.catch_warnings():
            # That TransformerEngine and Apex are missing is no news on a CPU.
            warnings.simplefilter("ignore")
            return importlib.import_module("megatron_fsdp")
    except ImportError as error:
        raise StrategyError(
            f"megatron_fsdp needs the package megatron-fsdp, which cannot be imported ({error}). "
            f"Install it: pip install 'megatron-fsdp>=0.6.1,<0.7'."
        ) from None


def submodule(name: str) -> Any:
    """A module inside the package; none of them is public.

    Args:
        name: there, without `megatron_fsdp.`.

    Raises:
        StrategyError: as `package`.
    """
    package()
    return importlib.import_module(f"megatron_fsdp.{name}")


def has_nccl_allocator() -> bool:
    """Whether megatron-fsdp has found an allocator for nccl_ub; it fails by an assertion without one."""
    return getattr(submodule("param_and_grad_buffer"), "nccl_allocator", None) is not None
