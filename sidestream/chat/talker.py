"""Who answers: what the session asks of an engine or of a server, and the engine."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from sidestream.chat.conversation import Message
from sidestream.params import SamplingParams

if TYPE_CHECKING:
    from sidestream import Engine


class Part(NamedTuple):
    """What is new of an answer."""

    text: str
    finish_reason: str | None = None  # of the last part
    thought: str = ""  # what a model that reasons says before its answer


class Talker(Protocol):
    model: str
    title: str  # who answers, for people
    more_context: str  # how to get a longer one

    def stream(self, messages: Sequence[Message]) -> Generator[Part, None, None]:
        """The answer in parts. Closing the generator gives the answer up. Raises SidestreamError."""
        ...


class EngineTalker:
    """An engine in this process."""

    more_context = "A larger --context-length or --kv-memory gives more room."

    def __init__(self, engine: Engine, sampling: SamplingParams) -> None:
        self._engine, self._sampling = engine, sampling
        self.model = engine.config.model
        self.title = f"{self.model} in this process, context {engine.context_length:,} tokens"

    def stream(self, messages: Sequence[Message]) -> Generator[Part, None, None]:
        with self._engine.stream(self._engine.encode_chat(messages), self._sampling) as parts:
            for part in parts:
                yield Part(part.text, part.finish_reason)
