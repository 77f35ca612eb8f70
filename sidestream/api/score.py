"""`/v1/score`, in SGLang's meaning: how likely each of some tokens comes next, after a query and an item."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.responses import Response

from sidestream.api.fields import OUTPUTS, called
from sidestream.api.generation import Generation
from sidestream.api.openai import check_not_aborted
from sidestream.api.prompts import MAX_PROMPTS, read_prompts
from sidestream.api.route import Call, Route
from sidestream.api.shapes import CompletionTokensDetails, PromptTokensDetails, Usage, finite
from sidestream.api.sse import json_response
from sidestream.errors import InvalidRequest
from sidestream.options import shown
from sidestream.output import Output
from sidestream.params import SamplingParams

MAX_LABELS = OUTPUTS["token_ids_logprob"].option.max_items

Label = Annotated[int, Meta(ge=0)]
Labels = Annotated[list[Label], Meta(min_length=1, max_length=MAX_LABELS)]


class Score(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    query: Annotated[str | list[int], Meta(description="What comes before every item: a text, or token ids.")] | None = None
    items: Annotated[
        str | Annotated[list[str | list[int]], Meta(max_length=MAX_PROMPTS)],
        Meta(description="What is scored: a text, a list of texts, or a list of token ids of each."),
    ]
    label_token_ids: Annotated[
        Annotated[list[Label | Labels], Meta(min_length=1, max_length=MAX_PROMPTS)],
        Meta(description="The tokens whose probability is asked for, or a list of such lists, one for each item."),
    ]
    apply_softmax: Annotated[bool, Meta(description="Let the scores of an item add up to 1.")] | None = None
    temperature: Annotated[float, Meta(gt=0, description="Divides the logprobs before the softmax.")] | None = None
    item_first: Annotated[bool, Meta(description="Put the item before the query.")] | None = None
    return_token_logprobs: Annotated[bool, Meta(description="Return token_logprobs, too.")] | None = None
    model: Annotated[str, Meta(description="Name of the model; may be left out.")] | None = None


class ScoreAnswer(msgspec.Struct, kw_only=True):
    """`scores[i][j]`: of item i and its label j."""

    object: str = "scoring"
    scores: list[list[float]]
    token_logprobs: list[list[float | None]] | None  # the same, as logprobs over the whole vocabulary
    model: str
    usage: Usage


async def score(call: Call[Score]) -> Response:
    body, service = call.body, call.service
    model = service.check_model(body.model)
    if body.temperature is not None and not body.apply_softmax:
        raise InvalidRequest("temperature", f"got {body.temperature}, must be left out without apply_softmax")
    if not body.items:  # nothing to score
        return json_response(ScoreAnswer(scores=[], token_logprobs=None, model=model, usage=_usage([])))
    prompts = _joined(body)
    labels = _labels(body.label_token_ids, len(prompts))
    ids, _ = await read_prompts(service.engine, prompts, "items")
    # The distribution after the prompt is that of the first output token. Which one it is does not matter.
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0)
    with called({"token_ids_logprob": "label_token_ids", "prompt": "items"}):
        generation = Generation(call, ids, sampling, {"token_ids_logprob": labels}, operation="text_completion")
        outputs = await generation.answers()
    for output in outputs:
        check_not_aborted(output)
    logprobs = [_logprobs(output) for output in outputs]
    answer = ScoreAnswer(
        scores=[_softmax(each, body.temperature or 1.0) if body.apply_softmax else list(map(math.exp, each)) for each in logprobs],
        token_logprobs=[list(map(finite, each)) for each in logprobs] if body.return_token_logprobs else None,
        model=model,
        usage=_usage(outputs),
    )
    return json_response(answer)


def _joined(body: Score) -> list[Any]:
    """Query and item as one prompt: texts are joined before they become tokens."""
    items: Sequence[Any] = [body.items] if isinstance(body.items, str) else body.items
    query: Any = body.query
    if query is None:
        query = "" if isinstance(items[0], str) else []
    for place, item in enumerate(items):
        if isinstance(item, str) != isinstance(query, str):
            kind = "a text" if isinstance(query, str) else "token ids"
            raise InvalidRequest(f"items.{place}", f"got {shown(item)}, must be {kind} like the query")
    return [item + query if body.item_first else query + item for item in items]


def _labels(given: Sequence[Any], count: int) -> list[list[int]]:
    listed = isinstance(given[0], list)
    for place, each in enumerate(given):
        if isinstance(each, list) != listed:
            kind = "a list of token ids" if listed else "a token id"
            raise InvalidRequest(f"label_token_ids.{place}", f"got {shown(each)}, must be {kind}: the first one is")
    if listed and len(given) != count:
        raise InvalidRequest("label_token_ids", f"got {len(given)} lists for {count} items, must be one list or one for each")
    return list(given) if listed else [list(given)] * count


def _logprobs(output: Output) -> list[float]:
    assert output.logprobs is not None
    return [value for value, _ in output.logprobs.output_ids[0]]


def _softmax(logprobs: Sequence[float], temperature: float) -> list[float]:
    best = max(logprobs)
    if best == -math.inf:  # none of them can come
        return [0.0] * len(logprobs)
    weights = [math.exp((value - best) / temperature) for value in logprobs]
    return [weight / sum(weights) for weight in weights]


def _usage(outputs: Sequence[Output]) -> Usage:
    """No token is returned."""
    tokens, cached = (sum(getattr(output, name) for output in outputs) for name in ("prompt_tokens", "cached_tokens"))
    return Usage(tokens, 0, tokens, PromptTokensDetails(cached), CompletionTokensDetails())


SCORE = (Route("POST", "/v1/score", score, "Probabilities of the next token", body=Score, answer=ScoreAnswer),)
