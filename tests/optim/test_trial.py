"""What a model's class would raise in the first step, or at the end of a run, is an error of the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.commands import MODEL as LLAMA

from meshwright.base.errors import ModelError
from meshwright.mesh.sizes import Degrees
from meshwright.model.configuration import config_from_mapping
from meshwright.model.layout import ModelSize
from meshwright_run.model_trial import check_memory, try_model

BAD = {
    "key and value heads that do not divide": (
        {"num_attention_heads": 4, "num_key_value_heads": 3},
        "cannot train .*size of tensor",
    ),
    "attention_dropout above 1": ({"attention_dropout": 1.5}, "cannot train .*dropout probability"),
    "attention_dropout below 0": ({"attention_dropout": -0.5}, "cannot train .*dropout"),
    "attention_dropout of null": ({"attention_dropout": None}, "cannot train .*dropout_p"),
    "outputs that are no mapping": ({"return_dict": False}, "cannot train .*tuple"),
    "a configuration that cannot be written": ({"output_attentions": True}, "cannot write .*output_attentions"),
    "an activation of no name": ({"hidden_act": "nope"}, "cannot build .*nope"),
    "a vocabulary beyond numbers": ({"vocab_size": 10**30}, "cannot build .*"),
}


def tried(**changes: Any) -> ModelSize:
    config = config_from_mapping({**LLAMA, "vocab_size": 50, **changes})
    return try_model(config, torch.float32, seq_len=16, device=torch.device("cpu"), degrees=Degrees())


@pytest.mark.parametrize(("changes", "text"), BAD.values(), ids=BAD)
def test_what_a_model_class_would_raise_is_an_error_of_the_plan(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=f"transformers {text}") as caught:
        tried(**changes)
    assert caught.value.exit_code == 2


def test_a_trial_leaves_the_random_state_as_it_was() -> None:
    before = torch.get_rng_state()
    assert tried().parameters > 0
    assert torch.get_rng_state().equal(before)


def test_a_model_beyond_the_memory_of_the_node_is_refused_with_the_numbers() -> None:
    # On the meta device alone: 1.3 TB.
    size = tried(vocab_size=10**10)
    for degrees, held in ((Degrees(), "1,280"), (Degrees(dp_shard=2, tp=2), "320")):
        with pytest.raises(ModelError, match=rf"a rank would hold {held}\.0 GB .* has 64\.0 GB"):
            check_memory(degrees, size, 64 * 10**9)
    check_memory(Degrees(), size, 2 * 10**12)
    check_memory(Degrees(dp_shard=2, tp=2), size, 400 * 10**9)
