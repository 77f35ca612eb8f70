"""How a conversation's answer is to be written and read: by the model's formats of tool calls and reasoning, and what the request asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sidestream.api.fields import called
from sidestream.api.large import others_first
from sidestream.api.openai import Asked
from sidestream.api.parts import joined
from sidestream.api.service import Service
from sidestream.api.tools import ToolUse
from sidestream.errors import InvalidRequest
from sidestream.output import Output
from sidestream.text.answer_parser import AnswerParser, ReasoningCounter
from sidestream.text.reasoning import ReasoningFormat
from sidestream.text.tools.events import Content, Event
from sidestream.text.tools.format import ToolFormat

SLICE_TOKENS, SLICE_CHARACTERS = 1024, 8192  # looked at before others get their turn


class Reasoned(NamedTuple):
    """What a request says of reasoning."""

    separate: bool = True
    effort: str | None = None
    wanted: bool | None = None  # None: as the model does by itself
    said: str | None = None  # in what word, where it is not the effort
    field: str = "reasoning_effort"  # of the request, which has that word
    before_grammar: bool | None = None  # None: where the model reasons
    continued: str = ""  # the message that the answer goes on with


class Dialogue:
    """One request. Raises InvalidRequest for tools or reasoning that the model cannot have."""

    def __init__(self, service: Service, use: ToolUse, reasoned: Reasoned) -> None:
        self._service = service
        self._use = use
        self._reasoned = reasoned
        self._tokenizer = service.engine.tokenizer
        self._format: ToolFormat | None = service.tool_format if use.active else None
        self._reasoning: ReasoningFormat | None = service.engine.frontend.reasoning
        if use.active:
            self._check_tools()

    def _check_tools(self) -> None:
        field, choice, _ = self._use.fields
        facts, parser = self._service.engine.facts, self._service.config.tool_call_parser
        if not self._service.engine.frontend.chat_template.takes_tools:
            hint = "Start the server with a template that does: --chat-template FILE."
            raise InvalidRequest(field, f"got {len(self._use.tools)}, but the chat template of {facts.name} takes no tools", hint=hint)
        if self._format is None and (parser != "none" or self._use.forced):
            hint = "Start the server with --tool-call-parser NAME" + (
                "." if parser == "none" else "; with none, what the model writes is returned as text."
            )
            raise InvalidRequest(
                choice if self._use.forced else field, f"it is not known how {facts.name} writes the calls of tools", hint=hint
            )

    def variables(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Those of the chat template; `given` are the request's own. Raises InvalidRequest."""
        said = self._reasoned
        wanted = said.effort != "none" if said.wanted is None and said.effort is not None else said.wanted
        variables = {"reasoning_effort": said.effort, "enable_thinking": wanted}
        variables = {name: value for name, value in variables.items() if value is not None}
        if wanted and self._reasoning is None and not self._service.engine.frontend.chat_template.variables.intersection(variables):
            name = self._service.engine.facts.name
            raise InvalidRequest(said.field, f"got {said.said or said.effort!r}, but {name} does not reason")
        tools = self._use.for_template()
        return {**variables, **(given or {}), **({} if tools is None else {"tools": tools})}

    def begin(self, asked: Asked, ids: Sequence[int], *, id_prefix: str = "call_") -> tuple[Asked, Reading]:
        """With the prompt: what is asked of the engine, so that it writes what the tools are given for, and how its answers are read."""
        reasoning, sampling, end = self._reasoning, asked.sampling, self._service.engine.frontend.end_of(ids)
        over = reasoning is not None and reasoning.is_over(end)
        changed = self._grammar(asked)
        grammar = sampling.grammar is not None or bool(changed)
        if grammar and self._reasoned.before_grammar is None:  # the model thinks first: the grammar is for its answer
            changed["require_reasoning"] = reasoning is not None and (not over or sampling.max_thinking_tokens is not None)
        if any(self._tokenizer.backend.token_to_id(marker) in self._tokenizer.special_token_ids for marker in self._markers):
            changed["skip_special_tokens"] = False
        if "ebnf" in changed:
            asked = replace(asked, names={**asked.names, "ebnf": self._field})
        if changed:
            with called(asked.names):
                sampling = replace(sampling, **changed)
        freed = not grammar or sampling.require_reasoning  # else the text is the answer from its first character on
        reading = Reading(
            ids,
            self._tokenizer,
            None if over else reasoning,
            inside=freed and reasoning is not None and (reasoning.starts_inside(end) or self._continues(reasoning)),
            verbatim=not self._reasoned.separate,
            format=self._format,
            names=[tool.name for tool in self._use.tools],
            id_prefix=id_prefix,
        )
        return replace(asked, sampling=sampling), reading

    def _continues(self, reasoning: ReasoningFormat) -> bool:
        """Whether the message that the answer goes on with has opened the reasoning."""
        text = self._reasoned.continued
        return text.rfind(reasoning.begin) > text.rfind(reasoning.end)

    @property
    def _markers(self) -> Sequence[str]:
        tools = () if self._format is None else self._format.markers
        return tools if self._reasoning is None else (*tools, self._reasoning.begin, self._reasoning.end)

    @property
    def _field(self) -> str:
        """The field that asks for the tools' schemas to be kept."""
        return self._use.fields[1 if self._use.forced else 0]

    def _grammar(self, asked: Asked) -> dict[str, Any]:
        """That of the tools, as a field of SamplingParams; nothing where they need none. Raises InvalidRequest."""
        use = self._use
        if self._format is None or not (use.forced or not use.parallel or any(tool.strict for tool in use.tools)):
            return {}
        other = asked.sampling.grammar
        if other is not None:
            said = f"got tools whose schemas are to be kept beside {asked.names.get(other, other)}, must be one of the two"
            raise InvalidRequest(self._field, said)
        parallel = use.parallel and use.name is None
        try:
            made = self._format.grammar(use.callable, parallel=parallel, free=not use.forced, special=self._tokenizer.special_tokens)
        except RecursionError:
            raise InvalidRequest(use.fields[0], "a schema is nested too deeply") from None
        return {"ebnf": made}


