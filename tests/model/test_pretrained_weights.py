"""The reader of Hugging Face directories: any rectangle of any weight is what transformers loads, bit for bit."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.model_types import REPRESENTATIVE_MODEL_TYPES
from support.tiers import mark_mostly_slow
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright.base.errors import ModelError
from meshwright.model.lazy_tensor import LazyCall, LazyTensor, read_full
from meshwright.model.model_files import InMemoryReader, open_weights
from meshwright.model.pretrained import PretrainedWeights, open_pretrained
from meshwright.tensors.chunks import to_slices
from meshwright_testing.models import build_tiny_model
from meshwright_testing.zoo import build_zoo_config, build_zoo_model


def names(model: nn.Module) -> dict[str, Tensor]:
    return model.state_dict(keep_vars=True)


def opened(directory: Path, **options: Any) -> tuple[nn.Module, PretrainedWeights]:
    return open_pretrained(directory, AutoConfig.from_pretrained(directory), **options)


def whole(weights: PretrainedWeights, name: str) -> Tensor:
    shape = weights.get_shape(name)
    return weights.read(name, [0] * len(shape), list(shape))


def assert_same_bits(found: Tensor, expected: Tensor, what: object) -> None:
    assert found.dtype == expected.dtype, what
    assert torch.equal(found.nan_to_num(), expected.detach().nan_to_num()), what


def check_equals_plain(model: nn.Module, weights: PretrainedWeights, plain: nn.Module) -> None:
    """Names, ties, dtypes, buffers, and weights whole and in random rectangles."""
    expected, found = names(plain), names(model)
    assert expected.keys() == found.keys() == set(weights)
    draw = random.Random(0)
    for name, value in expected.items():
        assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype), name
        assert found[name].requires_grad == value.requires_grad, name
        assert_same_bits(whole(weights, name), value, name)
        for _ in range(3):
            offsets = [draw.randint(0, size - 1) for size in value.shape]
            sizes = [draw.randint(0, size - offset) for size, offset in zip(value.shape, offsets, strict=True)]
            part = weights.read(name, offsets, sizes)
            assert_same_bits(part, value[to_slices(offsets, sizes)], (name, offsets, sizes))
    for (name, value), (other, buffer) in zip(plain.named_buffers(), model.named_buffers(), strict=True):
        assert name == other
        assert type(buffer) is Tensor
        assert_same_bits(buffer, value, name)
    assert all(type(parameter) is nn.Parameter and parameter.is_meta for parameter in model.parameters())
    assert groups(expected) == groups(found)
    assert [type(module) for module in plain.modules()] == [type(module) for module in model.modules()]


def groups(state: dict[str, Any]) -> set[tuple[str, ...]]:
    """Names of one parameter."""
    return {tuple(other for other in state if state[other] is state[name]) for name in state}


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [
        *mark_mostly_slow([(name, torch.float32) for name in REPRESENTATIVE_MODEL_TYPES]),
        *mark_mostly_slow([(name, torch.bfloat16) for name in ("llama", "qwen3_moe")]),
    ],
)
def test_every_weight_is_the_one_that_transformers_loads(model_type, dtype, tmp_path):
    saved = build_zoo_model(model_type, dtype=torch.float32)
    saved.save_pretrained(tmp_path)
    # Not by the auto class: some models save the configuration of their text part, whose type it does not know.
    torch.manual_seed(0)
    plain = type(saved).from_pretrained(tmp_path, config=saved.config, dtype=dtype)
    check_equals_plain(*open_pretrained(tmp_path, build_zoo_config(model_type), dtype=dtype), plain)


# -- directories


@pytest.mark.parametrize("tied", [False, True])
def test_files_in_shards(tied, tmp_path):
    build_tiny_model(tied=tied).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    check_equals_plain(*opened(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path))


def edit(directory: Path, change: Any) -> None:
    """Change the weights in the one file of a directory."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _renamed(rename: Callable[[str], str]) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [*tensors]:
            tensors[rename(name)] = tensors.pop(name)

    return change


def _head_of_its_own(added: float) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1, -1] += added

    return change


@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        ("gpt2", _renamed(lambda name: name.removeprefix("transformer."))),
        ("gpt2", _renamed("transformer.{}".format)),
        ("llama", _renamed(lambda name: name.replace("model.embed_tokens", "lm_head"))),
        ("llama", _head_of_its_own(0)),
        ("llama", _head_of_its_own(1)),
    ],
    ids=["without prefix", "prefix twice", "head instead of embedding", "equal head", "another head"],
)
def test_tied_weights_and_the_prefix_of_the_base_model_may_be_saved_in_several_ways(model_type, change, tmp_path):
    build_tiny_model(model_type, tied=True).save_pretrained(tmp_path)
    edit(tmp_path, change)
    model, weights = opened(tmp_path)
    assert not weights.warnings
    check_equals_plain(model, weights, AutoModelForCausalLM.from_pretrained(tmp_path))


