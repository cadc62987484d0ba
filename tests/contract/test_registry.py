"""Plugins: the broken ones are kept aside and reported, the others work; lookup by name and alias."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
from contextlib import redirect_stdout
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import typer
from support.tiers import mark_mostly_slow
from typer.testing import CliRunner

from meshwright.base.errors import StrategyError, UnknownStrategyError
from meshwright.base.lazy import format_install_command
from meshwright.cli import main as cli
from meshwright.cli.main import add_commands
from meshwright.strategy.hooks import hookimpl
from meshwright.strategy.registry import ENTRY_POINT_GROUP, Registry, find_installable_extras

EXAMPLE = Path(__file__).parents[2] / "examples" / "stdlib.yaml"

GOOD = """
from meshwright.strategy.contract import StrategyConfig, StrategySpec
from meshwright.strategy.hooks import hookimpl

class Config(StrategyConfig):
    pass

def spec(name, **changes):
    parts = dict(name=name, summary="S.", axes=frozenset({"tp"}), config_cls=Config, build=print)
    return StrategySpec(**{**parts, **changes})
"""


def hooked(body: str, hook: str = "register_strategies()") -> str:
    """The source of a plugin whose hook does this."""
    return f"{GOOD}\n@hookimpl\ndef {hook}:\n    {body}\n"


def bringing(*specs: str) -> str:
    """The source of a plugin that brings these specs."""
    return hooked(f"return [{', '.join(specs)}]")


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Write a plugin module and return its entry point."""
    monkeypatch.syspath_prepend(tmp_path)
    counter = itertools.count()

    def write(name: str, source: str) -> EntryPoint:
        module = f"plugin_{tmp_path.name}_{next(counter)}".replace("-", "_")
        (tmp_path / f"{module}.py").write_text(source, encoding="utf-8")
        monkeypatch.delitem(sys.modules, module, raising=False)
        return EntryPoint(name, module, ENTRY_POINT_GROUP)

    return write


