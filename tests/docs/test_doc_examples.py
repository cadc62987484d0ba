"""What the documents print is true: code blocks run, the example is the file, named tests and paths exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from meshwright import get_registry
from meshwright.testing import Case
from meshwright_run.data.tokenizer import train_tokenizer
from meshwright_testing import pool
from meshwright_testing.case import Outcome, rank_microbatches
from meshwright_testing.models import build_tiny_model
from meshwright_testing.parity import build_manager, find_max_difference, run_reference, train_case

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"


def find_block(page: Path, text: str) -> str:
    """Return the only Python block of `page` that holds `text`."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    (block,) = [each for each in blocks if text in each]
    return block


LOOP = find_block(ROOT / "README.md", "mw.open_world() as world")
TRAINER = find_block(ROOT / "README.md", "MeshSFTTrainer(")
OBJECTIVE = find_block(GUIDES / "write-an-objective.md", "def policy_loss(")
PRETRAINED = find_block(GUIDES / "python-api.md", "mw.from_pretrained(")
STRATEGY = find_block(GUIDES / "write-a-strategy.md", "class PlainManager(")
CONFORMANCE = find_block(GUIDES / "write-a-strategy.md", 'conformance("flat")')


@pytest.mark.slow
def test_the_loop_runs_and_the_loss_falls() -> None:
    loop = ROOT / "examples" / "training_loop.py"
    assert loop.read_text(encoding="utf-8").split('"""\n\n', 1)[1] == LOOP
    launchers = ((), ("-m", "torch.distributed.run", "--nproc-per-node", "2"))
    commands = ([sys.executable, *launcher, loop] for launcher in launchers)
    runs = [subprocess.run(each, capture_output=True, text=True, timeout=240, check=True) for each in commands]
    losses, on_two_ranks = ([float(line.split()[3]) for line in run.stdout.splitlines()] for run in runs)
    assert losses == pytest.approx(on_two_ranks, abs=2e-4)
    assert len(losses) == 10
    assert losses[-1] < losses[0]


def _minimized_as_in_the_readme() -> tuple[float, float]:
    names: dict[str, Any] = {}
    exec(OBJECTIVE, names)
    manager = build_manager("fsdp2", {}, {"cp_size": 2}, Case())
    batch = rank_microbatches(Case(), 0, manager.mesh.data_rank, manager.mesh.data_size)[0]
    loss, entropy = names["step"](manager, batch, torch.ones(batch["labels"].shape, dtype=torch.float64))
    return float(loss), float(entropy)


@pytest.mark.slow
def test_an_objective_is_minimized_as_the_readme_does_it() -> None:
    for loss, entropy in pool(2).run(_minimized_as_in_the_readme):
        # Ratios are 1, so that the loss is minus the mean advantage.
        assert loss == pytest.approx(-1.0, abs=1e-12)
        assert 4.0 < entropy < 4.9


def _load_as_in_the_readme(path: str) -> tuple[str, str]:
    names: dict[str, Any] = {}
    exec(PRETRAINED.replace("path/to/model", path).replace("open_world()", "open_world('cpu')"), names)
    return str(names["manager"].mesh.degrees), str(next(names["manager"].model_parts[0].parameters()).dtype)


@pytest.mark.slow
def test_a_pretrained_model_is_loaded_as_the_readme_does_it(tmp_path: Path) -> None:
    build_tiny_model().save_pretrained(tmp_path)
    for degrees, dtype in pool(2).run(_load_as_in_the_readme, str(tmp_path)):
        assert "tp=2" in degrees.replace(" ", "")
        assert dtype == "torch.bfloat16"


def _train_as_in_the_readme(directory: str) -> list[float]:
    names: dict[str, Any] = {}
    options = f'output_dir="{directory}/out", max_steps=3, logging_steps=1, use_cpu=True, bf16=False, report_to=[]'
    source = TRAINER.replace('output_dir="out"', options).replace("2048", "32")
    exec(
        source.replace("path/to/model", f"{directory}/model").replace("chats.jsonl", f"{directory}/chats.jsonl"), names
    )
    return [each["loss"] for each in names["trainer"].state.log_history if "loss" in each]


