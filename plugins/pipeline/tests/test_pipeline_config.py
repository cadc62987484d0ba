"""Options of `pipeline`: what is taken, what is refused, and the numbers that follow."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright import ConfigError
from meshwright.base.validation import validate_config
from meshwright_pipeline.config import PipelineConfig, compute_num_microbatches, compute_num_stages, resolve_schedule


def config(**values):
    return validate_config(PipelineConfig, values, where="config")


def test_each_field_is_described_and_defaults_are_those_of_the_reference():
    given = {name: value for name, value in PipelineConfig().to_dict().items() if value is not None}
    assert given == {
        "pp_schedule": "1f1b",
        "pp_microbatch_size": 1,
        "pp_batch_size": 1,
        "patch_inner_model": True,
        "patch_causal_lm_model": True,
        "patch_stage_backward_maybe_with_nosync": False,
        "scale_grads_in_schedule": False,
    }
    assert len(PipelineConfig.model_fields) == 14
    assert all(field.description for field in PipelineConfig.model_fields.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", torch.bfloat16])
def test_dtype_is_reported_by_its_plain_name(dtype):
    assert config(dtype=dtype).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"pp_schedule": "1f1c"}, "'1f1c' is unknown"),
        ({"pp_schedule": None}, "pp_schedule=None needs a file. Set pp_schedule_csv"),
        ({"pp_schedule": "PipelineScheduleMulti"}, "needs a file"),
        ({"pp_schedule": "gpipe", "pp_schedule_csv": "a.csv"}, "are two schedules. Set one"),
        ({"round_virtual_stages_to_pp_multiple": "up"}, "acts only with layers_per_stage"),
        ({"round_virtual_stages_to_pp_multiple": "nearest", "layers_per_stage": 2}, "'up' or 'down'"),
        ({"layers_per_stage": 2, "module_fqns_per_model_part": [["a"]]}, "both split the model. Set one"),
        ({"layers_per_stage": 0}, "layers_per_stage: .*greater than or equal to 1"),
        ({"pp_microbatch_size": 0}, "pp_microbatch_size: .*greater than or equal to 1"),
        ({"pp_batch_size": 6, "pp_microbatch_size": 4}, "pp_microbatch_size=4. Use one of 1, 2, 3, 6"),
        ({"module_fqns_per_model_part": []}, "at least one stage"),
        ({"module_fqns_per_model_part": [["a"], []]}, "each stage at least one module"),
        ({"dtype": "int8"}, "must be one of float64, float32, bfloat16, as"),
        ({"dtype": torch.int64}, "must be one of float64"),
        ({"loss_fn": 3}, "must be a callable, or the import path of one"),
        ({"loss_fn": "os.system"}, "its module is not on the allow-list"),
        ({"pp_seq_len": 0}, "pp_seq_len"),
        ({"pp_shedule": "1f1b"}, "unknown key. Did you mean 'pp_schedule'"),
    ],
)
def test_what_is_refused(values, text):
    with pytest.raises(ConfigError, match=text):
        config(**values)


@pytest.mark.parametrize("values", [{}, {"pp_schedule": None}, {"pp_schedule": "PipelineScheduleSingle"}])
def test_a_file_may_stand_alone_or_under_the_name_that_torch_has_for_it(values):
    assert config(pp_schedule_csv="a.csv", **values).pp_schedule_csv == "a.csv"


# -- stages

UP, DOWN = {"round_virtual_stages_to_pp_multiple": "up"}, {"round_virtual_stages_to_pp_multiple": "down"}


@pytest.mark.parametrize(
    ("values", "layers", "ranks", "stages"),
    [
        ({}, 4, 4, 4),
        ({"pp_schedule": "interleaved1f1b"}, 9, 4, 8),
        ({"pp_schedule": "zbv"}, 8, 2, 4),
        ({"layers_per_stage": 2}, 8, 4, 4),
        ({"layers_per_stage": 3}, 10, 4, 4),
        ({"pp_schedule": "interleaved1f1b", "layers_per_stage": 2}, 11, 3, 6),
        ({"pp_schedule": "interleaved1f1b", "layers_per_stage": 2, **UP}, 13, 4, 8),
        ({"layers_per_stage": 2, **DOWN}, 13, 4, 4),
        ({"module_fqns_per_model_part": [["a"], ["b"]]}, 3, 2, 2),
    ],
)
def test_number_of_stages(values, layers, ranks, stages):
    assert compute_num_stages(config(**values), num_layers=layers, pp_size=ranks) == stages


@pytest.mark.parametrize(
    ("values", "layers", "ranks", "text"),
    [
        (
            {"layers_per_stage": 2},
            9,
            4,
            "with 9 blocks gives 5 stages, which is not a multiple of pp_size=4.*'up' or",
        ),
        ({"layers_per_stage": 1}, 8, 4, "8 stages, 2 on each of 4 ranks.*exactly one stage.*layers_per_stage=2"),
        ({"layers_per_stage": 4, "pp_schedule": "interleaved1f1b"}, 8, 2, "1 on each of 2 ranks.*2 or more stages"),
        ({"layers_per_stage": 1, "pp_schedule": "zbv"}, 12, 2, "6 on each of 2 ranks.*exactly 2.*layers_per_stage=3"),
        ({"layers_per_stage": 4, **DOWN}, 8, 4, "fewer stages than pp_size=4.*layers_per_stage to at most 2"),
        ({}, 3, 4, "gives 4 stages, but the model has 3 blocks"),
        ({"pp_schedule": "zbv"}, 5, 4, "gives 8 stages, but the model has 5 blocks"),
        ({"module_fqns_per_model_part": [["a"], ["b"], ["c"]]}, 6, 2, "gives 3 stages, which is not a multiple of pp"),
    ],
)
def test_numbers_of_stages_that_do_not_fit(values, layers, ranks, text):
    with pytest.raises(ConfigError, match=text):
        compute_num_stages(config(**values), num_layers=layers, pp_size=ranks)


@given(layers=st.integers(1, 100), per_stage=st.integers(1, 20), ranks=st.integers(1, 8))
def test_rounding_gives_the_next_multiple(layers, per_stage, ranks):
    def rounded(how):
        options = config(
            pp_schedule="interleaved1f1b", layers_per_stage=per_stage, round_virtual_stages_to_pp_multiple=how
        )
        try:
            return compute_num_stages(options, num_layers=layers, pp_size=ranks)
        except ConfigError:
            return None

    exact = -(-layers // per_stage)
    up, down = rounded("up"), rounded("down")
    for found, distance in ((up, (up or exact) - exact), (down, exact - (down or exact))):
        assert found is None or (found % ranks == 0 and 0 <= distance < ranks)
    assert rounded(None) == (up if exact % ranks == 0 else None)


def test_a_file_says_how_many_stages_there_are_and_where(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("0F0,1F0,,,1B0,0B0\n,,2F0,2B0\n", encoding="utf-8")
    options = config(pp_schedule_csv=str(path))
    assert compute_num_stages(options, num_layers=3, pp_size=2) == 3
    with pytest.raises(ConfigError, match="gives 3 stages, but the model has 2 blocks"):
        compute_num_stages(options, num_layers=2, pp_size=2)


# -- microbatches


@pytest.mark.parametrize(
    ("values", "sequences", "microbatches"),
    [
        ({}, 6, 6),
        ({"pp_microbatch_size": 2}, 6, 3),
        ({"pp_batch_size": 4, "pp_microbatch_size": 2}, 8, 2),
        ({"pp_batch_size": 1, "pp_microbatch_size": 2}, 8, 4),
    ],
)
def test_number_of_microbatches(values, sequences, microbatches):
    assert compute_num_microbatches(config(**values), num_sequences=sequences) == microbatches


def test_sequences_that_do_not_divide():
    for values, text in (
        ({"pp_microbatch_size": 4}, "6 sequences does not divide .*pp_microbatch_size=4. Use one of 1, 2, 3, 6"),
        ({"pp_batch_size": 4}, "6 sequences per step.*pp_batch_size=4. Use one of 1, 2, 3, 6"),
    ):
        with pytest.raises(ConfigError, match=text):
            compute_num_microbatches(config(**values), num_sequences=6)


def test_a_file_says_how_many_microbatches_a_run_has(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("0F0,0F1,0B0,0B1\n", encoding="utf-8")
    assert compute_num_microbatches(config(pp_schedule_csv=str(path), pp_microbatch_size=3), num_sequences=12) == 2
    both = config(pp_schedule_csv=str(path), pp_batch_size=6, pp_microbatch_size=2)
    with pytest.raises(ConfigError, match=r"pp_batch_size=6 is 3 microbatches of 2, but .*own.csv' runs 2"):
        compute_num_microbatches(both, num_sequences=12)
    schedule = resolve_schedule(config(pp_schedule_csv=str(path)), num_ranks=1, num_stages=1, num_microbatches=2)
    assert [str(action) for action in schedule.actions_by_rank[0]] == ["0F0", "0F1", "0B0", "0B1"]
