from __future__ import annotations

import io
import sys

import pytest

from sidestream.chat.screen import MarkdownWriter, PlainScreen, RichScreen, clean, split_blocks


@pytest.mark.parametrize(
    ("text", "complete", "rest"),
    [
        ("one", "", "one"),
        ("one\n\ntwo", "one\n\n", "two"),
        ("one\n\ntwo\n\n", "one\n\ntwo\n\n", ""),
        ("one\n\n```\na\n\nb", "one\n\n", "```\na\n\nb"),
        ("```py\na\n\nb\n```\n\nnext", "```py\na\n\nb\n```\n\n", "next"),
        ("~~~\n```\n\n~~~\n\nx", "~~~\n```\n\n~~~\n\n", "x"),
        ("one\n \n", "one\n \n", ""),
        ("one\n  ", "", "one\n  "),
    ],
)
def test_blocks(text, complete, rest):
    assert split_blocks(text) == (complete, rest)


def test_a_terminal_gets_no_orders_from_a_model():
    assert clean("a\tb\n\x1b[2Jc\x07\x9b\r") == "a\tb\n\ufffd[2Jc\ufffd\ufffd\ufffd"


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        (["Hi"], "Hi"),
        (["a\\", "b\\", "c"], "a\nb\nc"),
        (['"""', "a", "b", '"""'], "a\nb"),
        (['"""a', 'b"""'], "a\nb"),
    ],
)
def test_several_lines(monkeypatch, typed, read):
    prompts = []
    monkeypatch.setattr("builtins.input", lambda prompt: prompts.append(prompt) or typed[len(prompts) - 1])
    assert PlainScreen().read() == read
    assert prompts == ["> ", *["  "] * (len(typed) - 1)]


def test_plain_answers(capsys):
    screen = PlainScreen()
    screen.think("hm")
    screen.end()
    screen.show("Hel")
    screen.show("lo\n")
    screen.end()
    screen.show("")
    screen.end()
    screen.note("note")
    assert capsys.readouterr().out == "hm\nHello\n[note]\n"


def test_markdown_that_comes_in_pieces():
    console = pytest.importorskip("rich.console")
    file = io.StringIO()
    writer = MarkdownWriter(console.Console(file=file, force_terminal=False, width=40))
    for piece in ("# Ti", "tle\n\nSome *te", "xt*.\n", "\n```\nco", "de\n```"):
        writer.write(piece)
    writer.end()
    writer.end()
    lines = [line.strip(" ┏┓┗┛━┃") for line in file.getvalue().splitlines()]
    assert [line for line in lines if line] == ["Title", "Some text.", "code"]


def test_rich_without_prompt_toolkit_is_not_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "prompt_toolkit.key_binding", None)
    with pytest.raises(ImportError):
        RichScreen([])


def test_editing_of_several_lines():
    pytest.importorskip("rich")
    pytest.importorskip("prompt_toolkit")
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        screen = RichScreen(["/clear"])
        keys.send_text("a\x1b\rb\r")
        assert screen.read() == "a\nb"
        keys.send_text("\x03")
        with pytest.raises(KeyboardInterrupt):
            screen.read()
        keys.send_text("\x04")
        with pytest.raises(EOFError):
            screen.read()


def test_rich_answers(capsys):
    pytest.importorskip("rich")
    pytest.importorskip("prompt_toolkit")
    screen = RichScreen([])
    screen.think("hm")
    screen.end()
    screen.show("*Hel")
    screen.show("lo*")
    screen.end()
    screen.note("note [red]")
    assert [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()] == ["hm", "Hello", "note [red]"]
