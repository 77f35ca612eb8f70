"""Llama 3: `{"name": "f", "parameters": {"a": 1}}`, several separated by `;`, all the answer or what follows `<|python_tag|>`."""

from __future__ import annotations

from collections.abc import Sequence

from sidestream.text.lark import quoted
from sidestream.text.tools.events import held_back
from sidestream.text.tools.grammar import Special, leading_calls, object_of
from sidestream.text.tools.parser import JsonCallParser
from sidestream.text.tools.tool import Tool

TAG = "<|python_tag|>"


class LlamaParser(JsonCallParser):
    needs_arguments = True  # the answer to a question may well be an object with a name

    def _start(self, final: bool) -> None:
        """Only space has come."""
        self._object_or_text(self._pending.lstrip(), final)

    def _text(self, final: bool) -> None:
        at = self._pending.find(TAG)
        if at >= 0:
            self._content(at)
            self._open(len(TAG))
        else:
            self._content(len(self._pending) - (0 if final else held_back(self._pending, TAG)))

    def _after_object(self, final: bool) -> None:
        text = self._pending.lstrip()
        self._object_or_text(text[1:].lstrip() if text.startswith(";") else text, final)

    def _object_or_text(self, text: str, final: bool) -> None:
        """`text` is what comes behind all that may stand before an object."""
        before = len(self._pending) - len(text)
        if text.startswith(TAG):
            self._open(before + len(TAG))
        elif text.startswith("{"):
            self._open(before)
        elif final or not TAG.startswith(text):
            self._step = self._text


def llama_rules(tools: Sequence[Tool], *, parallel: bool, free: bool, special: Special) -> list[str]:
    calls = f"object ({quoted('; ')} object)*" if parallel else "object"
    return [*leading_calls(calls, "{", free=free), object_of(tools, "parameters", free=free)]
