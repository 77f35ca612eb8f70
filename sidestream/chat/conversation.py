"""What was said: a system message, then turns of the user and the assistant."""

from __future__ import annotations

import json
from pathlib import Path

Message = dict[str, str]


class Conversation:
    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self._turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """In OpenAI's form."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self._turns]

    def ask(self, text: str) -> None:
        self._turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        self._turns.append({"role": "assistant", "content": text})

    @property
    def is_waiting(self) -> bool:
        """Whether the last question has no answer."""
        return bool(self._turns) and self._turns[-1]["role"] == "user"

    def reopen(self) -> bool:
        """Drop the last answer, so that its question waits for another. False if there is none."""
        if not self._turns or self.is_waiting:
            return False
        self._turns.pop()
        return True

    def undo(self) -> str | None:
        """Drop the last question, and its answer if it has one. The question, None if there is none."""
        self.reopen()
        return self._turns.pop()["content"] if self._turns else None

    def clear(self) -> None:
        """Forget all but the system message."""
        self._turns.clear()

    def save(self, path: Path, model: str) -> None:
        """Write the messages as JSON. Raises OSError; a file that is there is not written over."""
        with path.open("x", encoding="utf-8") as file:
            json.dump({"model": model, "messages": self.messages}, file, ensure_ascii=False, indent=2)
            file.write("\n")
