"""Chat with a model in the terminal: its chat template, its adapter, and the answer as it is generated.

One process holds the model; several ranks shard it with fsdp2. All ranks then generate the same tokens, since each call
of the sharded model is collective. The first rank reads the lines of the terminal through a pipe of the launching
process.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
import transformers

from meshwright import from_pretrained
from meshwright.plugin import (
    ADAPTER_CONFIG,
    ConfigError,
    echo,
    escape_unprintable,
    export_checkpoint,
    find_model_directory,
    merge_adapter,
    open_world,
    read_adapter_config,
)

from .commands import open_checkpoint_storage
from .data.tokenizer import load_tokenizer
from .evaluate import read_target
from .launch.rank_process import heartbeat
from .output import load_trained_model

if TYPE_CHECKING:
    from torch.distributed import Store
    from transformers import PreTrainedTokenizerBase

    ReadLine = Callable[[], str | None]

_HELP = "/reset starts a new conversation, /system TEXT sets the system message, /exit ends."
_PROMPT = "> "
_TIMEOUT_S = 7 * 86400.0
"""How long ranks wait for a line."""


@dataclass(frozen=True)
class ChatOptions:
    """How answers are generated. `temperature`: 0 for the most likely tokens."""

    system: str | None = None
    max_new_tokens: int = 256
    temperature: float = 0.7
    top_p: float = 0.95
    seed: int = 0


@dataclass(frozen=True)
class ChatModel:
    """A Hugging Face directory of a model or of an adapter, and the base of an adapter."""

    directory: Path
    base: Path | None


@contextmanager
def open_chat_model(target: str, key_file: str | None = None) -> Iterator[ChatModel]:
    """Find the model of a run directory, checkpoint, model directory or Hub id; checkpoints are exported first."""
    values, checkpoint = read_target(target, key_file)
    section = values["model"]
    with tempfile.TemporaryDirectory(prefix="meshwright-chat-") as temporary:
        if checkpoint is not None:
            directory = Path(temporary) / "model"
            export_checkpoint(open_checkpoint_storage(checkpoint, key_file), directory)
        else:
            directory = Path((section.get("peft") or {}).get("adapter") or find_model_directory(section["path"]))
        base = None
        if (directory / ADAPTER_CONFIG).is_file():
            named = section.get("path") or read_adapter_config(directory).base_model_name_or_path
            base = find_model_directory(str(named))
        yield ChatModel(directory, base)


def run_chat(
    target: str, options: ChatOptions, *, nproc: int = 1, key_file: str | None = None, show_traceback: bool = False
) -> int:
    """Chat with a model on `nproc` ranks of this machine, and return the exit code."""
    with open_chat_model(target, key_file) as found:
        if nproc == 1:
            transformers.utils.logging.disable_progress_bar()
            device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            model = load_trained_model(found.directory, found.base).to(device or "cpu")
            chat(model, load_tokenizer(found.directory), options, _read_terminal)
            return 0
        from .launch.local import launch_ranks

        with tempfile.TemporaryDirectory(prefix="meshwright-chat-") as directory:
            if found.base is not None:
                # The ranks load parts of a full model.
                merged = Path(directory) / "merged"
                merge_adapter(found.directory, merged, base=found.base)
                found = ChatModel(merged, None)
            pipe = Path(directory) / "lines"
            os.mkfifo(pipe)
            threading.Thread(target=_copy_lines, args=(sys.stdin, pipe), daemon=True).start()
            return launch_ranks(chat_on_rank, (found, options, pipe), nproc=nproc, show_traceback=show_traceback)


def _read_terminal() -> str | None:
    try:
        return input(_PROMPT)
    except EOFError:
        return None


def _copy_lines(source: TextIO, pipe: Path) -> None:
    # The ranks close the pipe when the conversation ends.
    with suppress(BrokenPipeError), pipe.open("w", encoding="utf-8") as target:
        for line in source:
            target.write(line)
            target.flush()


def chat_on_rank(store: Store | None, found: ChatModel, options: ChatOptions, pipe: Path) -> None:
    """Chat on one of several ranks, which shard the model. Collective."""
    transformers.utils.logging.disable_progress_bar()
    with (
        heartbeat(_TIMEOUT_S, None) as progress,
        open_world(store=store, timeout_s=_TIMEOUT_S) as world,
    ):
        world.progress = progress
        manager = from_pretrained(found.directory, "fsdp2", world=world)
        lines = pipe.open(encoding="utf-8") if world.rank == 0 else None

        def read_line() -> str | None:
            def read() -> str | None:
                if lines is None:
                    return None
                echo(_PROMPT)
                sys.stdout.flush()
                return lines.readline() or None

            return world.run_on_first_rank(read)

        chat(manager.model_parts[0], load_tokenizer(found.directory), options, read_line, prints=world.rank == 0)


def chat(
    model: Any, tokenizer: PreTrainedTokenizerBase, options: ChatOptions, read_line: ReadLine, *, prints: bool = True
) -> None:
    """Answer lines until `read_line` returns None or "/exit"."""
    conversation = Conversation(tokenizer, options.system)
    say = echo if prints else lambda _: None
    if not conversation.has_template:
        say("The tokenizer has no chat template: the model continues each line as text.\n")
    say(f"{_HELP}\n")
    model.eval()
    torch.manual_seed(options.seed)
    while (line := read_line()) is not None and (line := line.strip()) != "/exit":
        if not line or conversation.handle_command(line):
            continue
        try:
            prompt = conversation.encode(line)
            answer = generate_answer(model, tokenizer, prompt, options, TokenPrinter(tokenizer) if prints else None)
        except ConfigError as error:
            say(f"{error}\n")
            continue
        conversation.add(line, answer)


def generate_answer(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompt: torch.Tensor, options: ChatOptions, streamer: Any
) -> torch.Tensor:
    """Generate the tokens that follow a prompt (1, T), int64; raise ConfigError if no position is left for them."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    room = options.max_new_tokens if positions is None else min(options.max_new_tokens, positions - prompt.shape[1])
    if room < 1:
        raise ConfigError(f"the conversation fills all {positions} positions of the model. Start a new one: /reset.")
    sampling: dict[str, Any] = {"do_sample": False}
    if options.temperature:
        sampling = {"do_sample": True, "temperature": options.temperature, "top_p": options.top_p}
    device = next(model.parameters()).device
    with torch.no_grad():
        output = model.generate(
            prompt.to(device),
            attention_mask=torch.ones_like(prompt, device=device),
            max_new_tokens=room,
            pad_token_id=tokenizer.eos_token_id,
            streamer=streamer,
            **sampling,
        )
    tokens: torch.Tensor = output[0, prompt.shape[1] :].cpu()
    return tokens


