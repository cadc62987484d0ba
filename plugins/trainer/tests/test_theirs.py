"""The runner of transformers' own tests, and what those have found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import trainer_cases
from torch import nn
from transformers import TrainingArguments

from meshwright.base.errors import CheckpointError, ModelError
from meshwright.launch.open_world import open_world
from meshwright_trainer import MeshTrainer

FOLDER = Path(__file__).parent
UTILS = """
    import numpy as np
    import torch
    from transformers import PreTrainedConfig, Trainer, TrainingArguments

    class RegressionDataset:
        def __init__(self, length=64):
            self.x = np.arange(length, dtype=np.float32) / length
        def __len__(self):
            return len(self.x)
        def __getitem__(self, i):
            return {"input_x": self.x[i], "labels": 2 * self.x[i] + 3}

    class RegressionModel(torch.nn.Module):
        config = None
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Parameter(torch.zeros(()))
        def forward(self, input_x, labels=None, **_):
            found = self.a * input_x
            return (torch.nn.functional.mse_loss(found, labels), found)

    class AlmostAccuracy:
        pass

    class TrainerIntegrationCommon:
        pass

    def trained(directory, **options):
        args = TrainingArguments(str(directory), max_steps=2, use_cpu=True, **options)
        trainer = Trainer(RegressionModel(), args, train_dataset=RegressionDataset())
        trainer.train()
        return trainer
"""
TESTS = """
    import pytest
    from .trainer_test_utils import trained

    def test_steps(tmp_path):
        assert trained(tmp_path).state.global_step == 2

    def test_whose_trainer(tmp_path):
        assert "MeshTrainer" not in [each.__name__ for each in type(trained(tmp_path)).__mro__]

    def test_refused(tmp_path):
        trained(tmp_path, neftune_noise_alpha=0.4)

    def test_regression(tmp_path):
        assert trained(tmp_path).model.a.dim() == 0 and len(list(trained(tmp_path).model.parameters())) == 1

    def test_of_the_hub():
        raise OSError("no hub")

    @pytest.mark.skip("needs a GPU")
    def test_of_a_gpu():
        pass
"""
VERDICTS = {
    "test_steps": ("passed", "on a causal model"),
    "test_whose_trainer": ("failed", "AssertionError"),
    "test_refused": ("failed", "neftune_noise_alpha=0.4 cannot be honoured"),
    "test_regression": ("not of a text", "scalar parameters"),
    "test_of_the_hub": ("not here", "no hub"),
    "test_of_a_gpu": ("skipped", "needs a GPU"),
}


def test_the_runner_tells_what_fails_with_ours_alone(tmp_path):
    folder = tmp_path / "tests" / "trainer"
    folder.mkdir(parents=True)
    for path in (folder.parent / "__init__.py", folder / "__init__.py"):
        path.write_text("")
    (folder / "trainer_test_utils.py").write_text(textwrap.dedent(UTILS))
    (folder / "test_some.py").write_text(textwrap.dedent(TESTS))
    out = tmp_path / "verdicts.json"
    command = [sys.executable, str(FOLDER / "theirs.py"), str(folder), "--json", str(out)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "6 tests: 1 passed, 2 failed, 1 not of a text, 1 not here, 1 skipped" in done.stdout
    found = json.loads(out.read_text())["verdicts"]
    for name, (verdict, reason) in VERDICTS.items():
        told, why = found[f"test_some.py::{name}"]
        assert told == verdict, name
        assert reason in why, name


def trainer(model, directory):
    args = TrainingArguments(**trainer_cases.arguments(directory, 1, max_steps=1, eval_strategy="no"))
    rows = trainer_cases.Dataset.from_list([{"input_ids": [2, 3, 4, 5]}] * 16)
    return MeshTrainer(model, args, train_dataset=rows, data_collator=trainer_cases.Padded())


def test_a_model_that_another_trainer_has_is_refused(tmp_path):
    with open_world("cpu"):
        model = trainer_cases.model()
        trainer(model, tmp_path).train()
        with pytest.raises(ModelError, match="has been parallelized by another manager already"):
            trainer(model, tmp_path).train()


def test_the_accelerator_unwraps_what_torch_has_wrapped(tmp_path):
    with open_world("cpu"):
        made = trainer(trainer_cases.model(), tmp_path)
        assert made.accelerator.unwrap_model(nn.DataParallel(made.model)) is made.model
        made.train()
        assert made.accelerator.unwrap_model(made.model) is made.model


def test_a_checkpoint_that_is_not_there_is_refused_by_its_name(tmp_path):
    with open_world("cpu"), pytest.raises(CheckpointError, match=r"checkpoint-9' is no checkpoint of a trainer"):
        trainer(trainer_cases.model(), tmp_path).train(str(tmp_path / "checkpoint-9"))
