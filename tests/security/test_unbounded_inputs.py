"""Patterns, templates, pipes and devices of others end in a message, and never in a command that does not end."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from security.small_run import write_small_run
from support.commands import run_command

from meshwright._compat import peft as peft_compat
from meshwright.base.errors import ConfigError, DataError, ModelError
from meshwright.checkpoint.storage import read_signing_key
from meshwright.files.parsing import read_regular_file, time_limit
from meshwright.model.adapter import add_adapter
from meshwright.model.configuration import compute_code_digest
from meshwright_run.data import chat_template
from meshwright_run.data.chat_template import ChatTemplate, read_chat_template
from meshwright_run.data.conversations import Conversation
from meshwright_run.data.files import open_decompressed
from meshwright_run.data.prepare import hash_tokenizer_files
from meshwright_run.data.progress import ReadProgress
from meshwright_run.data.tokenizer import train_tokenizer
from meshwright_run.run_logs import get_run_id
from meshwright_run.start import _read_last_step
from meshwright_testing.models import build_tiny_model

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
PATTERN = r"(\w+|\.)*(\w|\.)*(\w|\.)*!"
SLOW = "(.*)" * 6 + "!"
"""A pattern that ends after a second."""

# -- the limit


def test_work_is_ended_after_a_time_and_others_are_not() -> None:
    with pytest.raises(TimeoutError, match=r"the loop took longer than 0\.2 seconds"), time_limit(0.2, "the loop"):
        re.fullmatch(PATTERN, "model.layers.0.self_attn.q_proj")
    with time_limit(0.05, "the loop"):
        pass
    time.sleep(0.1)
    with time_limit(60, "outer"), time_limit(0.01, "inner"):
        # An alarm is set already.
        time.sleep(0.1)

    def elsewhere() -> None:
        with time_limit(0.01, "elsewhere"):
            time.sleep(0.1)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(elsewhere).result()


@pytest.mark.parametrize("marks", ["", "{% generation %}{% endgeneration %}"])
def test_a_template_that_does_not_end_is_refused(marks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_TIMEOUT_S", 0.5)
    template = ChatTemplate(train_tokenizer(["some words"], 300), LOOP + marks)
    conversation = Conversation(({"role": "user", "content": "x"},), (), {}, "a place")
    with pytest.raises(DataError, match=r"the template took longer than 0\.5 seconds"):
        (template.render_with_spans if marks else template.render)(conversation)


@pytest.mark.parametrize("name", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"])
def test_a_pattern_that_does_not_end_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft_compat, "PATTERN_TIMEOUT_S", 0.01)
    options: dict[str, Any] = {"target_modules": ["q_proj"]}
    options[name] = SLOW if name.endswith("modules") else {SLOW: 2}
    adapter = pytest.importorskip("peft").LoraConfig(r=2, **options)
    with pytest.raises(ModelError, match=r"matching its patterns .* took longer than 0\.01 seconds"):
        add_adapter(build_tiny_model("llama"), None, adapter, seed=0)


# -- pipes and devices

READERS: dict[str, Callable[[Path], object]] = {
    "chat template": lambda path: read_chat_template(str(path)),
    "key": lambda path: read_signing_key(path, where="key"),
    "corpus": lambda path: open_decompressed(path, ReadProgress()).__enter__().read(1),
    "code": lambda path: compute_code_digest(path.parent),
    "tokenizer": lambda path: hash_tokenizer_files(path.parent),
    "events": lambda path: get_run_id(path.parent),
    "metrics": lambda path: _read_last_step(path),
    "small file": lambda path: read_regular_file(path),
}
NAMES = {"code": "model.py", "tokenizer": "tokenizer.json", "events": "events.jsonl"}


def _in_time(read: Callable[[Path], object], path: Path) -> None:
    began = time.monotonic()
    with suppress(ConfigError, DataError, ModelError, OSError), time_limit(20, "reading"):
        read(path)
    # Where the limit has ended it, its error is an OSError, too.
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("kind", READERS)
def test_a_pipe_is_not_waited_for_and_a_device_not_read_to_its_end(kind: str, tmp_path: Path) -> None:
    path = tmp_path / NAMES.get(kind, "file.txt")
    os.mkfifo(path)
    _in_time(READERS[kind], path)
    if kind == "code":
        with pytest.raises(ModelError, match=r"model\.py cannot be read: it is no file"):
            compute_code_digest(tmp_path)
    path.unlink()
    path.symlink_to("/dev/zero")
    _in_time(READERS[kind], path)


def test_a_small_file_that_is_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.touch()
    # Without a byte on the disk.
    os.truncate(path, 1 << 34)
    for kind in ("chat template", "key", "small file"):
        with pytest.raises((ConfigError, OSError), match="larger than"):
            READERS[kind](path)


@pytest.mark.slow
def test_commands_refuse_a_pipe(tmp_path: Path) -> None:
    place = tmp_path / "step-00000001"
    place.mkdir()
    os.mkfifo(place / "checkpoint.json")
    run = write_small_run(tmp_path)
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out" / "metrics.jsonl")
    for arguments in (("checkpoint", "show", str(place)), ("train", str(run), "--set", "overwrite=true")):
        done = run_command(*arguments, timeout_s=120)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
