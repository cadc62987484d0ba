"""Plugins: the broken ones are kept aside and told, the others work; lookup by name and alias."""

from __future__ import annotations

import itertools
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import typer
from support.tiers import mostly_slow
from typer.testing import CliRunner

from meshwright.base.errors import StrategyError, UnknownStrategyError
from meshwright.base.lazy import install_line
from meshwright.cli import main as cli
from meshwright.cli.main import add_commands
from meshwright.strategy.contract import StrategySpec
from meshwright.strategy.hooks import hookimpl
from meshwright.strategy.registry import ENTRY_POINT_GROUP, Registry, installable

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
    monkeypatch.setattr("meshwright.cli.listing.get_registry", lambda: registry)
    result = CliRunner().invoke(cli.app, ["strategies"])
    assert result.exit_code == 0
    return result.stdout


BROKEN_PLUGINS = {
    "import error": (
        "import no_such_module_anywhere",
        "ModuleNotFoundError: No module named 'no_such_module_anywhere'",
    ),
    "syntax error": ("def broken(:\n", "SyntaxError: "),
    "error at import": ("1 / 0", "ZeroDivisionError: division by zero"),
    "exit at import": ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
    "misspelt hook": (hooked("return []", "register_strategy()"), "unknown hook 'register_strategy'"),
    "wrong argument": (hooked("pass", "on_step_end(outcome)"), "{'outcome'}"),
    "no hook": ("x = 1", "it implements no hook of meshwright"),
    "forgotten mark": ("def register_strategies():\n    return []\n", "mark its functions with meshwright.hookimpl"),
    "raises": (hooked("raise RuntimeError('no network')"), "register_strategies failed: RuntimeError: no network"),
    "exits": (hooked("raise SystemExit(3)"), "register_strategies failed: SystemExit: 3"),
    "returns None": (hooked("pass"), "it returned None, not a list of meshwright.StrategySpec"),
    "returns a spec": (hooked("return spec('broken')"), "it returned StrategySpec(name='broken'"),
    "returns a string": (hooked("return 'broken'"), "it returned 'broken', not a list"),
    "returns other things": (bringing("dict(name='broken')"), "is a dict, not a meshwright.StrategySpec"),
    "raises halfway": (
        hooked("yield spec('half')\n    raise OSError('gone')"),
        "register_strategies failed: OSError: gone",
    ),
    "no summary": (bringing("spec('broken', summary='')"), "summary is missing"),
    "unknown axis": (bringing("spec('broken', axes={'tpp'})"), "axes {'tpp'} are not a set out of pp, dp_replicate"),
    "axes a string": (bringing("spec('broken', axes='tp')"), "axes 'tp' are not a set"),
    "axes missing": (bringing("spec('broken', axes=None)"), "axes None are not a set"),
    "config no model": (bringing("spec('broken', config_cls=dict)"), "is not a pydantic model class"),
    "build not callable": (bringing("spec('broken', build='module:build')"), "build 'module:build' is not callable"),
    "aliases a string": (bringing("spec('broken', aliases='b')"), "aliases 'b' are not a tuple of strings"),
    "aliases missing": (bringing("spec('broken', aliases=None)"), "aliases None are not a tuple"),
    "alias empty": (bringing("spec('broken', aliases=('',))"), "aliases ('',) are not a tuple of strings"),
    "name in capitals": (bringing("spec('Broken')"), "name 'Broken' is not a lower-case identifier"),
    "name no identifier": (bringing("spec(None)"), "name None is not a lower-case identifier"),
    "two defects": (bringing("spec('broken', summary='', build=None)"), "summary is missing; build None"),
}


@pytest.mark.parametrize(("source", "reason"), BROKEN_PLUGINS.values(), ids=BROKEN_PLUGINS)
def test_a_broken_plugin_is_told_at_its_name_and_in_the_list_and_the_others_work(source, reason, plugin, monkeypatch):
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


def test_a_good_strategy_of_a_plugin_works_beside_its_broken_one(plugin):
    registry = Registry([plugin("two", bringing("spec('broken', build=None)", "spec('good')"))])
    assert registry.get("good").name == "good"
    assert [failure.strategy for failure in registry.failures] == ["broken"]


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
    assert registry.owner("single") == "core"
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
def test_a_name_wins_over_the_alias_of_another_strategy_whatever_the_order(entry, plugin):
    registry = Registry(
        [plugin(entry, bringing("spec('other', aliases=('named',))")), plugin("m", bringing("spec('named')"))]
    )
    assert registry.get("named").name == "named"
    assert [str(failure).split(": ")[-1] for failure in registry.failures] == [
        "its alias 'named' is the name of another strategy"
    ]


def test_the_name_of_a_broken_strategy_does_not_fall_through_to_an_alias_of_that_name(plugin):
    registry = Registry(
        [plugin("named", "import no_such_module_anywhere"), plugin("z", bringing("spec('other', aliases=('named',))"))]
    )
    with pytest.raises(StrategyError, match="no_such_module_anywhere"):
        registry.get("named")


