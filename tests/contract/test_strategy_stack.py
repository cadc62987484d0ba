"""Which strategies together shard every axis, and what is said when none do."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from meshwright.base.errors import ConfigError, MeshError, ReplicateSizeError, StrategyError
from meshwright.base.lazy import format_install_command
from meshwright.mesh.sizes import Degrees, MeshSizes
from meshwright.strategy.contract import StrategyConfig, StrategySpec
from meshwright.strategy.hooks import hookimpl
from meshwright.strategy.registry import Registry
from meshwright.strategy.stack import find_strategy_name, resolve


class DataConfig(StrategyConfig):
    level: int = 1


class StagesConfig(StrategyConfig):
    schedule: str = "1f1b"


class BothConfig(StrategyConfig):
    pass


class Manager:
    """Records what it was built from."""

    def __init__(self, name: str, config: BaseModel, mesh: Any, inner: Any = None) -> None:
        self.name, self.config, self.mesh, self.inner = name, config, mesh, inner


def spec(name: str, *axes: str, config_cls: type[BaseModel] = DataConfig, **parts: Any) -> StrategySpec:
    def build(config: BaseModel, mesh: Any, *inner: Any) -> Any:
        return Manager(name, config, mesh, *inner)

    return StrategySpec(name, "For tests.", frozenset(axes), config_cls, build, **parts)


def stages(name: str = "stages", *axes: str) -> StrategySpec:
    return spec(name, *(axes or ("pp",)), config_cls=StagesConfig, is_wrapper=True, aliases=(f"{name}_alias",))


SHARDS = spec("shards", "dp_replicate", "dp_shard", aliases=("sh",))
COPIES = spec("copies", "dp_replicate")


def registry_of(*specs: StrategySpec) -> Registry:
    class Plugin:
        @hookimpl
        def register_strategies(self) -> list[StrategySpec]:
            return list(specs)

    registry = Registry([])
    if specs:
        registry.register(Plugin(), name="test")
    assert registry.failures == []
    return registry


def mesh_of(degrees: Degrees) -> Any:
    return SimpleNamespace(degrees=degrees)


@pytest.mark.parametrize(
    ("strategy", "sizes", "world_size", "text", "degrees"),
    [
        ("shards", {}, 4, "shards", Degrees(dp_shard=4)),
        ("shards", {"dp_replicate_size": 2}, 4, "shards", Degrees(dp_replicate=2, dp_shard=2)),
        ("copies", {}, 4, "copies", Degrees(dp_replicate=4)),
        ("single", {}, 1, "single", Degrees()),
        ("shards", {"pp_size": 2}, 4, "stages over shards", Degrees(pp=2, dp_shard=2)),
        ("stages", {"pp_size": 2}, 2, "stages over single", Degrees(pp=2)),
        ("shards", {"pp_size": 2, "cp_size": 2}, 4, "rings over stages over shards", Degrees(pp=2, cp=2)),
        ("rings", {"pp_size": 2, "cp_size": 2}, 4, "stages over rings over single", Degrees(pp=2, cp=2)),
    ],
)
def test_each_axis_above_one_finds_its_strategy(strategy, sizes, world_size, text, degrees):
    registry = registry_of(SHARDS, COPIES, stages(), stages("rings", "cp"))
    stack, found = resolve(strategy, MeshSizes(**sizes), world_size, registry=registry)
    assert (str(stack), found) == (text, degrees)
    assert set(degrees.active_axes()) <= stack.claimed_axes


def test_two_wrappers_for_one_axis_are_an_error_that_names_both():
    registry = registry_of(SHARDS, stages("one"), stages("two"))
    with pytest.raises(MeshError, match=r"pp=2 .*\(one, two\)"):
        resolve("shards", MeshSizes(pp_size=2), 2, registry=registry)
    assert str(resolve("two", MeshSizes(pp_size=2), 2, registry=registry)[0]) == "two over single"


@pytest.mark.parametrize(
    ("strategy", "sizes", "texts"),
    [
        ("shards", {"tp_size": 2}, "tp=2|shards shards dp_replicate, dp_shard|that shard tp: dense.|Or set tp_size=1."),
        ("shards", {"pp_size": 2}, "pp=2|no wrapping strategy shards pp|No installed strategy shards pp.|pp_size=1."),
        ("copies", {"dp_replicate_size": 1}, "dp_shard=4|copies shards dp_replicate|that shard dp_shard: shards."),
        ("copies", {"dp_replicate_size": 1}, "leave dp_replicate_size out, or set it to dp_size=4."),
        ("single", {}, "dp_shard=4|shards no axis|shard dp_replicate or dp_shard: copies, shards.|Or start one rank"),
        # Whether or not ep_size divides the ranks along axes that the strategy does not shard either.
        ("copies", {"ep_size": 2}, "ep=2|copies does not shard experts: every rank holds all of them."),
    ],
)
def test_an_axis_that_nobody_claims_is_an_error_with_who_could_and_what_to_change(strategy, sizes, texts):
    registry = registry_of(SHARDS, COPIES, spec("dense", "tp"))
    with pytest.raises(MeshError) as caught:
        resolve(strategy, MeshSizes(**sizes), 4, registry=registry)
    for text in [*texts.split("|"), format_install_command("fsdp2"), format_install_command("ddp")]:
        assert text in str(caught.value)


def test_dp_replicate_size_for_a_strategy_that_does_not_take_it_is_an_assertion_error_too():
    for strategy, sizes in (("copies", {}), ("stages", {"pp_size": 2})):
        with pytest.raises(AssertionError) as caught:
            resolve(strategy, MeshSizes(dp_replicate_size=1, **sizes), 4, registry=registry_of(COPIES, stages()))
        assert isinstance(caught.value, ReplicateSizeError)
    with pytest.raises(MeshError) as plain:
        resolve("shards", MeshSizes(dp_replicate_size=3), 4, registry=registry_of(SHARDS))
    assert not isinstance(plain.value, AssertionError)


# -- configs


def test_options_reach_the_named_strategy_and_its_wrapper():
    registry = registry_of(SHARDS, stages())
    stack, _ = resolve(
        "shards",
        MeshSizes(pp_size=2),
        4,
        config={"level": 3},
        wrapper_config={"Stages": {"schedule": "gpipe"}},
        registry=registry,
    )
    assert stack.inner.config == DataConfig(level=3)
    assert stack.wrappers[0].config == StagesConfig(schedule="gpipe")


def test_the_strategy_follows_from_bases_and_subclasses_of_its_config() -> None:
    class Reference(StrategyConfig):
        """A class of the reference, from which a strategy's own config derives."""

    class Own(Reference):
        pass

    class OfUser(DataConfig):
        pass

    # A strategy without options takes the base of all configs.
    bare = spec("bare", config_cls=StrategyConfig)
    registry = registry_of(bare, SHARDS, spec("own", config_cls=Own))
    for config, name in ((Reference(), "own"), (OfUser(), "shards"), (StrategyConfig(), "bare")):
        assert find_strategy_name(config, registry) == name
    further = registry_of(spec("own", config_cls=Own), spec("further", config_cls=Reference))
    assert find_strategy_name(Reference(), further) == "further"
    with pytest.raises(ConfigError, match=r"config is a Own, which does not determine a strategy\. Name the strategy"):
        find_strategy_name(Own(), registry_of(spec("own", config_cls=Own), spec("again", config_cls=Own)))


