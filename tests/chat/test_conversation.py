from __future__ import annotations

import json

import pytest

from sidestream.chat.conversation import Conversation


def said(*turns: str, system: str | None = None) -> Conversation:
    conversation = Conversation(system)
    for index, text in enumerate(turns):
        (conversation.answer if index % 2 else conversation.ask)(text)
    return conversation


def test_messages():
    assert said("a", "b", "c", system="s").messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert said("a").messages == [{"role": "user", "content": "a"}]


def test_undo_and_reopen_and_clear():
    conversation = said("a", "b", "c", "d", system="s")
    assert conversation.reopen() is True
    assert conversation.reopen() is False
    assert conversation.messages[-1] == {"role": "user", "content": "c"}
    assert conversation.undo() == "c"
    assert conversation.undo() == "a"
    assert conversation.undo() is None
    conversation.ask("x")
    conversation.clear()
    assert conversation.messages == [{"role": "system", "content": "s"}]


def test_save(tmp_path):
    path = tmp_path / "chat.json"
    said("ä", "b", system="s").save(path, "m")
    assert json.loads(path.read_text(encoding="utf-8")) == {"model": "m", "messages": said("ä", "b", system="s").messages}
    with pytest.raises(FileExistsError):
        said().save(path, "m")
