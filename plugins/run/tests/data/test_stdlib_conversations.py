"""Conversations of Python's own library: what is asked, what is answered, and always the same."""

from __future__ import annotations

import itertools
import sysconfig
from pathlib import Path

import pytest
from support.chat_templates import build_tokenizer, decode_supervised_spans

from meshwright_run.data.config import SourceConfig
from meshwright_run.data.encoder import Encoder
from meshwright_run.data.sources import read_records
from meshwright_run.data.stdlib_conversations import iter_stdlib_records

ROOT = Path(sysconfig.get_paths()["stdlib"])
SOURCE = '''"""A module.

It has a second paragraph, which is read since the first one is short: what is asked for is to be worth an answer.
"""

def first(a, /, *, b=1):
    """Do this
    and that, at some length, so that nothing more is needed to make it an answer of its own.

    More than is needed.
    """

def _private():
    """Not shown."""

def first():
    """The other platform's."""

class Thing:
    """A thing which
    is here.

        >>> Thing()
    """

    def act(self, b):
        """Act.

        >>> Thing().act(1)
        """

    async def wait(self, *, long=True):
        """Wait for the thing."""

class _Hidden:
    def shown(self):
        """Not shown either."""
'''


def found(source, module="pack/mod.py", source_format="messages"):
    return list(iter_stdlib_records(source, ROOT / module, source_format))


def test_docstrings_answer_questions_about_their_names():
    values = found(SOURCE)
    answers = {where: value["messages"][1]["content"] for value, where in values}
    assert answers == {
        "pack/mod.py:1": "A module.\n\nIt has a second paragraph, which is read since the first one is short: what is "
        "asked for is to be worth an answer.",
        "pack/mod.py:6": "Do this and that, at some length, so that nothing more is needed to make it an answer of its "
        "own.",
        "pack/mod.py:19": "A thing which is here.",
        "pack/mod.py:32": "Wait for the thing.",
    }
    questions = [value["messages"][0]["content"] for value, _ in values]
    for question, name in zip(
        questions, ("pack.mod", "pack.mod.first", "pack.mod.Thing", "pack.mod.Thing.wait"), strict=True
    ):
        assert name in question
        assert "self" not in question


def test_topics_of_the_reference_are_read_and_private_modules_are_not():
    topics = (
        "topics = {'assert': 'The \"assert\" statement\\n**********************\\n\\nIt states what must hold.\\n'}\n"
    )
    [(value, _)] = found(topics, "pydoc_data/topics.py")
    assert value["messages"][1]["content"] == "It states what must hold."
    assert found(SOURCE, "pack/_mod.py") == []
    assert found("def f(:\n", "pack/mod.py") == []
    [(value, _)] = found('def join(a, *p):\n    """Join two or more."""\n', "posixpath.py")
    assert "os.path.join" in value["messages"][0]["content"]


def test_prompts_and_completions_are_made_as_well():
    values = found(SOURCE, source_format="prompt_completion")
    both = [(v["messages"][0]["content"] + "\n", v["messages"][1]["content"]) for v, _ in found(SOURCE)]
    assert [(value["prompt"], value["completion"]) for value, _ in values] == both


@pytest.mark.slow
def test_a_source_of_conversations_is_the_library():
    chosen = build_tokenizer("llama3", "llama3")
    records = list(itertools.islice(read_records(SourceConfig(files="stdlib", format="messages")), 200))
    documents, counts = Encoder(chosen, "messages").encode(records)
    assert (counts.records, counts.documents) == (200, 200)
    for one, [document] in zip(records, documents, strict=True):
        answer = one.fields["messages"][1]["content"]
        assert decode_supervised_spans(chosen, document) == [f"{answer}<|eot_id|>"]