def test_options_of_a_wrapper_whose_axis_has_one_rank_act_on_nothing_and_say_so():
    registry = registry_of(SHARDS, stages())
    for config in ({"schedule": "gpipe"}, StagesConfig()):
        stack, degrees = resolve("shards", MeshSizes(), 4, wrapper_config={"stages": config}, registry=registry)
        assert str(stack) == "shards"
        with pytest.warns(UserWarning, match=r"StagesConfig has no effect here: pp_size is 1\."):
            stack.build(SimpleNamespace(degrees=degrees, rank=0))
        # The other ranks say nothing.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            stack.build(SimpleNamespace(degrees=degrees, rank=1))


@pytest.mark.parametrize("at", ["inner", "wrapper"])
def test_a_spec_may_refuse_a_config_on_a_mesh(at):
    def check(config, degrees):
        raise StrategyError(f"{type(config).__name__} on {degrees}")

    inner = spec("inner", "dp_shard", check=check if at == "inner" else None)
    wrapper = spec("outer", "pp", config_cls=StagesConfig, is_wrapper=True, check=check if at == "wrapper" else None)
    with pytest.raises(StrategyError, match=r"Config on pp=2 x dp_shard=2"):
        resolve("inner", MeshSizes(pp_size=2), 4, registry=registry_of(inner, wrapper))


@pytest.mark.parametrize(
    ("strategy", "sizes", "options", "texts"),
    [
        ("shards", {}, {"config": StagesConfig()}, ["takes a DataConfig, not a StagesConfig"]),
        ("shards", {}, {"config": {"levle": 2}}, ["strategy_config of 'shards'", "levle: unknown key", "mean 'level'"]),
        ("shards", {}, {"wrapper_config": {"stagse": {}}}, ["'stagse'", "(shards)", "mean 'stages'", "Remove them"]),
        (None, {}, {"config": MeshSizes()}, ["config is a MeshSizes", "DataConfig (shards)", "StagesConfig (stages)"]),
        (
            "shards",
            {"pp_size": 2},
            {"wrapper_config": {"stages": {"schedul": "x"}}},
            ["wrapper_config of 'stages'", "schedul: unknown key", "mean 'schedule'"],
        ),
        (
            "stages",
            {"pp_size": 2},
            {"wrapper_config": {"stages": {"schedule": "x"}}},
            ["'stages'", "is the named strategy", "move them to strategy_config"],
        ),
    ],
)
def test_options_that_fit_no_strategy_of_the_run_are_an_error(strategy, sizes, options, texts):
    registry = registry_of(SHARDS, stages(), spec("both", "dp_shard", "pp", config_cls=BothConfig))
    with pytest.raises(ConfigError) as caught:
        resolve(strategy, MeshSizes(**sizes), 2, registry=registry, **options)
    for text in texts:
        assert text in str(caught.value)


# -- building


def test_build_hands_a_wrapper_the_means_to_make_inner_managers():
    registry = registry_of(SHARDS, stages(), stages("rings", "cp"))
    stack, degrees = resolve("shards", MeshSizes(pp_size=2, cp_size=2), 4, config={"level": 2}, registry=registry)
    mesh = mesh_of(degrees)
    outer: Any = stack.build(mesh)
    assert (outer.name, outer.config, outer.mesh) == ("rings", StagesConfig(), mesh)
    middle = outer.inner(outer.mesh)
    assert middle.name == "stages"
    one, two = middle.inner(middle.mesh), middle.inner(middle.mesh)
    assert one is not two
    assert (one.name, one.config, one.mesh, one.inner) == ("shards", DataConfig(level=2), mesh, None)


def test_build_refuses_a_mesh_with_an_axis_that_the_stack_does_not_claim():
    stack, _ = resolve("copies", MeshSizes(), 4, registry=registry_of(COPIES))
    with pytest.raises(MeshError, match="copies does not shard dp_shard, tp, but the mesh is dp_shard=2 x tp=2"):
        stack.build(mesh_of(Degrees(dp_shard=2, tp=2)))
