"""Blocks of code of the documents, and what the documents say of how they are held to be true.

[Note: notes] A plain viewer shows a block as it is. What becomes of it in tests, a comment of HTML above it says:

    <!-- not run: why -->                    shown, and read as far as one can
    <!-- run by: tests/test_x.py -->         that file has a test which runs it
    <!-- run with: --set steps=2 -->         run, with this behind `meshwright train` and the like

and for all blocks of a language on a page, anywhere on it, `<!-- each python block run by: ... -->`. A block without a
note is run: shell and Python from the top of the page to its end, in one directory, the Python with the names of what
came before. YAML is no program: it is validated if it is a run file, or a part of one; else a note says what it is.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "docs/**/*.md", "plugins/*/README.md", "examples/*/README.md")
GENERATED = (
    "docs/decisions",
    "docs/reference/api/README.md",
    "docs/reference/proofs/first-hour.md",
    "docs/reference/proofs/ignored-options.md",
    "docs/reference/proofs/planted-bugs.md",
)
"""Records and tables, in which blocks are quotations."""
SHELL = ("sh", "bash", "shell")
COMMANDS = ["meshwright", "make", "pip", "python", "torchrun", "srun", "mpirun", "git", "automodel", "accelerate"]
"""Of an indented block that begins with one."""
_NOTE = re.compile(r"<!-- (not run|run by|run with): (.+?) -->", flags=re.DOTALL)
_PAGE_NOTE = re.compile(r"<!-- each (\w+) block (not run|run by|run with): (.+?) -->", flags=re.DOTALL)
_HERE_DOCUMENT = re.compile(r"<<'?(\w+)'?\n.*?^\1$", flags=re.MULTILINE | re.DOTALL)
_TAB = re.compile(r"^(?P<title>=== .*\n)(?P<content>(?:^    .*\n|^\n(?=    |\n))+)", flags=re.MULTILINE)
_PIECE = re.compile(
    r"(?P<fence>^```(?P<language>[\w-]*)\n(?P<fenced>(?s:.*?))^```$)|(?P<indented>^\n(?:^    .*\n|^\n(?=    ))+)",
    flags=re.MULTILINE,
)


@dataclass(frozen=True)
class Note:
    """What a document says of a block; see [Note: notes]."""

    kind: str = "run"
    text: str = ""


@dataclass(frozen=True)
class CodeBlock:
    """A block of code, without indentation, and where it begins in the repository, lines from 1."""

    document: str
    line: int
    language: str
    text: str
    note: Note

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"

    @cached_property
    def commands(self) -> list[list[str]]:
        """Words of each command of a shell block, without variables that are set before it."""
        joined = _HERE_DOCUMENT.sub("", self.text.replace("\\\n", " "))
        lines = [shlex.split(line, comments=True) for line in joined.splitlines()]
        return [words for line in lines for part in _split_commands(line) if (words := _strip_variables(part))]


def find_documents() -> list[str]:
    found = [path for pattern in DOCUMENTS for path in sorted(ROOT.glob(pattern))]
    names = [path.relative_to(ROOT).as_posix() for path in found]
    return [name for name in names if not name.startswith(GENERATED)]


def parse_blocks(document: str) -> list[CodeBlock]:
    """The blocks of a document in its order."""
    text = _TAB.sub(_dedent_tab, (ROOT / document).read_text(encoding="utf-8"))
    of_page = {match[1]: Note(match[2], " ".join(match[3].split())) for match in _PAGE_NOTE.finditer(text)}
    found = []
    for match in _PIECE.finditer(text):
        body = match["fenced"] if match["fence"] else textwrap.dedent(match["indented"].lstrip("\n"))
        language = match["language"] if match["fence"] else _guess_language(body)
        before = text[: match.start()].rstrip()
        above = before[before.rfind("\n\n") + 1 :] if before.endswith("-->") else ""
        own = [Note(kind, " ".join(said.split())) for kind, said in _NOTE.findall(above)]
        line = text.count("\n", 0, match.start()) + 1
        note = own[-1] if own else of_page.get("shell" if language in SHELL else language, Note())
        found.append(CodeBlock(document, line, language, body, note))
    return found


def _dedent_tab(match: re.Match[str]) -> str:
    """Return the content of a tab as if it were outside; lines keep their numbers."""
    return match["title"] + re.sub(r"^    ", "", match["content"], flags=re.MULTILINE)


def _guess_language(text: str) -> str:
    """What an indented block is."""
    first = _strip_variables(text.split())
    is_shell = first and Path(first[0]).name in COMMANDS
    return "shell" if is_shell else "yaml" if re.match(r"[a-z_]+:( |\n|$)", text) else ""


def _split_commands(words: list[str]) -> Iterator[list[str]]:
    """What `&&`, `|` and `;` join; what comes after `>` is left out."""
    part: list[str] = []
    for word in words:
        if word in ("&&", "|", ";", "||"):
            yield part
            part = []
        else:
            part.append(word)
    yield part[: part.index(">")] if ">" in part else part


def _strip_variables(words: list[str]) -> list[str]:
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return words
