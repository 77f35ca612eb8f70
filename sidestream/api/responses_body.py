"""What comes in by the Responses API, and what it means: messages, reasoning, calls of tools and their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from sidestream.api.chat import EFFORT, Effort
from sidestream.api.dialect import DialectBody, Ignored, assistant, call_of, text_parts, tool_result
from sidestream.api.dialogue import Reasoned
from sidestream.api.openai import MAX_TOKENS, TOP_LOGPROBS
from sidestream.api.structured import TextFormat
from sidestream.api.tools import MAX_TOOLS, Mode, Parallel, Parameters, Strict, ToolName, ToolUse
from sidestream.errors import InvalidRequest
from sidestream.text.tools.tool import Tool

STATELESS = "Nothing is stored here: send the whole conversation as `input`."
NO_OTHERS = "There are no tools that run here: only functions of the client's."
FIELDS = ("tools", "tool_choice", "tool_choice.name")
Metadata = dict[str, Annotated[str, Meta(max_length=512)]]
Includable = Literal[
    "message.output_text.logprobs",
    # Of what this server never has; clients ask for it as a matter of course.
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
Kind = Literal["message", "reasoning", "function_call", "function_call_output"]
Role = Literal["user", "assistant", "system", "developer"]


class InputPart(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["input_text", "output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None  # these two come back with an answer that is sent in again
    logprobs: list[Any] | None = None


class InputItem(Struct, kw_only=True, forbid_unknown_fields=True):
    """The type says which fields it has. Items of an answer can be sent in as they came."""

    type: Annotated[Kind, Meta(description=STATELESS)] = "message"
    role: Annotated[Role, Meta(description="Of a message.")] | None = None
    content: Annotated[str | Annotated[list[InputPart], Meta(min_length=1)], Meta(description="Of a message, or of reasoning.")] | None = (
        None
    )
    call_id: Annotated[str, Meta(description="Of a call, and of its output.")] | None = None
    name: Annotated[str, Meta(description="Of the function that was called.")] | None = None
    arguments: Annotated[str, Meta(description="Of a call: JSON.")] | None = None
    output: Annotated[str | list[InputPart], Meta(description="What the call gave.")] | None = None
    id: str | None = None  # what an answer has besides, and nothing here needs
    status: str | None = None
    phase: str | None = None
    summary: list[Any] | None = None
    encrypted_content: str | None = None
    matched_stop: str | int | None = None
    hidden_states: Any = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    flat_logprobs: Any = None


class TextOptions(Struct, forbid_unknown_fields=True):
    format: Annotated[TextFormat, Meta(description="Which form the text has.")] | None = None
    verbosity: Annotated[Literal["medium"], Meta(description="The model has no such setting.")] | None = None


class ReasoningOptions(Struct, forbid_unknown_fields=True):
    effort: Annotated[Effort, EFFORT] | None = None
    summary: Annotated[None, Meta(description="There are no summaries: all of the reasoning is in the answer.")] = None


class FunctionTool(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Annotated[Literal["function"], Meta(description=NO_OTHERS)]
    name: ToolName
    description: str | None = None
    parameters: Parameters | None = None
    strict: Strict | None = None


class FunctionChoice(Struct, forbid_unknown_fields=True):
    type: Annotated[Literal["function"], Meta(description=NO_OTHERS)]
    name: str


class Obfuscation(Struct, forbid_unknown_fields=True):
    include_obfuscation: Annotated[bool, Meta(description="Accepted; nothing is added to hide the length of a text.")] | None = None


class ResponsesBody(DialectBody, kw_only=True, forbid_unknown_fields=True):
    input: Annotated[
        str | Annotated[list[InputItem], Meta(min_length=1)],
        Meta(description="A user's message, or the conversation.", examples=["Name three fruits."]),
    ]
    instructions: Annotated[str, Meta(description="A system message that goes before the input.")] | None = None
    max_output_tokens: Annotated[int, MAX_TOKENS] | None = None
    top_logprobs: Annotated[int, TOP_LOGPROBS] | None = None
    include: Annotated[list[Includable], Meta(description="Only the logprobs are something that there is here.")] | None = None
    stream_options: Obfuscation | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS, description="What the model may call.")] | None = None
    tool_choice: Mode | FunctionChoice | None = None
    parallel_tool_calls: Parallel | None = None
    max_tool_calls: Annotated[int, Meta(description="Accepted; it counts calls of tools that run on a server.")] | None = None
    store: Annotated[bool, Meta(description=STATELESS, extra_json_schema={"const": False})] | None = None
    background: Annotated[bool, Meta(description=STATELESS, extra_json_schema={"const": False})] | None = None
    truncation: Annotated[Literal["disabled"], Meta(description="A conversation that is too long is refused, never cut.")] | None = None
    previous_response_id: Annotated[None, Meta(description=STATELESS)] = None
    conversation: Annotated[None, Meta(description=STATELESS)] = None
    prompt: Annotated[None, Meta(description=STATELESS)] = None
    context_management: Annotated[None, Meta(description="A conversation is never cut or summarised.")] = None
    moderation: Annotated[None, Meta(description="There is no moderation here.")] = None
    metadata: Annotated[Metadata, Meta(max_length=16, description="Comes back with the answer.")] | None = None
    user: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Annotated[dict[str, Any], Meta(description="Accepted; prefixes are cached anyway.")] | None = None
    service_tier: Ignored = None


def tool_use(body: ResponsesBody) -> ToolUse:
    """What the body says of tools. Raises InvalidRequest."""
    choice = body.tool_choice
    tools = [
        Tool(tool.name, tool.description, tool.parameters, bool(tool.strict), f"tools.{place}.parameters")
        for place, tool in enumerate(body.tools or ())
    ]
    named = choice.name if isinstance(choice, FunctionChoice) else None
    mode: Mode = "auto" if choice is None or isinstance(choice, FunctionChoice) else choice
    return ToolUse(tuple(tools), mode, named, body.parallel_tool_calls is not False, FIELDS)


def reasoned(body: ResponsesBody) -> Reasoned:
    effort = None if body.reasoning is None else body.reasoning.effort
    return Reasoned(effort=effort, field="reasoning.effort", before_grammar=getattr(body, "require_reasoning", None))


def conversation(body: ResponsesBody) -> list[dict[str, Any]]:
    """As chat templates know it: what an assistant did in a row is one message; `developer` is OpenAI's newer word for `system`.

    Raises InvalidRequest.
    """
    given = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    messages: list[dict[str, Any]] = [] if body.instructions is None else [_message("system", text_parts(body.instructions))]
    turn = _Turn()
    for place, item in enumerate(given):
        where = f"input.{place}"
        if item.type == "reasoning":
            turn.reasoning += "".join(_texts(item.content))
        elif item.type == "function_call":
            call = [_present(item, name, where) for name in ("call_id", "name", "arguments")]
            turn.calls.append(call_of(*call))
        elif item.type == "message" and _present(item, "role", where) == "assistant":
            if turn.calls:  # in the order in which it was written
                messages += turn.taken()
            turn.content += _parts(_present(item, "content", where))
        else:
            messages += turn.taken()
            if item.type == "function_call_output":
                messages.append(tool_result(_present(item, "call_id", where), _parts(_present(item, "output", where))))
            else:
                role = "system" if item.role == "developer" else item.role
                messages.append(_message(str(role), _parts(_present(item, "content", where))))
    return messages + turn.taken()


class _Turn:
    """What an assistant did, item by item."""

    def __init__(self) -> None:
        self.content: list[dict[str, str]] = []
        self.calls: list[dict[str, Any]] = []
        self.reasoning = ""

    def taken(self) -> list[dict[str, Any]]:
        """As a message, if it was anything."""
        content, calls, reasoning = self.content, self.calls, self.reasoning
        self.content, self.calls, self.reasoning = [], [], ""
        return [assistant(content, calls, reasoning)] if content or calls else []


def _message(role: str, content: list[dict[str, str]]) -> dict[str, Any]:
    return {"role": role, "content": content}


def _present(item: InputItem, name: str, where: str) -> Any:
    value = getattr(item, name)
    if value is None:
        raise InvalidRequest(f"{where}.{name}", f"is missing: an item of type {item.type!r} has one")
    return value


def _texts(content: str | Sequence[InputPart] | None) -> list[str]:
    return [content] if isinstance(content, str) else [part.text for part in content or ()]


def _parts(content: str | Sequence[InputPart]) -> list[dict[str, str]]:
    return [part for text in _texts(content) for part in text_parts(text)]
