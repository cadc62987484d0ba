"""Small tokenizers around the special tokens of well-known models, and chat templates after theirs."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

DIRECTORY = Path(__file__).parents[2] / "plugins" / "run" / "tests" / "data" / "chat_templates"
TEXTS = [
    "Be brief. Hi there Hello! What is two and two? It is four.\n\n",
    "User: Assistant: ### Instruction: ### Response: system user assistant Today's Date: You are a helpful assistant",
    "<tools> <tool_call> <tool_response> <think> </think> <|user|> <|assistant|> <|system|> [INST] [/INST] <<SYS>>\n\n",
    "\n  indented\n\n\n    more. ### ## # ... (a + b) * c = {'name': 'value'}",
] * 3
CHATML = ("<|im_start|>", "<|im_end|>")
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
# Of each family: how text is cut, bos and eos tokens, other special tokens, and tokens that are added but not special.
FAMILIES = {
    "base": ("bytes", None, "<|endoftext|>", (), ()),
    "chatml": ("bytes", None, "<|im_end|>", CHATML, ()),
    "llama2": ("pieces", "<s>", "</s>", (), ()),
    "llama3": ("digits", "<|begin_of_text|>", "<|eot_id|>", HEADERS, ()),
    "gemma": ("pieces", "<bos>", "<eos>", ("<start_of_turn>", "<end_of_turn>"), ()),
    "tekken": (
        "digits", "<s>", "</s>",
        ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
         "[/TOOL_RESULTS]"), (),
    ),
    "qwen": ("digits", None, "<|im_end|>", (*CHATML, "<|endoftext|>"), ("<think>", "</think>", "<tool_call>", "</tool_call>")),
    "phi3": ("pieces", "<s>", "<|endoftext|>", (*ROLES, "<|end|>"), ()),
    "phi4": ("digits", "<|endoftext|>", "<|im_end|>", (*CHATML, "<|im_sep|>"), ()),
    "deepseek": (
        "digits", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", (),
        ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
    ),
    "granite": ("bytes", "<|end_of_text|>", "<|end_of_text|>", ("<|start_of_role|>", "<|end_of_role|>"), ()),
    "zephyr": ("pieces", "<s>", "</s>", (), ()),
    "command_r": (
        "digits", "<BOS_TOKEN>", "<EOS_TOKEN>",
        ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
         "<|SYSTEM_TOKEN|>"), (),
    ),
    "olmo2": ("digits", "<|endoftext|>", "<|endoftext|>", (), ()),
    "smollm3": ("digits", None, "<|im_end|>", CHATML, ("<think>", "</think>")),
    "harmony": (
        "digits", "<|startoftext|>", "<|return|>",
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"), (),
    ),
}  # fmt: skip
_DIGITS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def read_template(name: str) -> str:
    return (DIRECTORY / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def build_tokenizer(family: str, template_name: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of a family, with a template; adds a bos token, if the family has one."""
    kind, bos, eos, special, added = FAMILIES[family]
    made = {
        "bytes": _build_byte_level_tokenizer,
        "digits": _build_byte_level_tokenizer,
        "pieces": _build_sentencepiece_tokenizer,
    }[kind](kind)
    special = list(dict.fromkeys([*((bos,) if bos else ()), eos, *special]))
    made.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in special])
    made.add_tokens([AddedToken(each, special=False, normalized=False) for each in added])
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, made.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=bos,
        eos_token=eos,
        clean_up_tokenization_spaces=False,
        chat_template=None if template_name is None else read_template(template_name),
    )


def _build_byte_level_tokenizer(kind: str) -> Tokenizer:
    """Byte-level BPE, cut as GPT-2's is or, for `digits`, as that of later models."""
    made = Tokenizer(models.BPE())
    made.decoder = decoders.ByteLevel()
    if kind == "digits":
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_DIGITS), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False))
    return made


def _build_sentencepiece_tokenizer(kind: str) -> Tokenizer:
    """BPE as of sentencepiece: a space is put before a text, and what is unknown is written in bytes."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    words = [word for text in TEXTS for word in text.replace("\n", " ").split(" ")]
    made.train_from_iterator(words, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    state = json.loads(made.to_str())
    vocabulary = state["model"]["vocab"]
    for piece in ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]:
        vocabulary[piece] = len(vocabulary)
    return Tokenizer.from_str(json.dumps(state))


def build_record(value: dict, where: str = "chats.jsonl:1") -> SimpleNamespace:
    return SimpleNamespace(fields=value, location=where, error=None)


def build_conversation(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    """Messages of user and assistant in turn."""
    roles = ("user", "assistant") * len(texts)
    found = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return ([{"role": "system", "content": system}] if system else []) + found


def decode_supervised_spans(tokenizer: PreTrainedTokenizerFast, example) -> list[str]:
    """The runs of supervised tokens of a document, decoded."""
    runs, before = [], False
    for token, label in zip(example.tokens.tolist(), example.loss_mask.tolist(), strict=True):
        if label:
            runs.append([*(runs.pop() if before else []), token])
        before = label
    return [tokenizer.decode(run) for run in runs]
