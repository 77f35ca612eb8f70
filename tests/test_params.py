from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestream import params
from sidestream.errors import InvalidRequest
from sidestream.options import fields_of
from sidestream.params import OutputParams, SamplingParams, outputs_per_prompt, per_prompt

NAN, INFINITY = math.nan, math.inf


def refusal(call, *arguments, **keywords) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        call(*arguments, **keywords)
    return refused.value


def test_sampling_defaults():
    assert vars(SamplingParams()) == {
        "max_new_tokens": 128,
        "min_new_tokens": 0,
        "temperature": 1.0,
        "top_k": -1,
        "top_p": 1.0,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop": (),
        "stop_regex": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "logit_bias": {},
        "allowed_token_ids": None,
        "bad_token_ids": (),
        "json_schema": None,
        "regex": None,
        "ebnf": None,
        "choice": None,
        "structural_tag": None,
        "require_reasoning": False,
        "max_thinking_tokens": None,
        "n": 1,
        "seed": None,
        "skip_special_tokens": True,
    }


def test_a_choice_of_nothing_is_refused():
    assert refusal(SamplingParams, choice=[]).param == "choice"


def test_values_are_normalised():
    made = SamplingParams(
        temperature=0,
        top_k=0,
        stop=["b", "a", "b"],
        stop_token_ids=[2, 1, 2],
        logit_bias={"5": -100, 7: 1},
        allowed_token_ids=np.array([3, 4]),
        bad_token_ids={4},
        n=np.int64(2),
    )
    assert made.temperature == 0.0
    assert isinstance(made.temperature, float)
    assert made.top_k == -1
    assert made.stop == ("b", "a")
    assert made.stop_token_ids == (2, 1)
    assert made.logit_bias == {5: -100.0, 7: 1.0}
    assert made.allowed_token_ids == (3, 4)
    assert made.bad_token_ids == (4,)
    assert type(made.n) is int
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(temperature=1e-6).temperature == 0.0
    assert SamplingParams(temperature=np.float32(0.5)).temperature == 0.5


def test_a_caller_keeps_its_own_mapping():
    bias = {1: 2.0}
    made = SamplingParams(logit_bias=bias)
    bias[3] = 4.0
    assert made.logit_bias == {1: 2.0}


def test_params_travel_between_processes_and_are_checked_when_replaced():
    made = SamplingParams(stop="x", logit_bias={1: 2}, seed=5)
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == made
    assert dataclasses.replace(made, seed=6).seed == 6
    assert refusal(dataclasses.replace, made, n=0).param == "n"
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.n = 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 10**30),
        ("temperature", params.MAX_TEMPERATURE),
        ("top_k", params.MAX_TOP_K),
        ("top_p", 1),
        ("min_p", 1),
        ("frequency_penalty", -2),
        ("presence_penalty", 2),
        ("repetition_penalty", 10),
        ("n", params.MAX_N),
        ("seed", -(2**63)),
        ("seed", 2**64 - 1),
        ("stop", ["x" * params.MAX_STOP_CHARACTERS]),
        ("stop", [str(i) for i in range(params.MAX_STOPS)]),
    ],
)
def test_limits_themselves_are_allowed(name, value):
    SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", -1),
        ("max_new_tokens", 1.0),
        ("max_new_tokens", "5"),
        ("max_new_tokens", None),
        ("max_new_tokens", True),
        ("min_new_tokens", -1),
        ("temperature", -0.1),
        ("temperature", NAN),
        ("temperature", INFINITY),
        ("temperature", 100.1),
        ("temperature", 10**400),
        ("temperature", "1"),
        ("temperature", True),
        ("top_k", -2),
        ("top_k", 2**31),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", NAN),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", -INFINITY),
        ("presence_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 10.1),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", b"a"),
        ("stop", None),
        ("stop", [str(i) for i in range(params.MAX_STOPS + 1)]),
        ("stop", "x" * (params.MAX_STOP_CHARACTERS + 1)),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.5]),
        ("stop_token_ids", "12"),
        ("stop_token_ids", 3),
        ("stop_token_ids", range(params.MAX_STOP_TOKEN_IDS + 1)),
        ("ignore_eos", 1),
        ("ignore_eos", None),
        ("logit_bias", {1: 100.1}),
        ("logit_bias", {1: NAN}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {True: 1}),
        ("logit_bias", {1: True}),
        ("logit_bias", {1: 1, "1": 1}),
        ("logit_bias", [1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [True]),
        ("allowed_token_ids", np.array(3)),
        ("bad_token_ids", [-5]),
        ("bad_token_ids", None),
        ("n", 0),
        ("n", 129),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("seed", 1.0),
        ("skip_special_tokens", "yes"),
    ],
)
def test_bad_sampling_values_are_refused(name, value):
    error = refusal(SamplingParams, **{name: value})
    assert error.param == name
    assert error.status == 400
    assert error.message.startswith(f"{name}: got ")
    assert ", must " in error.message


