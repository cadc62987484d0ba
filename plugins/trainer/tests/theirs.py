"""transformers' own tests of Trainer, against MeshTrainer on one rank.

    python plugins/trainer/tests/theirs.py PATH_TO_TRANSFORMERS/tests/trainer [--strategy fsdp2] [--json FILE]

Each test runs four times: with Trainer and with MeshTrainer, each with the models of the tests (most of them
y = a x + b) and with a small causal model instead of those, and text instead of numbers. It has

    passed          with MeshTrainer, on its own model or on the causal one
    failed          with MeshTrainer, and passes with Trainer on the same model
    not of a text   passes with Trainer on its own model, and not on the causal one: what it tests is y = a x + b
    not here        fails with Trainer, on either model: it needs the hub, a GPU, or a package
    skipped         by itself

What it prints for a failure is the last line of its error. Needs pytest and the package parameterized.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

VERDICTS = ("passed", "failed", "not of a text", "not here", "skipped")
LENGTH, WORDS = 12, 31


def replace_trainer(strategy: str) -> None:
    """Have `transformers.Trainer` be ours, on the layout of one rank."""
    from meshwright_trainer import MeshTrainer

    class Trainer(MeshTrainer):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, mesh={"strategy": strategy}, **kwargs)

    # Under this name alone: what is imported above may have put another module object there.
    sys.modules["transformers"].Trainer = Trainer  # type: ignore[attr-defined]


def replace_models(utils: Any) -> None:
    """Have the regressions of a module be causal models, and their data text in which each word is the one before
    plus one, so that it is learned at once."""
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}

    def number(parameter: Any) -> Any:
        """One for a whole parameter, a tensor as `a` and `b` are."""
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        return whole.detach().square().sum().float()

    class Model(LlamaForCausalLM):
        """Two numbers stand for its parameters, as `a` and `b` do for a regression's."""

        def __init__(self, *_: Any, **__: Any) -> None:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                super().__init__(LlamaConfig(vocab_size=WORDS + 1, pad_token_id=0, tie_word_embeddings=False, **sizes))
            self.double()

        a = property(lambda self: number(self.lm_head.weight))
        b = property(lambda self: number(self.model.norm.weight))

    class Texts:
        def __init__(self, a: Any = 2, b: Any = 3, length: int = 64, seed: int = 42, label_names: Any = None) -> None:
            self.length, self.seed = length, seed
            self.x, self.ys = np.zeros(length), [np.zeros(length)]

        def __len__(self) -> int:
            return self.length

        def __getitem__(self, index: int) -> dict[str, Any]:
            if index >= self.length:
                raise IndexError(index)
            generator = torch.Generator().manual_seed(1000 * self.seed + index)
            first = int(torch.randint(0, WORDS, (1,), generator=generator))
            ids = (first + torch.arange(LENGTH)) % WORDS + 1
            return {"input_ids": ids, "labels": ids.clone()}

    class Guessed:
        def __init__(self, thresh: float = 0.25) -> None:
            pass

        def __call__(self, found: Any) -> dict[str, float]:
            predictions, labels = found
            return {"accuracy": float(np.mean(predictions.argmax(-1)[:, :-1] == labels[:, 1:]))}

    for name in ("Model", "DictModel", "PreTrainedModel", "RandomPreTrainedModel"):
        setattr(utils, f"Regression{name}", Model)
    utils.RegressionPreTrainedModelWithGradientCheckpointing = Model
    utils.RegressionDataset, utils.AlmostAccuracy = Texts, Guessed


def replace_files(utils: Any) -> None:
    """Have the check of a checkpoint's files expect ours, where Trainer writes optimizer.pt and scheduler.pt."""

    def check_saved_checkpoints(
        test: Any, output_dir: str, freq: int, total: int, is_pretrained: bool = True, use_scaler: bool = False
    ) -> None:
        for step in range(freq, total, freq):
            for name in ("model.safetensors", "config.json", "training_args.bin", "trainer_state.json", "mesh"):
                assert (Path(output_dir) / f"checkpoint-{step}" / name).exists(), f"{step} {name}"

    utils.TrainerIntegrationCommon.check_saved_checkpoints = check_saved_checkpoints


