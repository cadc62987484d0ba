"""Whole parameters, one after the other: the same names in the same order and the same bits under every strategy."""

from __future__ import annotations

import functools
import hashlib
import re
import subprocess
import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from support.measurements import measure_memory
from support.tiers import mark_mostly_slow
from torch import Tensor

from meshwright import ConfigError, StrategyError
from meshwright.strategy.contract import StrategyManager
from meshwright.testing import Case
from meshwright_testing import pool
from meshwright_testing.models import build_case_model
from meshwright_testing.parity import build_manager, full_weights, train_steps

BUCKET, ALL_AT_ONCE = 30_000, 1 << 40
"""Smaller than an embedding, larger than most others of the cases; and larger than all together."""

DTYPES = (torch.bfloat16, torch.float32)

PLAIN = Case(steps=2, sequences=12)
TIED = replace(PLAIN, tied=True, frozen=("*layers.1.*",))
STAGES = replace(TIED, layers=5)
EXPERTS = replace(PLAIN, model_type="mixtral", tied=None, layers=2)
MIXED = replace(PLAIN, float32_parameters=("*norm*",))
HALF = replace(PLAIN, dtype="bfloat16")
ZERO1 = {"engine": "bucketed", "use_distributed_optimizer": True}


@dataclass(frozen=True)
class Layout:
    """A strategy on some ranks.

    Attributes:
        trains_others: what is trained are float32 values beside those that the model computes with.
    """

    strategy: str
    ranks: int
    sizes: dict[str, int] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    case: Case = PLAIN
    schedule: str | None = None
    trains_others: bool = False


LAYOUTS = {
    "single": Layout("single", 1),
    "ddp, distributed optimizer": Layout("ddp", 2, config=ZERO1),
    "ddp, distributed optimizer, gathers to come": Layout(
        "ddp", 2, config={**ZERO1, "overlap_grad_reduce": True, "overlap_param_gather": True}
    ),
    "ddp, distributed optimizer, bfloat16": Layout("ddp", 2, config=ZERO1, case=HALF, trains_others=True),
    "fsdp2": Layout("fsdp2", 3, case=TIED),
    "fsdp2, mixed dtypes": Layout("fsdp2", 2, case=MIXED),
    "fsdp2, ep": Layout("fsdp2", 2, {"ep_size": 2}, case=EXPERTS),
    "fsdp2, tp": Layout("fsdp2", 4, {"tp_size": 2}, case=TIED),
    "megatron_fsdp": Layout("megatron_fsdp", 2, case=TIED),
    "megatron_fsdp, main weights": Layout(
        *("megatron_fsdp", 2, {}, {"zero_dp_strategy": 1, "main_params_dtype": "float32"}, HALF), trains_others=True
    ),
    "pipeline, ddp": Layout("ddp", 2, {"pp_size": 2}, case=TIED),
    "pipeline, fsdp2, interleaved": Layout("fsdp2", 4, {"pp_size": 2}, case=STAGES, schedule="interleaved1f1b"),
    "pipeline, fsdp2, tp": Layout("fsdp2", 4, {"pp_size": 2, "tp_size": 2}),
}


def _manager(layout: Layout) -> StrategyManager:
    wrapper = {"pipeline": {"pp_schedule": layout.schedule}} if layout.schedule else None
    return build_manager(layout.strategy, layout.config, layout.sizes, layout.case, wrapper_config=wrapper)


