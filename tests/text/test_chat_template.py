"""Chat templates: rendering as transformers renders, and clear refusals."""

from __future__ import annotations

import warnings
from datetime import datetime
from typing import Any

import pytest

from sidestream.errors import InvalidRequest, ModelError
from sidestream.text.chat_template import ChatTemplate
from sidestream.text.tokenizer import Tokenizer

USER: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
# Reads content as text or as parts, calls of tools and their results.
RICH = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.content is string %}[{{ message.role }}]{{ message.content }}
    {%- elif message.content %}[{{ message.role }}]{% for part in message.content %}{{ part.text }}{% endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}<{{ call.function.name }} {{ call.function.arguments | tojson }}>{% endfor %}
{%- endfor %}
{%- if tools %}{{ tools | tojson(indent=1) }}{% endif %}"""


def template(source: str | None) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>", model="tiny")


def test_default_models_template(metadata: dict[str, Any], tokenizer: Tokenizer) -> None:
    made = ChatTemplate(metadata["tokenizer.chat_template"], bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    prompt = system + "<|im_start|>user\nHi<|im_end|>\n"
    assert made.render(USER) == prompt + "<|im_start|>assistant\n"
    assert made.render(USER, add_generation_prompt=False) == prompt
    chat = [{"role": "system", "content": "Be brief."}, *USER, {"role": "assistant", "content": "Hello, "}]
    begun = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello, "
    assert made.render(chat, add_generation_prompt=False, continue_final_message=True) == begun
    ids = tokenizer.encode_chat(made.render(USER))
    assert ids[:3] == [1, 9690, 198]  # the template's own `<|im_start|>`, which is BOS, once
    assert len(ids) == 31
    # Content as parts, for a template that knows only text.
    assert made.render([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]) == made.render(USER)


def test_parts_tools_and_calls() -> None:
    made = template(RICH)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert made.render([{"role": "user", "content": parts}]) == "<s>[user]ab"
    call: dict[str, Any] = {"type": "function", "function": {"name": "f", "arguments": '{"z": 1, "a": "é<"}'}}
    chat: list[dict[str, Any]] = [*USER, {"role": "assistant", "tool_calls": [call]}]
    assert made.render(chat) == '<s>[user]Hi<f {"z": 1, "a": "é<"}>'  # order kept, nothing escaped
    assert call["function"] == {"name": "f", "arguments": '{"z": 1, "a": "é<"}'}  # the caller's own is not touched
    call["function"]["arguments"] = "not json"
    assert made.render(chat) == '<s>[user]Hi<f "not json">'
    assert made.render(USER, tools=[{"b": 1, "a": [True]}]) == '<s>[user]Hi[\n {\n  "b": 1,\n  "a": [\n   true\n  ]\n }\n]'


def test_features_of_transformers_environment() -> None:
    assert template("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}").render(
        [*USER, *USER]
    ) == ("Hi")
    assert template("  {% if true %}\nx\n  {% endif %}\ny").render(USER) == "x\ny"
    assert template("{% generation %}{{ eos_token }}{% endgeneration %}{{ thinking }}").render(USER, thinking="yes") == "</s>yes"
    assert template("{{ strftime_now('%Y') }}").render(USER) == str(datetime.now().year)
    assert template("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}").render(USER) == "2"
    assert template("{{ documents is none }} {{ tools is none }}").render(USER) == "True True"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].name + 'x' }}", "no attribute 'name'"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ messages.append(1) }}", "attribute 'append' of 'list' object is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set ns = namespace(_x=1) %}", "_x"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)
def test_errors_of_a_template_are_the_requests(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        template(source).render(USER)
    assert caught.value.param == "messages"
    assert "tiny" in str(caught.value)


def test_no_template_and_a_broken_one() -> None:
    with pytest.raises(InvalidRequest, match="tiny has no chat template") as caught:
        template(None).render(USER)
    assert caught.value.hint == "Send a prompt instead: generate(...) in Python, no --chat on the command line."
    with pytest.raises(ModelError, match=r"tiny does not parse, line 2"):
        template("x\n{% if %}")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ("Hi", "messages"),
        ({"role": "user", "content": "Hi"}, "messages"),
        ([], "messages"),
        (["Hi"], "messages[0]"),
        ([*USER, {"content": "Hi"}], "messages[1].role"),
        ([{"role": 1, "content": "Hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["Hi"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "Hi", "extra": object()}], "messages[0].extra"),
    ],
)
def test_malformed_messages(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        template(RICH).render(messages)
    assert caught.value.param == param


def test_continuing_the_final_message() -> None:
    def continued(source: str, chat: Any = USER, **extra: Any) -> str:
        return template(source).render(chat, **{"add_generation_prompt": False, "continue_final_message": True, **extra})

    spaced = [{"role": "assistant", "content": "Hi "}]
    assert continued("<{{ messages[-1].content }}>", spaced) == "<Hi "
    assert continued("<{{ messages[-1].content | trim }}>", spaced) == "<Hi"
    assert continued(RICH, [{"role": "assistant", "content": [{"type": "text", "text": "ab"}]}]) == "<s>[assistant]ab"
    with pytest.raises(InvalidRequest, match="leaves out"):
        continued("<{{ messages[0].role }}>")
    with pytest.raises(InvalidRequest, match="no text to continue"):
        continued(RICH, [{"role": "assistant", "content": None, "tool_calls": []}])
    with pytest.raises(InvalidRequest) as caught:
        continued(RICH, add_generation_prompt=True)
    assert caught.value.param == "continue_final_message"


@pytest.mark.slow
def test_like_transformers_on_other_templates() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("transformers")
        from transformers.utils.chat_template_utils import render_jinja_template

    chats: list[list[dict[str, Any]]] = [
        USER,
        [*USER, {"role": "assistant", "content": " x \n"}],
        [{"role": "user", "content": [{"type": "text", "text": "p"}]}],
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"b": "ž", "a": {}}}}]
    extras: list[dict[str, Any]] = [{"tools": tools}, {"continue_final_message": True, "add_generation_prompt": False}]
    for chat in chats:
        for extra in extras:
            theirs = render_jinja_template([chat], chat_template=RICH, bos_token="<s>", eos_token="</s>", **extra)
            assert template(RICH).render(chat, **extra) == theirs[0][0]