@pytest.mark.slow
def test_a_trainer_of_trl_trains_as_the_readme_does_it(tmp_path: Path) -> None:
    texts = ["".join(chr(97 + (row * place) % 26) for place in range(40)) for row in range(24)]
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    train_tokenizer(texts, 257).save_pretrained(tmp_path / "model")
    model = build_tiny_model()
    model.resize_token_embeddings(257)
    model.save_pretrained(tmp_path / "model")
    losses, others = pool(2).run(_train_as_in_the_readme, str(tmp_path))
    assert len(losses) == 3
    assert losses == others
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not torch.equal(trained.get_input_embeddings().weight, model.get_input_embeddings().weight)


def _parity_of_block(source: str, case: Case) -> Outcome:
    plugin = types.ModuleType("plain_plugin")
    exec(compile(source, "README.md", "exec"), plugin.__dict__)
    if "plain" not in get_registry().strategies:
        get_registry().register(plugin, name="plain_plugin")
    return train_case("plain", {}, {}, case)


@pytest.mark.parametrize(
    "case",
    [
        Case(microbatches=3, tied=True),
        pytest.param(Case(model_type="routed", route="ranks"), marks=pytest.mark.slow),
        pytest.param(Case(frozen=("*proj*",)), marks=pytest.mark.slow),
    ],
)
def test_the_strategy_of_the_readme_reaches_parity(case: Case) -> None:
    found = find_max_difference(pool(4).run(_parity_of_block, STRATEGY, case), run_reference(case))
    assert found.worst <= 1e-9, found


def test_linked_paths_exist() -> None:
    patterns = ("*.md", "changelog.d/*.md", "docs/**/*.md", "plugins/*/README.md", "examples/*/README.md")
    documents = (each for pattern in patterns for each in ROOT.glob(pattern))
    missing = [
        f"{document.relative_to(ROOT)}: {target}"
        for document in documents
        for target in re.findall(r"\]\((?!https:)([^)#]+)\)", document.read_text(encoding="utf-8"))
        if not (document.parent / target).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("plugin", ["fsdp2", "ddp", "megatron_fsdp", "pipeline"])
def test_option_tables_name_every_option_and_tests_that_exist(plugin: str) -> None:
    from meshwright import get_strategy

    table = (ROOT / "plugins" / plugin / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| .* \| ((?:`test_\w+`(?:, )?)+) \|$", table, flags=re.MULTILINE)
    assert {option for option, _ in rows} == set(get_strategy(plugin).config_cls.model_fields)
    files = [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("plugins/*/tests/test_*.py")]
    sources = "".join(file.read_text(encoding="utf-8") for file in files)
    for _, tests in rows:
        for test in re.findall(r"test_\w+", tests):
            assert f"def {test}(" in sources, test


def test_install_lines_name_extras_that_there_are_and_no_plugin_twice() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/README.md")]:
        for line in re.findall(r"pip install [^`\n\"]*?-e '?\.\[[^`\n\"]*", path.read_text(encoding="utf-8")):
            assert {*re.findall(r"\.\[(.*?)\]", line)[0].split(",")} <= extras.keys(), line
            # pip takes what an extra names and what is named by its place for two, and refuses.
            assert "-e plugins/" not in line.replace("'", ""), line


@pytest.mark.slow
def test_the_test_of_the_readme_tries_every_cell() -> None:
    names: dict[str, Any] = {}
    exec(CONFORMANCE.replace('"flat"', '"ddp"'), names)
    (mark,) = names["test_conformance"].pytestmark
    assert list(map(str, mark.args[1])) == list(map(str, names["conformance"]("ddp")))
    names["test_conformance"](mark.args[1][0])
