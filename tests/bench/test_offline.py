from __future__ import annotations

import json
import sys

import pytest

from sidestream import cli
from sidestream.bench.offline import Bench, works_of
from sidestream.bench.roofline import Limits
from sidestream.kernels import cpu
from sidestream.observe.table import table_lines

ENGINE = ["--device", "cpu", "--threads", "1", "--kv-tokens", "8192"]
needs_native = pytest.mark.skipif(cpu.native() is None, reason="the native backend is not built")


@needs_native
def test_json_holds_every_number(tiny, capsys):
    words = ["bench", "offline", str(tiny), "--dtype", "bfloat16", "--cases", "prefill,single", "--repetitions", "2", "--json", *ENGINE]
    assert cli.main(words) == 0
    value = json.loads(capsys.readouterr().out)
    assert sorted(value) == ["limits", "machine", "model", "works"]
    machine = value["machine"]
    assert (machine["threads"], machine["backend"], machine["instruction_set"]) == (1, "native", cpu.isa())
    assert machine["processor"] and machine["cores"] >= 1
    model = value["model"]
    # Two layers of 12,288 weights in bfloat16, the head's 128 rows of 32, five norms; the embedding is not read.
    assert model["bytes_per_step"] == 2 * (2 * 12288 + 128 * 32) + 4 * 5 * 32
    assert model["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    assert model["flop_per_token"] == 2 * (2 * 12288 + 128 * 32)
    limits = value["limits"]
    assert len(limits["measured"]) == 4
    assert limits["bandwidth_bytes_per_second"] == max(measured["bandwidth"] for measured in limits["measured"])
    assert limits["compute_flop_per_second"] == max(measured["compute"] for measured in limits["measured"])
    assert [work["name"] for work in value["works"]] == ["single stream", "prefill"]
    for work in value["works"]:
        tokens = {"single stream": 255, "prefill": 2048}[work["name"]]
        assert len(work["seconds"]) == 2
        assert work["tokens_per_second"]["low"] == pytest.approx(tokens / max(work["seconds"]))
        assert work["roofline_tokens_per_second"] == pytest.approx(tokens / work["roofline_seconds"])
        assert work["share"]["high"] == pytest.approx(work["roofline_seconds"] / min(work["seconds"]))


@needs_native
def test_the_table(tiny, capsys):
    words = ["bench", "offline", str(tiny), "--dtype", "bfloat16", "--cases", "shared", "--repetitions", "1", *ENGINE]
    assert cli.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"1 threads, {cpu.isa()}, native kernels" in lines[0]
    assert lines[1].startswith("tiny in bfloat16")
    assert lines[3].split("  ")[0] == "work"
    assert [line[:19] for line in lines[4:6]] == ["shared prefix, cold", "shared prefix, warm"]
    assert lines[4].endswith("%)")
    assert "GB/s from a buffer of 0.058 MB, as large as the packed weights" in lines[7]
    assert "a step reads 0.058 MB of weights and 0.256 kB per token of context" in lines[8]


def test_in_pytorch_there_is_no_roofline(tiny, capsys):
    words = ["bench", "offline", str(tiny), "--dtype", "float32", "--cases", "prefill", "--repetitions", "1", *ENGINE]
    assert cli.main([*words, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["limits"] is None
    assert value["works"][0]["share"] is None
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "No roofline: it is that of the native CPU kernels, and PyTorch computes here." in out


def test_the_limit_is_the_best_that_was_measured(tiny):
    from sidestream import Engine

    with Engine(str(tiny), dtype="float32", device="cpu", threads=1, kv_tokens=256) as engine:
        bench = Bench(engine, {})
        assert bench.limits is None
        bench.measured = [Limits(1.0, 8.0), Limits(3.0, 5.0)]
        assert bench.limits == Limits(3.0, 8.0)


def test_works_come_in_the_order_of_their_declaration():
    assert list(works_of(["prefill", "single"])) == ["single stream", "prefill"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "sidestream bench: what to measure is missing. Write sidestream bench offline [MODEL] or sidestream bench serve\n"),
        (["online"], "sidestream bench: got 'online'. Write sidestream bench offline [MODEL] or sidestream bench serve\n"),
        (["offline", "a", "b"], "sidestream bench: got 2 models. Give one\n"),
        (["offline", "--cases", "single,x"], "sidestream bench: --cases: got 'x', must be some of single,batch,prefill,shared\n"),
        (["offline", "--repetitions", "0"], "sidestream bench: --repetitions: got '0', must be an integer between 1 and 100\n"),
        (["offline", "--repetitions", "x"], "sidestream bench: --repetitions: got 'x', must be an integer between 1 and 100\n"),
        (["offline", "--page-size", "3"], "sidestream: --page-size: got 3, must be a power of two between 1 and 256\n"),
        (["offline", "--repetition", "1"], "sidestream bench: unknown flag --repetition. Did you mean --repetitions?\n"),
    ],
)
def test_mistakes_are_one_line(capsys, words, message):
    assert cli.main(["bench", *words]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", message)


def test_a_work_longer_than_the_context_is_refused(tiny, capsys):
    words = ["bench", "offline", str(tiny), "--dtype", "float32", "--device", "cpu", "--threads", "1", "--kv-tokens", "1024"]
    assert cli.main([*words, "--cases", "single,prefill"]) == 2
    error = "sidestream: --cases: got prefill, which takes 2,049 tokens, must be at most the context of 1,024. Choose others with --cases"
    assert capsys.readouterr().err.splitlines()[-1].startswith(error)


def test_a_table_is_plain_unless_it_is_shown_on_a_terminal(monkeypatch):
    assert table_lines(["a", "long head"], [["1234", "x"]]) == ["a     long head", "1234  x"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "┃" in "".join(table_lines(["a", "long head"], [["1234", "x"]]))
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert table_lines(["a"], [["b"]]) == ["a", "b"]
