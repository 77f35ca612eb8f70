"""What comes in by the Messages API, and what it means: blocks of text, thinking, calls and their results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from sidestream.api.dialect import DialectBody, Ignored, Model, TemplateVariables, assistant, call_of, text_parts, tool_result
from sidestream.api.dialogue import Reasoned
from sidestream.api.fields import STOPS
from sidestream.api.structured import MessageFormat
from sidestream.api.tools import MAX_TOOLS, Parameters, Strict, ToolName, ToolUse
from sidestream.errors import InvalidRequest
from sidestream.text.tools.tool import Tool

NO_OTHERS = "There are no tools that run here."
FIELDS = ("tools", "tool_choice", "tool_choice.name")


class CacheControl(Struct):
    type: Literal["ephemeral"] = "ephemeral"


Cached = Annotated[CacheControl, Meta(description="Accepted; prefixes are cached anyway.")]


class TextBlock(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str
    cache_control: Cached | None = None
    citations: Annotated[None, Meta(description="There are no citations here.")] = None


class ThinkingBlock(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="thinking"):
    """Of an answer that is sent in again."""

    thinking: str
    signature: Ignored = None
    cache_control: Cached | None = None


class ToolUseBlock(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Cached | None = None
    caller: Annotated[Any, Meta(description="Accepted; changes nothing here.")] = None


class ToolResultBlock(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: Annotated[bool, Meta(description="Accepted; the content says so.")] | None = None
    cache_control: Cached | None = None


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
SystemText = Annotated[list[TextBlock], Meta(min_length=1)]


class MessageParam(Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Meta(min_length=1)]


class ClientTool(Struct, kw_only=True, forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    input_schema: Parameters
    type: Annotated[Literal["custom"], Meta(description=NO_OTHERS)] | None = None
    strict: Strict | None = None
    cache_control: Cached | None = None
    eager_input_streaming: Annotated[bool, Meta(description="Accepted; arguments are always streamed as they come.")] | None = None
    input_examples: Annotated[list[Any], Meta(description="Accepted; chat templates have no place for them.")] | None = None


class ToolChoice(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=1, description="Most tokens of thinking; then the model has to answer.")] | None = None
    display: Ignored = None


Messages = Annotated[
    list[MessageParam],
    Meta(
        min_length=1,
        description="The conversation. Where an assistant has the last word, the answer goes on with it.",
        examples=[[{"role": "user", "content": "Name three fruits."}]],
    ),
]
System = Annotated[str | SystemText, Meta(description="A system message that goes before the conversation.")]
Tools = Annotated[list[ClientTool], Meta(max_length=MAX_TOOLS, description="What the model may call.")]


class OutputConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    format: Annotated[MessageFormat, Meta(description="Which form the text has.")] | None = None
    effort: Annotated[None, Meta(description="The model has no such setting: thinking.budget_tokens bounds its reasoning.")] = None


class MessagesBody(DialectBody, kw_only=True, forbid_unknown_fields=True):
    messages: Messages
    max_tokens: Annotated[int, Meta(ge=0, examples=[64], description="Most tokens to produce; the context length bounds it too.")]
    system: System | None = None
    stop_sequences: Annotated[STOPS, Meta(description="End when one of these texts appears; the text is cut before it.")] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    container: Annotated[None, Meta(description=NO_OTHERS)] = None
    mcp_servers: Annotated[list[Any], Meta(max_length=0, description=NO_OTHERS)] | None = None
    context_management: Annotated[None, Meta(description="A conversation is never cut or summarised.")] = None
    metadata: Annotated[dict[str, Any], Meta(description="Accepted; changes nothing here.")] | None = None
    cache_control: Cached | None = None
    service_tier: Ignored = None
    speed: Ignored = None


class CountBody(Struct, kw_only=True, forbid_unknown_fields=True):
    messages: Messages
    model: Model | None = None
    system: System | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Cached | None = None
    speed: Ignored = None
    chat_template_kwargs: TemplateVariables | None = None


def tool_use(body: MessagesBody | CountBody) -> ToolUse:
    """What the body says of tools. Raises InvalidRequest."""
    choice = body.tool_choice or ToolChoice(type="auto")
    if (choice.name is None) != (choice.type != "tool"):
        raise InvalidRequest("tool_choice.name", f"got {choice.name!r}, must be a tool's name with type 'tool', and left out otherwise")
    tools = [
        Tool(tool.name, tool.description, tool.input_schema, bool(tool.strict), f"tools.{place}.input_schema")
        for place, tool in enumerate(body.tools or ())
    ]
    modes: dict[str, Any] = {"any": "required", "none": "none"}
    parallel = not choice.disable_parallel_tool_use
    return ToolUse(tuple(tools), modes.get(choice.type, "auto"), choice.name, parallel, FIELDS, said=choice.type)


def reasoned(body: MessagesBody | CountBody, *, continued: str) -> Reasoned:
    """What the body says of thinking. Raises InvalidRequest."""
    thinking = body.thinking
    if thinking is not None and thinking.budget_tokens is not None and thinking.type != "enabled":
        raise InvalidRequest("thinking.budget_tokens", f"got {thinking.budget_tokens}, must be left out with type {thinking.type!r}")
    wanted = None if thinking is None else thinking.type != "disabled"
    said, before = None if thinking is None else thinking.type, getattr(body, "require_reasoning", None)
    return Reasoned(wanted=wanted, said=said, field="thinking.type", before_grammar=before, continued=continued)


def conversation(body: MessagesBody | CountBody) -> list[dict[str, Any]]:
    """As chat templates know it: messages of one role that follow each other are one, as in this API; results of tools are their own.

    Raises InvalidRequest.
    """
    joined: list[dict[str, Any]] = []
    first = [] if body.system is None else [MessageParam(role="system", content=body.system)]  # type: ignore[arg-type]
    for place, message in enumerate((*first, *body.messages), -len(first)):
        for each in _messages(message, f"messages.{place}"):
            if joined and joined[-1]["role"] == each["role"] != "tool":
                joined[-1] = _both(joined[-1], each)
            else:
                joined.append(each)
    return joined


def _both(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The values are lists, and texts."""
    return {**one, **{name: value if name == "role" or name not in one else one[name] + value for name, value in other.items()}}


def _messages(message: MessageParam, where: str) -> Iterator[dict[str, Any]]:
    blocks: Sequence[Block] = [TextBlock(text=message.content)] if isinstance(message.content, str) else message.content
    content: list[dict[str, str]] = []
    calls: list[dict[str, Any]] = []
    thinking = ""
    for place, block in enumerate(blocks):
        role = {ThinkingBlock: "assistant", ToolUseBlock: "assistant", ToolResultBlock: "user"}.get(type(block), message.role)
        if role != message.role:
            kind = block.__struct_config__.tag
            raise InvalidRequest(f"{where}.content.{place}.type", f"got {kind!r}, which has no place in a message of role {message.role!r}")
        match block:
            case TextBlock():
                content += text_parts(block.text)
            case ThinkingBlock():
                thinking += block.thinking
            case ToolUseBlock():
                calls.append(call_of(block.id, block.name, block.input))
            case ToolResultBlock():
                given = block.content
                texts = (
                    text_parts(given)
                    if given is None or isinstance(given, str)
                    else [part for each in given for part in text_parts(each.text)]
                )
                yield tool_result(block.tool_use_id, texts)
    if message.role == "assistant":
        yield assistant(content, calls, thinking)
    elif content:
        yield {"role": message.role, "content": content}