def test_a_refusal_names_value_and_limit():
    assert str(refusal(SamplingParams, n=129)) == "n: got 129, must be an integer between 1 and 128"
    assert str(refusal(SamplingParams, top_p=0)) == "top_p: got 0.0, must be a finite number above 0 and at most 1"
    assert str(refusal(SamplingParams, temperature=NAN)) == "temperature: got nan, must be a finite number between 0 and 100"
    assert "too long to write" in str(refusal(SamplingParams, n=10**5000))
    long = refusal(SamplingParams, stop_token_ids="x" * 10**6)
    assert len(str(long)) < 250


def test_min_new_tokens_cannot_exceed_max_new_tokens():
    SamplingParams(min_new_tokens=5, max_new_tokens=5)
    error = refusal(SamplingParams, min_new_tokens=6, max_new_tokens=5)
    assert str(error) == "min_new_tokens: got 6, must be at most max_new_tokens, 5"


def test_some_token_must_be_left_to_sample():
    assert refusal(SamplingParams, allowed_token_ids=[1, 2], bad_token_ids=[2, 1, 3]).param == "allowed_token_ids"
    every = SamplingParams(bad_token_ids=range(10))
    every.check(vocab_size=11)
    assert refusal(every.check, vocab_size=10).param == "bad_token_ids"
    only_eos = SamplingParams(allowed_token_ids=[2], min_new_tokens=1)
    only_eos.check(vocab_size=10, eos_token_ids=[3])
    assert refusal(only_eos.check, vocab_size=10, eos_token_ids=[2]).param == "allowed_token_ids"
    SamplingParams(allowed_token_ids=[2], min_new_tokens=1, ignore_eos=True).check(vocab_size=10, eos_token_ids=[2])
    assert refusal(SamplingParams, allowed_token_ids=[2], min_new_tokens=1, stop_token_ids=[2]).param == "allowed_token_ids"


@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias", "allowed_token_ids", "bad_token_ids"])
def test_ids_outside_the_vocabulary_are_refused(name):
    def made(token):
        return SamplingParams(**{name: {token: 1.0} if name == "logit_bias" else [token]})

    made(9).check(vocab_size=10)
    error = refusal(made(10).check, vocab_size=10)
    assert str(error) == f"{name}: got token id 10, must be between 0 and 9 (the vocabulary)"


def plan(prompt_len=5, **keywords):
    return OutputParams(**keywords).check(vocab_size=100, num_layers=30, prompt_len=prompt_len)


def test_nothing_is_planned_when_nothing_is_asked():
    nothing = plan()
    assert not nothing.return_logprob
    assert nothing.logprob_start is None
    assert nothing.return_hidden_states is False
    assert nothing.layers == ()


@pytest.mark.parametrize(
    "asked", [{"logprob_start_len": 0}, {"top_logprobs_num": 1}, {"token_ids_logprob": [7]}, {"logprobs_mode": "processed"}]
)
def test_return_logprob_is_implied_by_the_fields_below_it(asked):
    assert OutputParams(**asked).return_logprob
    assert plan(**asked).return_logprob
    assert not OutputParams(logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=[], logprobs_mode="raw").return_logprob


@pytest.mark.parametrize(("asked", "start"), [(-1, None), (0, 0), (4, 4), (5, None), (10**9, None)])
def test_input_logprobs_cover_start_to_the_end_of_the_prompt(asked, start):
    assert plan(logprob_start_len=asked).logprob_start == start


