"""The trackers that a run file names: found among plugins, checked before the ranks start, called on the first rank.

A tracker that fails while the run trains is reported in a warning and not called again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

from meshwright.plugin import (
    ConfigError,
    FrozenModel,
    Registry,
    RunInfo,
    TrackerSpec,
    get_registry,
    hookimpl,
    nearest,
    validated,
    warn,
)

from .secrets import resolved

Asked: TypeAlias = "str | Mapping[str, Any]"
"""A tracker in the run file: its name, or a mapping of name and options."""
INSTALL = "pip install -e plugins/trackers"


def list_trackers(registry: Registry | None = None) -> dict[str, TrackerSpec]:
    """Return the trackers of the installed plugins by name, sorted."""
    found: dict[str, TrackerSpec] = {}
    for plugin, register in (registry or get_registry()).implementations("register_trackers"):
        for spec in (spec for specs in register() for spec in specs):
            if not isinstance(spec, TrackerSpec):
                raise ConfigError(f"plugin {plugin} brings {spec!r}, which is no meshwright.TrackerSpec.")
            if spec.name in found:
                raise ConfigError(f"two plugins bring a tracker {spec.name!r}; one is {plugin}. Uninstall one.")
            found[spec.name] = spec
    return dict(sorted(found.items()))


def chosen(asked: Sequence[Asked], registry: Registry | None = None) -> list[tuple[TrackerSpec, FrozenModel]]:
    """Return the trackers that are asked for, with their options."""
    known = list_trackers(registry) if asked else {}
    found = []
    for each in asked:
        options = {"name": each} if isinstance(each, str) else dict(each)
        name = options.pop("name", None)
        if not isinstance(name, str) or name not in known:
            hint = nearest(str(name), known)
            raise ConfigError(
                f"trackers: there is no tracker {name!r}.{hint} Installed: {', '.join(known) or 'none'}. Those of the "
                f"project are installed from a clone with: {INSTALL}"
            )
        spec = known[name]
        options = resolved(options, f"trackers: {name}")
        config = validated(spec.config_cls, options, where=f"trackers: {name}")
        spec.check(config)
        found.append((spec, config))
    return found


@contextmanager
def tracking(trackers: Sequence[tuple[TrackerSpec, FrozenModel]], run: RunInfo) -> Iterator[None]:
    """Have trackers observe a run, on this rank."""
    with ExitStack() as held:
        for spec, config in trackers:
            try:
                built = spec.build(config, run)
            except ConfigError:
                raise
            except Exception as error:
                # Whatever a library raises that cannot reach its server, or write its files.
                raise ConfigError(
                    f"tracker {spec.name!r} cannot be started: {type(error).__name__}: {error}. Mend that, or leave it "
                    f"out of trackers."
                ) from error
            tracker = _Tolerated(spec.name, built)
            held.callback(tracker.close)
            held.enter_context(get_registry().observing(tracker))
        yield


class _Tolerated:
    """A tracker whose failures end no run."""

    def __init__(self, name: str, tracker: Any) -> None:
        self._name, self._tracker, self._has_failed = name, tracker, False

    def _call(self, hook: str, *values: Any) -> None:
        try:
            if not self._has_failed and hasattr(self._tracker, hook):
                getattr(self._tracker, hook)(*values)
        except Exception as error:
            self._has_failed = True
            warn(
                f"tracker {self._name!r} has failed in {hook} and is left aside: {type(error).__name__}: {error}. "
                f"Training goes on; metrics.jsonl has everything.",
                stacklevel=2,
            )

    def close(self) -> None:
        self._has_failed = False
        self._call("close")

    @hookimpl
    def on_run_start(self, run: Any, mesh: Any) -> None:
        self._call("on_run_start", run, mesh)

    @hookimpl
    def on_evaluation(self, evaluation: Any) -> None:
        self._call("on_evaluation", evaluation)

    @hookimpl
    def on_step_end(self, result: Any) -> None:
        self._call("on_step_end", result)

    @hookimpl
    def on_checkpoint(self, checkpoint: Any) -> None:
        self._call("on_checkpoint", checkpoint)

    @hookimpl
    def on_fault(self, fault: Any) -> None:
        self._call("on_fault", fault)

    @hookimpl
    def on_run_end(self, summary: Any) -> None:
        self._call("on_run_end", summary)
