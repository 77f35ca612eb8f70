"""What the asking side knows of an engine: facts of the model and its limits, the tokenizer and the chat template. No tensors, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sidestream.messages import Grammar, Thinking
from sidestream.params import SamplingParams
from sidestream.text.chat_template import ChatTemplate
from sidestream.text.grammar import GrammarCache
from sidestream.text.grammar_guard import GrammarGuard
from sidestream.text.grammar_source import grammar_of
from sidestream.text.reasoning import ReasoningFormat, reasoning_of
from sidestream.text.tokenizer import Tokenizer, TokenizerState

PROMPT_END = 16  # tokens


@dataclass(frozen=True)
class Facts:
    """The numbers that requests are checked against, and what a server tells about its model."""

    model: str  # as it was asked for
    name: str  # of the model itself
    vocab_size: int
    num_layers: int  # blocks
    hidden_size: int
    num_parameters: int
    context: int  # tokens of prompt and output together
    eos_token_ids: tuple[int, ...]
    device: str
    dtype: str  # of the arithmetic, keys, values and hidden rows
    itemsize: int  # bytes of one number of that type
    backend: str  # what runs the model
    overlap: bool
    max_running: int
    arena_bytes: int
    kv_tokens: int
    page_size: int


class FrontendState(NamedTuple):
    """A frontend as plain data, to send to another process."""

    facts: Facts
    tokenizer: TokenizerState
    chat_template: str | None


@dataclass(frozen=True)
class Frontend:
    facts: Facts
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    grammars: GrammarCache[Any]
    reasoning: ReasoningFormat | None  # how the model reasons, if it does

    def grammars_of(self, samplings: Sequence[SamplingParams], prompts: Sequence[Sequence[int]]) -> list[Grammar | None]:
        """What the text that follows each prompt, its token ids, may be; made once for all that say the same.

        Raises InvalidRequest; what only the compiler sees, `grammars` refuses.
        """
        made: dict[tuple[int, Thinking | None], Grammar | None] = {}
        keys = []
        for sampling, ids in zip(samplings, prompts, strict=True):
            thinking = self.thinking(ids) if sampling.constrains else None
            keys.append((id(sampling), thinking))
            if sampling.constrains and keys[-1] not in made:
                made[keys[-1]] = grammar_of(sampling, thinking, self.tokenizer.special_tokens)
        return list(map(made.get, keys))

    def thinking(self, ids: Sequence[int]) -> Thinking | None:
        """How the model reasons behind the prompt `ids`."""
        format = self.reasoning
        return None if format is None else Thinking(format.begin, format.end, format.starts_inside(self.end_of(ids)))

    def end_of(self, ids: Sequence[int]) -> str:
        """The end of a prompt, where its template may have opened or closed the reasoning."""
        return self.tokenizer.decode(ids[-PROMPT_END:], skip_special_tokens=False)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """Token ids of a conversation by the model's chat template. Raises InvalidRequest."""
        return self.tokenizer.encode_chat(self.chat_template.render(messages, **kwargs))

    def state(self) -> FrontendState:
        return FrontendState(self.facts, self.tokenizer.state(), self.chat_template.source)

    @classmethod
    def from_state(cls, state: FrontendState) -> Frontend:
        tokenizer = Tokenizer.from_state(state.tokenizer)
        template = template_of(state.chat_template, tokenizer, state.facts.name)
        guard = GrammarGuard(state.tokenizer, state.facts.vocab_size)  # the engine's process compiles what it lets pass
        return cls(state.facts, tokenizer, template, GrammarCache(guard.check, guard.close), reasoning_of(template.source))


def template_of(source: str | None, tokenizer: Tokenizer, model: str) -> ChatTemplate:
    """Raises ModelError if the template does not parse."""
    eos = tokenizer.eos_token_ids
    return ChatTemplate(
        source,
        bos_token="" if tokenizer.bos_token_id is None else tokenizer.token_text(tokenizer.bos_token_id),
        eos_token=tokenizer.token_text(eos[0]) if eos else "",
        model=model,
    )
