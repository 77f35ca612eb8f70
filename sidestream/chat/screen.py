"""The terminal of a chat: lines are read, answers appear as they come. With rich and prompt-toolkit, if both are there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Protocol

from sidestream.commands.terminal import write

PROMPT, MORE = "> ", "  "
BLOCK = '"""'
# A model's text, or a server's, must not move the cursor or name the window.
CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}")
FENCE = re.compile(r"\s*(```|~~~)")


class Screen(Protocol):
    how_to_write_lines: str

    def read(self) -> str:
        """What the user says. Raises EOFError at Ctrl-D and KeyboardInterrupt at Ctrl-C."""
        ...

    def show(self, text: str) -> None:
        """More of the answer."""
        ...

    def think(self, text: str) -> None:
        """More of what the model says before its answer."""
        ...

    def end(self) -> None:
        """The answer, or what was said before it, is complete or given up."""
        ...

    def note(self, text: str) -> None:
        """A line that is nobody's."""
        ...


def clean(text: str) -> str:
    """Without what a terminal would obey."""
    return text.translate(CONTROLS)


class PlainScreen:
    """`input` and `print`."""

    how_to_write_lines = f"End a line with \\ to go on in the next one, or write several between {BLOCK} and {BLOCK}."

    def __init__(self) -> None:
        self._column = 0  # of the cursor, as far as it matters: 0 is the start of a line
        with suppress(ImportError):  # input() then edits its line, where Python has it
            import_module("readline")

    def read(self) -> str:
        line = input(PROMPT)
        if line.startswith(BLOCK):
            return self._block(line.removeprefix(BLOCK))
        while line.endswith("\\"):
            line = f"{line[:-1]}\n{input(MORE)}"
        return line

    def _block(self, line: str) -> str:
        lines = [line]
        while not lines[-1].endswith(BLOCK):
            lines.append(input(MORE))
        return "\n".join(lines).removesuffix(BLOCK).strip("\n")

    def show(self, text: str) -> None:
        self._print(clean(text))

    def think(self, text: str) -> None:
        self._print(clean(text))

    def _print(self, text: str) -> None:
        if text:
            write(text, end="")
            self._column = 0 if text.endswith("\n") else 1

    def end(self) -> None:
        if self._column:
            write("")
        self._column = 0

    def note(self, text: str) -> None:
        write(f"[{clean(text)}]")


class RichScreen:
    """Editing of several lines, a history, completion of commands; answers as Markdown. Raises ImportError where that cannot be had."""

    how_to_write_lines = "Alt-Enter starts a new line."

    def __init__(self, commands: Sequence[str]) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)
        self._markdown = MarkdownWriter(self._console)
        self._thinking = False
        self._session = _prompt_session(commands)

    def read(self) -> str:
        text: str = self._session.prompt(PROMPT)
        return text

    def show(self, text: str) -> None:
        self._markdown.write(clean(text))

    def think(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(clean(text), style="dim italic"), end="", soft_wrap=True)
        self._thinking = True

    def end(self) -> None:
        self._markdown.end()
        if self._thinking:
            self._console.print()
        self._thinking = False

    def note(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(clean(text), style="dim"))


def _prompt_session(commands: Sequence[str]) -> Any:
    bindings = import_module("prompt_toolkit.key_binding").KeyBindings()

    @bindings.add("enter")  # type: ignore[untyped-decorator]
    def _(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")  # type: ignore[untyped-decorator]
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    completer = import_module("prompt_toolkit.completion").WordCompleter(list(commands), sentence=True)
    session = import_module("prompt_toolkit").PromptSession
    return session(
        multiline=True, key_bindings=bindings, completer=completer, complete_while_typing=False, prompt_continuation=lambda *_: MORE
    )


class MarkdownWriter:
    """Markdown that comes in pieces: a block is printed for good when the next one begins, and shown as it is meanwhile."""

    def __init__(self, console: Any) -> None:
        self._console = console
        self._block = ""
        self._live: Any = None

    def write(self, text: str) -> None:
        from rich.live import Live
        from rich.markdown import Markdown

        complete, self._block = split_blocks(self._block + text)
        if complete.strip():
            self._stop()
            self._console.print(Markdown(complete))
        if self._live is None:
            self._live = Live(console=self._console, transient=True, refresh_per_second=10)
            self._live.start()
        self._live.update(Markdown(self._block))

    def end(self) -> None:
        from rich.markdown import Markdown

        self._stop()
        if self._block.strip():
            self._console.print(Markdown(self._block))
        self._block = ""

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def split_blocks(text: str) -> tuple[str, str]:
    """The blocks that are complete, and the one that is not: blocks end at an empty line, but not within a fence."""
    end = position = 0
    fence = ""
    for line in text.splitlines(keepends=True):
        position += len(line)
        if found := FENCE.match(line):
            fence = "" if fence == found[1] else fence or found[1]
        if not line.strip() and not fence and line.endswith("\n"):
            end = position
    return text[:end], text[end:]
