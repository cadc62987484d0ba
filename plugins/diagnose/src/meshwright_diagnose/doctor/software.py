"""Versions against the ranges that the packages declare, plugins, and settings of the environment."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from meshwright.plugin import Registry, usable_cores

from .finding import Finding

OURS = "meshwright"
_VERSIONS, _PLUGINS, _SETTINGS = "versions", "plugins", "settings"
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def version_findings() -> Iterator[Finding]:
    """Check Python and the requirements of each of our distributions."""
    ours = {found.name: found for found in distributions() if found.name and found.name.split("-")[0] == OURS}
    yield from _python(ours)
    for name, found in sorted(ours.items()):
        yield Finding(_VERSIONS, name, "ok", found.version)
    # A package that is needed in several ranges is checked for each.
    for needed, extra in dict.fromkeys(each for found in ours.values() for each in _needs(found)):
        yield from _needed(Requirement(needed), extra)


def _python(ours: Mapping[str, Distribution]) -> Iterator[Finding]:
    own = platform.python_version()
    for name, found in ours.items():
        (wanted, *_) = found.metadata.get_all("Requires-Python") or [""]
        if not SpecifierSet(wanted).contains(own, prereleases=True):
            yield Finding(_VERSIONS, "python", "wrong", f"{own}, but {name} needs {wanted}", f"Use Python {wanted}.")
            return
    yield Finding(_VERSIONS, "python", "ok", own)


def _needs(found: Distribution) -> Iterator[tuple[str, bool]]:
    """Requirements that apply here, and whether each is of an extra."""
    for text in found.requires or ():
        needed = Requirement(text)
        if needed.name.split("-")[0] == OURS:
            continue
        extras = [extra for extra in found.metadata.get_all("Provides-Extra") or () if extra != "dev"]
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            yield f"{needed.name}{needed.specifier}", False
        elif any(needed.marker.evaluate({"extra": extra}) for extra in extras):
            yield f"{needed.name}{needed.specifier}", True


def _needed(needed: Requirement, of_extra: bool) -> Iterator[Finding]:
    try:
        own = version(needed.name)
    except PackageNotFoundError:
        if not of_extra:
            yield Finding(
                _VERSIONS, needed.name, "wrong", "not installed", f"pip install '{needed.name}{needed.specifier}'"
            )
        return
    wanted = f" ({needed.specifier})" if needed.specifier else ""
    if needed.specifier.contains(own, prereleases=True):
        yield Finding(_VERSIONS, needed.name, "ok", f"{own}{wanted}")
    else:
        yield Finding(
            _VERSIONS,
            needed.name,
            "warning" if of_extra else "wrong",
            f"{own}, which is outside of {needed.specifier}",
            f"pip install '{needed.name}{needed.specifier}'",
        )


def plugin_findings(registry: Registry) -> Iterator[Finding]:
    """List the strategies, and what is broken."""
    yield Finding(_PLUGINS, "strategies", "ok", ", ".join(registry.strategies))
    for failure in registry.failures:
        name = failure.strategy or failure.plugin
        yield Finding(
            _PLUGINS, name, "wrong", str(failure), f"Install it again, or remove the package that brings {name}."
        )


def setting_findings(environment: Mapping[str, str], ranks: int) -> Iterator[Finding]:
    """Check variables that change how ranks run; `ranks` is how many this machine would start."""
    yield _threads(environment, ranks)
    offline = [f"{name}={environment[name]}" for name in _OFFLINE if environment.get(name)]
    cache = Path(environment.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    said = f"{', '.join(offline)}: only what is in {cache}" if offline else f"a hub id is downloaded to {cache}"
    parent = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    if os.access(parent, os.W_OK):
        yield Finding(_SETTINGS, "hub", "ok", said)
    else:
        mend = "Set HF_HOME to a directory that can be written, or give models as local directories."
        yield Finding(_SETTINGS, "hub", "warning", f"{said}, which cannot be written", mend)


def _threads(environment: Mapping[str, str], ranks: int) -> Finding:
    name, cores = "OMP_NUM_THREADS", usable_cores()
    value = environment.get(name)
    if value is None:
        return Finding(_SETTINGS, name, "ok", f"not set: each rank takes its share of {cores} cores")
    if not value.isdecimal() or not int(value):
        mend = f"Unset {name}, or set it to a number of threads."
        return Finding(_SETTINGS, name, "wrong", f"{value!r} is no number of threads", mend)
    if int(value) * ranks > cores > 1 and int(value) > 1:
        mend = f"Unset {name}, or set threads_per_rank in the run file."
        said = f"{value} threads of {ranks} ranks are more than {cores} cores, and wait for each other"
        return Finding(_SETTINGS, name, "warning", said, mend)
    return Finding(_SETTINGS, name, "ok", value)
