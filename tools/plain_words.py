"""Refuse words of this project's old private dialect, and report long sentences.

    python tools/plain_words.py                # refused words, with the plain term for each; exit code 1 if there are
    any python tools/plain_words.py --sentences    # also the sentences of documents that have more than 35 words

The words are in plain_words.yaml, next to this file, each with its replacement. They are refused in names, docstrings,
comments, messages and documents. `docs/contribute/glossary.md` has the terms to use.
"""

from __future__ import annotations

import argparse
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
MAX_SENTENCE_WORDS = 35
_CHECKED_SUFFIXES = (".md", ".py", ".pyi", ".yaml", ".yml", ".toml", ".js", ".html")
_SKIPPED_PREFIXES = (
    *("benchmarks/results/", "tests/golden/", "tests/data/", "tools/plain_words"),
    *("LICENSE", "CODE_OF_CONDUCT.md", "plugins/watch/src/meshwright_watch/web/vendor/"),
)


@functools.cache
def load_refused_words() -> dict[str, str]:
    """Return the replacement of each refused word or phrase, in lower case."""
    words: dict[str, str] = yaml.safe_load((ROOT / "tools" / "plain_words.yaml").read_text(encoding="utf-8"))
    return words


@functools.cache
def _compile_pattern() -> re.Pattern[str]:
    """Match a refused phrase as whole words, in prose or as parts of a name such as `test_goes_on`."""
    phrases = sorted(load_refused_words(), key=len, reverse=True)
    alternatives = "|".join(re.escape(phrase).replace(r"\ ", r"[\s_]+") for phrase in phrases)
    return re.compile(rf"(?<![A-Za-z])(?:{alternatives})(?![A-Za-z])", re.IGNORECASE)


def find_refused_words(text: str) -> list[tuple[int, str, str]]:
    """Return line number, refused phrase and replacement for each place in `text`."""
    found = []
    for match in _compile_pattern().finditer(text):
        phrase = re.sub(r"[\s_]+", " ", match[0]).lower()
        found.append((text.count("\n", 0, match.start()) + 1, phrase, load_refused_words()[phrase]))
    return found


def find_long_sentences(markdown: str) -> list[tuple[int, str]]:
    """Return the number of words and the text of each sentence of prose that is too long; tables and code are
    skipped."""
    prose = re.sub(r"```.*?```|<!--.*?-->", "\n\n", markdown, flags=re.DOTALL)
    prose = re.sub(r"(?m)^(?:\s{4,}\S.*|\|.*|#.*)$", "\n", prose)
    prose = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", prose)
    found = []
    for paragraph in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s", prose):
        for sentence in re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split())):
            count = len(sentence.split())
            if count > MAX_SENTENCE_WORDS:
                found.append((count, sentence))
    return found


def list_files() -> list[str]:
    """Return the tracked files that are checked, relative to the repository's root."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [
        name
        for name in listed.splitlines()
        if name.endswith(_CHECKED_SUFFIXES) and not name.startswith(_SKIPPED_PREFIXES) and (ROOT / name).is_file()
    ]


def check_files(names: list[str]) -> Iterator[str]:
    """Yield a line for each refused word."""
    for name in names:
        for line, phrase, replacement in find_refused_words((ROOT / name).read_text(encoding="utf-8")):
            yield f"{name}:{line}: {phrase!r}; write {replacement}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sentences", action="store_true", help="report sentences of documents that are too long")
    parser.add_argument("files", nargs="*", help="files to check; all tracked ones by default")
    given = parser.parse_args()
    names = given.files or list_files()
    refused = list(check_files(names))
    for line in refused:
        print(line)
    if given.sentences:
        for name in names:
            if name.endswith(".md") and not name.startswith("docs/reference/proofs/"):
                for count, sentence in find_long_sentences((ROOT / name).read_text(encoding="utf-8")):
                    print(f"{name}: {count} words: {sentence}")
    return bool(refused)


if __name__ == "__main__":
    sys.exit(main())
