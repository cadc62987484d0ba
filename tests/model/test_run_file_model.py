"""Building and loading the model of a run file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import MODEL as LLAMA
from support.error_assertions import raises_containing
from support.managers import build_empty_manager
from support.measurements import measure_memory
from support.tiers import mark_mostly_slow

from meshwright.base.errors import ModelError
from meshwright.mesh.sizes import Degrees
from meshwright.model import deferred_init as deferred
from meshwright.model.configuration import build_model_config, config_from_mapping
from meshwright.model.layout import ModelSize
from meshwright.model.pretrained import build_model, get_model_dtype
from meshwright.model.weights import load_weights, materialize
from meshwright_run.model_probe import check_memory, probe_model
from meshwright_testing import pool

GPT2 = {"model_type": "gpt2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "n_positions": 32}


class Tokenizer:
    """What `model_config` asks of a tokenizer."""

    eos_token_id = 7

    def __len__(self) -> int:
        return 50


def config_of(section: dict[str, Any], seq_len: int = 16) -> Any:
    directory = Path(section["path"]) if "path" in section else None
    return build_model_config(section, tokenizer=Tokenizer(), seq_len=seq_len, directory=directory)


def model_of(section: dict[str, Any], seed: int = 0) -> Any:
    model, weights = build_model(section, config_of(section), seed=seed)
    if weights is not None:
        materialize(model, "cpu")
        load_weights(model, weights)
    return model


def equal(one: Any, two: Any) -> bool:
    mine, other = one.state_dict(), two.state_dict()
    return mine.keys() == other.keys() and all(tensor.equal(other[name]) for name, tensor in mine.items())


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A saved tiny model with a vocabulary of 60."""
    path = tmp_path_factory.mktemp("model")
    model_of({**LLAMA, "vocab_size": 60, "tie_word_embeddings": True}, seed=5).save_pretrained(path)
    return path


@pytest.fixture
def edited(directory, tmp_path):
    """A copy of the saved model's configuration, changed, with an empty file for weights."""

    def write(**changes: Any) -> str:
        config = json.loads((directory / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    return write


# -- from fields


def test_the_tokenizer_gives_what_the_fields_leave_out_and_fields_reach_the_configuration():
    config = config_of(LLAMA)
    assert (config.vocab_size, config.eos_token_id, config.bos_token_id) == (50, 7, None)
    own = {"vocab_size": 64, "eos_token_id": 3, "rope_theta": 500.0, "attn_implementation": "eager"}
    config = config_of({**LLAMA, **own})
    assert (config.vocab_size, config.eos_token_id, config._attn_implementation) == (64, 3, "eager")
    assert config.rope_parameters == {"rope_theta": 500.0, "rope_type": "default"}
    # A common name stands for the type's own.
    assert config_of(GPT2).n_embd == 16
    assert get_model_dtype(LLAMA) is torch.float32


@pytest.mark.parametrize(
    ("section", "texts"),
    [
        ({"model_type": "lama"}, ["model_type='lama' is not a model type", "Did you mean 'llama'?"]),
        ({"model_type": "t5"}, ["'t5' has no causal language model"]),
        ({"model_type": "llava"}, ["'llava' has no causal", "its text part alone is no model there"]),
        ({**LLAMA, "dtype": "float16"}, ["dtype='float16' is not one of float32, bfloat16, float64"]),
        ({**LLAMA, "dtype": "bfloat"}, ["Did you mean 'bfloat16'?"]),
        ({**LLAMA, "init": "paralel"}, ["init='paralel' is not one of parallel, transformers. Did you mean 'paral"]),
        ({**LLAMA, "num_hiden_layers": 2}, ["model.num_hiden_layers is not", "Did you mean 'num_hidden_layers'?"]),
        ({**LLAMA, "n_embd": 2}, ["model.n_embd is not a field of the llama configuration", "hidden_size"]),
        # A method and a property of the configuration class are no fields.
        ({**LLAMA, "to_dict": 2}, ["model.to_dict is not a field"]),
        ({**LLAMA, "hidden_size": 15}, ["refuses the model configuration", "15"]),
        # Made layer by layer, forever.
        ({**LLAMA, "num_hidden_layers": 2**40}, ["num_hidden_layers=1099511627776 is more than 10,000 layers"]),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 2**31}}, ["text_config.num_hidden_layers="]),
        ({**LLAMA, "return_dict": "no"}, ["model.return_dict='no' must be true or false"]),
        ({**LLAMA, "vocab_size": 49}, ["vocabulary has 49 entries", "tokenizer has 50", "Leave model.vocab_size out"]),
        (
            {"model_type": "gemma3", "text_config": {"vocab_size": 49}},
            ["tokenizer has 50", "Set model.text_config.vocab_size to at least 50"],
        ),
        (
            {**LLAMA, "max_position_embeddings": 15},
            ["holds 15 positions", "seq_len is 16", "at most 15", "at least 16"],
        ),
        (
            {"model_type": "gemma3", "text_config": {"hiden_size": 16}},
            ["model.text_config.hiden_size is not", "Did you mean 'hidden_size'?"],
        ),
    ],
)
def test_a_configuration_that_is_not_meant_so_is_an_error(section, texts):
    with raises_containing(ModelError, *texts):
        config_of(section)


