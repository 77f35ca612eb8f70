from __future__ import annotations

import json

import pytest
import torch

from sidestream.output import HiddenStates, Logprobs, Output, output_to_dict

INFINITY, NAN = float("inf"), float("nan")


def strict(output: Output):
    return json.loads(json.dumps(output_to_dict(output), allow_nan=False), parse_constant=pytest.fail)


def made(**keywords) -> Output:
    fields = {
        "text": "Hi",
        "token_ids": [5, 2],
        "finish_reason": "stop",
        "matched_stop": 2,
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 1,
        "rid": "r-1",
    }
    return Output(**fields | keywords)


def test_fields_are_those_of_the_contract():
    assert strict(made()) == {
        "text": "Hi",
        "token_ids": [5, 2],
        "finish_reason": "stop",
        "matched_stop": 2,
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 1,
        "rid": "r-1",
        "index": 0,
        "logprobs": None,
        "hidden_states": None,
        "copied_bytes": None,
    }
    assert strict(made(copied_bytes={"token": 8}))["copied_bytes"] == {"token": 8}


def test_logprobs_are_strictly_valid_json():
    logprobs = Logprobs(
        input=[None, -1.5],
        output=[-INFINITY, NAN],
        input_top=[None, [(-0.5, 7), (-INFINITY, 8)]],
        output_top=[[(-0.25, 3)], []],
        input_ids=[None, [(-2.0, 9)]],
        output_ids=[[(NAN, 9)], [(INFINITY, 9)]],
    )
    assert strict(made(logprobs=logprobs))["logprobs"] == {
        "input": [None, -1.5],
        "output": [-9999.0, None],
        "input_top": [None, [[-0.5, 7], [-9999.0, 8]]],
        "output_top": [[[-0.25, 3]], []],
        "input_ids": [None, [[-2.0, 9]]],
        "output_ids": [[[None, 9]], [[None, 9]]],
    }


def test_hidden_states_carry_type_shape_layers_and_positions():
    data = torch.tensor([[[1.0, 0.1]], [[NAN, -INFINITY]]], dtype=torch.bfloat16)  # [2 rows, 1 layer, 2]
    assert strict(made(hidden_states=HiddenStates.of(data, [3, 4], (-1,))))["hidden_states"] == {
        "dtype": "bfloat16",
        "shape": [2, 1, 2],
        "layers": [-1],
        "positions": [3, 4],
        "data": [[[1.0, 0.10009765625]], [[None, None]]],
    }


def test_float32_rows_survive_json_bit_for_bit():
    data = torch.randn(4, 2, 3)
    back = torch.tensor(strict(made(hidden_states=HiddenStates.of(data, range(4), (0, 1))))["hidden_states"]["data"])
    assert torch.equal(back, data)


def test_zero_rows_keep_their_shape():
    states = strict(made(hidden_states=HiddenStates.of(torch.empty(0, 2, 4), [], (0, 1))))["hidden_states"]
    assert (states["shape"], states["positions"], states["data"]) == ([0, 2, 4], [], [])


def test_repr_shows_sizes_and_not_contents():
    assert repr(made()) == "Output(text='Hi', token_ids=[2], finish_reason='stop', prompt_tokens=3, rid='r-1', index=0)"
    large = made(
        text="word " * 1000,
        logprobs=Logprobs(input=[None, -1.5], output=[-0.5], output_top=[[(-0.5, 3)] * 100]),
        hidden_states=HiddenStates.of(torch.zeros(1000, 2, 576, dtype=torch.bfloat16), range(1000), (12, -1)),
    )
    assert repr(large) == (
        f"Output(text={('word ' * 16)[:79] + '…'!r}, token_ids=[2], finish_reason='stop', prompt_tokens=3, rid='r-1', index=0, "
        "logprobs=Logprobs(input=[2], output=[1], output_top=[1]), hidden_states=HiddenStates(bfloat16 [1000, 2, 576], layers=(12, -1)))"
    )
    assert repr(Logprobs()) == "Logprobs()"
