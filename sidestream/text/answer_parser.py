"""From the text of an answer to its parts: reasoning first, then content and calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sidestream.text.detokenizer import Detokenizer
from sidestream.text.reasoning import ReasoningFormat, ReasoningParser
from sidestream.text.tools.events import Content, Event, Reasoning
from sidestream.text.tools.parser import CallParser

if TYPE_CHECKING:
    from sidestream.text.tokenizer import Tokenizer


class AnswerParser:
    """Reads one answer. `verbatim`: reasoning stays in the content, as the model wrote it; calls in it are none."""

    def __init__(self, reasoning: ReasoningFormat | None, calls: CallParser | None, *, inside: bool, verbatim: bool) -> None:
        self._reasoning = None if reasoning is None else ReasoningParser(reasoning, inside=inside, verbatim=verbatim)
        self._calls = calls
        self._verbatim = verbatim

    def feed(self, text: str) -> list[Event]:
        return self._read([Content(text)] if self._reasoning is None else self._reasoning.feed(text))

    def finish(self) -> list[Event]:
        """The rest: nothing more comes."""
        events = [] if self._reasoning is None else self._read(self._reasoning.finish())
        return events if self._calls is None else events + self._calls.finish()

    def _read(self, events: Iterable[Event]) -> list[Event]:
        read: list[Event] = []
        for event in events:
            if isinstance(event, Reasoning):
                read.append(Content(event.text) if self._verbatim else event)
            elif isinstance(event, Content) and self._calls is not None:
                read += self._calls.feed(event.text)
            elif not isinstance(event, Content) or event.text:
                read.append(event)
        return read


class ReasoningCounter:
    """Counts the tokens of an answer that are reasoning, with the markers around it."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], format: ReasoningFormat, *, inside: bool) -> None:
        self.tokens = 0
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special_tokens=False)
        self._parser = ReasoningParser(format, inside=inside, verbatim=True)
        self._waiting = 0  # tokens of which it is not decided what they are
        self._over = False

    def feed(self, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            if self._over:
                return
            self._waiting += 1
            events = self._parser.feed(self._detokenizer.feed((token,)))
            if any(isinstance(event, Reasoning) for event in events):
                self.tokens, self._waiting = self.tokens + self._waiting, 0
            self._over = self._parser.over