@pytest.mark.parametrize(("asked", "start"), [(0, 0), (3, 3), (5, 5), (99, 99), (-1, 4), (-5, 0)])
def test_hidden_start_is_made_absolute(asked, start):
    assert plan(return_hidden_states=True, hidden_states_start=asked).hidden_start == start


def test_a_start_before_the_prompt_is_refused():
    error = refusal(plan, return_hidden_states=True, hidden_states_start=-6)
    assert str(error) == "hidden_states_start: got -6, must be at least -5 (the prompt has 5 tokens)"


def test_layers_are_numbered_as_in_hugging_face():
    made = plan(return_hidden_states=True, hidden_states_layers=[12, -1, 0, -31, 30, 12])
    assert made.layers == (12, 30, 0, 0, 30, 12)
    assert made.requested_layers == (12, -1, 0, -31, 30, 12)


@pytest.mark.parametrize("layer", [31, -32])
def test_a_layer_the_model_does_not_have_is_refused(layer):
    error = refusal(plan, return_hidden_states=True, hidden_states_layers=[0, layer])
    assert str(error) == f"hidden_states_layers: got {layer}, must be between -31 and 30 (the model has 30 blocks)"


def test_last_has_no_start():
    assert plan(return_hidden_states="last").return_hidden_states == "last"
    assert plan(return_hidden_states="last", hidden_states_start=0).return_hidden_states == "last"
    assert refusal(OutputParams, return_hidden_states="last", hidden_states_start=-1).param == "hidden_states_start"


@pytest.mark.parametrize(
    ("name", "value", "got"),
    [("hidden_states_start", -1, "-1"), ("hidden_states_layers", (12, -1), "[12, -1]"), ("hidden_states_dtype", "float16", "'float16'")],
)
def test_details_of_hidden_states_that_are_not_returned_are_refused(name, value, got):
    OutputParams(**{name: value, "return_hidden_states": "last" if name != "hidden_states_start" else True})
    error = refusal(OutputParams, **{name: value})
    assert error.message == f"{name}: got {got}, must be left out without return_hidden_states"
    assert error.hint == 'Set return_hidden_states to True or "last".'
    assert refusal(outputs_per_prompt, {name: value, "return_hidden_states": [False, False]}, 2).param == name
    assert OutputParams(**vars(OutputParams())) == OutputParams()  # naming the defaults asks for nothing


def test_details_of_hidden_states_are_for_the_prompts_that_return_them():
    for layers in ([3, 4], [[3, 4], [5]]):
        first, second = outputs_per_prompt({"return_hidden_states": [True, False], "hidden_states_layers": layers}, 2)
        assert (first.hidden_states_layers, second.hidden_states_layers) == ((3, 4), (-1,))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("return_logprob", 1),
        ("logprob_start_len", -2),
        ("logprob_start_len", None),
        ("top_logprobs_num", -1),
        ("top_logprobs_num", 101),
        ("top_logprobs_num", True),
        ("token_ids_logprob", [1, 1]),
        ("token_ids_logprob", [-1]),
        ("token_ids_logprob", 5),
        ("logprobs_mode", "RAW"),
        ("logprobs_mode", None),
        ("return_hidden_states", "all"),
        ("return_hidden_states", 1),
        ("return_hidden_states", None),
        ("hidden_states_start", 0.0),
        ("hidden_states_layers", []),
        ("hidden_states_layers", -1),
        ("hidden_states_layers", [True]),
        ("hidden_states_layers", ["-1"]),
        ("hidden_states_dtype", "float64"),
        ("hidden_states_dtype", None),
    ],
)
def test_bad_output_values_are_refused(name, value):
    error = refusal(OutputParams, **{name: value})
    assert error.param == name
    assert error.message.startswith(f"{name}: got ")


def test_outputs_are_checked_against_the_vocabulary():
    assert refusal(plan, token_ids_logprob=[100]).param == "token_ids_logprob"
    few = OutputParams(top_logprobs_num=11)
    assert str(refusal(few.check, vocab_size=10, num_layers=1, prompt_len=1)) == (
        "top_logprobs_num: got 11, must be at most 10 (the vocabulary)"
    )


