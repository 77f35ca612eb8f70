"""`/tokenize`, `/detokenize` and `/tokenizer_info`, in shapes that clients of SGLang and of vLLM read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.responses import Response

from sidestream.api.chat import EFFORT, NO_TEMPLATE, TEXT_ONLY, ChatMessage, Effort, checked_variables, encode_messages
from sidestream.api.dialogue import Dialogue, Reasoned
from sidestream.api.prompts import MAX_PROMPTS
from sidestream.api.route import Call, Route
from sidestream.api.sse import json_response
from sidestream.api.tools import Parallel, ToolChoice, Tools, tool_use
from sidestream.async_client import LONG_TEXT
from sidestream.errors import InvalidRequest
from sidestream.options import shown

Ids = Annotated[list[int | list[int]], Meta(description="Token ids, or a list of lists of them.")]


class Tokenize(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: Annotated[str, Meta(description="Name of the model; may be left out.")] | None = None
    prompt: (
        Annotated[
            str | Annotated[list[str], Meta(max_length=MAX_PROMPTS)],
            Meta(description="A text, or a list of them.", examples=["Hello, world"]),
        ]
        | None
    ) = None
    messages: Annotated[list[ChatMessage], Meta(description="A conversation, written by the chat template.")] | None = None
    add_special_tokens: Annotated[bool, Meta(description="Begin a prompt with BOS if the model's prompts do; the default.")] | None = None
    return_token_strs: Annotated[bool, Meta(description="Return token_strs: the tokens as the vocabulary writes them.")] | None = None
    add_generation_prompt: Annotated[bool, Meta(description="End messages with the beginning of an answer; the default.")] | None = None
    continue_final_message: Annotated[bool, Meta(description="End messages where the text of the last one ends.")] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(description="Variables for the chat template.")] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Parallel | None = None
    reasoning_effort: Annotated[Effort, EFFORT] | None = None
    chat_template: Annotated[None, NO_TEMPLATE] = None
    mm_processor_kwargs: Annotated[None, TEXT_ONLY] = None


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """With a list of prompts each field is a list."""

    count: int | list[int]
    max_model_len: int
    tokens: list[int | list[int]]
    token_strs: list[str | list[str]] | None


class Detokenize(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: Annotated[str, Meta(description="Name of the model; may be left out.")] | None = None
    tokens: Ids
    skip_special_tokens: Annotated[bool, Meta(description="Leave special tokens such as EOS out; the default.")] | None = None


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    """The same text under SGLang's and vLLM's name; a list of texts for a list of lists."""

    text: str | list[str]
    prompt: str | list[str]


class TokenizerInfo(msgspec.Struct, kw_only=True):
    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    eos_token_ids: list[int]
    add_bos_token: bool  # whether prompts begin with it
    chat_template: str | None
    vocab_size: int
    model_max_length: int


async def tokenize(call: Call[Tokenize]) -> Response:
    body, service = call.body, call.service
    service.check_model(body.model)
    tokenizer = service.engine.tokenizer
    tokens: Sequence[Any]
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt", f"got {'neither' if body.prompt is None else 'both'} of prompt and messages, must be one of them")
    if body.prompt is None:
        tokens = await _conversation(call)
        lists = [tokens]
    else:
        lists = await _texts(call, [body.prompt] if isinstance(body.prompt, str) else body.prompt)
        tokens = lists[0] if isinstance(body.prompt, str) else lists
    listed = tokens is lists
    written = [[tokenizer.backend.id_to_token(token) or "" for token in ids] for ids in lists] if body.return_token_strs else None
    answer = TokenizeAnswer(
        count=[len(ids) for ids in lists] if listed else len(tokens),
        max_model_len=service.any_engine.context_length,
        tokens=list(tokens),
        token_strs=None if written is None else [*written] if listed else [*written[0]],
    )
    return json_response(answer)


async def _texts(call: Call[Tokenize], texts: Sequence[str]) -> list[list[int]]:
    body, tokenizer = call.body, call.service.engine.tokenizer
    for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools", "tool_choice", "reasoning_effort"):
        if getattr(body, name):
            raise InvalidRequest(name, f"got {shown(getattr(body, name))}, must be left out with a prompt: no template writes it")
    special = body.add_special_tokens is not False
    if sum(map(len, texts)) > LONG_TEXT:
        return await asyncio.to_thread(tokenizer.encode_batch, texts, add_special_tokens=special)
    return [tokenizer.encode(text, add_special_tokens=special) for text in texts]


async def _conversation(call: Call[Tokenize]) -> list[int]:
    """As a chat request with the same fields is tokenized."""
    body, engine = call.body, call.service.engine
    if body.add_special_tokens:
        raise InvalidRequest("add_special_tokens", "got true, must be left out with messages: the chat template writes special tokens")
    use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    dialogue = Dialogue(call.service, use, Reasoned(effort=body.reasoning_effort))
    return await encode_messages(
        engine,
        body.messages or [],
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables=dialogue.variables(checked_variables(body.chat_template_kwargs)),
    )


async def detokenize(call: Call[Detokenize]) -> Response:
    body, service = call.body, call.service
    service.check_model(body.model)
    engine = service.engine
    listed = bool(body.tokens) and isinstance(body.tokens[0], list)
    lists = body.tokens if listed else [body.tokens]
    for place, ids in enumerate(lists):
        _check(ids, f"tokens.{place}" if listed else "tokens", engine.facts.vocab_size)
    skip = body.skip_special_tokens is not False
    texts = await asyncio.to_thread(lambda: [engine.tokenizer.decode(ids, skip_special_tokens=skip) for ids in lists])
    text = texts if listed else texts[0]
    return json_response(DetokenizeAnswer(text=text, prompt=text))


def _check(ids: Any, where: str, vocab_size: int) -> None:
    if isinstance(ids, int):
        raise InvalidRequest(where, f"got {ids}, must be a list of token ids: the first one is")
    for place, token in enumerate(ids):
        if not isinstance(token, int):
            raise InvalidRequest(f"{where}.{place}", f"got {shown(token)}, must be a token id: the first one is")
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"{where}.{place}", f"got token id {token}, must be between 0 and {vocab_size - 1} (the vocabulary)")


async def tokenizer_info(call: Call[None]) -> Response:
    engine = call.service.any_engine
    tokenizer = engine.tokenizer
    eos = tokenizer.eos_token_ids
    answer = TokenizerInfo(
        tokenizer_class="PreTrainedTokenizerFast",  # of transformers: reads what this one reads
        bos_token=tokenizer.bos_token or None,
        eos_token=tokenizer.eos_token or None,
        pad_token=None,  # nothing is padded here
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=eos[0] if eos else None,
        eos_token_ids=list(eos),
        add_bos_token=tokenizer.adds_bos,
        chat_template=engine.frontend.chat_template.source,
        vocab_size=tokenizer.vocab_size,
        model_max_length=engine.context_length,
    )
    return json_response(answer)


TOKENIZE = (
    Route(
        "POST", "/tokenize", tokenize, "Text to token ids", body=Tokenize, answer=TokenizeAnswer, aliases=("/v1/tokenize",), queues=False
    ),
    Route(
        "POST",
        "/detokenize",
        detokenize,
        "Token ids to text",
        body=Detokenize,
        answer=DetokenizeAnswer,
        aliases=("/v1/detokenize",),
        queues=False,
    ),
    Route("GET", "/tokenizer_info", tokenizer_info, "What the tokenizer is", answer=TokenizerInfo),
)