@dataclass(frozen=True)
class Reading:
    """How the answers to a prompt are read."""

    ids: Sequence[int]
    tokenizer: Any
    reasoning: ReasoningFormat | None  # None where there is none, or the prompt has closed it
    inside: bool  # the prompt has opened it
    verbatim: bool  # reasoning stays in the content
    format: ToolFormat | None  # None: calls are text
    names: Sequence[str]
    id_prefix: str

    def reader(self) -> AnswerReader:
        """For one answer."""
        reasoning = self.reasoning
        if reasoning is None and self.format is None:
            return AnswerReader(None, None)
        calls = None if self.format is None else self.format.parser(self.names, self.id_prefix)
        counter = None if reasoning is None else ReasoningCounter(self.tokenizer, self.ids, reasoning, inside=self.inside)
        return AnswerReader(AnswerParser(reasoning, calls, inside=self.inside, verbatim=self.verbatim), counter)


class Piece(NamedTuple):
    """What is new in an answer, and the part of the output that it belongs to: every token, logprob and row is in one piece."""

    events: Sequence[Event]
    output: Output


class AnswerReader:
    """Reads one answer, whole or in parts."""

    def __init__(self, parser: AnswerParser | None, counter: ReasoningCounter | None) -> None:
        self._parser = parser
        self._counter = counter
        self._held: list[Output] = []  # parts whose text is not decided yet

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._counter is None else self._counter.tokens

    async def read(self, part: Output) -> Piece | None:
        """None while there is nothing to tell; what a part brought then comes with a later piece. The last part always gives one."""
        if self._counter is not None:
            for first in range(0, len(part.token_ids), SLICE_TOKENS):
                self._counter.feed(part.token_ids[first : first + SLICE_TOKENS])
                if len(part.token_ids) > SLICE_TOKENS:
                    await others_first()
        if self._parser is None:
            return Piece([Content(part.text)] if part.text else [], part)
        events: list[Event] = []
        for first in range(0, len(part.text), SLICE_CHARACTERS):
            events += self._parser.feed(part.text[first : first + SLICE_CHARACTERS])
            if len(part.text) > SLICE_CHARACTERS:
                await others_first()
        if part.finish_reason is not None:
            events += self._parser.finish()
        self._held.append(part)
        if not events and part.finish_reason is None:
            return None
        held, self._held = self._held, []
        return Piece(events, joined(held))
