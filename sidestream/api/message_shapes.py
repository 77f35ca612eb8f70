"""What the Messages API answers: a message of blocks, and the events of a stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from sidestream.api.errors import AnthropicErrorAnswer
from sidestream.api.logprobs import ChatLogprobs


class TextAnswer(Struct, kw_only=True, tag_field="type", tag="text"):
    text: str
    citations: None = None


class ThinkingAnswer(Struct, kw_only=True, tag_field="type", tag="thinking"):
    """What the model wrote before it answered. Nothing is signed here."""

    thinking: str
    signature: str = ""


class ToolUseAnswer(Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call. Arguments that are no JSON object, as where the limit cut them, are the text `INVALID_JSON`."""

    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextAnswer | ThinkingAnswer | ToolUseAnswer


class MessageUsage(Struct, kw_only=True):
    """All of the prompt is `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


Logprobs = Annotated[ChatLogprobs, Meta(description="As chat completions have them; or all lists, with the flat format.")]
HiddenStates = Annotated[Any, Meta(description="In the form that hidden_states_format says.")]
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "model_context_window_exceeded", "tool_use"]


class Message(Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    logprobs: Logprobs | UnsetType = UNSET
    hidden_states: HiddenStates | UnsetType = UNSET


class TokenCount(Struct):
    input_tokens: int


# Events


class MessageStart(Struct, tag_field="type", tag="message_start"):
    message: Message


class ContentBlockStart(Struct, kw_only=True, tag_field="type", tag="content_block_start"):
    index: int = 0
    content_block: AnswerBlock


class Ping(Struct, tag_field="type", tag="ping"):
    pass


class TextPiece(Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingPiece(Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputPiece(Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class ContentBlockDelta(Struct, kw_only=True, tag_field="type", tag="content_block_delta"):
    index: int = 0
    delta: TextPiece | ThinkingPiece | InputPiece
    logprobs: Logprobs | UnsetType = UNSET
    hidden_states: HiddenStates | UnsetType = UNSET


class ContentBlockStop(Struct, tag_field="type", tag="content_block_stop"):
    index: int = 0


class Ending(Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    delta: Ending
    usage: MessageUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    pass


Event = MessageStart | ContentBlockStart | Ping | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop
Events = Event | AnthropicErrorAnswer
