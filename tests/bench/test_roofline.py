"""The arithmetic, against numbers computed by hand."""

from __future__ import annotations

import pytest

from sidestream.bench.roofline import Costs, Limits, Step
from sidestream.bench.work import Work
from sidestream.models.spec import DecoderSpec, RopeSpec

LAYER = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32  # q and o, k and v, the three of the MLP
TOKEN = 2 * 2 * LAYER
HEAD = 2 * 100 * 32
WEIGHTS = 1000


def costs(*windows: int | None) -> Costs:
    spec = DecoderSpec(
        model_type="llama",
        vocab_size=100,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=64,
        norm_eps=1e-5,
        windows=windows,
        rope=RopeSpec(theta=1e4, dim=8),
        attention_scale=1.0,
        tie_word_embeddings=True,
        max_position=64,
    )
    return Costs(spec, WEIGHTS, 2)


def test_the_costs_of_a_token():
    full = costs(None, None)
    assert (LAYER, full.token_flop, full.head_flop) == (9216, 36864, 6400)
    assert full.keys(10) == 20
    assert full.attention_flop(20) == 2560  # 4 heads of 8, two products, each a multiplication and an addition
    assert full.kv_bytes(20) == 1280  # 2 heads of 8, keys and values, 2 bytes
    assert costs(4, None).keys(10) == 14
    assert costs(4, None).keys(3) == 6


def test_decode_reads_the_weights_once_and_each_request_its_keys():
    one = costs(None, None).steps(Work(1, 9, 2, "decode"))
    assert one == [Step(WEIGHTS + 1280, TOKEN + HEAD + 2560)]
    assert len(costs(None, None).steps(Work(1, 9, 5, "decode"))) == 4
    three = costs(None, None).steps(Work(3, 9, 2, "decode"))
    assert three == [Step(WEIGHTS + 3 * 1280, 3 * (TOKEN + HEAD + 2560))]


def test_a_shared_prefix_is_computed_and_read_once():
    work = Work(3, 6, 3, "output", shared=4)
    own = 3 * (2 * TOKEN + 128 * 2 * (5 + 6))
    decode = [
        Step(WEIGHTS + 64 * (8 + 3 * 6), 3 * (TOKEN + HEAD + 128 * 14)),
        Step(WEIGHTS + 64 * (8 + 3 * 8), 3 * (TOKEN + HEAD + 128 * 16)),
    ]
    shared = 4 * TOKEN + 128 * 2 * (1 + 2 + 3 + 4)
    assert shared + own + 3 * HEAD == 398848
    assert costs(None, None).steps(work) == [Step(WEIGHTS, 398848), *decode]
    warm = Work(3, 6, 3, "output", shared=4, warm=True)
    assert costs(None, None).steps(warm) == [Step(WEIGHTS + 64 * 8, own + 3 * HEAD), *decode]


@pytest.mark.parametrize(
    ("limits", "seconds"),
    [
        (Limits(100.0, 1e12), 30.0),  # the bytes bound both steps
        (Limits(1e12, 50.0), 100.0),  # the operations
        (Limits(100.0, 50.0), 10.0 + 90.0),  # one each
    ],
)
def test_a_step_takes_the_longer_of_the_two(limits, seconds):
    assert limits.seconds([Step(1000, 500), Step(2000, 4500)]) == pytest.approx(seconds)