def listing(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> str:
    """What `meshwright strategies` prints."""
    monkeypatch.setattr("meshwright.cli.main.get_registry", lambda: registry)
    with redirect_stdout(io.StringIO()) as printed:
        cli.strategies()
    return printed.getvalue()


BROKEN_PLUGINS = {
    "import error": (
        "import no_such_module_anywhere",
        "ModuleNotFoundError: No module named 'no_such_module_anywhere'",
    ),
    "exit at import": ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
    "misspelt hook": (hooked("return []", "register_strategy()"), "unknown hook 'register_strategy'"),
    "wrong argument": (hooked("pass", "on_step_end(outcome)"), "{'outcome'}"),
    "no hook": ("x = 1", "it implements no hook of meshwright"),
    "forgotten mark": ("def register_strategies():\n    return []\n", "mark its functions with meshwright.hookimpl"),
    "returns None": (hooked("pass"), "it returned None, not a list of meshwright.StrategySpec"),
    "returns other things": (bringing("dict(name='broken')"), "is a dict, not a meshwright.StrategySpec"),
    "raises halfway": (
        hooked("yield spec('half')\n    raise OSError('gone')"),
        "register_strategies failed: OSError: gone",
    ),
    "unknown axis": (
        bringing("spec('broken', axes={'tpp'})"),
        "axes {'tpp'} are not a set of names out of pp, dp_replicate",
    ),
    "axes a string": (bringing("spec('broken', axes='tp')"), "axes 'tp' are not a set"),
    "config no model": (bringing("spec('broken', config_cls=dict)"), "is not a pydantic model class"),
    "build not callable": (bringing("spec('broken', build='module:build')"), "build 'module:build' is not callable"),
    "aliases a string": (bringing("spec('broken', aliases='b')"), "aliases 'b' are not a tuple of strings"),
    "name in capitals": (bringing("spec('Broken')"), "name 'Broken' is not a lower-case identifier"),
    "two defects": (bringing("spec('broken', summary='', build=None)"), "summary is missing; build None"),
}


@pytest.mark.parametrize(("source", "reason"), BROKEN_PLUGINS.values(), ids=BROKEN_PLUGINS)
def test_a_broken_plugin_is_reported_at_its_name_and_in_the_list_and_the_others_work(
    source, reason, plugin, monkeypatch
):
    registry = Registry([plugin("broken", source), plugin("good", bringing("spec('good', aliases=('fine',))"))])
    assert registry.get("good").name == registry.get("fine").name == "good"
    assert list(registry.strategies) == ["good", "single"]
    assert len(registry.failures) == 1
    assert reason in registry.failures[0].reason
    assert registry.failures[0].plugin.startswith("broken (")
    with pytest.raises(StrategyError) as caught:
        registry.get("broken")
    assert "'broken' cannot be used" in str(caught.value)
    assert reason in str(caught.value)
    assert "Installed: good, single." in str(caught.value)
    assert reason in listing(registry, monkeypatch)


@pytest.mark.parametrize("count", [2, 3])
def test_one_name_from_several_plugins_is_refused_for_all_of_them(count, plugin, monkeypatch):
    plugins = [plugin(f"p{index}", bringing("spec('same', aliases=('twin',))")) for index in range(count)]
    registry = Registry([*plugins, plugin("good", bringing("spec('good')"))])
    assert list(registry.strategies) == ["good", "single"]
    with pytest.raises(StrategyError) as caught:
        registry.get("same")
    printed = listing(registry, monkeypatch)
    for entry_point in plugins:
        owner = f"{entry_point.name} ({entry_point.value})"
        assert f"same of plugin {owner}: also registered by plugin" in str(caught.value)
        assert owner in printed
    with pytest.raises(UnknownStrategyError):
        registry.get("twin")


def test_the_names_of_core_cannot_be_taken(plugin, monkeypatch):
    registry = Registry([plugin("thief", bringing("spec('single')", "spec('other', aliases=('single',))"))])
    assert registry.get_owner("single") == "core"
    assert registry.get("single").axes == frozenset()
    assert "the name 'single' belongs to core" in listing(registry, monkeypatch)
    assert "its alias 'single' is the name of another strategy" in str(registry.failures[-1])


@pytest.mark.parametrize("first", ["one", "two"])
def test_an_alias_of_two_strategies_stands_for_neither_whatever_the_order(first, plugin, monkeypatch):
    # Entry points are loaded in the order of their names.
    names = {"one": "a", "two": "b"} if first == "one" else {"one": "b", "two": "a"}
    registry = Registry(
        [plugin(entry, bringing(f"spec({n!r}, aliases=('both', {n + '_x'!r}))")) for n, entry in names.items()]
    )
    with pytest.raises(StrategyError, match="'both' is an alias of one and of two"):
        registry.get("both")
    assert registry.get("one_x").name == registry.get("one").name == "one"
    assert registry.get("two_x").name == registry.get("two").name == "two"
    assert "its alias 'both' is claimed by two too" in listing(registry, monkeypatch)
    assert [failure.strategy for failure in registry.failures] == ["one", "two"]


@pytest.mark.parametrize("entry", ["a", "z"])
def test_a_name_wins_over_the_alias_of_another_strategy_whatever_the_order_also_if_it_is_broken(entry, plugin):
    other = plugin(entry, bringing("spec('other', aliases=('named',))"))
    registry = Registry([other, plugin("m", bringing("spec('named')"))])
    assert registry.get("named").name == "named"
    (failure,) = registry.failures
    assert str(failure).endswith(": its alias 'named' is the name of another strategy")
    with pytest.raises(StrategyError, match="no_such_module_anywhere"):
        Registry([plugin("named", "import no_such_module_anywhere"), other]).get("named")


def test_one_module_under_two_entry_points_is_used_once_and_reported_and_one_found_twice_is_loaded_once(plugin):
    one = plugin("one", bringing("spec('good')"))
    registry = Registry([one, EntryPoint("two", one.value, one.group)])
    assert registry.get("good").name == "good"
    assert "it is the same module as plugin one" in str(registry.failures[0])
    assert Registry([one, EntryPoint(one.name, one.value, one.group)]).failures == []


# -- lookup


def test_names_and_aliases_are_found_in_any_case_and_with_hyphens(plugin):
    registry = Registry([plugin("p", bringing("spec('my_strategy', aliases=('Short', 'two-words'))"))])
    for name in ("my_strategy", " My-Strategy ", "SHORT", "Two_Words"):
        assert registry.get(name).name == "my_strategy"
    assert registry.failures == []


def test_an_unknown_name_offers_the_nearest_one_or_lists_what_is_installed_installable_and_broken(plugin):
    with pytest.raises(UnknownStrategyError, match=r"'fsdp3' is not installed\. Did you mean 'fsdp2'"):
        Registry([]).get("fsdp3")
    registry = Registry([plugin("broken", "1 / 0")])
    with pytest.raises(UnknownStrategyError) as caught:
        registry.get("zzz")
    text = str(caught.value)
    assert "Did you mean" not in text
    assert "Installed: single." in text
    assert "Installable: ddp, fsdp2, megatron_fsdp, pipeline." in text
    assert "Failed to load: broken of plugin broken (" in text


def test_a_strategy_of_this_project_that_is_missing_answers_with_its_install_line(monkeypatch):
    registry, printed = Registry([]), listing(Registry([]), monkeypatch)
    for name in find_installable_extras():
        line = format_install_command(find_installable_extras()[name])
        assert line.startswith("pip install ")
        with pytest.raises(UnknownStrategyError) as caught:
            registry.get(name.upper())
        assert line in str(caught.value)
        assert f"{name}: {line}" in printed


def test_the_installed_plugins_of_this_project_are_found():
    registry = Registry()
    assert registry.failures == []
    assert {"ddp", "fsdp2", "single"} <= set(registry.strategies)
    assert registry.get("fsdp").name == "fsdp2"


# -- the list


# -- other hooks


COMMAND = """
from meshwright.strategy.hooks import hookimpl

@hookimpl
def register_commands(app):
    @app.command()
    def hello():
        print("hello from a plugin")
"""


@pytest.mark.parametrize("ending", ["raise KeyError('no')", "raise SystemExit(1)"])
def test_a_plugin_adds_a_command_and_one_that_fails_is_reported(ending, plugin):
    failing = (
        f"from meshwright.strategy.hooks import hookimpl\n\n@hookimpl\ndef register_commands(app):\n    {ending}\n"
    )
    registry = Registry([plugin("failing", failing), plugin("hello", COMMAND)])
    app = typer.Typer()
    app.command()(lambda: None)
    add_commands(app, registry)
    assert CliRunner().invoke(app, ["hello"]).stdout == "hello from a plugin\n"
    assert "register_commands raised" in str(registry.failures[0])
    assert registry.failures[0].plugin.startswith("failing (")


def test_a_command_that_exists_cannot_be_replaced(plugin):
    rival = COMMAND.replace("hello()", "train()")
    registry = Registry([plugin("rival", rival), plugin("twin", COMMAND), plugin("hello", COMMAND)])
    app = typer.Typer()
    app.command("train")(lambda: print("core trains"))  # noqa: T201
    app.command("other")(lambda: None)
    add_commands(app, registry)
    assert CliRunner().invoke(app, ["train"]).stdout == "core trains\n"
    assert CliRunner().invoke(app, ["hello"]).stdout == "hello from a plugin\n"
    reasons = [failure.reason for failure in registry.failures]
    assert reasons == ["its commands exist already: train", "its commands exist already: hello"]


class Observer:
    def __init__(self) -> None:
        self.seen: list[object] = []

    @hookimpl
    def on_step_end(self, result: object) -> None:
        self.seen.append(result)


class MisspeltObserver:
    @hookimpl
    def on_step_ended(self, result: object) -> None: ...


def test_an_observer_sees_steps_inside_the_with_block_only():
    registry, observer = Registry([]), Observer()
    registry.hook.on_step_end(result=1)
    with registry.observing(observer):
        registry.hook.on_step_end(result=2)
        with pytest.raises(StrategyError, match="registered already"), registry.observing(observer):
            pass
        registry.hook.on_step_end(result=3)
    registry.hook.on_step_end(result=4)
    assert observer.seen == [2, 3]
    with pytest.raises(RuntimeError), registry.observing(observer):
        raise RuntimeError
    # A misspelt one is refused, and none of its companions stays.
    with pytest.raises(StrategyError, match="unknown hook 'on_step_ended'"):
        with registry.observing(observer, MisspeltObserver()):
            pass
    registry.hook.on_step_end(result=4)
    assert observer.seen == [2, 3]


# -- no torch


@pytest.mark.parametrize(
    "code",
    mark_mostly_slow(
        [
            "meshwright.list_strategies()",
            "[s.config_cls() for s in meshwright.list_strategies().values()]; meshwright.get_strategy('fsdp2')",
            "from meshwright_run.run_file import load_run; load_run(sys.argv[1])",
            "from meshwright_run.run_schema import run_schema; run_schema()",
            "from meshwright.strategy.stack import resolve; resolve('fsdp2', meshwright.MeshSizes(), 4)",
        ]
    ),
)
def test_listing_validating_and_resolving_import_neither_torch_nor_transformers(code):
    check = f"import sys, meshwright; {code}; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", check, str(EXAMPLE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