def test_a_tokenizer_that_is_larger_than_the_weights_is_reported_what_it_can_do(tmp_path):
    model = model_of(LLAMA)
    model.resize_token_embeddings(49)
    model.save_pretrained(tmp_path)
    with raises_containing(ModelError, "resize_token_embeddings(50)"):
        config_of({"path": str(tmp_path)})


def test_fields_may_differ_between_layers_and_a_section_is_left_as_it_is():
    assert config_of({"model_type": "gemma4_text", "head_dim": 8}).per_layer_config[0].head_dim == 8
    # transformers writes into mappings; a run is known by what its file holds.
    section = {**LLAMA, "rope_parameters": {"rope_theta": 5e5}}
    config_of(section)
    assert section["rope_parameters"] == {"rope_theta": 5e5}


def _built_and_sharded(strategy: str, sizes: dict[str, int]) -> tuple[int, int, int, int]:
    """Bytes of the whole model, of its largest parameter, of what this rank holds of it, and of all at the peak."""
    deferred.MIN_TRACKED_BYTES, deferred.MAX_RESIDENT_BYTES = 64, 0
    section = {**LLAMA, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 8, "dtype": "float64"}
    manager = build_empty_manager(strategy, {}, sizes)
    found: list[int] = []

    def build() -> None:
        model, weights = build_model(section, config_of(section), seed=3)
        found.extend(parameter.nbytes for parameter in model.parameters())
        manager.parallelize(model, weights)

    memory = measure_memory(build, [])
    return sum(found), max(found), memory.after.total, memory.peak.total


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    mark_mostly_slow([("fsdp2", {}), ("fsdp2", {"tp_size": 2}), ("single", {"pp_size": 4}), ("megatron_fsdp", {})]),
    ids=str,
)
def test_a_new_model_is_never_whole_on_a_rank_that_trains_a_part_of_it(strategy, sizes):
    for whole, largest, mine, peak in pool(4).run(_built_and_sharded, strategy, sizes):
        # Beside its parameters, megatron_fsdp has the buffers of their gradients.
        assert mine < (0.6 if strategy == "megatron_fsdp" else 0.35) * whole
        assert peak <= mine + 6 * largest < 0.8 * whole


# -- from a directory


def test_a_directory_is_loaded_whatever_the_seed(directory):
    model = model_of({"path": str(directory)}, seed=9)
    assert equal(model, model_of({**LLAMA, "vocab_size": 60, "tie_word_embeddings": True}, seed=5))
    assert model.config.eos_token_id == 7


