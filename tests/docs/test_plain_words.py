"""The lint of words: no refused word is left, it finds them in prose and names, and it reports long sentences."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def lint() -> Any:
    spec = importlib.util.spec_from_file_location("plain_words", ROOT / "tools" / "plain_words.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_no_refused_word_is_left(lint: Any) -> None:
    assert list(lint.check_files(lint.list_files())) == []


@pytest.mark.parametrize("words", [("goes", "on"), ("in", "the", "place", "of")])
@pytest.mark.parametrize("joint", [" ", "_", "\n    "])
def test_a_refused_phrase_is_found_in_prose_and_in_names(lint: Any, words: tuple[str, ...], joint: str) -> None:
    phrase = " ".join(words)
    text = f"first line\nA run_{joint.join(words)}_it."
    assert lint.find_refused_words(text) == [(2, phrase, lint.load_refused_words()[phrase])]
    assert lint.find_refused_words(f"x{joint.join(words)} {joint.join(words)}x") == []


def test_long_sentences_are_reported_and_tables_and_code_are_not(lint: Any) -> None:
    sentence = " ".join(["word"] * (lint.MAX_SENTENCE_WORDS + 1))
    assert lint.find_long_sentences(f"Short one. {sentence}.\n") == [(lint.MAX_SENTENCE_WORDS + 1, f"{sentence}.")]
    assert lint.find_long_sentences(f"| {sentence} |\n\n```\n{sentence}\n```\n\n    {sentence}\n") == []


def test_files_that_the_architecture_page_names_exist() -> None:
    page = (ROOT / "docs" / "contribute" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:core|plugins|tests|tools|examples|benchmarks|docs)/[\w./-]+)`", page))
    assert len(named) > 15
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
