from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from sidestream.chat.conversation import Conversation
from sidestream.chat.session import COMMANDS, CUT, Session, answer_lines
from sidestream.chat.talker import EngineTalker, Part
from sidestream.errors import ContextLengthExceeded, EngineDead, InvalidRequest
from sidestream.params import SamplingParams


class FakeTalker:
    """Says what it was told to: parts, or an error in between."""

    model, title, more_context = "m", "m here", "No more."

    def __init__(self, *answers):
        self.answers, self.asked, self.closed = list(answers), [], 0

    def stream(self, messages) -> Iterator[Part]:
        self.asked.append([(message["role"], message["content"]) for message in messages])
        try:
            for part in self.answers.pop(0):
                if isinstance(part, BaseException):
                    raise part
                yield part if isinstance(part, Part) else Part(part)
        finally:
            self.closed += 1


class FakeScreen:
    """The user's lines, and a transcript."""

    how_to_write_lines = "Like this."

    def __init__(self, *lines):
        self.lines, self.log = list(lines), []

    def read(self):
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    def show(self, text):
        self.log.append(text)

    def think(self, text):
        self.log.append(f"({text})")

    def end(self):
        self.log.append("|")

    def note(self, text):
        self.log.append(f"[{text}]")


def chat(lines, *answers, system=None):
    talker, screen, conversation = FakeTalker(*answers), FakeScreen(*lines), Conversation(system)
    Session(talker, screen, conversation).run()
    assert screen.log.pop(0) == "[m here. /help lists the commands, Ctrl-D ends.]"
    assert talker.closed == len(talker.asked)
    return talker, screen.log, conversation


def test_turns():
    talker, log, _ = chat(["Hi", "", "  ", "More"], ["Hel", "lo"], ["Yes", Part("", "stop")], system="s")
    assert talker.asked == [
        [("system", "s"), ("user", "Hi")],
        [("system", "s"), ("user", "Hi"), ("assistant", "Hello"), ("user", "More")],
    ]
    assert log == ["Hel", "lo", "|", "Yes", "|", "|"]


def test_thoughts_are_shown_and_not_kept():
    _, log, conversation = chat(["Hi"], [Part("", None, "hm"), Part("", None, "so"), "Hello"])
    assert log == ["(hm)", "(so)", "|", "Hello", "|", "|"]
    assert conversation.messages[-1]["content"] == "Hello"


def test_ctrl_c_stops_the_answer_and_keeps_the_chat():
    talker, log, conversation = chat([KeyboardInterrupt(), "Hi", "More", "End"], ["Hel", KeyboardInterrupt()], [KeyboardInterrupt()], ["x"])
    assert log == [
        "|",
        "[Ctrl-D or /exit ends the chat]",
        "Hel",
        "|",
        "[stopped; what came is kept, /retry asks again]",
        "|",
        "[stopped; your message was taken back]",
        "x",
        "|",
        "|",
    ]
    assert talker.asked[2] == [("user", "Hi"), ("assistant", "Hel"), ("user", "End")]
    assert conversation.messages[-1] == {"role": "assistant", "content": "x"}


