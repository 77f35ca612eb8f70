from __future__ import annotations

import sys

import pytest

from sidestream.bench.answer import Answer, Arrival, Failure
from sidestream.bench.load import Load
from sidestream.bench.picture import BINS, bin_width, check_drawing, draw, rates
from sidestream.bench.serve import Client, Run
from sidestream.bench.summary import Summary
from sidestream.errors import ConfigError, SidestreamError


def answer(sent: float, first: float, gap: float, count: int, failure: Failure | None = None) -> Answer:
    arrivals = [Arrival(sent + first + i * gap, 1) for i in range(count)]
    ended = arrivals[-1].at if arrivals else sent + first
    return Answer(sent=sent, ended=ended, arrivals=arrivals, counted=True, completion_tokens=count, failure=failure)


RUNS = {
    "several": [*(answer(i / 5, 0.1 + i / 100, 0.01 * (i + 1), 9) for i in range(20)), answer(1.0, 0.2, 0.01, 3, Failure("timeout", ""))],
    "one token": [answer(0.0, 0.3, 0.0, 1)],
    "in one packet": [answer(0.0, 0.3, 0.0, 9), answer(0.0, 0.3, 0.0, 9)],
    "widely spread": [answer(0.0, 0.001, 0.001, 9), answer(0.0, 9.0, 1.0, 9)],
    "none answered": [answer(0.0, 0.1, 0.0, 0, Failure("HTTP 503", ""))],
}


@pytest.mark.parametrize("answers", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_every_run_can_be_drawn(tmp_path, answers, suffix):
    file = tmp_path / f"run{suffix}"
    check_drawing(str(file))
    draw(Summary(Run(Load(), "m", answers, max(one.ended for one in answers), Client(0.1, [0.0]))), str(file))
    assert file.read_bytes().startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    assert file.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("run.bmp", "must end in one of .png, .svg, .pdf"),
        ("run", "must end in one of .png, .svg, .pdf"),
        ("nowhere/run.png", "must be in a directory that exists"),
    ],
)
def test_files_that_cannot_be(tmp_path, name, message):
    with pytest.raises(ConfigError) as refused:
        check_drawing(str(tmp_path / name))
    assert refused.value.message == f"--output: got {tmp_path / name}, {message}"


def test_without_matplotlib_there_is_a_clear_message(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SidestreamError) as refused:
        check_drawing(str(tmp_path / "run.png"))
    assert refused.value.message == "--output needs matplotlib"
    assert refused.value.hint == "pip install 'sidestream[bench]', or leave --output out."


@pytest.mark.parametrize(("seconds", "width"), [(60.0, 1.0), (61.0, 2.0), (8.3, 0.2), (0.3, 0.005), (1300.0, 50.0), (0.06, 0.001)])
def test_bins_are_round(seconds, width):
    assert bin_width(seconds) == pytest.approx(width)
    assert seconds / bin_width(seconds) <= BINS + 1e-6


def test_rates_add_up_to_the_tokens():
    arrivals = [(0.0, 1.0), (0.49, 2.0), (0.6, 4.0), (61.3, 8.0)]
    per_second, edges = rates(arrivals, 61.3)
    assert edges[0] == 0.0
    assert edges[-1] == 61.3
    assert per_second[0] == pytest.approx(7 / 2)
    assert per_second[-1] == pytest.approx(8 / 1.3)
    assert (per_second * (edges[1:] - edges[:-1])).sum() == pytest.approx(15.0)
