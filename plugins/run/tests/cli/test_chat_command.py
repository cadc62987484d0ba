"""`meshwright chat`: the answers of transformers, with the chat template, the adapter, and several ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.commands import copy_environment, write_run
from support.tiers import mark_mostly_slow
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from meshwright.base.errors import escape_unprintable
from meshwright_run.data.prepare import prepare_data
from meshwright_run.run_file import load_run

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `plain`, `templated`, and `adapter`, an adapter over `templated`."""
    directory = tmp_path_factory.mktemp("models")
    data = prepare_data(load_run(write_run(directory)).data)
    tokenizer = AutoTokenizer.from_pretrained(data.tokenizer_dir)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, initializer_range=0.5, **sizes)
    )
    # Answers of random weights would be broken characters, which a stream of text shows in another way.
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    odd = [token for token, text in enumerate(texts) if not (text.isascii() and text.isprintable()) or ">" in text]
    model.generation_config.suppress_tokens = odd
    for name in ("plain", "templated"):
        model.save_pretrained(directory / name)
        tokenizer.chat_template = None if name == "plain" else TEMPLATE
        tokenizer.save_pretrained(directory / name)
    base = AutoModelForCausalLM.from_pretrained(directory / "templated")
    adapted = get_peft_model(base, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    adapted.save_pretrained(directory / "adapter")
    tokenizer.save_pretrained(directory / "adapter")
    return directory


def chat(directory: Path, lines: str, *options: str) -> str:
    environment = copy_environment()
    words = [sys.executable, "-m", "meshwright", "chat", str(directory), "--max-new-tokens", "8", *options]
    found = subprocess.run(
        words, input=lines, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def expect(directory: Path, messages: list[dict[str, str]]) -> str:
    tokenizer, model = AutoTokenizer.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(directory)
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    text: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


@pytest.mark.parametrize(
    ("name", "nproc"),
    mark_mostly_slow(
        [("templated", "1"), ("templated", "2"), ("adapter", "1"), ("adapter", "2")],
        ("templated", "2"),
        ("adapter", "2"),
    ),
)
def test_the_second_answer_follows_from_the_conversation(models: Path, name: str, nproc: str) -> None:
    directory = models / name
    messages = [{"role": "system", "content": "be odd"}, {"role": "user", "content": "4 is"}]
    first = expect(directory, messages)
    second = expect(directory, [*messages, {"role": "assistant", "content": first}, {"role": "user", "content": "7"}])
    printed = chat(directory, "4 is\n7\n", "--system", "be odd", "--temperature", "0", "--nproc", nproc)
    answers = printed.split("\n> ")[1:]
    assert answers[:2] == [escape_unprintable(each) for each in (first, second)]


@pytest.mark.slow
def test_reset_forgets_and_a_model_without_a_template_continues_text(models: Path) -> None:
    printed = chat(models / "plain", "4 is\n/reset\n\n4 is\n/exit\nnever read\n", "--temperature", "0")
    assert "has no chat template" in printed
    _, first, _, _, second, *rest = printed.split("> ")
    assert first == second
    assert rest in ([], [""])


@pytest.mark.slow
def test_a_full_conversation_says_so_and_continues(models: Path) -> None:
    long = "4 is even, " * 40
    printed = chat(models / "templated", f"{long}\n4 is\n", "--temperature", "0")
    assert "fills all 64 positions of the model. Start a new one: /reset." in printed
    answer = expect(models / "templated", [{"role": "user", "content": "4 is"}])
    assert printed.split("\n> ")[-2] == escape_unprintable(answer)
