"""Sizes a user asks for, and the degrees that follow."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.base.errors import ConfigError, MeshError
from meshwright.base.validation import validate_config
from meshwright.mesh.sizes import CLAIMABLE_AXES, ROOT_AXES, Degrees, MeshSizes


@pytest.mark.parametrize(
    ("sizes", "world_size", "expected"),
    [
        ({}, 8, Degrees(dp_shard=8)),
        ({"tp_size": 2}, 8, Degrees(dp_shard=4, tp=2)),
        ({"dp_size": 2, "tp_size": None}, 8, Degrees(dp_shard=2, tp=4)),
        ({"dp_replicate_size": 2, "tp_size": 2}, 8, Degrees(dp_replicate=2, dp_shard=2, tp=2)),
        ({"dp_replicate_size": 4, "dp_size": 4}, 4, Degrees(dp_replicate=4)),
        ({"ep_size": 4, "tp_size": 2, "dp_replicate_size": 2}, 16, Degrees(dp_replicate=2, dp_shard=4, tp=2, ep=4)),
        ({}, 1, Degrees()),
    ],
)
def test_one_open_size_is_inferred_and_the_product_is_the_world(sizes, world_size, expected):
    assert MeshSizes(**sizes).resolve(world_size) == expected


@pytest.mark.parametrize(
    ("sizes", "world_size", "texts"),
    [
        (
            {"dp_size": 3, "tp_size": 2},
            8,
            ["dp_size=3 x cp_size=1 x tp_size=2 = 6", "world size is 8", "Set dp_size=4", "leave dp_size out"],
        ),
        ({"tp_size": 3}, 8, ["tp_size=3 = 3", "world size 8", "dp_size cannot be inferred", "a multiple of 3"]),
        ({"tp_size": None, "cp_size": None}, 8, ["3 are left open: dp_size, cp_size, tp_size"]),
        ({"dp_replicate_size": 3}, 8, ["dp_replicate_size=3", "dp_size=8", "1, 2, 4, 8"]),
        ({"ep_size": 3, "tp_size": 2}, 8, ["ep_size=3", "dp_shard=4 x cp=1 x tp=2 = 8", "1, 2, 4, 8"]),
    ],
)
def test_error_names_the_numbers_and_the_remedy(sizes, world_size, texts):
    with pytest.raises(MeshError) as caught:
        MeshSizes(**sizes).resolve(world_size)
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.parametrize("name", list(MeshSizes.model_fields))
@pytest.mark.parametrize("value", [0, -1, 1.5, "two"])
def test_a_size_below_one_or_no_whole_number_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        validate_config(MeshSizes, {name: value}, where="sizes")


SIZE = st.integers(1, 6)
OPEN_SIZE = st.none() | SIZE


@given(
    sizes=st.builds(
        MeshSizes,
        dp_size=OPEN_SIZE,
        dp_replicate_size=OPEN_SIZE,
        tp_size=OPEN_SIZE,
        pp_size=OPEN_SIZE,
        cp_size=OPEN_SIZE,
        ep_size=SIZE,
    ),
    # Mostly worlds that the sizes can fill.
    world_size=st.integers(1, 64) | st.sampled_from([24, 36, 48, 60, 72, 120, 144, 360, 720]),
    claims=st.sets(st.sampled_from(CLAIMABLE_AXES)),
)
def test_degrees_fill_the_world_and_experts_share_the_shards_or_it_is_an_error(sizes, world_size, claims):
    try:
        degrees = sizes.resolve(world_size, claims)
    except MeshError:
        return
    assert math.prod(getattr(degrees, axis) for axis in ROOT_AXES) == world_size == degrees.world_size
    assert degrees.dp_shard * degrees.cp * degrees.tp == degrees.ep_shard * degrees.ep
    assert degrees.dp == degrees.dp_replicate * degrees.dp_shard
    given_sizes = {"dp": sizes.dp_size, "tp": sizes.tp_size, "pp": sizes.pp_size, "cp": sizes.cp_size}
    given_sizes |= {"ep": sizes.ep_size, "dp_replicate": sizes.dp_replicate_size}
    for axis, size in given_sizes.items():
        assert size is None or getattr(degrees, axis) == size
    if sizes.dp_replicate_size is None:
        only_copies = "dp_replicate" in claims and "dp_shard" not in claims
        assert (degrees.dp_replicate, degrees.dp_shard) == ((degrees.dp, 1) if only_copies else (1, degrees.dp))
