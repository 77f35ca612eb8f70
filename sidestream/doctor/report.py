"""A report that is complete whatever is broken: each question is asked by itself, and a failure is an answer."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import wrap
from typing import Any, NamedTuple, TypeVar

from sidestream.errors import SidestreamError

T = TypeVar("T")
WIDTH, NAMES = 132, 14  # columns of the text, and those of them for the names of facts


class Fact(NamedTuple):
    """An answer in words for people, and as a JSON value for programs."""

    words: str
    value: Any


class Report:
    """Facts in sections, and what somebody should do something about."""

    def __init__(self) -> None:
        self.sections: dict[str, dict[str, Fact]] = {}
        self.problems: list[str] = []

    def tell(self, section: str, name: str, question: Callable[[], Fact]) -> None:
        self.ask(section, name, lambda: (None, question()))

    def ask(self, section: str, name: str, question: Callable[[], tuple[T, Fact]]) -> T | None:
        """Keep the answer, and return what goes with it; None if there is no answer, which is a problem."""
        try:
            value, fact = question()
        except SidestreamError as error:
            reason = error.one_line()
            self.add_problem(reason)
        except Exception as error:  # a machine can be broken in any way
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            self.add_problem(f"{name}: {reason}")
        else:
            self.sections.setdefault(section, {})[name] = fact
            return value
        self.sections.setdefault(section, {})[name] = Fact(f"unknown: {reason}", {"error": reason})
        return None

    def add_problem(self, words: str) -> None:
        if words not in self.problems:
            self.problems.append(words)

    def as_json(self) -> dict[str, Any]:
        values = {title: {name.replace(" ", "_"): fact.value for name, fact in facts.items()} for title, facts in self.sections.items()}
        return {**values, "problems": self.problems}

    def as_text(self) -> str:
        lines: list[str] = []
        for title, facts in self.sections.items():
            lines += [title, *(line for name, fact in facts.items() for line in _indented(name, fact.words)), ""]
        lines += ["problems", *(line for problem in self.problems or ["none"] for line in _indented("", problem, 0))]
        return "\n".join(lines)


def _indented(name: str, words: str, names: int = NAMES) -> list[str]:
    first = f"  {name:<{names}}"
    return wrap(words, WIDTH, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False) or [first.rstrip()]
