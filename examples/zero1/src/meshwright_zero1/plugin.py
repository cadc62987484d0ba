"""The entry point of the distribution. No torch in this module, so that listing strategies stays fast."""

from meshwright import StrategyConfig, StrategySpec, hookimpl


class Zero1Config(StrategyConfig):
    """Options of `zero1`: `reduce_dtype`, which comes with the base class."""


def build(config, mesh):
    from .manager import Zero1Manager

    return Zero1Manager(config, mesh)


@hookimpl
def register_strategies():
    summary = "Whole copies of the model, optimizer state in 1/N (ZeRO-1)."
    return [StrategySpec("zero1", summary, frozenset({"dp_replicate"}), Zero1Config, build)]