def test_fields_change_what_a_directory_says(directory):
    section = {"path": str(directory), "attention_dropout": 0.5, "dtype": "bfloat16"}
    model = model_of(section)
    assert model.config.attention_dropout == 0.5
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"attention_droput": 0.5}, ["model.attention_droput is not", "Did you mean 'attention_dropout'?"]),
        ({"num_hidden_layers": 3}, ["lacks 9 weights", "would start at random", "model.layers.2."]),
        (
            {"hidden_size": 32},
            ["of another shape than the model's", "model.embed_tokens.weight is (60, 16), not (60, 32)"],
        ),
    ],
)
def test_fields_that_do_not_fit_a_directory_are_an_error(fields, texts, directory):
    with raises_containing(ModelError, *texts):
        model_of({"path": str(directory), **fields})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "t5"}, "'t5' has no causal language model"),
        ({"model_type": "no_such_type"}, "no_such_type"),
        ({"model_type": "own_type", "auto_map": {"AutoConfig": "code.Config"}}, "code of its own"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers=2147483648 is more than 10,000 layers"),
        ({}, "is not a whole safetensors file"),
    ],
)
def test_a_directory_that_cannot_be_trained_is_an_error(changes, text, edited, tmp_path):
    with pytest.raises(ModelError, match=text):
        model_of({"path": edited(**changes)})
    for lost, reported in (("model.safetensors", "holds no weights"), ("config.json", r"holds no config\.json")):
        (tmp_path / lost).unlink()
        with pytest.raises(ModelError, match=reported):
            config_of({"path": str(tmp_path)})
    with pytest.raises(ModelError, match=r"nowhere' is not a directory"):
        config_of({"path": str(tmp_path / "nowhere")})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"[]", "it holds a JSON list, not an object"),
        (b"{", "Expecting property name.*Write or copy it again"),
        # Shallow enough for a reader of JSON, and too deep for what looks at its values.
        (b'{"model_type": "llama", "a":' + b"[" * 300 + b"]" * 300 + b"}", "it is nested deeper than 50 levels"),
    ],
)
def test_a_config_that_cannot_be_read_is_named(content: bytes, text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=rf"config\.json is no model configuration: .*{text}"):
        build_model_config({"path": str(tmp_path)}, tokenizer=Tokenizer(), seq_len=16, directory=tmp_path)


BAD = {
    "key and value heads that do not divide": (
        {"num_attention_heads": 4, "num_key_value_heads": 3},
        "cannot train .*size of tensor",
    ),
    "attention_dropout above 1": ({"attention_dropout": 1.5}, "cannot train .*dropout probability"),
    "outputs that are no mapping": ({"return_dict": False}, "cannot train .*tuple"),
    "a configuration that cannot be written": ({"output_attentions": True}, "cannot save .*output_attentions"),
    "an activation of no name": ({"hidden_act": "nope"}, "cannot build .*nope"),
    "a vocabulary beyond numbers": ({"vocab_size": 10**30}, "cannot build .*"),
}


def tried(**changes: Any) -> ModelSize:
    config = config_from_mapping({**LLAMA, "vocab_size": 50, **changes})
    return probe_model(config, torch.float32, seq_len=16, device=torch.device("cpu"), degrees=Degrees())


@pytest.mark.parametrize(("changes", "text"), BAD.values(), ids=BAD)
def test_what_a_model_class_would_raise_is_an_error_of_the_plan(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=f"transformers {text}") as caught:
        tried(**changes)
    assert caught.value.exit_code == 2


def test_a_model_beyond_the_memory_of_the_node_is_refused_with_the_numbers() -> None:
    before = torch.get_rng_state()
    # On the meta device alone: 1.3 TB.
    size = tried(vocab_size=10**10)
    assert torch.get_rng_state().equal(before)
    for degrees, held in ((Degrees(), "1,280"), (Degrees(dp_shard=2, tp=2), "320")):
        with pytest.raises(ModelError, match=rf"a rank would hold {held}\.0 GB .* has 64\.0 GB"):
            check_memory(degrees, size, 64 * 10**9)
    check_memory(Degrees(), size, 2 * 10**12)
    check_memory(Degrees(dp_shard=2, tp=2), size, 400 * 10**9)
