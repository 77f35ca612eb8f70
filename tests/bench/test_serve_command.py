from __future__ import annotations

import json

import pytest
from starlette.responses import JSONResponse

from sidestream import cli


def test_a_table(openai_server, capsys):
    words = ["bench", "serve", "--url", openai_server.url, "--num-prompts", "4", "--output-len", "5", "--input-len", "7"]
    assert cli.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{openai_server.url}/v1/completions · first · 4 requests, 32 at once · 7 + 5 tokens"
    assert lines[2].startswith("requests  4 answered, 0 failed in ")
    assert lines[3].startswith("input     44 tokens (12 cached)    ")
    assert lines[4].startswith("output    20 tokens    ")
    assert lines[5].startswith("received  0.00")
    assert lines[7].split() == ["ms", "mean", "p50", "p90", "p99"]
    assert [line.split()[0] for line in lines[8:12]] == ["TTFT", "ITL", "TPOT", "e2e"]


def test_json_and_a_picture(openai_server, capsys, tmp_path):
    file = tmp_path / "run.png"
    words = ["bench", "serve", "--url", openai_server.url, "--num-prompts", "2", "--output-len", "5", "--json", "--output", str(file)]
    assert cli.main(words) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["ok"], made["output_tokens"], made["load"]["num_prompts"]) == (2, 10, 2)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_failed_request_is_a_failed_command(openai_server, capsys):
    openai_server.answers = lambda number, body: JSONResponse({"error": {"message": "full"}}, 429) if number == 1 else None
    assert cli.main(["bench", "serve", "--url", openai_server.url, "--num-prompts", "2", "--output-len", "5"]) == 1
    assert "failed: 1 x HTTP 429: full\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["smollm2"], "sidestream bench serve: got 'smollm2'. The server is given by --url, the model by --model\n"),
        (["--num-prompt", "3"], "sidestream bench serve: unknown flag --num-prompt. Did you mean --num-prompts?\n"),
        (["--input-len", "0"], "sidestream bench serve: --input-len: got 0, must be an integer between 1 and 10000000\n"),
        (["--shared-prefix", "200"], "sidestream: --shared-prefix: got 200, must be at most --input-len, 128\n"),
        (["--output", "run.bmp"], "sidestream: --output: got run.bmp, must end in one of .png, .svg, .pdf\n"),
        (
            ["--concurrency", "2", "--request-rate", "3"],
            "sidestream: --request-rate: got 3 and --concurrency 2, must be only one of them. Either the end of a request starts the next, "
            "or the clock does.\n",
        ),
    ],
)
def test_mistakes_are_one_line(capsys, words, message):
    assert cli.main(["bench", "serve", *words]) == 2
    assert capsys.readouterr().err == message


def test_help(capsys):
    assert cli.main(["bench", "serve", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: sidestream bench serve [--url URL] [options]")
    for flag in ("--url", "--endpoint {chat,completions}", "--request-rate X", "--prompts FILE.jsonl", "--extra JSON", "--output FILE.png"):
        assert f" {flag}" in text
