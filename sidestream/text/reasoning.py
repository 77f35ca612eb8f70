"""Reasoning: what a model writes between two markers before it answers, told apart from the answer while the text comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sidestream.errors import ConfigError
from sidestream.text.tools.events import Content, Event, Reasoning, held_back


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers around the reasoning of a model."""

    name: str
    begin: str
    end: str

    def starts_inside(self, prompt_end: str) -> bool:
        """Whether a prompt has opened the reasoning, so that the model goes on inside it: as text, the prompt or its last characters."""
        return prompt_end.rstrip().endswith(self.begin)

    def is_over(self, prompt_end: str) -> bool:
        """Whether a prompt has closed the reasoning, as templates do that are told not to let the model think."""
        return prompt_end.rstrip().endswith(self.end)


FORMATS: Mapping[str, ReasoningFormat] = {
    each.name: each for each in (ReasoningFormat("think", "<think>", "</think>"), ReasoningFormat("mistral", "[THINK]", "[/THINK]"))
}
NAMES = ("auto", "none", *FORMATS)


def reasoning_of(template_source: str | None, name: str = "auto") -> ReasoningFormat | None:
    """The format of a model's reasoning: the one whose end its chat template writes, or the one called `name`. None for a model without.

    Raises ConfigError for a name that is not in NAMES.
    """
    if name not in NAMES:
        raise ConfigError(f"reasoning_parser: got {name!r}, must be one of {', '.join(NAMES)}")
    if name == "auto":
        return next((each for each in FORMATS.values() if each.end in (template_source or "")), None)
    return FORMATS.get(name)


class ReasoningParser:
    """Splits an answer that comes in pieces. The space around the reasoning belongs to the markers.

    Only what an answer begins with is reasoning; a marker anywhere else is text. `inside`: the prompt has opened it.
    `verbatim`: it is kept as the model wrote it, markers and all.
    """

    def __init__(self, format: ReasoningFormat, *, inside: bool, verbatim: bool = False) -> None:
        self._format = format
        self._verbatim = verbatim
        self._inside = inside
        self._pending = ""
        self._step: Callable[[bool], list[Event]] = self._before

    @property
    def over(self) -> bool:
        """Whether what comes next is the answer."""
        return self._step in (self._closed, self._after)

    def feed(self, text: str) -> list[Event]:
        return self._parse(text, final=False)

    def finish(self) -> list[Event]:
        return self._parse("", final=True)

    def _parse(self, text: str, *, final: bool) -> list[Event]:
        self._pending += text
        events: list[Event] = []
        while True:
            step = self._step
            events += step(final)
            if self._step == step:  # it waits for more
                return events

    def _before(self, final: bool) -> list[Event]:
        """Nothing but space has come, or the beginning of the first marker."""
        begin, text = self._format.begin, self._pending.lstrip()
        if not final and len(text) < len(begin) and begin.startswith(text):
            return []
        begun = text.startswith(begin)  # some models open it although the prompt has
        if not begun and not self._inside:
            self._step = self._after
        elif self._verbatim:
            self._step = self._within
        else:
            self._pending, self._step = text.removeprefix(begin), self._opened
        return []

    def _opened(self, final: bool) -> list[Event]:
        """After the marker, before the first word."""
        self._pending = self._pending.lstrip()
        if self._pending:
            self._step = self._within
        return []

    def _within(self, final: bool) -> list[Event]:
        end, text = self._format.end, self._pending
        at = text.find(end)
        if at >= 0:
            self._step = self._after if self._verbatim else self._closed
            cut = at + len(end)
            self._pending = text[cut:]
            return self._reasoning(text[:cut] if self._verbatim else text[:at].rstrip())
        shown = text if final else text[: len(text) - held_back(text, end)]
        shown = shown if self._verbatim else shown.rstrip()
        self._pending = text[len(shown) :]
        return self._reasoning(shown)

    def _closed(self, final: bool) -> list[Event]:
        """After the reasoning, before the answer's first word."""
        self._pending = self._pending.lstrip()
        if self._pending:
            self._step = self._after
        return []

    def _after(self, final: bool) -> list[Event]:
        text, self._pending = self._pending, ""
        return [Content(text)] if text else []

    def _reasoning(self, text: str) -> list[Event]:
        return [Reasoning(text)] if text else []
