"""Conversations become tokens with a mask of what is supervised: over templates and tokenizers of well-known kinds."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.chat_templates import (
    DIRECTORY,
    build_conversation,
    build_record,
    build_tokenizer,
    decode_supervised_spans,
    read_template,
)
from transformers import ByT5Tokenizer

from meshwright.base.errors import ConfigError, DataError
from meshwright_run.data.chat_template import read_chat_template
from meshwright_run.data.encoder import Encoder, EncodingCounts

TALK = build_conversation("Hi there", "Hello!", "What is two and two?", "It is four.", system="Be brief.")
UNSYSTEMATIC = TALK[1:]
# Family, template: what is supervised in each document that the conversation becomes.
SUPERVISED = {
    ("chatml", "chatml"): [["Hello!<|im_end|>", "It is four.<|im_end|>"]],
    # No special token ends a turn, but the template's text does.
    ("base", "chatml"): [["Hello!<|im_end|>\n", "It is four.<|im_end|>\n<|endoftext|>"]],
    ("llama2", "llama2"): [["Hello! </s>", "It is four. </s>"]],
    ("llama3", "llama3"): [["Hello!<|eot_id|>", "It is four.<|eot_id|>"]],
    ("llama3", "llama31"): [["Hello!<|eot_id|>", "It is four.<|eot_id|>"]],
    ("gemma", "gemma"): [["Hello!<end_of_turn>", "It is four.<end_of_turn>"]],
    ("llama2", "mistral_v1"): [["Hello!</s>", "It is four.</s>"]],
    # The system prompt moves to the last turn of the user.
    ("tekken", "mistral_tekken"): [["Hello!</s>"], ["It is four.</s>"]],
    ("qwen", "qwen25"): [["Hello!<|im_end|>", "It is four.<|im_end|>"]],
    # Thoughts are written in the last answer alone.
    ("qwen", "qwen3"): [["<think>\n\n</think>\n\nHello!<|im_end|>"], ["<think>\n\n</think>\n\nIt is four.<|im_end|>"]],
    # A text ends with one token more than a turn.
    ("phi3", "phi3"): [["Hello!<|end|>", "It is four.<|end|>"]],
    ("phi4", "phi4"): [["Hello!<|im_end|>", "It is four.<|im_end|>"]],
    ("deepseek", "deepseek_v2"): [[" Hello!<｜end▁of▁sentence｜>", " It is four.<｜end▁of▁sentence｜>"]],
    ("deepseek", "deepseek_r1"): [["Hello!<｜end▁of▁sentence｜>", "It is four.<｜end▁of▁sentence｜>"]],
    ("granite", "granite"): [["Hello!<|end_of_text|>", "It is four.<|end_of_text|>"]],
    ("zephyr", "zephyr"): [["Hello!</s>", "It is four.</s>"]],
    ("command_r", "command_r"): [["Hello!<|END_OF_TURN_TOKEN|>", "It is four.<|END_OF_TURN_TOKEN|>"]],
    ("olmo2", "olmo2"): [["Hello!<|endoftext|>", "It is four.<|endoftext|>"]],
    # The last answer ends otherwise than an earlier one.
    ("harmony", "harmony"): [
        ["<|channel|>final<|message|>Hello!<|return|>"],
        ["<|channel|>final<|message|>It is four.<|return|>"],
    ],
    # Nothing ends a turn.
    ("base", "alpaca"): [["Hello!<|endoftext|>"], ["It is four.<|endoftext|>"]],
}
MARKED = {
    "chatml_marked": ("chatml", "chatml"),
    "llama3_marked": ("llama3", "llama3"),
    "gemma_marked": ("gemma", "gemma"),
    "phi4_marked": ("phi4", "phi4"),
    "granite_marked": ("granite", "granite"),
    "zephyr_marked": ("zephyr", "zephyr"),
    "qwen3_marked": ("qwen", None),
    "smollm3": ("smollm3", None),
}


def encoded(family, name, value, source_format="messages", **options):
    """The documents of one record, and the counts."""
    [documents], counts = Encoder(build_tokenizer(family, name), source_format, **options).encode([build_record(value)])
    return documents, counts


def runs(family, name, value, source_format="messages", **options):
    documents, _ = encoded(family, name, value, source_format, **options)
    return [decode_supervised_spans(build_tokenizer(family, name), each) for each in documents]


# -- templates


@pytest.mark.parametrize(("family", "name"), SUPERVISED, ids=map("-".join, SUPERVISED))
def test_answers_and_what_ends_their_turns_are_supervised(family, name):
    messages = UNSYSTEMATIC if name == "mistral_v1" else TALK
    documents, counts = encoded(family, name, {"messages": messages})
    chosen = build_tokenizer(family, name)
    assert [decode_supervised_spans(chosen, each) for each in documents] == SUPERVISED[family, name]
    text = chosen.decode(documents[-1].tokens)
    assert text.removesuffix("<|endoftext|>" * (family == "base")) == chosen.apply_chat_template(
        messages, tokenize=False, chat_template=read_chat_template(read_template(name)), date_string="26 Jul 2024"
    )
    assert counts == EncodingCounts(
        records=1,
        documents=len(documents),
        tokens=sum(map(len, documents)),
        supervised=sum(int(each.loss_mask.sum()) for each in documents),
    )


@pytest.mark.parametrize("name", MARKED)
def test_marks_are_supervised_as_transformers_reads_them(name):
    family, twin = MARKED[name]
    chosen = build_tokenizer(family, name)
    [document], _ = encoded(family, name, {"messages": TALK})
    text = read_chat_template(read_template(name)).replace("strftime_now('%d %B %Y')", "'26 July 2024'")
    found = chosen.apply_chat_template(TALK, return_assistant_tokens_mask=True, return_dict=True, chat_template=text)
    assert document.tokens.tolist() == found["input_ids"]
    assert document.loss_mask.tolist() == [bool(each) for each in found["assistant_masks"]]
    assert 0 < sum(found["assistant_masks"]) < len(document)
    if twin is not None:
        # Turn by turn the same is found without marks.
        [unmarked], _ = encoded(family, twin, {"messages": TALK})
        assert np.array_equal(unmarked.tokens, document.tokens)
        assert np.array_equal(unmarked.loss_mask, document.loss_mask)


def test_every_template_is_tried():
    tried = {name for _, name in SUPERVISED} | set(MARKED)
    assert tried == {path.stem for path in DIRECTORY.glob("*.jinja")}
    assert len({name for _, name in SUPERVISED}) >= 12


@pytest.mark.parametrize(("family", "name"), [*SUPERVISED, *((family, name) for name, (family, _) in MARKED.items())])
def test_an_answer_stands_behind_the_tokens_that_ask_for_it(family, name):
    """What a model is given when it answers is what stood before each answer that it has supervised."""
    chosen = build_tokenizer(family, name)
    for text in ("Hello!", "\n\nHello!", "  indented"):
        messages = build_conversation("Hi there\n\n", text, "What is two and two?", f"{text}It is four.")
        documents, _ = encoded(family, name, {"messages": messages})
        for document in documents:
            first = int(np.flatnonzero(document.loss_mask)[0])
            asked = 3 if "What is two" in chosen.decode(document.tokens[:first]) else 1
            given = chosen.apply_chat_template(
                messages[:asked],
                add_generation_prompt=True,
                tokenize=False,
                chat_template=_without_clock(name),
                date_string="26 Jul 2024",
            )
            assert document.tokens[:first].tolist() == chosen(given, add_special_tokens=False)["input_ids"]


def _without_clock(name):
    text = read_template(name)
    for form, date in (("%d %B %Y", "26 July 2024"), ("%B %d, %Y", "July 26, 2024")):
        text = text.replace(f"strftime_now('{form}')", f"'{date}'")
    return text


@pytest.mark.parametrize("family", ["base", "qwen"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(st.sampled_from(" \nabc.#\t"), min_size=1, max_size=8), min_size=4, max_size=4))
def test_whatever_is_said_is_supervised_whole_and_alone(family, texts):
    texts = [text if text.strip() else f"a{text}" for text in texts]
    documents, _ = encoded(family, "chatml", {"messages": build_conversation(*texts)})
    chosen = build_tokenizer(family, "chatml")
    whole = chosen.apply_chat_template(build_conversation(*texts), tokenize=False)
    # A tokenizer of sentencepiece drops the space that it has put before a text.
    end = "" if family == "qwen" else "\n"
    said = [f"{text}<|im_end|>{end}" for text in texts[1::2]]
    said[-1] += chosen.eos_token if end else ""
    [document] = documents
    assert chosen.decode(document.tokens).removesuffix(chosen.eos_token if end else "") == whole
    assert [text.removeprefix(" ") for text in decode_supervised_spans(chosen, document)] == [
        text.removeprefix(" ") for text in said
    ]


# -- what templates do with earlier turns


def test_thoughts_that_a_template_forgets_are_supervised_where_it_writes_them():
    messages = build_conversation("Hi there", "Hello!", "What is two and two?", "It is four.")
    messages[1]["reasoning_content"], messages[3]["reasoning_content"] = "A greeting.", "2 + 2."
    assert runs("qwen", "qwen3", {"messages": messages}) == [
        ["<think>\nA greeting.\n</think>\n\nHello!<|im_end|>"],
        ["<think>\n2 + 2.\n</think>\n\nIt is four.<|im_end|>"],
    ]
    documents, _ = encoded("qwen", "qwen3", {"messages": messages})
    assert "A greeting." not in build_tokenizer("qwen", "qwen3").decode(documents[1].tokens)
    assert runs("qwen", "qwen3", {"messages": messages}, loss_on="last_answer") == [
        ["<think>\n2 + 2.\n</think>\n\nIt is four.<|im_end|>"]
    ]
    inline = build_conversation("Hi there", "<think>\nA greeting.\n</think>\n\nHello!")
    assert runs("qwen", "qwen3", {"messages": inline}) == [["<think>\nA greeting.\n</think>\n\nHello!<|im_end|>"]]


def test_a_record_says_what_else_its_template_is_given():
    """Without thinking, the empty thought is in the prompt and not supervised."""
    value = {"messages": build_conversation("Hi there", "Hello!"), "chat_template_kwargs": {"enable_thinking": False}}
    assert runs("qwen", "qwen3", value) == [["Hello!<|im_end|>"]]
    value["chat_template_kwargs"] = '{"enable_thinking": false}'
    assert runs("qwen", "qwen3", value) == [["Hello!<|im_end|>"]]


@pytest.mark.parametrize("loss_on", ["answers", "last_answer"])
def test_calls_of_tools_are_answers(loss_on):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
    messages = [
        {"role": "user", "content": "What is two and two?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is four.", "tool_calls": None},
    ]
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
    found = runs("qwen", "qwen25", {"messages": messages, "tools": tools}, loss_on=loss_on)
    assert found == [[f"{written}<|im_end|>", "It is four.<|im_end|>"][loss_on == "last_answer" :]]
    documents, _ = encoded("qwen", "qwen25", {"messages": messages, "tools": tools})
    assert '"name": "add", "parameters"' in build_tokenizer("qwen", "qwen25").decode(documents[0].tokens)
    as_json = encoded("qwen", "qwen25", {"messages": messages, "tools": json.dumps(tools)})[0]
    assert np.array_equal(as_json[0].tokens, documents[0].tokens)
    assert runs("llama3", "llama31", {"messages": messages, "tools": tools}) == [
        ['{"name": "add", "parameters": {"a": 2, "b": 2}}<|eot_id|>', "It is four.<|eot_id|>"]
    ]
    # Tools stand before the last turn of the user: one document for a single turn.
    assert runs("tekken", "mistral_tekken", {"messages": messages, "tools": tools}) == [
        ['[TOOL_CALLS][{"name": "add", "arguments": {"a": 2, "b": 2}}]</s>', "It is four.</s>"]
    ]


def test_a_tokenizer_may_have_another_template_for_tools():
    chosen = build_tokenizer.__wrapped__("llama3", None)
    chosen.chat_template = {"default": read_template("llama3_marked"), "tool_use": read_template("llama31")}
    tools = [{"type": "function", "function": {"name": "add"}}]
    talk = build_conversation("Hi there", "Hello!")
    found, _ = Encoder(chosen, "messages").encode(
        [build_record({"messages": talk, "tools": each}) for each in (None, tools)]
    )
    assert [decode_supervised_spans(chosen, each[0]) for each in found] == [["Hello!<|eot_id|>"]] * 2
    assert ["Environment: ipython" in chosen.decode(each[0].tokens) for each in found] == [False, True]


def test_a_template_does_not_know_what_day_it_is():
    for family, name in (("granite", "granite"), ("llama3", "llama31"), ("smollm3", "smollm3")):
        documents, _ = encoded(family, name, {"messages": build_conversation("Hi there", "Hello!")})
        assert any(
            date in build_tokenizer(family, name).decode(documents[0].tokens) for date in ("26 Ju", "July 26, 2024")
        )


def test_loss_on_says_which_answers_are_supervised():
    for name in ("llama3", "llama3_marked"):
        last = runs("llama3", name, {"messages": TALK}, loss_on="last_answer")
        assert last == [["It is four.<|eot_id|>"]]
        [document], counts = encoded("llama3", name, {"messages": TALK}, loss_on="all")
        assert document.loss_mask is None
        assert counts.supervised == len(document) - 1


def test_older_names_and_parts_of_messages_are_understood():
    value = {
        "conversations": [
            {"from": "human", "value": "Hi there"},
            {"from": "gpt", "value": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]},
        ]
    }
    fields = {"messages": "conversations", "role": "from", "content": "value"}
    assert runs("llama3", "llama3", value, fields=fields) == [["Hello!<|eot_id|>"]]
    # A greeting that opens a conversation answers nothing.
    value["conversations"].insert(0, {"from": "gpt", "value": "Welcome."})
    assert runs("llama3", "llama3", value, fields=fields) == [["Hello!<|eot_id|>"]]


# -- prompts, completions, preferences


def test_a_prompt_and_its_completion_are_one_text_with_special_tokens_once():
    for prompt, completion in (("Hi there ", "Hello!"), ("Hi there\n\n", "\nHello!"), ("Hi there", " Hello!")):
        for family in ("llama2", "llama3", "base"):
            chosen = build_tokenizer(family, None)
            [document], _ = encoded(family, None, {"prompt": prompt, "completion": completion}, "prompt_completion")
            first = int(np.flatnonzero(document.loss_mask)[0])
            assert document.tokens[:first].tolist() == chosen(prompt)["input_ids"]
            assert document.loss_mask[first:].all()
            assert _decoded(chosen, document) == f"{chosen.bos_token or ''}{prompt}{completion}{chosen.eos_token}"
            written = {"prompt": f"{chosen.bos_token or ''}{prompt}", "completion": completion + chosen.eos_token}
            [again], _ = encoded(family, None, written, "prompt_completion")
            assert _decoded(chosen, again) == _decoded(chosen, document)


def test_a_text_has_special_tokens_as_its_tokenizer_adds_them_and_never_twice():
    for family in ("llama2", "llama3", "base", "olmo2"):
        chosen = build_tokenizer(family, None)
        bos, eos = chosen.bos_token or "", chosen.eos_token
        texts = ["Hi there", f"{bos}Hi there", f"Hi there{eos}", f"{bos}Hi there{eos}"]
        found, counts = Encoder(chosen).encode([build_record({"text": text}) for text in texts])
        assert {_decoded(chosen, each[0]) for each in found} == {f"{bos}Hi there{eos}"}
        assert all(each[0].loss_mask is None for each in found)
        assert counts.documents == 4


def _decoded(chosen, document):
    """Without the space that a tokenizer of sentencepiece puts before a text."""
    return chosen.decode(document.tokens).replace("<s> ", "<s>")


def test_messages_may_be_prompts_and_completions():
    value = {"prompt": TALK[:4], "completion": TALK[4:]}
    assert runs("llama3", "llama3", value, "prompt_completion") == [["It is four.<|eot_id|>"]]
    assert runs("llama3", "llama3_marked", value, "prompt_completion") == [["It is four.<|eot_id|>"]]


@pytest.mark.parametrize("way", ["explicit", "implicit", "both", "named"])
def test_a_pair_answers_one_prompt(way):
    good, bad = [{"role": "assistant", "content": text} for text in ("It is four.", "It is five.")]
    value = {"chosen": [good], "rejected": [bad], "prompt": TALK[:4]}
    if way != "explicit":
        value = {"chosen": [*TALK[:4], good], "rejected": [*TALK[:4], bad]}
    if way == "both":
        value["prompt"] = TALK[:4]
    if way == "named":
        value["prompt"] = TALK[3]["content"]
    [one, other], counts = encoded("llama3", "llama3", value, "preference")
    chosen = build_tokenizer("llama3", "llama3")
    assert [decode_supervised_spans(chosen, each) for each in (one, other)] == [
        ["It is four.<|eot_id|>"],
        ["It is five.<|eot_id|>"],
    ]
    first = int(np.flatnonzero(one.loss_mask)[0])
    assert np.array_equal(one.tokens[:first], other.tokens[:first])
    assert (counts.records, counts.documents) == (1, 2)


def test_a_pair_of_texts_is_kept_whole_or_not_at_all():
    value = {"prompt": "What is two and two? ", "chosen": "It is four.", "rejected": "It is " + "not " * 90}
    found = [
        decode_supervised_spans(build_tokenizer("llama3", None), each)
        for each in encoded("llama3", None, value, "preference")[0]
    ]
    assert found == [[f"{value[side]}<|eot_id|>"] for side in ("chosen", "rejected")]
    documents, counts = encoded("llama3", None, value, "preference", too_long="drop", seq_len=60)
    assert (documents, counts) == ([], EncodingCounts(records=1, dropped=2))
    documents, counts = encoded("llama3", None, value, "preference", too_long="truncate", seq_len=60)
    assert (len(documents), len(documents[1]), counts.documents, counts.truncated) == (2, 60, 2, 1)
    documents, counts = encoded("llama3", None, value, "preference", too_long="truncate", seq_len=8)
    assert (documents, counts) == ([], EncodingCounts(records=1, unsupervised=2))


def test_tokens_are_taken_as_they_are():
    value = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}
    [document], _ = encoded("llama3", None, value, "tokens")
    assert document.tokens.tolist() == [5, 6, 7, 8]
    assert document.loss_mask.tolist() == [False, False, True, True]
    [document], _ = encoded("llama3", None, {"input_ids": [5, 6, 7], "loss_mask": [1, 0, 1]}, "tokens")
    assert document.loss_mask.tolist() == [True, False, True]
    [document], _ = encoded("llama3", None, {"ids": [5, 6, 7]}, "tokens", fields={"input_ids": "ids"})
    assert document.loss_mask.all()
    # Nothing stands before the first token, so it is not supervised.
    documents, counts = encoded("llama3", None, {"input_ids": [5, 6, 7], "loss_mask": [1, 0, 0]}, "tokens")
    assert (documents, counts) == ([], EncodingCounts(records=1, unsupervised=1))


# -- lengths


def test_what_is_too_long_is_cut_dropped_split_or_an_error_and_counted():
    messages = build_conversation("Hi there", "It is four. " * 8)
    whole, _ = encoded("llama3", "llama3", {"messages": messages})
    length = len(whole[0])
    with pytest.raises(DataError, match=rf"chats\.jsonl:1: {length} tokens, but seq_len=40"):
        encoded("llama3", "llama3", {"messages": messages}, seq_len=40)
    [cut], counts = encoded("llama3", "llama3", {"messages": messages}, seq_len=40, too_long="truncate")
    assert np.array_equal(cut.tokens, whole[0].tokens[:40])
    assert (counts.truncated, counts.documents, counts.tokens) == (1, 1, 40)
    documents, counts = encoded("llama3", "llama3", {"messages": messages}, seq_len=40, too_long="drop")
    assert (documents, counts) == ([], EncodingCounts(records=1, dropped=1))
    pieces, counts = encoded("llama3", "llama3", {"messages": messages}, seq_len=40, too_long="split")
    assert np.array_equal(np.concatenate([each.tokens for each in pieces]), whole[0].tokens)
    assert (counts.split, counts.documents) == (1, len(pieces))


@pytest.mark.parametrize("loss_on", ["answers", "last_answer"])
@pytest.mark.parametrize("name", ["llama3", "llama3_marked"])
def test_turns_behind_the_last_answer_are_left_out_and_counted(name, loss_on):
    messages = build_conversation("Hi there", "Hello!")
    _, answered = encoded("llama3", name, {"messages": messages}, loss_on=loss_on)
    [document], counts = encoded(
        "llama3", name, {"messages": [*messages, {"role": "user", "content": "And now?"}]}, loss_on=loss_on
    )
    assert "And now?" not in build_tokenizer("llama3", name).decode(document.tokens)
    assert (answered.trailing_turns, counts.trailing_turns, counts.documents) == (0, 1, 1)


# -- what is wrong with a record


def test_what_is_wrong_with_a_conversation_is_reported_with_its_place():
    user, assistant = build_conversation("Hi there", "Hello!")
    system = {"role": "system", "content": "Be brief."}
    wrong = {
        "empty conversation": [],
        "must hold a list of messages": 3,
        r"turn 1: has no string 'role'.*Its fields: who\. .*fields": [{"who": "user"}],
        r"turn 1: role 'narrator' is not one of system,": [{"role": "narrator", "content": "x"}, assistant],
        r"turn 1: the user has no 'content'": [{"role": "user", "text": "x"}, assistant],
        r"turn 1: its content has the part .*image": [
            {"role": "user", "content": [{"type": "image", "url": "x"}]},
            assistant,
        ],
        r"turn 2: empty answer": [user, {"role": "assistant", "content": " "}],
        r"roles out of order: turn 2 has role 'user', after 'user': join the two turns\. Expected: system": [
            user,
            user,
            assistant,
        ],
        r"roles out of order: turn 3 has role 'system', after 'assistant'": [user, assistant, system],
        r"roles out of order: turn 1 has role 'tool', at the start": [
            {"role": "tool", "content": "4"},
            user,
            assistant,
        ],
        r"there is no answer to supervise.*\(roles: system, user\)": [system, user],
    }
    for reason, messages in wrong.items():
        with pytest.raises(DataError, match=rf"\Achats\.jsonl:1: .*{reason}"):
            encoded("llama3", "llama3", {"messages": messages})


MESSAGES = "{% for message in messages %}{{ message.content }}{% endfor %}"
ASKED = build_conversation("a", "b")


@pytest.mark.parametrize(
    ("text", "messages", "reason"),
    [
        (read_template("gemma"), [{"role": "assistant", "content": "a"}, *ASKED], "TemplateError: Conversation roles"),
        (
            MESSAGES.replace("}}", "}").replace("%}{{", "%}\n{{"),
            ASKED,
            "TemplateSyntaxError: .* The error is in line 2: correct chat_template",
        ),
        (
            MESSAGES.replace("content", "name.first"),
            ASKED,
            "UndefinedError: 'dict object' has no attribute 'name'.*chat_template_kwargs",
        ),
        (
            "{% for message in messages if message.role != 'system' %}{{ message.content }};{% endfor %}",
            build_conversation("a", "b", system="Be brief."),
            r"the chat template leaves out the content of turn 1 \(system",
        ),
        (
            f"{{% generation %}}{{% endgeneration %}}{MESSAGES}",
            ASKED,
            "empty answer: .* {% generation %} tags",
        ),
        (
            read_template("deepseek_r1").replace("if think_first else ''", ""),
            ASKED,
            r"cannot find where the answer of turn 2 starts: .* writes '<think>\\n'",
        ),
    ],
)
def test_what_a_template_cannot_write_is_reported_with_its_place(text, messages, reason):
    with pytest.raises(DataError, match=rf"(?s)\Achats\.jsonl:1: .*{reason}"):
        encoded("deepseek", None, {"messages": messages}, chat_template=text)


def test_what_a_template_does_not_know_of_is_not_lost_in_silence():
    tools = [{"type": "function", "function": {"name": "add"}}]
    with pytest.raises(DataError, match=r"leaves out the tool 'add'\."):
        encoded("llama3", "llama3", {"messages": build_conversation("Hi there", "Hello!"), "tools": tools})
    call = {"role": "assistant", "content": "So: ", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    messages = [
        *build_conversation("Hi there"),
        call,
        {"role": "tool", "content": "4"},
        *build_conversation("", "It is four.")[1:],
    ]
    with pytest.raises(DataError, match=r"leaves out the tool_calls of turn 2\."):
        encoded("llama3", "llama3", {"messages": messages})
    with pytest.raises(DataError, match=r"leaves out the content of turn 3 \(tool\)"):
        encoded("deepseek", "deepseek_r1", {"messages": messages}, loss_on="last_answer")


@pytest.mark.parametrize("name", ["llama3", "llama3_marked"])
def test_what_ends_a_turn_is_not_there_twice(name):
    for messages in (
        build_conversation("Hi there", "Hello!<|eot_id|>"),
        build_conversation("Hi there<|eot_id|>", "Hello!"),
    ):
        with pytest.raises(DataError, match=r"turn [12] ends with .*<\|eot_id\|>', but the chat template writes"):
            encoded("llama3", name, {"messages": messages})


@pytest.fixture(scope="module")
def in_python():
    """A tokenizer that tells no places of tokens, and adds an eos token to whatever it is called with."""
    made = ByT5Tokenizer(extra_ids=0)
    made.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = read_template("chatml")
    return made


def test_a_tokenizer_in_python_needs_no_offsets(in_python):
    [[document]], _ = Encoder(in_python, "messages").encode([build_record({"messages": TALK})])
    assert decode_supervised_spans(in_python, document) == SUPERVISED["chatml", "chatml"][0]
    assert document.tokens.tolist() == in_python.apply_chat_template(TALK)["input_ids"]


def test_an_eos_token_that_the_tokenizer_adds_is_not_added_twice(in_python):
    found, _ = Encoder(in_python).encode([build_record({"text": text}) for text in ("Hi there", "Hi there</s>")])
    assert [in_python.decode(each[0].tokens) for each in found] == ["Hi there</s>"] * 2


@pytest.mark.parametrize(
    ("source_format", "value", "reason"),
    [
        ("text", {"texts": "x"}, r"no field 'text'\. .*texts\. Did you mean 'texts'\?.*fields"),
        (
            "text",
            {"messages": build_conversation("a", "b")},
            r"no field 'text'\. .* Set format: messages, whose fields",
        ),
        (
            "text",
            {"question": "a", "answer": "b"},
            r"Set format: prompt_completion, .*{prompt: question, completion: answer}",
        ),
        ("text", {"text": 3}, "field 'text' holds 3, a int, but must hold a string"),
        ("text", {"text": "a\ud800"}, "an unpaired surrogate"),
        (
            "messages",
            {"messages": build_conversation("a", "b"), "tools": "[{"},
            "field 'tools' holds a string that is not JSON",
        ),
        ("messages", {"messages": build_conversation("a", "b"), "chat_template_kwargs": [3]}, "must hold an object"),
        ("prompt_completion", {"prompt": "a", "completion": ""}, "empty answer: field 'completion' has no text"),
        (
            "preference",
            {"chosen": build_conversation("a", "b"), "rejected": build_conversation("c", "d")},
            "the prompt of chosen and rejected is unknown",
        ),
        (
            "preference",
            {"prompt": "z", "chosen": build_conversation("a", "b"), "rejected": build_conversation("a", "d")},
            "`prompt` is not the",
        ),
        ("tokens", {"input_ids": "abc"}, "'input_ids' holds 'abc', a str, but must hold a list of token ids"),
        ("tokens", {"input_ids": [1, 99999]}, "token 99999 is not in the tokenizer's vocabulary"),
        ("tokens", {"input_ids": [1, 2], "labels": [1]}, "holds 1 values for 2 tokens"),
        ("tokens", {"input_ids": [1, 2], "labels": [2, -100]}, "label 2 of token 0 .* must not be shifted by one"),
        ("tokens", {"input_ids": [1, 2], "loss_mask": [1, 2]}, "loss_mask holds 2"),
    ],
)
def test_what_is_wrong_with_a_record_is_reported_with_its_place(source_format, value, reason):
    with pytest.raises(DataError, match=rf"\Achats\.jsonl:1: .*{reason}"):
        encoded("llama3", "llama3", value, source_format)


def test_a_chat_template_is_text_or_the_path_of_one():
    path = DIRECTORY / "chatml.jinja"
    assert read_chat_template(str(path)) == path.read_text(encoding="utf-8")
    assert read_chat_template("{{ messages }}") == "{{ messages }}"
    with pytest.raises(ConfigError, match=r"chat_template: 'no/such.jinja'"):
        read_chat_template("no/such.jinja")
    with pytest.raises(ConfigError, match=r"the tokenizer has none\. Set data\.chat_template"):
        Encoder(build_tokenizer("llama3", None), "messages")
