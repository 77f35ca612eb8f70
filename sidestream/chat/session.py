"""The chat itself: what the user says is a message or a command, and an answer can be stopped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from sidestream.chat.conversation import Conversation
from sidestream.chat.screen import Screen
from sidestream.chat.talker import Talker
from sidestream.commands.terminal import write
from sidestream.errors import EngineDead, SidestreamError
from sidestream.options import did_you_mean

CUT = "the answer was cut: it reached --max-new-tokens or the end of the context."
ROOM = "/undo takes the last turn back, /clear starts anew."


class Command(NamedTuple):
    run: Callable[[Session, str], None]
    argument: str
    help: str


class Session:
    def __init__(self, talker: Talker, screen: Screen, conversation: Conversation) -> None:
        self._talker, self._screen, self._conversation = talker, screen, conversation
        self._open = True

    def run(self) -> None:
        """Until /exit or Ctrl-D. Raises EngineDead."""
        self._screen.note(f"{self._talker.title}. /help lists the commands, Ctrl-D ends.")
        while self._open:
            try:
                self._turn(self._screen.read())
            except EOFError:
                self._screen.end()
                return
            except KeyboardInterrupt:  # at the prompt, or just beside an answer
                if self._conversation.is_waiting:
                    self._conversation.undo()
                self._screen.end()
                self._screen.note("Ctrl-D or /exit ends the chat")

    def _turn(self, text: str) -> None:
        if text.startswith("/") and not text.startswith("//"):
            self._command(text)
        elif text.strip():
            self._conversation.ask(text.removeprefix("/"))
            self._answer()

    def _command(self, text: str) -> None:
        name, _, argument = text.strip().partition(" ")
        argument = argument.strip()
        command = COMMANDS.get(name)
        if command is None:
            advice = did_you_mean(name, COMMANDS) or "/help lists the commands."
            self._screen.note(f"there is no command {name}. {advice} A message that begins with / begins with //.")
        elif argument and not command.argument:
            self._screen.note(f"{name} takes nothing after it")
        else:
            command.run(self, argument)

    def _answer(self) -> None:
        """Ask for the answer to the conversation. Ctrl-C stops it, and what has come of it stays."""
        text, finish_reason, thinking = "", None, False
        try:
            with closing(self._talker.stream(self._conversation.messages)) as parts:
                for part in parts:
                    if part.thought:
                        self._screen.think(part.thought)
                        thinking = True
                    if part.text:
                        if thinking:
                            self._screen.end()
                        self._screen.show(part.text)
                        thinking = False
                    text += part.text
                    finish_reason = part.finish_reason or finish_reason
        except KeyboardInterrupt:
            self._screen.end()
            self._keep(text, "stopped")
        except EngineDead:
            self._screen.end()
            raise
        except SidestreamError as error:
            self._screen.end()
            self._keep(text, error.one_line())
            if error.code == "context_length_exceeded":
                self._screen.note(f"{ROOM} {self._talker.more_context}")
        else:
            self._screen.end()
            self._conversation.answer(text)
            if finish_reason == "length":
                self._screen.note(f"{CUT} {ROOM} {self._talker.more_context}")

    def _keep(self, text: str, why: str) -> None:
        """Of an answer that was broken off: what came of it, or else the question is taken back."""
        if text:
            self._conversation.answer(text)
            self._screen.note(f"{why}; what came is kept, /retry asks again")
        else:
            self._conversation.undo()
            self._screen.note(f"{why}; your message was taken back")

    # Commands

    def _exit(self, _: str) -> None:
        self._open = False

    def _clear(self, _: str) -> None:
        self._conversation.clear()
        self._screen.note("a new conversation")

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = text
        self._screen.note(f"the system message is: {self._conversation.system or 'none'}")

    def _undo(self, _: str) -> None:
        question = self._conversation.undo()
        self._screen.note("there is nothing to take back" if question is None else f"taken back: {question}")

    def _retry(self, _: str) -> None:
        if self._conversation.reopen():
            self._answer()
        else:
            self._screen.note("there is no answer yet")

    def _save(self, name: str) -> None:
        if not name:
            self._screen.note("write /save FILE")
            return
        path = Path(name).expanduser()
        try:
            self._conversation.save(path, self._talker.model)
        except FileExistsError:
            self._screen.note(f"{path} is there already, and is not written over")
        except OSError as error:
            self._screen.note(f"{path} cannot be written: {error.strerror or error}")
        else:
            self._screen.note(f"saved as {path}")

    def _help(self, _: str) -> None:
        for name, command in COMMANDS.items():
            self._screen.note(f"{f'{name} {command.argument}':14} {command.help}")
        self._screen.note(f"Ctrl-C stops an answer, Ctrl-D ends the chat. {self._screen.how_to_write_lines}")


COMMANDS = {
    "/exit": Command(Session._exit, "", "end the chat"),
    "/clear": Command(Session._clear, "", "forget the conversation, not the system message"),
    "/system": Command(Session._system, "TEXT", "set the system message; without TEXT show it"),
    "/undo": Command(Session._undo, "", "take the last question and its answer back"),
    "/retry": Command(Session._retry, "", "answer the last question again"),
    "/save": Command(Session._save, "FILE", "write the conversation as JSON"),
    "/help": Command(Session._help, "", "these lines"),
}


def answer_lines(talker: Talker, conversation: Conversation, lines: Iterable[str]) -> None:
    """Each line is a turn, and only answers are printed; what is to be said about them goes to standard error. Raises SidestreamError."""
    for line in lines:
        if not line.strip():
            continue
        conversation.ask(line.rstrip("\r\n"))
        text = ""
        try:
            with closing(talker.stream(conversation.messages)) as parts:
                for part in parts:
                    write(part.text, end="")
                    text += part.text
                    if part.finish_reason == "length":
                        print(f"sidestream: {CUT}", file=sys.stderr)
        except SidestreamError as error:
            if error.code == "context_length_exceeded":
                error.hint = talker.more_context
            raise
        write("")
        conversation.answer(text)
