"""Parts of an output, put together."""

from __future__ import annotations

import numpy as np

from sidestream import Output
from sidestream.api.parts import joined
from sidestream.output import HiddenStates, Logprobs


def part(text: str, tokens: list[int], first: int, **more: object) -> Output:
    rows = np.arange(first, first + len(tokens), dtype=np.float32)
    states = HiddenStates(rows.view(np.uint8), "float32", (len(tokens), 1, 1), list(range(first, first + len(tokens))), (-1,))
    logprobs = Logprobs(input=[None] if not first else [], output=[-float(token) for token in tokens])
    given = {"finish_reason": None, "matched_stop": None, "prompt_tokens": 1, "completion_tokens": first + len(tokens), "cached_tokens": 0}
    return Output(text=text, token_ids=tokens, rid="r", logprobs=logprobs, hidden_states=states, **given | more)  # type: ignore[arg-type]


def test_everything_is_there_once_and_in_order() -> None:
    whole = joined([part("a", [1], 0), part("", [2, 3], 1), part("b", [4], 3, finish_reason="stop", matched_stop=4)])
    assert (whole.text, whole.token_ids, whole.finish_reason, whole.matched_stop) == ("ab", [1, 2, 3, 4], "stop", 4)
    assert whole.completion_tokens == 4 and whole.logprobs is not None and whole.hidden_states is not None
    assert (whole.logprobs.input, whole.logprobs.output) == ([None], [-1.0, -2.0, -3.0, -4.0])
    assert whole.hidden_states.positions == [0, 1, 2, 3] and whole.hidden_states.shape == (4, 1, 1)
    assert whole.hidden_states.numbers().ravel().tolist() == [0, 1, 2, 3]


def test_one_part_is_itself() -> None:
    only = part("a", [1], 0)
    assert joined([only]) is only
