"""What documents show is true: commands are those of the command line, run files are valid, programs run."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import doc_blocks
from support.doc_blocks import ROOT, SHELL, Block, Note, blocks, documents
from typer.main import get_group

import meshwright
from meshwright import RunConfig, get_registry, load_run
from meshwright.base.validation import validated
from meshwright.cli.main import add_commands, app
from meshwright.files.parsing import parse_yaml

ALL = [block for document in documents() for block in blocks(document)]
NEEDS_NO_NOTE = {*SHELL, "python", "yaml", "toml", "json", "text"}


@pytest.fixture(scope="module")
def cli() -> Any:
    if "pipeline" not in get_group(app).commands:
        add_commands(app, get_registry())
    return get_group(app)


def of(*languages: str) -> list[Block]:
    return [block for block in ALL if block.language in languages]


def run_by_tests(document: str) -> list[Block]:
    """What the page itself asks to be run."""
    return [
        block
        for block in blocks(document)
        if block.language in (*SHELL, "python") and block.note.kind in ("run", "run with")
    ]


def test_every_block_is_of_a_known_kind_or_says_why_it_is_not_run() -> None:
    unknown = [str(block) for block in ALL if block.language not in NEEDS_NO_NOTE and block.note == Note()]
    assert not unknown, "put <!-- not run: why --> above them; see tests/support/doc_blocks.py"
    assert len(ALL) > 90


def test_files_that_are_said_to_run_a_block_name_its_page() -> None:
    for block in ALL:
        if block.note.kind == "run by":
            path, _, test = block.note.text.partition("::")
            source = (ROOT / path).read_text(encoding="utf-8")
            page = Path(block.document)
            assert page.name in source or page.stem in source, block
            assert not test or f"def {test}(" in source, block


def test_python_is_python_and_its_names_of_ours_are_public() -> None:
    for block in of("python"):
        tree = ast.parse(block.text.replace("...)", "*())"), filename=str(block))
        used = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mw"
        }
        assert used <= set(dir(meshwright)), block


def test_toml_and_json_are_what_they_say() -> None:
    for block in of("toml"):
        tomllib.loads(block.text)
    for block in of("json"):
        json.loads(block.text)


# -- the command line


def meshwright_arguments(block: Block) -> Iterator[list[str]]:
    """Arguments of each call of the command line in a shell block."""
    for words in block.commands:
        if Path(words[0]).name == "meshwright":
            yield words[1:]
        elif "meshwright" in words and (words[words.index("meshwright") - 1] == "-m" or words[0] == "srun"):
            yield words[words.index("meshwright") + 1 :]


CALLS = [(block, arguments) for block in of(*SHELL) for arguments in meshwright_arguments(block)]


def test_commands_parse_with_their_options(cli: Any) -> None:
    assert len(CALLS) > 40
    for block, arguments in CALLS:
        check_call(cli, block, arguments)


def check_call(cli: Any, block: Block, arguments: list[str]) -> None:
    command, rest = cli, list(arguments)
    while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"{block}: there is no command {rest[0]!r}"
        command = command.commands[rest.pop(0)]
    try:
        command.make_context("meshwright", rest)
    except Exception as error:  # click's, whose module is typer's own affair
        if type(error).__name__ != "Exit":
            raise AssertionError(f"{block}: meshwright {' '.join(arguments)}: {error}") from error


def test_files_that_commands_name_exist_and_their_settings_are_valid() -> None:
    checked = 0
    for block, arguments in CALLS:
        for word in arguments:
            if re.match(r"(examples|benchmarks|tests|docs|plugins)/", word):
                assert (ROOT / word).exists(), f"{block}: {word}"
        settings = [after for word, after in itertools.pairwise(arguments) if word == "--set"]
        if arguments[:1] in (["train"], ["plan"], ["launch"]) and settings:
            named = [ROOT / word for word in arguments if word.endswith(".yaml") and (ROOT / word).is_file()]
            load_run(*(named or [ROOT / "examples" / "stdlib.yaml"]), [each for each in settings if "..." not in each])
            checked += 1
    assert checked > 5


def test_other_commands_name_what_is_there() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for block in of(*SHELL):
        for program, *words in block.commands:
            if program == "make":
                assert {word for word in words if "=" not in word} <= set(targets), block
            elif Path(program).name == "python" and words and words[0].endswith(".py"):
                # Others are a reader's, or of the page.
                assert (ROOT / words[0]).is_file() or block.note.kind != "run", f"{block}: {words[0]}"


def test_a_command_with_an_option_that_does_not_exist_is_noticed(cli: Any) -> None:
    wrong = Block("docs/x.md", 1, "sh", "meshwright plan run.yaml --wrold 8", Note())
    with pytest.raises(AssertionError, match="--wrold"):
        check_call(cli, wrong, next(meshwright_arguments(wrong)))


# -- run files


def run_file_of(block: Block) -> dict[str, Any] | None:
    """What a block gives a run file; None where it is of something else."""
    values = parse_yaml(block.text)
    ours = isinstance(values, dict) and values.keys() & RunConfig.model_fields.keys()
    return dict(values) if ours else None


def check_run_file(block: Block) -> None:
    values = run_file_of(block)
    assert values is not None, f"{block} is no run file: put <!-- not run: what it is --> above it"
    rest = {"model": {"model_type": "llama"}, "batch_size": 8, **({} if "epochs" in values else {"steps": 9})}
    validated(RunConfig, {**rest, **values}, where=str(block))


def test_run_files_are_valid() -> None:
    given = [block for block in of("yaml") if block.note == Note()]
    assert len(given) > 8
    for block in given:
        check_run_file(block)


def test_a_run_file_with_a_misspelt_key_is_noticed() -> None:
    wrong = Block("docs/x.md", 1, "yaml", "strategy: fsdp2\ntp_sise: 2\n", Note())
    with pytest.raises(meshwright.ConfigError, match="tp_size"):
        check_run_file(wrong)


# -- programs

PAGES = [document for document in documents() if run_by_tests(document)]
QUICK = [*(f"docs/how/{name}.md" for name in ("axes", "mesh", "parity", "pieces", "pipelines"))]
RUNNER = """
import json, subprocess, sys
names = {"__name__": "__main__"}
for language, text, where in json.load(open(sys.argv[1], encoding="utf-8")):
    print(f"-- {where}", flush=True)
    if language == "python":
        exec(compile(text, where, "exec"), names)
    else:
        subprocess.run(["bash", "-euo", "pipefail", "-c", text], check=True)