class TokenPrinter(transformers.TextStreamer):
    """Print an answer as it is generated, with control characters escaped."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        echo(escape_unprintable(text) + "\n" * stream_end)
        sys.stdout.flush()


class Conversation:
    """The messages so far."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system: str | None) -> None:
        self._tokenizer = tokenizer
        self.has_template = tokenizer.chat_template is not None
        self._reset(system)

    def _reset(self, system: str | None) -> None:
        self._system = system
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def handle_command(self, line: str) -> bool:
        """Whether a line was a command."""
        name, _, text = line.partition(" ")
        if name == "/reset":
            self._reset(self._system)
        elif name == "/system":
            self._reset(text.strip() or None)
        return name in ("/reset", "/system")

    def encode(self, text: str) -> torch.Tensor:
        """Return the tokens of the conversation with a further message of the user: int64, (1, T)."""
        if not self.has_template:
            tokens: torch.Tensor = self._tokenizer(text, return_tensors="pt")["input_ids"]
            return tokens
        messages = [*self._messages, {"role": "user", "content": text}]
        try:
            encoded: Any = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        except Exception as error:
            # A template is code of the model's author, and raises what it likes.
            raise ConfigError(f"the chat template refuses the conversation: {error}.") from None
        tokens = encoded["input_ids"]
        return tokens

    def add(self, text: str, answer: torch.Tensor) -> None:
        """Add a message of the user and the tokens of its answer."""
        if self.has_template:
            self._messages.append({"role": "user", "content": text})
            content = self._tokenizer.decode(answer, skip_special_tokens=True)
            self._messages.append({"role": "assistant", "content": content})
