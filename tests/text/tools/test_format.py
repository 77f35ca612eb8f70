"""Which format a chat template teaches."""

from __future__ import annotations

import pytest

from sidestream.errors import ConfigError
from sidestream.text.tools.format import FORMATS, HERMES, LLAMA, MISTRAL, PYTHONIC, format_of
from sidestream.text.tools.mistral import identified_rules, named_rules

TEMPLATES = [
    ('within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}', HERMES),
    ("<tool_call>\\n<function=example>\\n<parameter=x>", None),
    ("<tool_call>{name}\\n<arg_key>", None),
    ("""{{- '[TOOL_CALLS] [' }}""", MISTRAL),
    ("""'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'""", LLAMA),
    ("{{- '<|python_tag|>' + tool_call.name }}", LLAMA),
    ("in the format of [func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]", PYTHONIC),
    ("{{ messages }}", None),
    (None, None),
]


@pytest.mark.parametrize(("source", "expected"), TEMPLATES)
def test_what_templates_teach(source, expected):
    assert format_of(source) == expected


def test_mistrals_variants():
    assert format_of("[TOOL_CALLS]{{ name }}[ARGS]").rules is named_rules
    assert format_of("[TOOL_CALLS]{{ name }}[CALL_ID]{{ id }}[ARGS]").rules is identified_rules
    assert format_of("[TOOL_CALLS]{{ name }}[ARGS]", "mistral").rules is named_rules


def test_by_name():
    assert format_of(None, "hermes") is HERMES
    assert format_of("<tool_call>", "none") is None
    with pytest.raises(
        ConfigError, match="tool_call_parser: got 'qwen', must be one of auto, none, hermes, llama3_json, pythonic, mistral"
    ):
        format_of(None, "qwen")
    assert list(FORMATS) == ["hermes", "llama3_json", "pythonic", "mistral"]
