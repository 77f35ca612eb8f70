"""What the Responses API answers: a response with one message in it, and the events of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from sidestream.api.logprobs import TokenLogprob

FlatLogprobs = Annotated[dict[str, Any], Meta(description="All that were asked for, with logprobs_format flat.")]
HiddenStates = Annotated[Any, Meta(description="In the form that hidden_states_format says.")]


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]
    matched_stop: Annotated[str | int, Meta(description="The stop string or token id that ended it.")] | UnsetType | None = UNSET
    prompt_logprobs: list[TokenLogprob] | UnsetType = UNSET
    flat_logprobs: FlatLogprobs | UnsetType = UNSET
    hidden_states: HiddenStates | UnsetType = UNSET


class ReasoningText(Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class Extras(Struct, kw_only=True):
    """What stands beside reasoning and calls, which have no place of their own for logprobs."""

    logprobs: list[TokenLogprob] | UnsetType = UNSET
    prompt_logprobs: list[TokenLogprob] | UnsetType = UNSET
    flat_logprobs: FlatLogprobs | UnsetType = UNSET
    hidden_states: HiddenStates | UnsetType = UNSET


class ReasoningItem(Extras, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[Any] = []
    content: list[ReasoningText]


class FunctionCall(Extras, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


Item = OutputMessage | ReasoningItem | FunctionCall


class InputTokensDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    reasoning_tokens: int = 0


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(Struct):
    message: str
    code: Literal["server_error"] = "server_error"


class Response(Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"] = "in_progress"
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[Item] = []
    usage: ResponseUsage | None = None
    temperature: float
    top_p: float
    top_logprobs: int
    metadata: dict[str, str]
    user: str | None
    text: dict[str, Any] = field(default_factory=lambda: {"format": {"type": "text"}})
    truncation: Literal["disabled"] = "disabled"
    tools: list[Any] = []
    tool_choice: Any = "auto"
    reasoning: Any = None
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    background: bool = False
    store: bool = False
    service_tier: Literal["default"] = "default"


# Events


class Event(Struct, kw_only=True):
    sequence_number: int  # from 0


class ResponseEvent(Event, kw_only=True, tag_field="type"):
    response: Response


class Created(ResponseEvent, tag="response.created"):
    pass


class InProgress(ResponseEvent, tag="response.in_progress"):
    pass


class Completed(ResponseEvent, tag="response.completed"):
    pass


class Incomplete(ResponseEvent, tag="response.incomplete"):
    pass


class Failed(ResponseEvent, tag="response.failed"):
    pass


class ItemEvent(Event, kw_only=True, tag_field="type"):
    output_index: int = 0
    item: Item


class ItemAdded(ItemEvent, tag="response.output_item.added"):
    pass


class ItemDone(ItemEvent, tag="response.output_item.done"):
    pass


class ContentEvent(Event, kw_only=True, tag_field="type"):
    item_id: str
    output_index: int = 0
    content_index: int = 0


class PartAdded(ContentEvent, kw_only=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(ContentEvent, kw_only=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class TextDelta(ContentEvent, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: Sequence[TokenLogprob]
    prompt_logprobs: list[TokenLogprob] | UnsetType = UNSET
    flat_logprobs: FlatLogprobs | UnsetType = UNSET
    hidden_states: HiddenStates | UnsetType = UNSET


class TextDone(ContentEvent, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: Sequence[TokenLogprob]


class TextPiece(Event, kw_only=True):
    """Of reasoning or of arguments, with what stands beside it."""

    item_id: str
    output_index: int = 0
    delta: str
    logprobs: Sequence[TokenLogprob] | UnsetType = UNSET
    prompt_logprobs: list[TokenLogprob] | UnsetType = UNSET
    flat_logprobs: FlatLogprobs | UnsetType = UNSET
    hidden_states: HiddenStates | UnsetType = UNSET


class ReasoningDelta(TextPiece, kw_only=True, tag_field="type", tag="response.reasoning_text.delta"):
    content_index: int = 0


class ReasoningDone(ContentEvent, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(TextPiece, kw_only=True, tag_field="type", tag="response.function_call_arguments.delta"):
    pass


class ArgumentsDone(Event, kw_only=True, tag_field="type", tag="response.function_call_arguments.done"):
    item_id: str
    output_index: int = 0
    name: str
    arguments: str


ReasoningEvents = ReasoningDelta | ReasoningDone
CallEvents = ArgumentsDelta | ArgumentsDone
TextEvents = PartAdded | TextDelta | TextDone | PartDone
Events = Created | InProgress | ItemAdded | TextEvents | ReasoningEvents | CallEvents | ItemDone | Completed | Incomplete | Failed
