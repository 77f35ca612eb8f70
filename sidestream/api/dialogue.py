"""How a conversation's answer is to be written and read: by the model's formats of tool calls and reasoning, and what the request asks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sidestream.api.fields import called
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

SLICE_TOKENS = 1024  # looked at before others get their turn


class Reasoned(NamedTuple):
    """What a request says of reasoning."""

    separate: bool = True
    effort: str | None = None
    wanted: bool | None = None  # None: as the model does by itself
    said: str | None = None  # in what word, where it is not the effort
    field: str = "reasoning_effort"  # of the request, which has that word
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

    def constrained(self, asked: Asked, reading: Reading) -> Asked:
        """What is asked of the engine, so that it writes what the tools are given for and shows all that the reading needs."""
        changed: dict[str, Any] = {}
        sampling = asked.sampling
        if self._format is not None and self._constrains:
            field = self._use.fields[1 if self._use.forced else 0]
            if sampling.grammar is not None:
                other = asked.names.get(sampling.grammar, sampling.grammar)
                raise InvalidRequest(field, f"got tools whose schemas are to be kept beside {other}, must be one of the two")
            reasons = self._reasoning is not None and (not reading.over or sampling.max_thinking_tokens is not None)
            changed |= {"ebnf": self._grammar(self._format), "require_reasoning": reasons}
            asked = replace(asked, names={**asked.names, "ebnf": field})
        if any(self._tokenizer.backend.token_to_id(marker) in self._tokenizer.special_token_ids for marker in self._markers):
            changed["skip_special_tokens"] = False
        if not changed:
            return asked
        with called(asked.names):
            return replace(asked, sampling=replace(sampling, **changed))

    @property
    def _markers(self) -> Sequence[str]:
        tools = () if self._format is None else self._format.markers
        return tools if self._reasoning is None else (*tools, self._reasoning.begin, self._reasoning.end)

    def reading(self, ids: Sequence[int], *, id_prefix: str = "call_") -> Reading:
        """How the answers to the prompt `ids` are read."""
        end, begun = self._service.engine.frontend.end_of(ids), self._reasoned.continued
        reasoning = self._reasoning
        return Reading(
            ids,
            self._tokenizer,
            reasoning,
            inside=reasoning is not None and (reasoning.starts_inside(end) or begun.rfind(reasoning.begin) > begun.rfind(reasoning.end)),
            over=reasoning is not None and reasoning.is_over(end),
            verbatim=not self._reasoned.separate,
            format=self._format,
            names=[tool.name for tool in self._use.tools],
            id_prefix=id_prefix,
        )

    @property
    def _constrains(self) -> bool:
        return self._use.forced or not self._use.parallel or any(tool.strict for tool in self._use.tools)

    def _grammar(self, format: ToolFormat) -> str:
        use = self._use
        parallel = use.parallel and use.name is None
        return format.grammar(use.callable, parallel=parallel, free=not use.forced, special=self._tokenizer.special_tokens)


@dataclass(frozen=True)
class Reading:
    """How the answers to a prompt are read. `inside`: the prompt has opened the reasoning; `over`: it has closed it."""

    ids: Sequence[int]
    tokenizer: Any
    reasoning: ReasoningFormat | None
    inside: bool
    over: bool
    verbatim: bool  # reasoning stays in the content
    format: ToolFormat | None  # None: calls are text
    names: Sequence[str]
    id_prefix: str

    def reader(self) -> AnswerReader:
        """For one answer."""
        reasoning = None if self.over else self.reasoning
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
                await asyncio.sleep(0)
        if self._parser is None:
            return Piece([Content(part.text)] if part.text else [], part)
        events = self._parser.feed(part.text)
        if part.finish_reason is not None:
            events += self._parser.finish()
        self._held.append(part)
        if not events and part.finish_reason is None:
            return None
        held, self._held = self._held, []
        return Piece(events, joined(held))