class Outcomes:
    """A plugin of pytest that keeps what became of each test, and the last line of its error."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            file, _, test = report.nodeid.partition("::")
            self.found[f"{Path(file).name}::{test}"] = report.outcome, _last_line(report)


def _last_line(report: Any) -> str:
    if report.outcome == "skipped":
        return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
    crash = getattr(report.longrepr, "reprcrash", None)
    return "" if crash is None else crash.message.splitlines()[0]


def one_run(folder: Path, strategy: str | None, *, is_causal: bool, out: Path) -> None:
    """Run all tests once, in this process."""
    import importlib

    import pytest

    warnings.simplefilter("ignore")
    if strategy is not None:
        replace_trainer(strategy)
    root = folder.parents[1]
    sys.path.insert(0, str(root))
    utils = importlib.import_module("tests.trainer.trainer_test_utils")
    if is_causal:
        replace_models(utils)
    if strategy is not None:
        replace_files(utils)
    outcomes = Outcomes()
    options = ["-q", "--tb=short", "-W", "ignore", "-p", "no:cacheprovider", "--noconftest", "-o", "addopts="]
    options += ["--rootdir", str(root), "-c", os.devnull, f"--ignore={folder / 'distributed'}"]
    pytest.main([*options, str(folder)], plugins=[outcomes])
    out.write_text(json.dumps(outcomes.found))


def verdict(runs: dict[str, dict[str, tuple[str, str]]], test: str) -> tuple[str, str]:
    """Of a test in four runs; and why, where it has not passed."""
    nothing = ("failed", "not collected")
    theirs, causal, plain, plain_causal = (
        runs[name].get(test, nothing) for name in ("mesh", "mesh causal", "plain", "plain causal")
    )
    if plain[0] == "skipped":
        return "skipped", plain[1]
    if theirs[0] == "passed":
        return "passed", "on its own model"
    if causal[0] == "passed":
        return "passed", "on a causal model"
    if plain_causal[0] == "failed":
        return ("not here", plain[1]) if plain[0] == "failed" else ("not of a text", theirs[1])
    return "failed", causal[1]


def main() -> None:
    parser = argparse.ArgumentParser(description="transformers' own tests of Trainer, against MeshTrainer on one rank")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--strategy", default="fsdp2")
    parser.add_argument("--json", type=Path, help="where to write the verdicts")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    folder = given.folder.resolve()
    if given.run is not None:
        strategy = given.strategy if "mesh" in given.run else None
        one_run(folder, strategy, is_causal="causal" in given.run, out=given.out)
        return
    runs = {}
    with tempfile.TemporaryDirectory() as directory:
        for name in ("plain", "mesh", "plain causal", "mesh causal"):
            out = Path(directory) / "found.json"
            command = [sys.executable, __file__, str(folder), "--strategy", given.strategy, "--run", name]
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
            log = Path(directory) / "log"
            with log.open("w") as file:
                done = subprocess.run(
                    [*command, "--out", str(out)], cwd=directory, env=environment, stdout=file, stderr=file
                )
            if done.returncode:
                sys.exit(f"run {name!r} ended with {done.returncode}:\n{log.read_text()[-4000:]}")
            runs[name] = json.loads(out.read_text())
            out.unlink()
    verdicts = {test: verdict(runs, test) for test in sorted(set().union(*runs.values()))}
    counts = Counter(each for each, _ in verdicts.values())
    for name in VERDICTS[1:]:
        for test, (each, why) in verdicts.items():
            if each == name:
                sys.stdout.write(f"{name}: {test}\n    {why:.200}\n")
    sys.stdout.write(f"{len(verdicts)} tests: " + ", ".join(f"{counts[name]} {name}" for name in VERDICTS) + "\n")
    if given.json:
        given.json.write_text(json.dumps({"verdicts": verdicts, "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