def test_one_value_goes_to_every_prompt():
    assert per_prompt("top_logprobs_num", 5, 3) == [5, 5, 5]
    assert per_prompt("top_logprobs_num", [1, 2, 3], 3) == [1, 2, 3]
    assert per_prompt("return_hidden_states", "last", 2) == ["last", "last"]
    assert per_prompt("hidden_states_layers", [12, -1], 2) == [[12, -1], [12, -1]]
    assert per_prompt("hidden_states_layers", [[12], (-1,)], 2) == [[12], (-1,)]
    assert per_prompt("token_ids_logprob", [None, [5]], 2) == [None, [5]]
    assert per_prompt("token_ids_logprob", None, 2) == [None, None]
    assert per_prompt("top_logprobs_num", 5, 0) == []


@pytest.mark.parametrize(("name", "value"), [("top_logprobs_num", [1, 2, 3]), ("hidden_states_layers", [[1], [2], [3]])])
def test_a_list_of_another_length_is_refused_with_both_counts(name, value):
    assert str(refusal(per_prompt, name, value, 2)) == f"{name}: got 3 values for 2 prompts, must be one value or one per prompt"


def test_outputs_are_spread_over_prompts():
    first, second = outputs_per_prompt({"return_hidden_states": [True, "last"], "hidden_states_layers": [3, 4]}, 2)
    assert (first.return_hidden_states, second.return_hidden_states) == (True, "last")
    assert first.hidden_states_layers == second.hidden_states_layers == (3, 4)
    assert outputs_per_prompt({}, 1) == [OutputParams()]


def test_an_unknown_keyword_is_answered_with_the_nearest():
    error = refusal(outputs_per_prompt, {"return_logprobs": True}, 1)
    assert error.param == "return_logprobs"
    assert error.hint == "Did you mean return_logprob?"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_tokens", "Did you mean max_new_tokens?"),
        ("temprature", "Did you mean temperature?"),
        ("return_logprob", "It is a keyword of generate(return_logprob=...)."),
        ("zzz", None),
    ],
)
def test_a_sampling_field_that_does_not_exist_is_refused_by_name(name, hint):
    error = refusal(SamplingParams, **{name: 3})
    assert (error.param, error.hint) == (name, hint)
    assert error.message == f"{name}: got 3, but SamplingParams has no such field"


def test_an_output_field_that_does_not_exist_is_refused_by_name():
    assert refusal(OutputParams, return_logprobs=True).hint == "Did you mean return_logprob?"


@pytest.mark.parametrize("name", ["max_new_tokens", "max_tokens"])
def test_a_sampling_field_among_the_keywords_is_sent_where_it_belongs(name):
    error = refusal(outputs_per_prompt, {name: 3}, 1)
    assert str(error) == f"{name}: got 3, but no such keyword exists\nIt goes into SamplingParams(max_new_tokens=...)."


def test_list_valued_keywords_are_those_declared_as_lists():
    assert {field.name for field in fields_of(OutputParams) if field.kind.combine is not None} == set(params.LIST_VALUED)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers() | st.text(max_size=2), inner, max_size=3),
    max_leaves=4,
)


@given(st.sampled_from([*fields_of(SamplingParams), *fields_of(OutputParams)]), ANYTHING)
def test_every_value_is_taken_or_refused_by_name(field, value):
    declaration = SamplingParams if field in fields_of(SamplingParams) else OutputParams
    try:
        made = declaration(**{field.name: value})
    except InvalidRequest as error:
        assert error.param == field.name or (field.name, error.param) == ("max_new_tokens", "min_new_tokens")
    else:
        assert declaration(**vars(made)) == made  # the normal form is a fixed point


@given(st.integers(-40, 40), st.integers(-20, 20), st.integers(1, 15))
def test_hidden_requests_resolve_or_are_refused(layer, start, prompt_len):
    try:
        made = plan(prompt_len, return_hidden_states=True, hidden_states_layers=[layer], hidden_states_start=start)
    except InvalidRequest:
        assert not -31 <= layer <= 30 or start < -prompt_len
    else:
        assert made.layers == ((layer,) if layer >= 0 else (31 + layer,))
        assert made.hidden_start == range(prompt_len)[start] if start < 0 else made.hidden_start == start
