"""From what a caller says to checked prompts: everything is refused here that can be, before anything is queued."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sidestream.answers import Choice, Mailbox, Prompt
from sidestream.engine.outputs import row_bytes
from sidestream.errors import ContextLengthExceeded, InvalidRequest
from sidestream.frontend import Facts, Frontend
from sidestream.options import shown
from sidestream.params import SamplingParams, outputs_per_prompt, per_prompt
from sidestream.text.stop_regex import compiled

PromptLike = str | Sequence[int]


def encode(frontend: Frontend, prompt: PromptLike) -> list[int]:
    """Token ids of one prompt, text or ids. Raises InvalidRequest; one that is much too long is not looked at to its end."""
    context = frontend.facts.context
    if isinstance(prompt, str):
        if frontend.tokenizer.surely_exceeds(prompt, context):
            raise _too_long(context, f"more than {2 * context} tokens")
        ids = frontend.tokenizer.encode(prompt)
    else:
        if isinstance(prompt, Sequence) and len(prompt) > context:
            raise _too_long(context, f"{len(prompt)} tokens")
        ids = _token_ids(prompt)
        limit = frontend.facts.vocab_size
        for token in ids:
            if not 0 <= token < limit:
                raise InvalidRequest("prompt", f"got token id {token}, must be between 0 and {limit - 1} (the vocabulary)")
    if not ids:
        raise InvalidRequest("prompt", "got an empty prompt, must have at least one token")
    return ids


def prepare(
    frontend: Frontend,
    ids: list[list[int]],
    sampling_params: Any,
    rid: Any,
    outputs: Mapping[str, Any],
    *,
    events: Mailbox,
    kind: type[Choice],
    keys: Iterator[int],
    max_output_bytes: int,
) -> list[Prompt]:
    """Check the parameters of every prompt of a call against the model. Raises InvalidRequest, naming field, value and limit."""
    count = len(ids)
    samplings = per_prompt("sampling_params", sampling_params if sampling_params is not None else SamplingParams(), count)
    rids = [_checked_rid(name) for name in per_prompt("rid", rid, count)]
    if len(set(rids)) < count:
        twice = next(name for name in rids if rids.count(name) > 1)
        raise InvalidRequest("rid", f"got {twice!r} for more than one prompt, must be different ids")
    facts, prompts = frontend.facts, []
    for sampling in {id(each): each for each in samplings}.values():
        if not isinstance(sampling, SamplingParams):
            raise InvalidRequest("sampling_params", f"got {type(sampling).__name__}, must be SamplingParams")
        for pattern in sampling.stop_regex:
            compiled(pattern)
    grammars = frontend.grammars_of(samplings, ids)
    asked = zip(ids, samplings, rids, outputs_per_prompt(outputs, count), grammars, strict=True)
    for tokens, sampling, name, wanted, grammar in asked:
        sampling.check(vocab_size=facts.vocab_size, eos_token_ids=facts.eos_token_ids)
        _check_length(facts, len(tokens), sampling)
        prompt = Prompt(
            rid=name,
            ids=tokens,
            sampling=sampling,
            plan=wanted.check(vocab_size=facts.vocab_size, num_layers=facts.num_layers, prompt_len=len(tokens)),
            max_tokens=min(sampling.max_new_tokens, facts.context - len(tokens)),
            hidden_size=facts.hidden_size,
            compute_dtype=facts.dtype,
            tokenizer=frontend.tokenizer,
            events=events,
            grammar=grammar,
        )
        _check_bytes(facts, prompt, max_output_bytes)
        prompt.choices = [kind(prompt, index, next(keys)) for index in range(sampling.n)]
        prompts.append(prompt)
    for grammar in set(grammars):  # last: to compile one may take long
        if grammar is not None:
            frontend.grammars.check(grammar)
    return prompts


def _check_length(facts: Facts, count: int, sampling: SamplingParams) -> None:
    context = facts.context
    if count > context or (count == context and sampling.max_new_tokens > 0):
        more = "" if count > context else f" and max_new_tokens is {sampling.max_new_tokens}: there is no room for any output"
        raise _too_long(context, f"{count} tokens{more}")


def _too_long(context: int, count: str) -> ContextLengthExceeded:
    said = f"This model's maximum context length is {context} tokens. However, the prompt has {count}."
    return ContextLengthExceeded("prompt", said, hint="Shorten the prompt.")


def _check_bytes(facts: Facts, prompt: Prompt, max_output_bytes: int) -> None:
    """One row must fit the arena, and all rows together what one request may ask for."""
    plan, sampling = prompt.plan, prompt.sampling
    row = row_bytes(plan, facts.hidden_size, facts.itemsize)
    smallest = 4 + row.hidden + 2 * row.logprob
    if smallest > facts.arena_bytes:
        fields = [*["hidden_states_layers"] * bool(row.hidden), *["top_logprobs_num", "token_ids_logprob"] * bool(row.logprob)]
        raise InvalidRequest(
            "arena_memory",
            f"got {facts.arena_bytes} bytes, must be at least {smallest}: what one position of this request needs",
            hint=f"Raise --arena-memory{', or ask for less with ' + ' or '.join(fields) if fields else ''}.",
        )
    length = len(prompt.ids)
    new = prompt.max_tokens
    rows = 1 if plan.return_hidden_states == "last" else max(0, length + max(new, 1) - 1 - plan.hidden_start)
    inputs = length - plan.logprob_start if plan.logprob_start is not None else 0
    total = rows * row.hidden * sampling.n + (inputs + new * sampling.n) * row.logprob
    if total > max_output_bytes:
        field = "return_hidden_states" if row.hidden else "return_logprob"
        raise InvalidRequest(
            field,
            f"the outputs may take {total} bytes, must be at most {max_output_bytes} (--max-output-bytes)",
            hint="Ask for fewer layers or positions, or lower max_new_tokens.",
        )


def is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return True
    dimensions = getattr(prompts, "ndim", None)  # of a numpy array or a tensor
    if dimensions is not None:
        if dimensions not in (1, 2):
            raise InvalidRequest("prompts", f"got an array of {dimensions} dimensions, must be 1 (a prompt) or 2 (a prompt in each row)")
        return bool(dimensions == 1)
    if not isinstance(prompts, Sequence):
        raise InvalidRequest("prompts", f"got {type(prompts).__name__}, must be text, token ids, or a list of them")
    return len(prompts) > 0 and isinstance(prompts[0], (int, np.integer))


def _token_ids(prompt: Any) -> list[int]:
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(ids, (list, tuple)):
        raise InvalidRequest("prompt", f"got {type(prompt).__name__}, must be text or a list of token ids")
    for token in ids:
        if isinstance(token, (str, list, tuple)):
            hint = "Engine.generate takes a list of prompts; Engine.stream takes one."
            raise InvalidRequest("prompt", f"got a list with {shown(token)} in it, must be one prompt: text or token ids", hint=hint)
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
            raise InvalidRequest("prompt", f"got {token!r} among the token ids, must be integers")
    return [int(token) for token in ids]


def _checked_rid(rid: Any) -> str:
    if rid is None:
        return secrets.token_hex(8)
    if not isinstance(rid, str) or not rid:
        raise InvalidRequest("rid", f"got {rid!r}, must be a text that is not empty")
    return rid
