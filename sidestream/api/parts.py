"""Parts of an output, put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import chain

import numpy as np

from sidestream.output import HiddenStates, Logprobs, Output


def joined(parts: Sequence[Output]) -> Output:
    """Parts of one output that follow each other, as the one part that they are together."""
    *_, last = parts
    if len(parts) == 1:
        return last
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    states = [part.hidden_states for part in parts if part.hidden_states is not None]
    return replace(
        last,
        text="".join(part.text for part in parts),
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=_logprobs(logprobs) if logprobs else None,
        hidden_states=_hidden_states(states) if states else None,
    )


def _logprobs(parts: Sequence[Logprobs]) -> Logprobs:
    return Logprobs(**{field.name: list(chain.from_iterable(getattr(part, field.name) for part in parts)) for field in fields(Logprobs)})


def _hidden_states(parts: Sequence[HiddenStates]) -> HiddenStates:
    rows = sum(part.shape[0] for part in parts)
    return replace(
        parts[-1],
        raw=np.concatenate([part.raw for part in parts]),
        shape=(rows, *parts[-1].shape[1:]),
        positions=[position for part in parts for position in part.positions],
    )