def test_one_module_under_two_entry_points_is_used_once_and_told_and_one_found_twice_is_loaded_once(plugin):
    one = plugin("one", bringing("spec('good')"))
    registry = Registry([one, EntryPoint("two", one.value, one.group)])
    assert registry.get("good").name == "good"
    assert "it is the same module as plugin one" in str(registry.failures[0])
    assert Registry([one, EntryPoint(one.name, one.value, one.group)]).failures == []


# -- lookup


@pytest.mark.parametrize(
    "name", ["my_strategy", "MY_STRATEGY", "my-strategy", " My-Strategy ", "short", "SHORT", "two-words", "Two_Words"]
)
def test_names_and_aliases_are_found_in_any_case_and_with_hyphens(name, plugin):
    registry = Registry([plugin("p", bringing("spec('my_strategy', aliases=('Short', 'two-words'))"))])
    assert registry.get(name).name == "my_strategy"
    assert registry.failures == []


@pytest.mark.parametrize(("name", "near"), [("fsdp3", "fsdp2"), ("singel", "single"), ("dpp", "ddp")])
def test_an_unknown_name_offers_the_nearest_one(name, near):
    with pytest.raises(UnknownStrategyError, match=f"'{name}' is not installed. Did you mean '{near}'"):
        Registry([]).get(name)


@pytest.mark.parametrize(("name", "near"), [("mesher", "meshed"), ("completely_meshd", "completely_meshed")])
def test_a_near_name_is_offered_before_a_near_alias(name, near, plugin):
    registry = Registry([plugin("p", bringing("spec('meshed', aliases=('meshe', 'completely_meshed'))"))])
    with pytest.raises(UnknownStrategyError, match=f"Did you mean '{near}'"):
        registry.get(name)


def test_an_unknown_name_lists_what_is_installed_installable_and_broken(plugin):
    registry = Registry([plugin("broken", "1 / 0")])
    with pytest.raises(UnknownStrategyError) as caught:
        registry.get("zzz")
    text = str(caught.value)
    assert "Did you mean" not in text
    assert "Installed: single." in text
    assert "Installable: ddp, fsdp2, megatron_fsdp, pipeline." in text
    assert "Failed to load: broken of plugin broken (" in text


@pytest.mark.parametrize("name", list(installable()))
def test_a_strategy_of_this_project_that_is_missing_answers_with_its_install_line(name, monkeypatch):
    registry = Registry([])
    line = install_line(installable()[name])
    assert line.startswith("pip install ")
    with pytest.raises(UnknownStrategyError) as caught:
        registry.get(name.upper())
    assert line in str(caught.value)
    assert f"{name}: {line}" in listing(registry, monkeypatch)


def test_a_broken_strategy_is_not_offered_for_installation(plugin):
    assert list(Registry([plugin("fsdp2", "1 / 0")]).installable) == [name for name in installable() if name != "fsdp2"]


def test_the_installed_plugins_of_this_project_are_found():
    registry = Registry()
    assert registry.failures == []
    assert {"ddp", "fsdp2", "single"} <= set(registry.strategies)
    assert registry.get("fsdp").name == "fsdp2"


# -- the list


def test_the_list_fits_80_columns_and_cuts_nothing_off(plugin, monkeypatch):
    summary = (
        "A summary that is much longer than one line of a terminal can hold, so that it must be wrapped somewhere."
    )
    source = bringing(f"spec('wordy', summary={summary!r}, aliases=('other_name',), wraps=True, axes={{'tp', 'pp'}})")
    printed = listing(Registry([plugin("p", source)]), monkeypatch)
    block = next(block for block in printed.split("\n\n") if block.startswith("wordy"))
    assert max(map(len, block.splitlines())) <= 80
    assert summary in " ".join(block.split())
    for text in ("aliases: other_name", "shards: pp, tp", "wraps: another strategy", "plugin: p ("):
        assert text in block
    assert "…" not in printed


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
def test_a_plugin_adds_a_command_and_one_that_fails_is_told(ending, plugin):
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
    registry.hook.on_step_end(result=4)
    assert observer.seen == [2, 3]


class MisspeltObserver:
    @hookimpl
    def on_step_ended(self, result: object) -> None: ...


def test_a_misspelt_observer_is_refused_and_none_of_its_companions_stays():
    registry, observer = Registry([]), Observer()
    with pytest.raises(StrategyError, match="unknown hook 'on_step_ended'"):
        with registry.observing(observer, MisspeltObserver()):
            pass
    registry.hook.on_step_end(result=1)
    assert observer.seen == []


def test_plugins_brought_as_objects_are_told_by_their_name():
    class Plugin:
        @hookimpl
        def register_strategies(self) -> list[StrategySpec]:
            raise ValueError("not today")

    registry = Registry([], builtins={})
    registry.register(Plugin(), name="mine")
    assert [str(failure) for failure in registry.failures] == [
        "plugin mine: register_strategies failed: ValueError: not today"
    ]
    registry.register(Plugin(), name="mine")
    assert registry.failures[-1].reason == "a plugin of this name is registered already"


# -- no torch


@pytest.mark.parametrize(
    "code",
    mostly_slow(
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
