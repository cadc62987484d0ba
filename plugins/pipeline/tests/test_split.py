"""How blocks are divided among stages."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright import ConfigError, model_layout
from meshwright_pipeline.config import PipelineConfig
from meshwright_pipeline.partition.split import (
    EMBEDDING_COST,
    compute_end_costs,
    count_parameters,
    split_blocks,
    split_by_names,
    split_model,
)
from meshwright_testing.models import TINY


def sizes(split):
    return [len(part) for part in split]


def all_splits(blocks, stages):
    for cuts in combinations(range(1, blocks), stages - 1):
        yield [range(start, stop) for start, stop in zip((0, *cuts), (*cuts, blocks), strict=True)]


def loads(split, costs, first, last):
    found = [sum(costs[index] for index in part) for part in split]
    found[0] += first
    found[-1] += last
    return found


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_the_largest_stage_is_as_small_as_it_can_be_and_the_rest_as_even(data):
    costs = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=9))
    stages = data.draw(st.integers(1, len(costs)))
    first, last = data.draw(st.integers(0, 30)), data.draw(st.integers(0, 30))
    split = split_blocks(costs, stages, first=first, last=last)
    assert [index for part in split for index in part] == list(range(len(costs)))
    assert len(split) == stages
    assert all(split)

    def worth(candidate):
        each = loads(candidate, costs, first, last)
        return max(each), sum(load**2 for load in each), [part.stop for part in candidate]

    assert worth(split) == min(worth(candidate) for candidate in all_splits(len(costs), stages))


def test_a_head_leaves_fewer_blocks_for_the_last_stage():
    assert sizes(split_blocks([7.1] * 12, 2, first=3.9, last=38.6)) == [8, 4]
    assert sizes(split_blocks([1] * 8, 4, first=1, last=2)) == [1, 3, 3, 1]


def test_costs_whose_sums_are_rounded_are_equal_all_the_same():
    assert sizes(split_blocks([0.1] * 30, 3)) == [10, 10, 10]


@pytest.mark.parametrize("stages", [0, 4])
def test_stages_without_a_block_are_refused(stages):
    with pytest.raises(ConfigError, match=f"3 blocks cannot be divided into {stages} stages.* between 1 and 3"):
        split_blocks([1, 1, 1], stages)


# -- by name

BLOCKS = [f"model.layers.{index}" for index in range(4)]
HOLDERS = ["model.embed", *(f"{block}.{part}" for block in BLOCKS for part in ("norm", "mlp.up")), "model.norm", "head"]
MODULES = {"", "model", "model.layers", "model.rotary", *BLOCKS, *(f"{block}.mlp" for block in BLOCKS), *HOLDERS}


def by_names(*parts, **options):
    return split_by_names(parts, blocks=BLOCKS, modules=MODULES, holders=HOLDERS, **options)


def test_names_say_which_blocks_a_stage_holds():
    split = by_names(
        ["model.rotary", "model.embed", BLOCKS[0]],
        ["model.rotary", *BLOCKS[1:], "model.norm", "head"],
    )
    assert split == [range(1), range(1, 4)]
    assert by_names(["model", "head"]) == [range(4)]


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([["model.embed", *BLOCKS[:2]], [*BLOCKS[2:], "model.norm"]], "'head' is on no stage. Add it"),
        ([["model.embed", *BLOCKS[:2]], [BLOCKS[3], "model.norm", "head"]], "'model.layers.2' is on no stage"),
        ([[*BLOCKS[:2]], [*BLOCKS[2:], "model.norm", "head"]], "'model.embed' is on no stage"),
        (
            [["model.embed", *BLOCKS[:2]], [*BLOCKS[1:], "model.norm", "head"]],
            r"'model.layers.1' is named 2 times, on stages \[0, 1\]",
        ),
        (
            [["model.embed", "model.embed", *BLOCKS[:2]], [*BLOCKS[2:], "model.norm", "head"]],
            r"'model.embed' is named 2 times, on stages \[0, 0\]",
        ),
        ([["model", "head"], [BLOCKS[3]]], r"'model.layers.3' is named 2 times"),
        ([["model.embd", *BLOCKS], ["head"]], "stage 0 names 'model.embd', which is not a module"),
        ([["model.embed", f"{BLOCKS[0]}.mlp"]], "a part of the block 'model.layers.0'. Name the full block"),
        (
            [["model.embed", BLOCKS[0], BLOCKS[2]], [BLOCKS[1], BLOCKS[3], "model.norm", "head"]],
            "'model.layers.2' is on stage 0, but blocks before it are on stage 1",
        ),
        ([["model.embed"], [*BLOCKS, "model.norm", "head"]], "stage 0 has no block"),
    ],
)
def test_a_module_that_is_forgotten_doubled_unknown_or_out_of_place_is_named(parts, text):
    with pytest.raises(ConfigError, match=text):
        by_names(*parts)


def test_a_module_on_a_stage_that_does_not_run_it_is_sent_to_the_one_that_does():
    with pytest.raises(ConfigError, match=r"'model.norm' is on stage 0, but runs on \[1\]. Name it there"):
        by_names(
            ["model.embed", *BLOCKS[:2], "model.norm"],
            [*BLOCKS[2:], "head"],
            runs_in=lambda module, stage: (stage.start == 0) == (module == "model.embed"),
        )


# -- of a model


@pytest.fixture(scope="module")
def model():
    # With a head as large as two blocks or so.
    config = AutoConfig.for_model("llama", **{**TINY["llama"], "num_hidden_layers": 6, "vocab_size": 600})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_a_model_is_divided_by_what_its_options_say(model):
    layout = model_layout(model)
    blocks = layout.blocks

    def split(stages, **options):
        return sizes(split_model(model, layout, PipelineConfig(**options), stages, blocks=blocks))

    assert split(3, layers_per_stage=2) == [2, 2, 2]
    head = model.get_submodule(layout.head).weight.numel()
    assert compute_end_costs(model, layout) == {"first": EMBEDDING_COST * head, "last": head}
    assert 1.5 < head / count_parameters(model, blocks[0]) < 2.5
    assert split(2) == [4, 2]
    parts = [[layout.embedding, *blocks[:1]], [*blocks[1:], "model.norm", layout.head]]
    assert split(2, module_fqns_per_model_part=parts) == [1, 5]
    with pytest.raises(ConfigError, match=r"'model.norm' is on no stage"):
        split(2, module_fqns_per_model_part=[parts[0], [*blocks[1:], layout.head]])
