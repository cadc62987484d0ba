"""The notebook of the examples runs, and errors and progress look in a notebook as they should."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from support.commands import copy_environment, write_run

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def execute(notebook: Any, directory: Path, *, allow_errors: bool = False) -> list[list[Any]]:
    """Outputs of each code cell of a notebook, run by a kernel in a directory."""
    env = copy_environment()
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        allow_errors=allow_errors,
        resources={"metadata": {"path": str(directory)}},
    )
    client.execute(env={**env, "OMP_NUM_THREADS": "1"})
    return [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]


def read_text(outputs: list[Any]) -> str:
    """Text that a reader sees below a cell."""
    texts = (each.get("text") or each.get("data", {}).get("text/plain", "") for each in outputs)
    return "".join([*texts, *("\n".join(each.traceback) for each in outputs if each.output_type == "error")])


@pytest.mark.slow
def test_the_notebook_of_the_examples_runs(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "stdlib.yaml", tmp_path)
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    for cell in notebook.cells:
        cell.source = cell.source.replace("steps=60", "steps=6").replace('"every": 20', '"every": 3')
    trained, plotted, generated, fitted = map(read_text, execute(notebook, tmp_path))
    assert "step 6/6" in trained
    assert "Run('runs/notebook', step 6 of 6, train_loss=" in trained
    assert "Figure" in plotted
    assert generated.startswith("def ") or "\ndef " in generated
    assert "30/30" in fitted
    assert "StepResult(step=30, num_steps=30, loss=" in fitted


@pytest.mark.slow
def test_an_error_in_a_notebook_begins_with_its_message(tmp_path: Path) -> None:
    write_run(tmp_path)
    notebook = nbformat.v4.new_notebook()
    cells = (
        "import meshwright as mw\ndef build():\n    return mw.OptimizerConfig(lrr=1e-3)\nbuild()",
        'mw.train("run.yaml", {"data.corpus": ["nowhere/*.txt"]})',
    )
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    built, trained = map(read_text, execute(notebook, tmp_path, allow_errors=True))
    assert built.startswith("ConfigError: OptimizerConfig is not valid:\n  lrr: unknown key. Did you mean 'lr'?")
    assert "\nsee docs/troubleshooting.md#configerror\n" in built
    assert "return mw.OptimizerConfig(lrr=1e-3)" in built
    assert "validation.py" not in built
    # The command in another process has reported this one.
    message = "DataError: corpus glob 'nowhere/*.txt' matches no file"
    assert f"{message}. Relative globs start at " in trained
    assert trained.count("matches no file") == 1
