"""Which rows of a step anybody gets, and where they are in the packed blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from sidestream.engine.outputs import LogprobSlice, plan_outputs
from sidestream.engine.request import Request
from sidestream.params import OutputParams, SamplingParams


def request_of(key: int, prompt_len: int, **outputs: Any) -> Request:
    return Request(
        key=key,
        rid=str(key),
        index=0,
        prompt=np.arange(10 * key, 10 * key + prompt_len, dtype=np.int32),
        sampling=SamplingParams(max_new_tokens=5),
        plan=OutputParams(**outputs).check(vocab_size=100, num_layers=2, prompt_len=prompt_len),
        max_tokens=5,
        eos_token_ids=frozenset(),
        matcher=None,
        constraint=None,
        primary=None,
    )


def test_logprob_rows_of_a_mixed_step() -> None:
    requests = [
        request_of(1, 4, top_logprobs_num=2, token_ids_logprob=[7, 8], logprob_start_len=2),  # positions 1 to 3: samples
        request_of(2, 3),  # asks for nothing
        request_of(3, 6, top_logprobs_num=3, logprob_start_len=0, logprobs_mode="processed"),  # 0 to 4: more to come
        request_of(4, 2, token_ids_logprob=[9]),
    ]
    starts, lengths, samples = [1, 0, 0, 0], [3, 3, 5, 2], [True, True, False, True]
    features = requests[0].features | requests[2].features | requests[3].features
    layout = plan_outputs(requests, starts, lengths, samples, features)

    scored = layout.input_token
    assert scored is not None and scored.targets is not None and scored.processed is None and scored.k == 3
    assert scored.rows.tolist() == [0, 1, 6, 7, 8, 9, 10]
    assert scored.targets.tolist() == [12, 13, 31, 32, 33, 34, 35]
    assert scored.top_index.tolist() == [0, 1, 3, 4, *range(6, 21)]
    assert (scored.id_rows.tolist(), scored.id_columns.tolist()) == ([0, 0, 1, 1], [7, 8, 7, 8])
    assert layout.input_slices == (
        LogprobSlice(span=0, position=2, n=2, k=2, ids=2, row=0, top=0, id=0),
        LogprobSlice(span=2, position=1, n=5, k=3, ids=0, row=2, top=4, id=4),
    )

    drawn = layout.next_token
    assert drawn is not None and drawn.targets is None and drawn.processed is None and drawn.k == 2
    assert drawn.rows.tolist() == [0, 2] and drawn.top_index.tolist() == [0, 1]
    assert (drawn.id_rows.tolist(), drawn.id_columns.tolist()) == ([0, 0, 1], [7, 8, 9])
    assert layout.next_slices == (
        LogprobSlice(span=0, position=4, n=1, k=2, ids=2, row=0, top=0, id=0),
        LogprobSlice(span=3, position=2, n=1, k=0, ids=1, row=1, top=2, id=2),
    )
    assert requests[2].logprob_next == 5 and layout.taps is None


def test_processed_rows_are_marked() -> None:
    requests = [request_of(1, 2, return_logprob=True), request_of(2, 2, return_logprob=True, logprobs_mode="processed")]
    drawn = plan_outputs(requests, [0, 0], [2, 2], [True, True], requests[0].features).next_token
    assert drawn is not None and drawn.processed is not None and drawn.processed.tolist() == [False, True]
    assert drawn.k == 0 and len(drawn.top_index) == len(drawn.id_rows) == len(drawn.id_columns) == 0
