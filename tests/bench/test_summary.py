from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sidestream.bench.answer import Answer, Arrival, Failure
from sidestream.bench.load import Load
from sidestream.bench.serve import Client, Run
from sidestream.bench.summary import Latency, Summary


def answer(sent: float, *arrivals: tuple[float, float], **fields: object) -> Answer:
    """Ends half a second after its last chunk."""
    tokens = int(sum(count for _, count in arrivals))
    made = Answer(sent=sent, ended=(arrivals[-1][0] if arrivals else sent) + 0.5, arrivals=[Arrival(*arrival) for arrival in arrivals])
    return replace(made, counted=True, prompt_tokens=10, cached_tokens=2, completion_tokens=tokens, finish_reason="length", **fields)


def summary(*answers: Answer, client: Client | None = None, **options: object) -> Summary:
    return Summary(Run(Load(**options), "m", list(answers), max(one.ended for one in answers), client or Client(0.1, [0.0, 0.001])))


FULL = Failure("HTTP 429 queue_full", "the queue is full")
RUN = (
    answer(0.0, (1.0, 1), (2.0, 1), (4.0, 1)),
    answer(0.0, (3.0, 1), (3.5, 3), received=900_000),
    answer(1.0, failure=FULL),
    answer(2.0, failure=FULL._replace(message="still full")),
    answer(2.0, (2.5, 7), failure=Failure("timeout", "no end after 2 s")),
)


def test_numbers():
    made = summary(*RUN, api_key="secret").as_json()
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    assert "secret" not in json.dumps(made)
    assert (made["requests"], made["ok"], made["failed"]) == (5, 2, 3)
    assert made["failures"] == [
        {"kind": "HTTP 429 queue_full", "count": 2, "message": "the queue is full"},
        {"kind": "timeout", "count": 1, "message": "no end after 2 s"},
    ]
    assert made["seconds"] == 4.5
    assert (made["requests_per_second"], made["output_tokens"], made["output_tokens_per_second"]) == (2 / 4.5, 7, 7 / 4.5)
    assert (made["input_tokens"], made["input_tokens_per_second"], made["cached_tokens"]) == (20, 20 / 4.5, 4)
    assert made["ttft_seconds"] == {"mean": 2.0, "p50": 2.0, "p90": pytest.approx(2.8), "p99": pytest.approx(2.98)}
    assert made["itl_seconds"] == {"mean": pytest.approx(3.5 / 3), "p50": 1.0, "p90": pytest.approx(1.8), "p99": pytest.approx(1.98)}
    assert made["tpot_seconds"]["mean"] == pytest.approx((1.5 + 0.5 / 3) / 2)
    assert made["e2e_seconds"]["p50"] == 4.25
    assert made["tokens_per_chunk"] == {"mean": 7 / 5, "most": 3}
    assert made["token_counts"] == "chunk"
    assert made["client"]["processor_share"] == pytest.approx(0.1 / 4.5)
    assert [one["failure"] for one in made["answers"]] == [None, None, "HTTP 429 queue_full", "HTTP 429 queue_full", "timeout"]
    assert made["answers"][1] == {
        "sent": 0.0,
        "ttft_seconds": 3.0,
        "tpot_seconds": pytest.approx(0.5 / 3),
        "e2e_seconds": 4.0,
        "prompt_tokens": 10,
        "cached_tokens": 2,
        "completion_tokens": 4,
        "finish_reason": "length",
        "failure": None,
    }


def test_words():
    made = summary(*RUN, num_prompts=5, concurrency=3, input_len=1000, shared_prefix=100)
    assert made.head() == [
        "http://127.0.0.1:30000/v1/completions · m · 5 requests, 3 at once · 1,000 + 128 tokens, 100 shared",
        "",
        "requests  2 answered, 3 failed in 4.5 s    0.444 request/s",
        "input     20 tokens (4 cached)    4.44 tok/s",
        "output    7 tokens    1.56 tok/s",
        "received  0.9 MB    0.2 MB/s",
    ]
    assert made.rows()[0] == ("TTFT to the first token", "2,000", "2,000", "2,800", "2,980")
    assert [row[0].split()[0] for row in made.rows()] == ["TTFT", "ITL", "TPOT", "e2e"]
    assert made.notes() == [
        "failed: 2 x HTTP 429 queue_full: the queue is full",
        "failed: 1 x timeout: no end after 2 s",
        "A chunk brings 1.40 tokens on average, 3 at most: ITL is the time between chunks, TPOT that of a token.",
    ]


def test_nothing_was_answered():
    made = summary(RUN[2])
    assert (made.latencies["ttft"], made.tokens_per_chunk, made.input_tokens) == (None, None, None)
    assert made.rows()[0] == ("TTFT to the first token", "-", "-", "-", "-")
    assert made.head()[3] == "input     unknown    "
    assert made.as_json()["ttft_seconds"] is None
    assert made.notes() == ["failed: 1 x HTTP 429 queue_full: the queue is full"]


@pytest.mark.parametrize(
    ("fields", "counts", "note"),
    [
        ({"counted": False, "prompt_tokens": None}, "none", "The server tells no usage: a chunk counts as one token."),
        (
            {"counted": False},
            "end",
            "A chunk brings 2.00 tokens on average: ITL is the time between chunks, TPOT that of a token.",
        ),
    ],
)
def test_what_the_server_does_not_tell(fields, counts, note):
    made = summary(replace(answer(0.0, (1.0, 2), (2.0, 2)), **fields))
    assert made.counts == counts
    assert made.notes() == [note]


def test_answers_of_another_length():
    short = summary(answer(0.0, (1.0, 1), (2.0, 1)), ignore_eos=True, output_len=3).notes()
    assert short == ["1 answers have not the 3 tokens of --output-len, in spite of --ignore-eos."]
    assert summary(answer(0.0, (1.0, 1), (2.0, 1)), ignore_eos=True, output_len=2).notes() == []


def test_a_client_that_is_busy_says_so():
    one = answer(0.0, (1.0, 1), (3.5, 1))
    assert summary(one, client=Client(1.0, [0.001])).notes() == []
    [note] = summary(one, client=Client(3.6, [0.001, 0.002])).notes()
    assert note.startswith("The client took 90% of a core and came up to 2 ms late (p99)")
    [note] = summary(one, client=Client(0.4, [0.05])).notes()
    assert note.startswith("The client took 10% of a core and came up to 50 ms late (p99)")


def test_percentiles():
    assert Latency.of([]) is None
    assert Latency.of([float(i) for i in range(101)]) == (50.0, 50.0, 90.0, 99.0)