def test_missing_weights_are_reported_and_start_as_the_model_initialises_them(tmp_path):
    build_tiny_model().save_pretrained(tmp_path)
    edit(tmp_path, lambda tensors: [tensors.pop(name) for name in ("lm_head.weight", "model.norm.weight")])
    model, weights = opened(tmp_path, seed=7)
    assert weights.missing == ("lm_head.weight", "model.norm.weight")
    assert "lacks 2 weights of the model" in weights.warnings[0]
    torch.manual_seed(7)
    check_equals_plain(model, weights, AutoModelForCausalLM.from_pretrained(tmp_path))
    assert not torch.equal(whole(weights, "lm_head.weight"), whole(opened(tmp_path, seed=8)[1], "lm_head.weight"))


def test_unexpected_weights_are_reported(tmp_path):
    build_tiny_model().save_pretrained(tmp_path)
    # The second is one that transformers drops in silence.
    extra = {"value_head.weight": torch.ones(3), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    edit(tmp_path, lambda tensors: tensors.update(extra))
    _, weights = opened(tmp_path)
    assert len(weights.warnings) == 1
    assert "1 weights that the model has no place for, which are not read: value_head.weight" in weights.warnings[0]


def test_the_generation_configuration_is_kept_and_random_state_stays_as_it_was(tmp_path):
    model = build_tiny_model()
    model.generation_config.max_length = 77
    model.save_pretrained(tmp_path)
    before = torch.get_rng_state()
    found, _ = opened(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.generation_config.max_length == 77
    assert found.config.name_or_path == str(tmp_path)


def test_pickles_are_opened_only_on_request(tmp_path):
    model = build_tiny_model(tied=True)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin\), which are not opened .* allow_pickle=True"):
        opened(tmp_path)
    check_equals_plain(*opened(tmp_path, allow_pickle=True), model)


def test_a_pickle_that_holds_more_than_tensors_is_an_error(tmp_path):
    model = build_tiny_model()
    model.config.save_pretrained(tmp_path)
    torch.save({"a": Path("x")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin holds no plain weights"):
        opened(tmp_path, allow_pickle=True)


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("shards")
    build_tiny_model().save_pretrained(path, max_shard_size="60KB")
    return path


DEEP = '{"a":' * 20_000 + "1" + "}" * 20_000
INDEX, GENERATION = "model.safetensors.index.json", "generation_config.json"


def _second(directory: Path) -> Path:
    return sorted(directory.glob("*.safetensors"))[1]


def _lose_tensor(path: Path) -> None:
    tensors = load_file(path)
    tensors.popitem()
    save_file(tensors, path, metadata={"format": "pt"})


def _quantize(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (directory / "config.json").write_text(json.dumps(config))


def _writes(name: str, text: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_text(text)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (
            lambda d: _second(d).write_bytes(_second(d).read_bytes()[:-10]),
            r"model-00002-of-\d+\.safetensors is not a whole safetensors file .*bytes\)",
        ),
        (lambda d: _second(d).unlink(), r"lacks 1 of the \d+ weight files .*: model-00002-of"),
        (
            lambda d: _lose_tensor(_second(d)),
            r"names 1 tensors that its files do not hold: .* should be in model-00002",
        ),
        (_writes(INDEX, '{"weight_map": [1]}'), r"index\.json is no index of weight files"),
        (_writes(GENERATION, DEEP), r"generation_config\.json is no generation configuration: .*nested too deeply"),
        (
            _writes(GENERATION, '{"max_new_tokens": "x", "temperature": []}'),
            r"generation_config\.json is no generation configuration",
        ),
        (_quantize, "holds a quantized model"),
        (_writes("adapter_config.json", "{}"), "holds an adapter"),
    ],
)
def test_a_damaged_or_unfit_directory_is_an_error_that_names_it(damage, text, shards, tmp_path):
    directory = shutil.copytree(shards, tmp_path / "copy")
    damage(directory)
    with pytest.raises(ModelError, match=text):
        opened(directory)


@pytest.mark.parametrize("verbosity", [transformers.logging.WARNING, transformers.logging.ERROR, None])
def test_a_conversion_that_fails_is_reported_with_its_reason(verbosity, tmp_path, monkeypatch):
    if verbosity is None:  # what logging.config.dictConfig does to loggers that are there
        monkeypatch.setattr(logging.getLogger("transformers"), "disabled", True)
        monkeypatch.setattr(logging.getLogger("transformers.modeling_utils"), "disabled", True)
    else:
        monkeypatch.setattr(logging.getLogger("transformers"), "level", verbosity)
    build_zoo_model("qwen3_moe", dtype=torch.float32).save_pretrained(tmp_path)
    first = "model.layers.0.mlp.experts.0.gate_proj.weight"
    edit(tmp_path, lambda tensors: tensors.update({first: tensors[first][:-1].clone()}))
    with pytest.raises(
        ModelError, match=r"(?s)transformers cannot load .*MergeModulelist on tensors .*gate_up_proj.*: stack expects"
    ):
        opened(tmp_path)


def test_what_is_no_rectangle_or_no_weight_is_an_error(shards):
    _, weights = opened(shards)
    for offsets, sizes in (([0], [36]), ([0, -1], [1, 1]), ([0, 30], [1, 7])):
        with pytest.raises(ModelError, match=r"no rectangle of lm_head\.weight, whose shape is"):
            weights.read("lm_head.weight", offsets, sizes)
    with pytest.raises(ModelError, match=r"no weight 'lm_haed\.weight'\. Did you mean 'lm_head\.weight'"):
        weights.read("lm_haed.weight", [0], [1])


# -- no more than needed


class Counted(InMemoryReader):
    """Counts the elements that are read."""

    total = 0

    def read(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        Counted.total += torch.Size(sizes).numel()
        return super().read(offsets, sizes)


@pytest.mark.parametrize(
    ("model_type", "name", "rows"),
    [
        ("llama", "model.layers.0.mlp.down_proj.weight", 3),
        ("qwen3_moe", "model.layers.0.mlp.experts.gate_up_proj", 1),
        ("hrm_text", "model.L_module.layers.0.self_attn.q_proj.weight", 5),
    ],
)
def test_a_rectangle_reads_its_own_elements_alone(model_type, name, rows, tmp_path, monkeypatch):
    build_zoo_model(model_type, dtype=torch.float32).save_pretrained(tmp_path)

    def counted(*args: Any, **kwargs: Any) -> Any:
        return {key: Counted(read_full(source)) for key, source in open_weights(*args, **kwargs).items()}

    monkeypatch.setattr("meshwright.model.pretrained.open_weights", counted)
    _, weights = opened(tmp_path)
    first, *others = weights.get_shape(name)
    Counted.total = 0
    weights.read(name, [0] * (1 + len(others)), [rows, *others])
    assert Counted.total == weights.get_shape(name).numel() * rows // first


def _operation(draw: Any, value: Tensor) -> Callable[[Tensor], Tensor]:
    """One operation that conversions of checkpoints may use on a tensor like this, drawn at random."""
    dims, length = value.dim(), value.numel()
    dim, other = draw(st.integers(-dims, dims - 1)), draw(st.integers(0, dims - 1))
    first, index = draw(st.integers(0, value.shape[dim])), draw(st.integers(0, max(0, value.shape[dim] - 1)))
    rows = draw(st.sampled_from([each for each in range(1, length + 1) if length % each == 0] or [1]))
    shape = draw(st.sampled_from([(rows, length // rows), (rows, length // rows, 1), (length,)]))
    pieces = (first, value.shape[dim] - first)
    operations: list[Callable[[Tensor], Tensor]] = [
        lambda x: torch.transpose(x, dim, other).contiguous(),
        lambda x: torch.chunk(x, other + 1, dim=dim)[0],
        lambda x: torch.chunk(x, 4, dim=dim)[-1],
        lambda x: torch.split(x, list(pieces), dim=dim)[index % 2],
        lambda x: torch.cat([x, x.clone()], dim),
        lambda x: x.reshape(shape),
        lambda x: x.to(device="cpu", dtype=torch.float64),
        lambda x: torch.roll(x, 1, dim),  # not cut: its argument is read whole
    ]
    if dims < 4:
        operations += [lambda x: torch.stack([x, x.detach(), x], dim=other), lambda x: x.unsqueeze(dim)]
    if dims > 1 and value.shape[dim]:
        operations.append(lambda x: x.unbind(dim)[index])
    return draw(st.sampled_from(operations))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_rectangles_of_what_operations_make_of_recorded_tensors(data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    real = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    recorded: Tensor = LazyTensor.from_source(InMemoryReader(real))
    for _ in range(data.draw(st.integers(0, 5))):
        operation = _operation(data.draw, real)
        real, recorded = operation(real), operation(recorded)
    assert isinstance(recorded, LazyTensor)
    assert (recorded.shape, recorded.dtype) == (real.shape, real.dtype)
    offsets = [data.draw(st.integers(0, size)) for size in real.shape]
    sizes = [data.draw(st.integers(0, size - offset)) for size, offset in zip(real.shape, offsets, strict=True)]
    part = recorded.source.read(offsets, sizes)
    assert_same_bits(part, real[to_slices(offsets, sizes)], (recorded.source, offsets, sizes))


def test_a_recorded_tensor_gives_values_where_they_are_asked_for_and_cannot_be_written_to():
    recorded = LazyTensor.from_source(InMemoryReader(torch.arange(6.0).reshape(2, 3)))
    assert recorded.sum().source.shape == ()
    assert float(read_full(recorded.sum().source)) == 15
    assert recorded.max().item() == 5
    assert torch.equal(recorded, torch.arange(6.0).reshape(2, 3))
    assert not torch.equal(recorded, torch.zeros(2, 3))
    assert isinstance(recorded.t().source, LazyCall)
    with pytest.raises(TypeError, match="zero_ writes into weights"):
        recorded.zero_()