def _bits(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _seen(given: Iterable[tuple[str, Tensor]]) -> list[tuple[str, torch.dtype, str]]:
    return [(name, tensor.dtype, _bits(tensor)) for name, tensor in given]


def _any_bits(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A whole parameter of NaN of all kinds, zeros with signs, and the rest, by chance."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    bits = torch.randint(-128, 128, (shape.numel() * dtype.itemsize,), generator=generator)
    return bits.to(torch.int8).view(dtype).view(shape)


@torch.no_grad()
def _set_any_bits(manager: StrategyManager) -> None:
    for name, sharded in manager.sharded_state().model.items():
        whole = _any_bits(name, sharded.shape, sharded.dtype)
        for piece in sharded.chunks:
            region = tuple(slice(a, a + size) for a, size in zip(piece.offsets, piece.sizes, strict=True))
            piece.tensor.copy_(whole[region])


@dataclass
class Found:
    """What a rank has seen.

    Attributes:
        given: after a step, in each dtype.
        state: the weights of `state_dict(full=True)`, on the first rank.
        equal: whether it was the same with buckets of all sizes, with any bits, and with the default of the contract.
        continues: whether training continued as if nothing had been asked for, also where it had been left half-way.
    """

    given: dict[str, list[tuple[str, torch.dtype, str]]]
    state: dict[str, tuple[torch.dtype, str]]
    equal: dict[str, bool]
    continues: bool


def _undisturbed(layout: Layout) -> tuple[list[float], dict[str, Tensor]]:
    manager = _manager(layout)
    return train_steps(manager, layout.case, range(2))[0], full_weights(manager)


def _find(name: str) -> Found:
    layout = LAYOUTS[name]
    manager = _manager(layout)
    first = train_steps(manager, layout.case, range(1))[0]
    # Before anything else has gathered what is still to come.
    own = _seen(manager.iter_parameters(bucket_bytes=BUCKET))
    state = {each: (value.dtype, _bits(value)) for each, value in manager.state_dict(full=True)["model"].items()}
    given = {"None": own}
    for dtype in DTYPES:
        given[str(dtype)] = _seen(manager.iter_parameters(bucket_bytes=BUCKET, dtype=dtype))
    equal = {}
    for size in (11_001, ALL_AT_ONCE):
        equal[f"bucket_bytes={size}"] = _seen(manager.iter_parameters(bucket_bytes=size)) == own
    some = manager.iter_parameters(bucket_bytes=3_000)
    next(some), next(some)
    del some
    second = train_steps(manager, layout.case, range(1, 2))[0]
    weights = full_weights(manager)
    # Where ranks are few, they train once more.
    losses, expected = _undisturbed(layout) if layout.ranks < 4 or layout.schedule else (first + second, weights)
    continues = first + second == losses and all(
        _bits(weights[each]) == _bits(value) for each, value in expected.items()
    )
    if layout.case.dtype == "float64":
        _set_any_bits(manager)
        same = [
            _bits(value) == _bits(_any_bits(each, value.shape, value.dtype))
            for each, value in manager.iter_parameters(bucket_bytes=BUCKET)
        ]
        equal["any bits"] = same == [True] * len(own)
    return Found(given, state, equal, continues)


@pytest.mark.parametrize("name", mark_mostly_slow(LAYOUTS, "fsdp2"))
def test_names_order_and_bits_are_those_of_the_unwrapped_model_on_every_rank(name: str) -> None:
    layout = LAYOUTS[name]
    found = pool(layout.ranks).run(_find, name)
    case = layout.case
    model = build_case_model(
        case.model_type, tied=case.tied, seed=0, dtype=getattr(torch, case.dtype), layers=case.layers
    )
    order = [each for each, _ in model.named_parameters()]
    apart = {each for each in order if any(fnmatchcase(each, pattern) for pattern in case.float32_parameters)}
    own = [(each, torch.float32 if each in apart else getattr(torch, case.dtype)) for each in order]
    for rank in found:
        assert rank.continues
        assert all(rank.equal.values()), rank.equal
        assert rank.given == found[0].given
        assert [(each, dtype) for each, dtype, _ in rank.given["None"]] == own
        for dtype in DTYPES:
            assert [each[:2] for each in rank.given[str(dtype)]] == [(each, dtype) for each in order]
    state = found[0].state
    for each, dtype, bits in found[0].given["None"]:
        if state[each][0] == dtype:
            assert state[each][1] == bits, each
        else:
            assert layout.trains_others
            assert state[each][0] == torch.float32


# -- memory


def _held(name: str, bucket_bytes: int) -> tuple[int, int]:
    """The most bytes beside the model, of a caller who keeps nothing; and those of the largest parameter."""
    manager = _manager(LAYOUTS[name])
    train_steps(manager, LAYOUTS[name].case, range(1))
    largest = max(value.nbytes for _, value in manager.iter_parameters(bucket_bytes=BUCKET))
    given = manager.iter_parameters(bucket_bytes=bucket_bytes)

    def keep_nothing() -> None:
        while next(given, None):
            pass

    parts = manager.model_parts
    before = measure_memory(lambda: None, parts).after.total
    return measure_memory(keep_nothing, parts).peak.total - before, largest


@pytest.mark.slow
@pytest.mark.parametrize("bucket_bytes", [1 << 13, 1 << 16])
@pytest.mark.parametrize("name", ["fsdp2", "fsdp2, tp", "megatron_fsdp"])
def test_a_bucket_and_one_parameter_are_all_that_is_held(name: str, bucket_bytes: int) -> None:
    ranks = LAYOUTS[name].ranks
    for peak, largest in pool(ranks).run(_held, name, bucket_bytes):
        assert largest == 131 * 36 * 8
        held = peak - largest
        # In rounds of one parameter a bucket is full of elements, except for less than one of each rank.
        least = bucket_bytes - 8 * ranks if bucket_bytes < largest else bucket_bytes // 2
        assert least < held <= bucket_bytes


# -- what third parties get, and what is refused


def _by_default(name: str) -> bool:
    """Whether the contract's own `parameter_chunks` gives the same."""
    manager = _manager(LAYOUTS[name])
    own = _seen(manager.iter_parameters(bucket_bytes=BUCKET))
    manager.parameter_chunks = functools.partial(StrategyManager.parameter_chunks, manager)  # type: ignore[method-assign]
    return _seen(manager.iter_parameters(bucket_bytes=BUCKET)) == own


@pytest.mark.parametrize(
    "name", mark_mostly_slow(["single", "fsdp2", "fsdp2, tp", "pipeline, ddp", "megatron_fsdp"], "fsdp2")
)
def test_a_manager_that_says_nothing_of_parameters_gives_them_from_its_sharded_state(name: str) -> None:
    assert all(pool(LAYOUTS[name].ranks).run(_by_default, name))


def _refused() -> list[str]:
    manager = _manager(LAYOUTS["fsdp2, mixed dtypes"])
    is_last = manager.mesh.rank == 1
    calls: list[dict[str, Any]] = [
        {"bucket_bytes": 0},
        {"bucket_bytes": 1.5},
        {"bucket_bytes": 1 << 20, "dtype": torch.int64},
        {"bucket_bytes": 1 << 20, "dtype": "bfloat16"},
        {"bucket_bytes": -1 if is_last else 1},
        {"bucket_bytes": 1 << 20, "dtype": torch.bfloat16 if is_last else None},
    ]
    texts = []
    for arguments in calls:
        with pytest.raises(ConfigError) as error:
            # By the call itself, before anything is asked of what it returns.
            manager.iter_parameters(**arguments)
        texts.append(str(error.value))
    whole = manager.parameter_chunks()
    for pieces in (dict(list(whole.items())[1 - is_last :]), {**whole, "lm_head.weight": None}):
        manager.parameter_chunks = lambda pieces=pieces: pieces  # type: ignore[method-assign,misc]
        with pytest.raises(StrategyError) as lacking:
            manager.iter_parameters(bucket_bytes=BUCKET)
        texts.append(str(lacking.value))
    return texts


def test_what_cannot_be_given_is_refused_on_all_ranks_by_the_call() -> None:
    first, second = pool(2).run(_refused)
    assert first == second
    for text, words in zip(
        first,
        [
            *("bucket_bytes=0 must be", "bucket_bytes=1.5 must be"),
            *("dtype=torch.int64 is no", "dtype='bfloat16' is no"),
            "bucket_bytes=-1 must be",
            "called with bucket_bytes=1048576, dtype=None and bucket_bytes=1048576, dtype=torch.bfloat16",
            *("do not have all of model.embed_tokens.weight", "do not have all of lm_head.weight"),
        ],
        strict=True,
    ):
        assert words in text


# -- the example

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_example_of_the_document_feeds_an_engine() -> None:
    example = ROOT / "examples" / "sync_engine_weights.py"
    (block,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "guides" / "inference-engines.md").read_text(), flags=re.DOTALL
    )
    assert example.read_text(encoding="utf-8").split('"""\n\n', 1)[1] == block
    run = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.splitlines()[-1] == f"step 19  continues 0 to 7 with {list(range(8, 16))}"
