"""Large answers: the same bytes as from one encoder, in slices."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import msgspec
import numpy as np
import pytest

from sidestream.api import hidden
from sidestream.api.large import LargeJson, encoded
from sidestream.api.sse import PIECE_BYTES, LargeResponse, event, json_response, slices
from sidestream.output import HiddenStates, Output


def output(rows: int, layers: int, *, prompt: int, first: int = 0) -> Output:
    numbers = np.arange(rows * layers * 4, dtype=np.float32).reshape(rows, layers, 4)
    positions = list(range(first, first + rows))
    states = HiddenStates(numbers.reshape(-1).view(np.uint8), "float32", (rows, layers, 4), positions, tuple(range(layers)))
    return Output("", [], None, None, prompt, 0, 0, "a", 0, None, states, None)


def told(given: Output, form: Any, **how: Any) -> Any:
    made = asyncio.run(hidden.hidden_json(given, form, **how))
    return json.loads(b"".join(encoded(made)))


def rows_of(given: Output) -> list[Any]:
    assert given.hidden_states is not None
    return given.hidden_states.numbers().tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("slice", [1, 4, 7, 8192])
def test_hidden_states_have_their_shape_whatever_the_slices(monkeypatch: pytest.MonkeyPatch, slice: int) -> None:
    monkeypatch.setattr(hidden, "SLICE_NUMBERS", slice)
    one = [row[0] for row in rows_of(output(5, 1, prompt=3))]
    assert told(output(5, 1, prompt=3), "json", start=0) == [one[:3], *one[3:]]
    assert told(output(3, 1, prompt=3), "json", start=0) == [one[:3]]
    assert told(output(2, 1, prompt=3, first=3), "json", start=0) == [[], *one[:2]]
    assert told(output(2, 1, prompt=3, first=3), "json", start=0, streamed=True) == one[:2]
    assert told(output(0, 1, prompt=3), "json", start=0) == [[]] and told(output(0, 1, prompt=3), "json", start=0, streamed=True) == []
    many = told(output(5, 3, prompt=3), "json", start=0)
    assert many["data"] == rows_of(output(5, 3, prompt=3)) and many["shape"] == [5, 3, 4]
    assert told(output(0, 3, prompt=3), "json", start=0)["data"] == []
    assert told(output(5, 1, prompt=3), "json", start=1)["data"] == rows_of(output(5, 1, prompt=3))
    packed = told(output(5, 3, prompt=3), "base64", start=0)
    assert base64.b64decode(packed["data"]) == output(5, 3, prompt=3).hidden_states.raw.tobytes()  # type: ignore[union-attr]


def test_large_json_stands_anywhere_in_an_answer() -> None:
    answer = {"a": LargeJson([b"[1", b",2]"]), "b": ["\0", LargeJson([b"3"])], "c": msgspec.Raw(b"4")}
    pieces = encoded(answer)
    assert json.loads(b"".join(pieces)) == {"a": [1, 2], "b": ["\0", 3], "c": 4}
    assert pieces[1:3] == [b"[1", b",2]"]
    assert event(answer, "x") == b"event: x\ndata: " + b"".join(pieces) + b"\n\n"
    with pytest.raises(NotImplementedError):
        encoded({"a": object()})


def test_pieces_are_sent_in_slices_and_none_is_lost() -> None:
    pieces = [b"a" * 10, memoryview(b"b" * (2 * PIECE_BYTES)), b"", b"c" * (PIECE_BYTES - 10), b"d"]
    sent = list(slices(pieces))
    assert b"".join(sent) == b"".join(pieces)
    assert [len(part) for part in sent] == [PIECE_BYTES] * 3 + [1]
    large = json_response({"a": LargeJson([b'"', b"x" * PIECE_BYTES, b'"'])})
    assert isinstance(large, LargeResponse) and int(large.headers["content-length"]) == PIECE_BYTES + 8