def test_ctrl_c_just_before_an_answer_takes_the_question_back(monkeypatch):
    monkeypatch.setattr(Session, "_answer", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    _, log, conversation = chat(["Hi"])
    assert log == ["|", "[Ctrl-D or /exit ends the chat]", "|"]
    assert conversation.messages == []


def test_a_conversation_that_is_too_long():
    error = ContextLengthExceeded("prompt", "the maximum is 10 tokens, the prompt has 12", hint="Shorten the prompt.")
    _, log, conversation = chat(["Hi"], [error])
    assert log == [
        "|",
        "[prompt: the maximum is 10 tokens, the prompt has 12. Shorten the prompt.; your message was taken back]",
        "[/undo takes the last turn back, /clear starts anew. No more.]",
        "|",
    ]
    assert conversation.messages == []


def test_an_answer_that_is_cut():
    _, log, conversation = chat(["Hi"], [Part("long", "length")])
    assert log[2] == (
        "[the answer was cut: it reached --max-new-tokens or the end of the context. "
        "/undo takes the last turn back, /clear starts anew. No more.]"
    )
    assert conversation.messages[-1]["content"] == "long"


def test_a_dead_engine_ends_the_chat():
    with pytest.raises(EngineDead):
        chat(["Hi"], ["x", EngineDead("out of memory")])


def test_commands(tmp_path):
    path = tmp_path / "chat.json"
    lines = [
        "/system Be brief.",
        "Hi",
        "/retry",
        f"/save {path}",
        f"/save {path}",
        "/undo",
        "/undo",
        "/retry",
        "/system",
        "/clear",
        "/exit",
        "no",
    ]
    talker, log, conversation = chat(lines, ["one"], ["two"])
    assert log == [
        "[the system message is: Be brief.]",
        "one",
        "|",
        "two",
        "|",
        f"[saved as {path}]",
        f"[{path} is there already, and is not written over]",
        "[taken back: Hi]",
        "[there is nothing to take back]",
        "[there is no answer yet]",
        "[the system message is: Be brief.]",
        "[a new conversation]",
    ]
    assert talker.asked == [[("system", "Be brief."), ("user", "Hi")]] * 2
    saved = json.loads(path.read_text())
    assert (saved["model"], saved["messages"][-1]) == ("m", {"role": "assistant", "content": "two"})
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]


def test_commands_that_cannot_be():
    talker, log, _ = chat(["/claer", "/qqqqq", "/clear all", "/save", "/save /nowhere/x", "/system", "//not a command"], ["ok"])
    assert log[:6] == [
        "[there is no command /claer. Did you mean /clear? A message that begins with / begins with //.]",
        "[there is no command /qqqqq. /help lists the commands. A message that begins with / begins with //.]",
        "[/clear takes nothing after it]",
        "[write /save FILE]",
        "[/nowhere/x cannot be written: No such file or directory]",
        "[the system message is: none]",
    ]
    assert talker.asked == [[("user", "/not a command")]]


def test_help_lists_every_command():
    _, log, _ = chat(["/help"])
    assert [line.split()[0][1:] for line in log[:-2]] == list(COMMANDS)
    assert log[-2] == "[Ctrl-C stops an answer, Ctrl-D ends the chat. Like this.]"


def test_lines_are_turns_and_only_answers_are_printed(capsys):
    talker = FakeTalker(["He", "llo"], [Part("cut", "length")], ["/x"])
    answer_lines(talker, Conversation(), ["Hi\n", "\n", "More\r\n", "/exit"])
    captured = capsys.readouterr()
    assert captured.out == "Hello\ncut\n/x\n"
    assert captured.err == f"sidestream: {CUT}\n"
    assert talker.asked[2][-1] == ("user", "/exit")


def test_lines_that_are_too_long_say_how_to_go_on():
    with pytest.raises(ContextLengthExceeded) as refused:
        answer_lines(FakeTalker([ContextLengthExceeded("prompt", "too long", hint="Shorten it.")]), Conversation(), ["Hi"])
    assert refused.value.one_line() == "prompt: too long. No more."


class FakeEngine:
    """An engine of a context of ten tokens, of which a character is one."""

    context_length = 10

    def __init__(self):
        self.config = type("Config", (), {"model": "tiny"})
        self.calls = []

    def encode_chat(self, messages):
        return [len(message["content"]) for message in messages]

    def stream(self, ids, sampling):
        self.calls.append((ids, sampling))
        part = type("Part", (), {"text": "x", "finish_reason": "stop"})
        return type("Stream", (), {"__enter__": lambda s: iter([part]), "__exit__": lambda s, *_: self.calls.append("closed")})()


def test_an_engine_answers():
    engine, sampling = FakeEngine(), SamplingParams(temperature=0)
    talker = EngineTalker(engine, sampling)
    assert (talker.model, talker.title) == ("tiny", "tiny in this process, context 10 tokens")
    assert list(talker.stream([{"role": "user", "content": "Hi"}])) == [Part("x", "stop")]
    assert engine.calls == [([2], sampling), "closed"]


def test_a_template_that_refuses_the_system_message():
    _, log, conversation = chat(["Hi"], [InvalidRequest("messages", "the chat template refuses them: no system role")], system="s")
    assert log[1] == "[messages: the chat template refuses them: no system role; your message was taken back]"
    assert conversation.messages == [{"role": "system", "content": "s"}]
