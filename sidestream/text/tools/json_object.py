"""Reads a tool call that is written as a JSON object, while its text comes: what can be told is told at once."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from enum import Enum, auto

SPACE = re.compile(r"[ \t\n\r]*")
IN_STRING = re.compile(r'[^"\\]*')
SCALAR = re.compile(r"[-+.0-9a-zA-Z]*")
SCALARS = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")


class Mark(Enum):
    """What a scanner meets in the object itself; what is inside its values it passes over."""

    KEY = auto()  # its text is `key`
    VALUE = auto()  # one begins with the next character
    VALUE_END = auto()  # of a text, the text is `string`
    END = auto()  # of the object
    ERROR = auto()  # the next character, or the number or word before it, is not JSON


class _Want(Enum):
    """What may come next."""

    OBJECT = auto()
    FIRST_KEY = auto()  # or the end
    KEY = auto()
    COLON = auto()
    FIRST_ITEM = auto()  # or the end
    VALUE = auto()
    COMMA = auto()  # or the end


class ObjectScanner:
    """One pass over the text of a JSON object, in pieces of any size. Characters that a text of JSON must escape pass all the same."""

    def __init__(self) -> None:
        self.key = ""
        self.string: str | None = None
        self._ends: list[str] = []  # the closing brackets of what is open
        self._want = _Want.OBJECT
        self._text: list[str] | None = None  # the pieces of a text that has not ended
        self._escaped = False
        self._scalar: str | None = None  # a number or word that may go on
        self._is_key = False
        self._announced = False  # the value that comes next

    def step(self, text: str, at: int) -> tuple[Mark | None, int]:
        """Go on from `at` to the next mark, and where it is; None at the end of this piece."""
        while at < len(text):
            if self._text is not None:
                mark, at = self._in_text(text, at)
            elif self._scalar is not None:
                mark, at = self._in_scalar(text, at)
            else:
                at = _end(SPACE, text, at)
                if at == len(text):
                    break
                mark, at = self._between(text[at], at)
            if mark is not None:
                return mark, at
        return None, at

    def _in_text(self, text: str, at: int) -> tuple[Mark | None, int]:
        assert self._text is not None
        start = at
        if self._escaped:
            self._escaped = False
            at += 1
        at = _end(IN_STRING, text, at)
        self._text.append(text[start:at])
        if at == len(text):
            return None, at
        if text[at] == "\\":
            self._text.append("\\")
            self._escaped = True
            return None, at + 1
        raw, self._text = "".join(self._text), None
        self._want = _Want.COLON if self._is_key else _Want.COMMA
        if len(self._ends) > 1:
            return None, at + 1
        try:
            self.string = json.loads(f'"{raw}"', strict=False)
        except ValueError:  # an escape that there is not
            return Mark.ERROR, at
        if not self._is_key:
            return Mark.VALUE_END, at + 1
        assert self.string is not None
        self.key = self.string
        return Mark.KEY, at + 1

    def _in_scalar(self, text: str, at: int) -> tuple[Mark | None, int]:
        assert self._scalar is not None
        end = _end(SCALAR, text, at)
        self._scalar += text[at:end]
        if end == len(text):
            return None, end
        if SCALARS.fullmatch(self._scalar) is None:
            return Mark.ERROR, end
        self._scalar, self.string, self._want = None, None, _Want.COMMA
        return (Mark.VALUE_END if len(self._ends) == 1 else None), end

    def _between(self, character: str, at: int) -> tuple[Mark | None, int]:
        want = self._want
        if want is _Want.OBJECT:
            return self._opened("}", _Want.FIRST_KEY, at) if character == "{" else (Mark.ERROR, at)
        if character in "]}" and want in (_Want.COMMA, _Want.FIRST_KEY if character == "}" else _Want.FIRST_ITEM):
            return self._closed(character, at)
        if want in (_Want.KEY, _Want.FIRST_KEY) and character == '"':
            return self._text_begun(at, is_key=True)
        if want is _Want.COLON and character == ":":
            self._want = _Want.VALUE
            return None, at + 1
        if want is _Want.COMMA and character == ",":
            self._want = _Want.KEY if self._ends[-1] == "}" else _Want.VALUE
            return None, at + 1
        if want in (_Want.VALUE, _Want.FIRST_ITEM):
            return self._value(character, at)
        return Mark.ERROR, at

    def _value(self, character: str, at: int) -> tuple[Mark | None, int]:
        if len(self._ends) == 1 and not self._announced:
            self._announced = True
            return Mark.VALUE, at
        self._announced = False
        if character == "{":
            return self._opened("}", _Want.FIRST_KEY, at)
        if character == "[":
            return self._opened("]", _Want.FIRST_ITEM, at)
        if character == '"':
            return self._text_begun(at, is_key=False)
        if character in "-0123456789tfn":
            self._scalar = ""
            return None, at
        return Mark.ERROR, at

    def _text_begun(self, at: int, *, is_key: bool) -> tuple[None, int]:
        self._text, self._is_key = [], is_key
        return None, at + 1

    def _opened(self, end: str, want: _Want, at: int) -> tuple[None, int]:
        self._ends.append(end)
        self._want = want
        return None, at + 1

    def _closed(self, character: str, at: int) -> tuple[Mark | None, int]:
        if self._ends[-1] != character:
            return Mark.ERROR, at
        self._ends.pop()
        self._want, self.string = _Want.COMMA, None
        return (Mark.END if not self._ends else Mark.VALUE_END if len(self._ends) == 1 else None), at + 1


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None, "it matches nothing, too"
    return found.end()


class CallReader:
    """A call as an object with the tool's name and its arguments, in either order. Other keys say nothing.

    `begun`: the name is one of `names` and the arguments are an object, as far as it has come; from then on it is a call whatever comes.
    `failed`: it is not one, or if it has begun, not JSON. `done`: the object has ended. `within`: the arguments have not.
    """

    def __init__(self, names: Collection[str], *, needs_arguments: bool) -> None:
        self.name: str | None = None
        self.failed = self.done = self.within = False
        self._names = names
        self._needs_arguments = needs_arguments
        self._scanner = ObjectScanner()
        self._has_arguments = False
        self._arguments: list[str] = []

    @property
    def begun(self) -> bool:
        return self.name is not None and self._has_arguments

    def taken(self) -> str:
        """The new text of the arguments."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def read(self, text: str, at: int) -> int:
        """Go on from `at`; where it stopped: at the end of the text, behind the object, or at what fails."""
        while not self.failed and not self.done:
            start = at
            mark, at = self._scanner.step(text, at)
            if self.within:
                self._arguments.append(text[start:at])
            if mark is None:
                break
            self._met(mark, text[at : at + 1])
        return at

    def _met(self, mark: Mark, character: str) -> None:
        key = self._scanner.key
        if mark is Mark.ERROR:
            self.failed = True
        elif mark is Mark.VALUE and key in ("arguments", "parameters") and not self._has_arguments:
            self._has_arguments = self.within = character == "{"
            self.failed = not self.within
        elif mark is Mark.VALUE_END and self.within:
            self.within = False
        elif mark is Mark.VALUE_END and key == "name" and self.name is None:
            self.name = self._scanner.string
            self.failed = self.name not in self._names
        elif mark is Mark.END:
            self._ended()

    def _ended(self) -> None:
        if not self._has_arguments and not self._needs_arguments:
            self._has_arguments = True
            self._arguments.append("{}")
        self.done, self.failed = self.begun, not self.begun


class ArgumentsReader:
    """The object of the arguments, of a call whose name stands before it: as `CallReader`, begun from the start."""

    begun = True

    def __init__(self, name: str) -> None:
        self.name: str | None = name
        self.failed = self.done = False
        self.within = True
        self._scanner = ObjectScanner()
        self._arguments: list[str] = []

    def taken(self) -> str:
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def read(self, text: str, at: int) -> int:
        while not self.failed and not self.done:
            start = at
            mark, at = self._scanner.step(text, at)
            self._arguments.append(text[start:at])
            if mark is None:
                break
            self.failed, self.done = mark is Mark.ERROR, mark is Mark.END
        return at
