"""Only answers are learned, and a line that cannot be used is named."""

import json

import numpy as np
import pytest

from huggingface import chat
from running.errors import UserError

pytest.importorskip("torch", reason="the conformance extra")
pytest.importorskip("transformers", reason="the conformance extra")

from tests.examples import hf_models

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def tokenizer():
    return hf_models.make_tokenizer()


def read(path, tokenizer, *lines):
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return chat.read_examples(path, tokenizer)


def message(role, content):
    return {"role": role, "content": content}


def learned(example, tokenizer):
    return tokenizer.convert_ids_to_tokens(example.tokens[example.learned])


def test_conversations(tokenizer, tmp_path):
    messages = [
        message("system", "be brief"),
        message("user", "what is 1 plus 2 ?"),
        message("assistant", "3"),
        message("user", "plus 4 ?"),
        message("assistant", "is 7"),
        message("user", "is"),  # behind the last answer: nothing of it is kept
    ]
    (example,) = read(tmp_path / "a.jsonl", tokenizer, {"messages": messages, "id": 7})
    written = tokenizer.apply_chat_template(messages[:5], tokenize=False)
    assert example.tokens.tolist() == tokenizer(written)["input_ids"]
    assert learned(example, tokenizer) == ["3", "<im_end>", "\n", "is", "7", "<im_end>", "\n"]
    assert example.length == len(example.tokens) - 1


def test_prompts_and_instructions(tokenizer, tmp_path):
    examples = read(
        tmp_path / "a.jsonl",
        tokenizer,
        {"prompt": "1 plus 2 is", "completion": "3"},
        "",
        {"instruction": "what is", "input": "1 plus 1", "output": "2"},
        {"instruction": "what is 2 ?", "output": "2"},
    )
    assert tokenizer.convert_ids_to_tokens(examples[0].tokens) == [
        "1",
        "plus",
        "2",
        "is",
        "3",
        "<eos>",
    ]
    assert learned(examples[0], tokenizer) == ["3", "<eos>"]
    question = tokenizer.convert_ids_to_tokens(examples[1].tokens)
    assert question[3:10] == ["what", "is", "\n", "\n", "1", "plus", "1"]
    assert learned(examples[2], tokenizer) == ["2", "<im_end>", "\n"]
    assert [example.line for example in examples] == [f"{tmp_path}/a.jsonl:{i}" for i in (1, 3, 4)]


def test_turns_that_change_when_others_follow_are_learned_one_by_one(tmp_path):
    # As in Qwen3, whose template writes an empty thought before the last answer only.
    template = hf_models.TEMPLATE.replace(
        "{{ m['content'] }}",
        "{% if loop.last and m['role'] == 'assistant' %}is {% endif %}{{ m['content'] }}",
    )
    tokenizer = hf_models.make_tokenizer(template)
    turns = [message("user", "1"), message("assistant", "2")]
    examples = read(tmp_path / "a.jsonl", tokenizer, {"messages": turns + turns})
    assert [learned(example, tokenizer) for example in examples] == [
        ["is", "2", "<im_end>", "\n"]
    ] * 2
    assert examples[0].length < examples[1].length


GOOD = json.dumps({"prompt": "1", "completion": "2"})
USER, ANSWER = message("user", "1"), message("assistant", "2")
UNFIT = {
    "no json": ('{"prompt": ', "no JSON (Expecting value"),
    "no object": ([1], "no object; expected {"),
    "typo": ({"prompt": "1", "completon": "2"}, "keys prompt, completon; expected {"),
    "empty": ({}, "keys ; expected {"),
    "number": ({"prompt": 1, "completion": "2"}, "prompt is int, expected text"),
    "no answer": ({"prompt": "1", "completion": ""}, "completion is empty"),
    "no list": ({"messages": "hello"}, "messages is not a list"),
    "no message": ({"messages": [{"role": "user"}]}, "message 1 is not {"),
    "role": ({"messages": [USER, message("bot", "2")]}, "message 2 has role 'bot', expected"),
    "no assistant": ({"messages": [USER]}, "no message has the role 'assistant'"),
    "content": ({"messages": [USER, message("assistant", None)]}, "content is NoneType"),
    "output": ({"instruction": "1", "output": ["2"]}, "output is list, expected text"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_an_unfit_line_is_named(case, tokenizer, tmp_path):
    line, message = UNFIT[case]
    path = tmp_path / "chat.jsonl"
    with pytest.raises(UserError) as error:
        read(path, tokenizer, GOOD, "", line, GOOD)
    assert str(error.value).startswith(f"{path}:3: ")
    assert message in str(error.value)


def test_a_template_is_needed_and_may_refuse(tmp_path):
    conversation = {"messages": [USER, ANSWER]}
    with pytest.raises(UserError, match="jsonl:1: the tokenizer has no chat template: take"):
        read(tmp_path / "a.jsonl", hf_models.make_tokenizer(None), conversation)
    refusing = hf_models.make_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match="the chat template refuses it: roles must alternate"):
        read(tmp_path / "a.jsonl", refusing, conversation)
    other = hf_models.make_tokenizer(
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    with pytest.raises(UserError, match="does not write an answer behind its own generation"):
        read(tmp_path / "a.jsonl", other, conversation)


def test_files_that_cannot_be_read(tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"none.jsonl' cannot be read .*: give a UTF-8 text file"):
        chat.read_examples(tmp_path / "none.jsonl", tokenizer)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="binary' cannot be read"):
        chat.read_examples(tmp_path / "binary", tokenizer)
    with pytest.raises(UserError, match="has no examples: give one JSON object a line"):
        read(tmp_path / "empty.jsonl", tokenizer, "", "")
    with pytest.raises(UserError, match=r"has no tokenizer that transformers can load"):
        chat.load_tokenizer(tmp_path)


def test_the_tokenizer_of_a_directory(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = chat.load_tokenizer(tmp_path)
    text = "what is 1 plus 2 ?"
    np.testing.assert_array_equal(loaded(text)["input_ids"], tokenizer(text)["input_ids"])