"""
TAKES = re.compile(r"^(.*\bmeshwright (?:train|plan|pipeline show)\b[^#\n>|&]*)", flags=re.MULTILINE)


def program(block: Block) -> str:
    text = block.text.replace("\\\n", " ")
    return TAKES.sub(rf"\1 {block.note.text} ", text) if block.note.kind == "run with" else block.text


@pytest.mark.parametrize(
    "document",
    [pytest.param(page, marks=pytest.mark.slow if page in QUICK else pytest.mark.zoo) for page in PAGES],
)
def test_a_page_runs_from_its_top_to_its_end(document: str, tmp_path: Path) -> None:
    for name in ("examples", "benchmarks", "tests", "docs", "plugins", "core", "constraints.txt", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    steps = [(block.language, program(block), str(block)) for block in run_by_tests(document)]
    (tmp_path / "steps.json").write_text(json.dumps(steps), encoding="utf-8")
    (tmp_path / "runner.py").write_text(RUNNER, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "runner.py", "steps.json"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def test_pages_are_run_in_their_order_with_names_and_files_kept(tmp_path: Path) -> None:
    steps = [
        ("python", "x = 1\nopen('a', 'w').write('2')", "1"),
        ("sh", 'test "$(cat a)" = 2', "2"),
        ("python", "x", "3"),
    ]
    (tmp_path / "steps.json").write_text(json.dumps(steps), encoding="utf-8")
    run = [sys.executable, "-c", RUNNER, "steps.json"]
    subprocess.run(run, cwd=tmp_path, check=True)
    steps[1] = ("sh", 'test "$(cat a)" = 3', "2")
    (tmp_path / "steps.json").write_text(json.dumps(steps), encoding="utf-8")
    assert subprocess.run(run, cwd=tmp_path, capture_output=True, check=False).returncode


# -- the package of docs/write-a-strategy.md


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of docs/write-a-strategy.md, as installing them would leave them."""
    directory = tmp_path_factory.mktemp("write_a_strategy")
    text = (ROOT / "docs" / "write-a-strategy.md").read_text(encoding="utf-8")
    for path, content in re.findall(r"^`(flat/[^`]+)`:\n\n```\w+\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        file = directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    source = directory / "flat" / "src"
    (source / "flat" / "__init__.py").touch()
    project = tomllib.loads((directory / "flat" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    installed = source / f"flat-{project['version']}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Name: flat\nVersion: {project['version']}\n", encoding="utf-8")
    points = project["entry-points"]["meshwright"]
    (installed / "entry_points.txt").write_text(
        "[meshwright]\n" + "".join(f"{name} = {path}\n" for name, path in points.items()), encoding="utf-8"
    )
    return directory


def with_flat(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(directory / "flat" / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=900, check=False
    )


def printed_in_the_guide(beginning: str) -> str:
    (found,) = (block for block in blocks("docs/write-a-strategy.md") if block.text.startswith(beginning))
    return found.text.rstrip("\n")


@pytest.mark.slow
def test_the_strategy_of_the_guide_is_listed_and_refuses_what_it_shows(flat: Path) -> None:
    assert printed_in_the_guide("flat\n") in with_flat(flat, "meshwright", "strategies").stdout
    change = ["--set", "strategy=flat", "--set", "strategy_config.bucket=2"]
    refused = with_flat(flat, "meshwright", "train", str(ROOT / "examples" / "stdlib.yaml"), *change)
    assert refused.returncode == 2
    assert printed_in_the_guide("error: ") in refused.stderr


@pytest.mark.slow
def test_the_tests_of_the_strategy_of_the_guide_pass(flat: Path) -> None:
    done = with_flat(flat, "pytest", "-q", "-p", "no:cacheprovider", "flat")
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.zoo
def test_the_strategy_of_the_guide_passes_the_suite(flat: Path) -> None:
    done = with_flat(flat, "meshwright", "check", "flat", "--ranks", "2")
    assert done.returncode == 0, done.stdout[-3000:]


def test_notes_and_blocks_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doc_blocks, "ROOT", tmp_path)
    text = (
        "# A\n\n<!-- each python block run by: tests/docs/test_docs.py -->\n\n```python\nx = 1\n```\n\nText.\n\n"
        "<!-- not run: it waits\nfor ever -->\n\n"
        "    meshwright train run.yaml \\\n        --set steps=2 > log  # why\n\n"
        "<!-- run with: --set steps=1 -->\n```sh\nA=1 meshwright train run.yaml && ls\n```\n\n    steps: 3\n"
    )
    (tmp_path / "a.md").write_text(text, encoding="utf-8")
    python, shown, run, values = blocks("a.md")
    assert (python.language, python.note, python.line) == ("python", Note("run by", "tests/docs/test_docs.py"), 5)
    assert (shown.language, shown.note) == ("shell", Note("not run", "it waits for ever"))
    assert shown.commands == [["meshwright", "train", "run.yaml", "--set", "steps=2"]]
    assert run.commands == [["meshwright", "train", "run.yaml"], ["ls"]]
    assert program(run) == "A=1 meshwright train run.yaml  --set steps=1 && ls\n"
    assert (values.language, values.note) == ("yaml", Note())
    assert yaml.safe_load(values.text) == {"steps": 3}
