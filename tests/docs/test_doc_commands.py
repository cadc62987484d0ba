"""What documents show is true: commands are those of the command line, run files are valid, programs run."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.doc_blocks import ROOT, SHELL, CodeBlock, Note, find_documents, parse_blocks
from typer.main import get_group

import meshwright
from meshwright import RunConfig, get_registry, load_run
from meshwright.base.validation import validate_config
from meshwright.cli.main import add_commands, app
from meshwright.files.parsing import parse_yaml

ALL = [block for document in find_documents() for block in parse_blocks(document)]
NEEDS_NO_NOTE = {*SHELL, "python", "yaml", "toml", "json", "text"}


def of(*languages: str) -> list[CodeBlock]:
    return [block for block in ALL if block.language in languages]


def run_by_tests(document: str) -> list[CodeBlock]:
    """What the page itself asks to be run."""
    return [
        block
        for block in parse_blocks(document)
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


def test_blocks_of_each_language_are_what_they_say() -> None:
    for block in of("toml"):
        tomllib.loads(block.text)
    for block in of("json"):
        json.loads(block.text)
    for block in of("python"):
        tree = ast.parse(block.text.replace("...)", "*())"), filename=str(block))
        attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        used = {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "mw"}
        assert used <= set(dir(meshwright)), block


def test_run_files_are_valid() -> None:
    given = [block for block in of("yaml") if block.note == Note()]
    assert len(given) > 8
    for block in given:
        values = parse_yaml(block.text)
        assert values.keys() & RunConfig.model_fields.keys(), f"{block} is no run file: say above it what it is"
        rest = {"model": {"model_type": "llama"}, "batch_size": 8, **({} if "epochs" in values else {"steps": 9})}
        validate_config(RunConfig, {**rest, **values}, where=str(block))


# -- the command line


def meshwright_arguments(block: CodeBlock) -> Iterator[list[str]]:
    """Arguments of each call of the command line in a shell block."""
    for words in block.commands:
        if Path(words[0]).name == "meshwright":
            yield words[1:]
        elif "meshwright" in words and (words[words.index("meshwright") - 1] == "-m" or words[0] == "srun"):
            yield words[words.index("meshwright") + 1 :]


def test_commands_parse_with_their_options_files_and_settings() -> None:
    if "pipeline" not in get_group(app).commands:
        add_commands(app, get_registry())
    calls = [(block, arguments) for block in of(*SHELL) for arguments in meshwright_arguments(block)]
    assert len(calls) > 40
    for block, arguments in calls:
        command: Any = get_group(app)
        rest = list(arguments)
        while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
            assert rest[0] in command.commands, f"{block}: there is no command {rest[0]!r}"
            command = command.commands[rest.pop(0)]
        try:
            command.make_context("meshwright", rest)
        except Exception as error:  # click's, whose module is typer's own affair
            if type(error).__name__ != "Exit":
                raise AssertionError(f"{block}: meshwright {' '.join(arguments)}: {error}") from error
        for word in arguments:
            if re.match(r"(examples|benchmarks|tests|docs|plugins)/", word):
                assert (ROOT / word).exists(), f"{block}: {word}"
        settings = [after for word, after in itertools.pairwise(arguments) if word == "--set"]
        if arguments[:1] in (["train"], ["plan"], ["launch"]) and settings:
            named = [ROOT / word for word in arguments if word.endswith(".yaml") and (ROOT / word).is_file()]
            load_run(*(named or [ROOT / "examples" / "stdlib.yaml"]), [each for each in settings if "..." not in each])


def test_other_commands_name_what_is_there() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for block in of(*SHELL):
        for program, *words in block.commands:
            if program == "make":
                assert {word for word in words if "=" not in word} <= set(targets), block
            elif Path(program).name == "python" and words and words[0].endswith(".py"):
                # Others are a reader's, or of the page.
                assert (ROOT / words[0]).is_file() or block.note.kind != "run", f"{block}: {words[0]}"


# -- programs

PAGES = [document for document in find_documents() if run_by_tests(document)]
QUICK = [*(f"docs/concepts/{name}.md" for name in ("parallel-axes", "mesh", "parity", "checkpoints", "pipelines"))]
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


def program(block: CodeBlock) -> str:
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


# -- the package of docs/guides/write-a-strategy.md


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of docs/guides/write-a-strategy.md, as installing them would leave them."""
    directory = tmp_path_factory.mktemp("write_a_strategy")
    text = (ROOT / "docs" / "guides" / "write-a-strategy.md").read_text(encoding="utf-8")
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
    env = {**os.environ, "PYTHONPATH": str(directory / "flat" / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=900, check=False)


def printed_in_the_guide(beginning: str) -> str:
    (found,) = (block for block in parse_blocks("docs/guides/write-a-strategy.md") if block.text.startswith(beginning))
    return found.text.rstrip("\n")


@pytest.mark.slow
def test_the_strategy_of_the_guide_is_listed_and_refuses_what_it_shows(flat: Path) -> None:
    assert printed_in_the_guide("flat\n") in with_flat(flat, "meshwright", "strategies").stdout
    change = ["--set", "strategy=flat", "--set", "strategy_config.bucket=2"]
    refused = with_flat(flat, "meshwright", "train", str(ROOT / "examples" / "stdlib.yaml"), *change)
    assert refused.returncode == 2
    assert printed_in_the_guide("error: ") in refused.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("pytest", "-q", "-p", "no:cacheprovider", "flat"), marks=pytest.mark.slow, id="its tests"),
        pytest.param(("meshwright", "check", "flat", "--ranks", "2"), marks=pytest.mark.zoo, id="the suite"),
    ],
)
def test_the_strategy_of_the_guide_passes(arguments: tuple[str, ...], flat: Path) -> None:
    done = with_flat(flat, *arguments)
    assert done.returncode == 0, done.stdout[-3000:]


# -- help


def _list_commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if hasattr(command, "commands"):
        for name, each in command.commands.items():
            yield from _list_commands(each, (*words, name))
    else:
        yield words, command


def test_the_help_of_each_command_has_two_examples_that_parse() -> None:
    if "pipeline" not in get_group(app).commands:
        add_commands(app, get_registry())
    commands = list(_list_commands(get_group(app)))
    assert len(commands) > 15
    for words, command in commands:
        examples = re.findall(r"^ *(?:python -m )?meshwright (.*)$", command.help or "", flags=re.MULTILINE)
        assert len(examples) >= 2, words
        for example in examples:
            arguments = shlex.split(example.partition(" > ")[0])
            assert tuple(arguments[: len(words)]) == words, example
            command.make_context("meshwright", arguments[len(words) :])
        for option in command.params:
            assert getattr(option, "help", None), (words, option.name)
