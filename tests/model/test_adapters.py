"""Models of peft under every strategy and axis: as `single` trains them, and as one process of peft starts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapter_cases import (
    ADAPTERS,
    LAYOUTS,
    LINEAR,
    LORA_OPTIONS,
    build_adapter_case,
    build_lora_config,
    compare_merged_parameters,
    load_with_peft,
    measure_step_bytes,
    open_adapted_model,
    train_from_files,
    train_with_dropout,
    write_base,
)
from support.tiers import mark_mostly_slow

from meshwright._compat.peft import tie_adapters
from meshwright.base.errors import ModelError
from meshwright.model.adapter import add_adapter
from meshwright.model.configuration import config_from_directory
from meshwright.model.pretrained import open_pretrained
from meshwright.model.weights import load_weights, materialize
from meshwright.testing import Case
from meshwright_testing import pool
from meshwright_testing.models import attach_adapter, build_case_model
from meshwright_testing.parity import find_max_difference, run_reference, train_case

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")

EXACT = 1e-12
LAYOUT_OF = dict.fromkeys(ADAPTERS, "tp") | {
    "all-linear": "sequence",
    "embedding": "pp",
    "saved modules": "tp",
    "dora": "tp",
    "experts": "ep",
}
LAYOUT_OF |= dict.fromkeys(("widths", "rank one", "biases"), "megatron")
OF_TIED = [("tied factors", layout, True) for layout in ("sequence", "interleaved", "bucketed")]
TRAINED = [*((*each, False) for each in LAYOUT_OF.items()), *OF_TIED, ("tied modules", "tp", True)]


@pytest.mark.parametrize(("adapter", "layout", "tied"), mark_mostly_slow(TRAINED, "all-linear"))
def test_adapters_train_as_in_one_process(adapter: str, layout: str, tied: bool) -> None:
    ranks, strategy, config, sizes, wrapper = LAYOUTS[layout]
    case = build_adapter_case(adapter, tied=tied)
    outcomes = pool(ranks).run(train_case, strategy, config, sizes, case, "cpu", wrapper)
    found = find_max_difference(outcomes, run_reference(case))
    assert found.worst <= EXACT, found


def _tied_base() -> Any:
    return build_case_model("llama", tied=True, seed=0, dtype=torch.float64)


def test_tied_factors_get_the_gradients_of_both_layers_that_peft_gives_them() -> None:
    model: Any = attach_adapter(_tied_base(), ADAPTERS["tied factors"][1], seed=0)
    ids = torch.arange(16).view(2, 8)
    model(ids, labels=ids).loss.backward()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    expected = embedding.lora_embedding_B["default"].grad + head.lora_A["default"].weight.grad.t()
    model.zero_grad()
    assert tie_adapters(tie_adapters(model)) is model
    model(ids, labels=ids).loss.backward()
    torch.testing.assert_close(embedding.lora_embedding_B["default"].grad, expected, rtol=1e-12, atol=1e-14)
    assert len(list(embedding.parameters())) == len({*embedding.parameters(), *head.parameters()}) == 3


def test_tied_factors_that_differ_and_a_bias_that_peft_leaves_out_are_refused() -> None:
    model: Any = attach_adapter(_tied_base(), ADAPTERS["tied factors"][1], seed=0)
    model.get_output_embeddings().lora_A["default"].weight = torch.nn.Parameter(torch.zeros(4, 36).double())
    with pytest.raises(ModelError, match=r"ensure_weight_tying=True, but its factors of .*lm_head are not those of"):
        tie_adapters(model)
    base = _tied_base()
    base.lm_head.bias = torch.nn.Parameter(torch.zeros(base.lm_head.out_features).double())
    model = attach_adapter(base, ADAPTERS["tied modules"][1], seed=0)
    with pytest.raises(ModelError, match=r"a trained copy of lm_head .* peft leaves its bias out"):
        tie_adapters(model)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_before_a_divided_adapter_falls_as_in_one_process(sequence_parallel: bool) -> None:
    options = LORA_OPTIONS | {"target_modules": "all-linear", "lora_dropout": 0.5}
    case = Case(adapter=options, sequences=4, max_norm=None)
    expected = pool(1).run(train_with_dropout, "single", {}, {}, case)[0]
    config = {"sequence_parallel": sequence_parallel}
    for losses in pool(2).run(train_with_dropout, "fsdp2", config, {"tp_size": 2}, case):
        assert losses == pytest.approx(expected, abs=1e-12)
    plain = Case(adapter={**options, "lora_dropout": 0.0}, sequences=4, max_norm=None)
    assert pool(1).run(train_with_dropout, "single", {}, {}, plain)[0] != pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("strategy", "config"), mark_mostly_slow([("ddp", {}), ("fsdp2", {})]))
def test_frozen_parameters_have_no_gradients_and_send_none(strategy: str, config: dict[str, Any]) -> None:
    case = Case(adapter=ADAPTERS["all-linear"][1], sequences=4)
    for summed, _, held, whole in pool(2).run(measure_step_bytes, strategy, config, {}, case):
        # Buckets are padded; the rest is what ranks tell each other.
        assert whole <= summed <= 1.1 * whole + 400
        assert held <= 1.1 * whole


@pytest.mark.parametrize(
    ("adapter", "layout", "tied"),
    mark_mostly_slow([("dora of ends", "tp", False), ("saved modules", "pp", False), ("experts", "ep", False)]),
)
def test_merged_parameters_are_those_that_peft_merges(adapter: str, layout: str, tied: bool) -> None:
    ranks, strategy, config, sizes, wrapper = LAYOUTS[layout]
    case = build_adapter_case(adapter, tied=tied, unshard_after=False)
    for differing, in_order, is_same in pool(ranks).run(
        compare_merged_parameters, strategy, config, sizes, case, wrapper
    ):
        assert differing == []
        assert in_order
        assert is_same


STARTS: dict[str, dict[str, Any]] = {
    "plain": LORA_OPTIONS | {"target_modules": "all-linear"},
    "dora": LORA_OPTIONS
    | {"target_modules": [*LINEAR[:4], "embed_tokens"], "use_dora": True, "init_lora_weights": False},
    "saved modules": LORA_OPTIONS | {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("start", STARTS)
def test_an_adapter_on_the_meta_device_starts_as_peft_starts_it(
    start: str, tied: bool, dtype: str, tmp_path: Path
) -> None:
    write_base(str(tmp_path / "base"), tied=tied, dtype=dtype)
    arguments: Any = (STARTS[start], str(tmp_path / "base"))
    for adapter in (None, str(tmp_path / "adapter")):
        expected = load_with_peft(*arguments, adapter, dtype)
        model, weights = open_adapted_model(*arguments, adapter, dtype)
        assert all(parameter.is_meta for parameter in model.parameters())
        materialize(model, "cpu")
        load_weights(model, weights)
        wanted = dict(expected.named_parameters())
        found = dict(model.named_parameters())
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            assert (value.dtype, value.requires_grad) == (wanted[name].dtype, wanted[name].requires_grad), name
            assert torch.equal(value, wanted[name]), name
        if adapter is None:
            for value in expected.parameters():
                value.data.add_(0.25)
            expected.save_pretrained(tmp_path / "adapter")
            write_base(str(tmp_path / "base"), tied=tied, dtype=dtype)


@pytest.mark.parametrize(
    ("layout", "start", "dtype"),
    [
        pytest.param("tp", "dora", "bfloat16", marks=pytest.mark.slow, id="tp"),
        pytest.param("pp", "saved modules", "bfloat16", marks=pytest.mark.slow, id="pp"),
    ],
)
def test_shards_of_a_base_in_bfloat16_train_an_adapter_in_float32(
    layout: str, start: str, dtype: str, tmp_path: Path
) -> None:
    ranks, strategy, config, sizes, _ = LAYOUTS[layout]
    write_base(str(tmp_path), tied=False, dtype=dtype)
    arguments: Any = (STARTS[start], str(tmp_path), None, dtype)
    expected = dict(load_with_peft(*arguments).named_parameters())
    losses = pool(1).run(train_from_files, "single", {}, {}, *arguments)[0][0]
    for found, started, dtypes in pool(ranks).run(train_from_files, strategy, config, sizes, *arguments):
        for name, value in expected.items():
            assert torch.equal(started[name], value), name
            assert dtypes[name] == str(value.dtype), name
        assert found == pytest.approx(losses, abs=1e-12 if dtype == "float64" else 2e-2)


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({"target_modules": ["no_such_layer"]}, "no_such_layer"),
        ({"target_modules": ["q_proj"], "init_lora_weights": "pissa"}, "drawn without them"),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [1]}, r"trainable_token_indices=\[1\] copies rows"),
    ],
    ids=["target", "pissa", "tokens"],
)
def test_adapters_that_cannot_start_on_the_meta_device_are_refused(
    options: dict[str, Any], reported: str, tmp_path: Path
) -> None:
    write_base(str(tmp_path), tied=False, dtype="float32")
    with pytest.raises(ModelError, match=reported):
        open_adapted_model(LORA_OPTIONS | options, str(tmp_path), None, "float32")


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    write_base(str(tmp_path / "base"), tied=False, dtype="float32")
    load_with_peft(STARTS["plain"], str(tmp_path / "base"), None, "float32").save_pretrained(tmp_path / "adapter")
    base, adapter = str(tmp_path / "base"), str(tmp_path / "adapter")
    for reported, options in (
        (r"is \(4, 36\), and that of this base model \(3, 36\)", {"r": 3, "target_modules": "all-linear"}),
        ("has no place for", {"target_modules": ["q_proj"]}),
    ):
        model, weights = open_pretrained(Path(base), config_from_directory(Path(base), {}))
        with pytest.raises(ModelError, match=reported):
            add_adapter(model, weights, build_lora_config(LORA_OPTIONS | options), seed=0, adapter_dir=adapter)
