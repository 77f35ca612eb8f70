from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import sidestream
from sidestream import cli
from sidestream.config import EngineConfig
from sidestream.errors import ConfigError, DownloadError, EngineDead, InvalidRequest, ModelError
from sidestream.options import fields_of
from sidestream.output import HiddenStates, Logprobs, Output
from sidestream.params import OutputParams, SamplingParams

STATS = {"steps": 3, "d2h": {"hidden": {"copied_bytes": 0}}}


def answer(index=0, **keywords) -> Output:
    fields = {
        "text": f"text {index}",
        "token_ids": [1],
        "finish_reason": "length",
        "matched_stop": None,
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "cached_tokens": 0,
        "rid": "r",
        "index": index,
    }
    return Output(**fields | keywords)


class FakeEngine:
    """Records how the command line calls the engine."""

    calls: list[tuple]
    answers: list[Output]
    failure: BaseException | None

    def __init__(self, model, **options):
        self.calls.append(("Engine", model, options))
        if isinstance(self.failure, ModelError):
            raise self.failure

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.calls.append(("close",))

    def generate(self, prompt, sampling, **outputs):
        self.calls.append(("generate", prompt, sampling, outputs))
        if self.failure is not None:
            raise self.failure
        return self.answers if len(self.answers) > 1 else self.answers[0]

    def chat(self, messages, sampling, **outputs):
        self.calls.append(("chat", messages, sampling, outputs))
        return self.answers[0]

    def encode_chat(self, messages):
        return [7, *[len(message["content"]) for message in messages]]

    def stream(self, prompt, sampling, **outputs):
        self.calls.append(("stream", prompt, sampling, outputs))
        yield from self.answers

    def stats(self):
        return STATS


@pytest.fixture
def engine(monkeypatch):
    for name in [field.variable for field in fields_of(EngineConfig)]:
        monkeypatch.delenv(name, raising=False)
    fake = type("Engine", (FakeEngine,), {"calls": [], "answers": [answer()], "failure": None})
    monkeypatch.setitem(vars(sidestream), "Engine", fake)
    return fake


def call_of(engine):
    return engine.calls[1]


def strict(text):
    return json.loads(text, parse_constant=pytest.fail)


def test_help_and_version_as_a_process():
    def run(*words):
        command = [sys.executable, "-m", "sidestream", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    assert run("--version").stdout == f"sidestream {sidestream.__version__}\n"
    top = run("--help")
    assert top.returncode == 0
    assert "\n  run " in top.stdout
    assert "\n  pull " in top.stdout
    assert run("rnu").stderr == "sidestream: unknown command rnu. Did you mean run?\n"
    nothing = run()
    assert (nothing.returncode, nothing.stdout) == (2, "")
    assert nothing.stderr == top.stdout
    refused = run("run", "Hi", "--max-new-tokns", "5")
    assert refused.returncode == 2
    assert refused.stderr == "sidestream run: unknown flag --max-new-tokns. Did you mean --max-new-tokens?\n"
    assert run("run", "Hi", "--page-size", "3").returncode == 2


def test_help_of_run_shows_every_option(capsys):
    assert cli.main(["run", "--help"]) == 0
    text = capsys.readouterr().out
    for field in [*fields_of(SamplingParams), *fields_of(OutputParams), *fields_of(EngineConfig)]:
        if not field.option.positional:
            flag = f"  --no-{field.flag[2:]}" if field.default is True else f"  {field.flag}"
            assert flag in text, field.name
    words = " ".join(text.split())
    page = (Path(__file__).parent.parent / "docs" / "options.md").read_text()
    variables = set(re.findall(r"SIDESTREAM_[A-Z_]+", page[: page.index("## Server")])) | {"SIDESTREAM_CONFIG"}
    assert set(re.findall(r"SIDESTREAM_[A-Z_]+", text)) == variables
    assert {"SIDESTREAM_MODEL", "SIDESTREAM_DISABLE_OVERLAP_SCHEDULE", "SIDESTREAM_CACHE"} < variables
    assert "--max-model-len" not in text
    assert "--no-skip-special-tokens Keep special tokens such as EOS in the text." in words
    assert "[default: warning; SIDESTREAM_LOG_LEVEL]" in words
    assert "Exit status: 0 when all went well; 2 when" in words


def test_one_word_is_the_prompt(engine, capsys):
    assert cli.main(["run", "Hello"]) == 0
    assert capsys.readouterr().out == "text 0\n"
    assert engine.calls[0] == ("Engine", "smollm2", {k: v for k, v in vars(EngineConfig()).items() if k != "model"})
    assert call_of(engine) == ("generate", "Hello", SamplingParams(), {})
    assert engine.calls[2] == ("close",)


def test_two_words_are_model_and_prompt(engine):
    assert cli.main(["run", "a.gguf", "--temperature", "0", "Hello"]) == 0
    assert engine.calls[0][1] == "a.gguf"
    assert call_of(engine)[1:3] == ("Hello", SamplingParams(temperature=0))


def test_the_prompt_can_come_from_standard_input(engine, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("line 1\nline 2\n"))
    assert cli.main(["run", "-"]) == 0
    assert call_of(engine)[1] == "line 1\nline 2"


def test_token_ids_in_place_of_a_prompt(engine):
    assert cli.main(["run", "a.gguf", "--prompt-ids", "1,2,3"]) == 0
    assert engine.calls[0][1] == "a.gguf"
    assert call_of(engine)[1] == [1, 2, 3]


def test_words_that_begin_with_a_dash(engine):
    assert cli.main(["run", "--stop", "-x", "--hidden-states-layers", "-1,12", "--json", "--return-hidden-states", "--", "-5+3"]) == 0
    name, prompt, sampling, outputs = call_of(engine)
    assert (name, prompt, sampling.stop) == ("generate", "-5+3", ("-x",))
    assert outputs == {"hidden_states_layers": (-1, 12), "return_hidden_states": True}


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        (["--return-hidden-states", "Hello"], True),
        (["Hello", "--return-hidden-states"], True),
        (["--return-hidden-states", "last", "Hello"], "last"),
        (["--return-hidden-states=last", "Hello"], "last"),
        (["--return-hidden-states", "--json", "Hello"], True),
        (["Hello", "--return-hidden-states", "false"], False),
    ],
)
def test_return_hidden_states_takes_a_value_only_if_it_is_one(engine, words, mode):
    assert cli.main(["run", "--json", *words]) == 0
    assert call_of(engine)[1] == "Hello"
    assert call_of(engine)[3] == {"return_hidden_states": mode}


def test_every_sampling_and_output_option_has_a_flag(engine):
    words = (
        "--max-new-tokens 7 --min-new-tokens 2 --temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --frequency-penalty -1"
        " --presence-penalty 1 --repetition-penalty 1.1 --stop a --stop b --stop-token-ids 3,4 --ignore-eos"
        " --logit-bias 5=-100,6=1 --logit-bias 7=2 --allowed-token-ids 5,6,8 --bad-token-ids 8 --n 2 --seed -3"
        " --no-skip-special-tokens --return-logprob --logprob-start-len 0 --top-logprobs-num 5 --token-ids-logprob 1,2"
        " --logprobs-mode processed"
        " --return-hidden-states --hidden-states-start -1 --hidden-states-layers 0,-1 --hidden-states-dtype float32"
    )
    assert cli.main(["run", "Hi", "--json", *words.split()]) == 0
    _, _, sampling, outputs = call_of(engine)
    assert sampling == SamplingParams(
        max_new_tokens=7,
        min_new_tokens=2,
        temperature=0.5,
        top_k=4,
        top_p=0.9,
        min_p=0.1,
        frequency_penalty=-1,
        presence_penalty=1,
        repetition_penalty=1.1,
        stop=["a", "b"],
        stop_token_ids=[3, 4],
        ignore_eos=True,
        logit_bias={5: -100, 6: 1, 7: 2},
        allowed_token_ids=[5, 6, 8],
        bad_token_ids=[8],
        n=2,
        seed=-3,
        skip_special_tokens=False,
    )
    assert outputs == {
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 5,
        "token_ids_logprob": (1, 2),
        "logprobs_mode": "processed",
        "return_hidden_states": True,
        "hidden_states_start": -1,
        "hidden_states_layers": (0, -1),
        "hidden_states_dtype": "float32",
    }
    assert set(outputs) == {field.name for field in fields_of(OutputParams)}


def test_engine_options_from_flags_and_environment(engine, monkeypatch):
    monkeypatch.setenv("SIDESTREAM_PAGE_SIZE", "8")
    monkeypatch.setenv("SIDESTREAM_THREADS", "2")
    words = "--page-size 4 --kv-memory 2GiB --disable-overlap-schedule --disable-radix-cache --max-model-len 100 --log-level error"
    assert cli.main(["run", "Hi", *words.split()]) == 0
    options = engine.calls[0][2]
    assert options["page_size"] == 4
    assert options["threads"] == 2
    assert options["kv_memory"] == 2**31
    assert options["overlap"] is False
    assert options["disable_radix_cache"] is True
    assert options["context_length"] == 100
    assert cli.main(["run", "Hi", "--overlap-schedule"]) == 0
    assert engine.calls[3][2]["overlap"] is True


def test_chat(engine):
    assert cli.main(["run", "Hi", "--chat", "--system", "Be brief."]) == 0
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert call_of(engine)[:2] == ("chat", messages)
    assert cli.main(["run", "Hi", "--chat", "--stream"]) == 0
    assert engine.calls[4][:2] == ("stream", [7, 2])


def test_json_of_one_output_has_its_fields_at_the_top(engine, capsys):
    states = HiddenStates.of(torch.tensor([[[1.5, float("nan")]]]), [4], (-1,))
    engine.answers = [answer(text="\u00fc\U0001f600", logprobs=Logprobs(output=[-float("inf")]), hidden_states=states)]
    assert cli.main(["run", "Hi", "--json", "--return-logprob", "--return-hidden-states", "last"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    value = strict(out)
    assert value["text"] == "\u00fc\U0001f600"
    assert value["stats"] == STATS
    assert value["logprobs"]["output"] == [-9999.0]
    assert value["hidden_states"] == {
        "dtype": "float32",
        "shape": [1, 1, 2],
        "layers": [-1],
        "positions": [4],
        "data": [[[1.5, None]]],
    }


def test_several_outputs(engine, capsys):
    engine.answers = [answer(0), answer(1)]
    assert cli.main(["run", "Hi", "--n", "2", "--json"]) == 0
    value = strict(capsys.readouterr().out)
    assert sorted(value) == ["outputs", "stats"]
    assert [item["text"] for item in value["outputs"]] == ["text 0", "text 1"]
    assert cli.main(["run", "Hi", "--n", "2"]) == 0
    assert capsys.readouterr().out == "--- 1 of 2\ntext 0\n--- 2 of 2\ntext 1\n"


def test_stream(engine, capsys):
    engine.answers = [answer(text="Hel", finish_reason=None), answer(text="lo")]
    assert cli.main(["run", "Hi", "--stream"]) == 0
    assert capsys.readouterr().out == "Hello\n"
    assert cli.main(["run", "Hi", "--stream", "--json"]) == 0
    lines = [strict(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("text") for line in lines] == ["Hel", "lo", None]
    assert lines[2] == {"stats": STATS}


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ([], 2, 'sidestream run: the prompt is missing. Write sidestream run [MODEL] "PROMPT", the prompt in quotes'),
        (["a", "b", "c"], 2, 'sidestream run: got 3 words. Write sidestream run [MODEL] "PROMPT", the prompt in quotes'),
        (["Hi", "--n", "0"], 2, "sidestream run: --n: got 0, must be an integer between 1 and 128\n"),
        (["Hi", "--n", "x"], 2, "sidestream run: --n: got 'x', must be an integer between 1 and 128\n"),
        (["Hi", "--n"], 2, "sidestream run: --n: expected one argument\n"),
        (["Hi", "--temperature", "nan"], 2, "sidestream run: --temperature: got nan, must be a finite number between 0 and 100\n"),
        (["Hi", "--top-p", "0"], 2, "sidestream run: --top-p: got 0.0, must be a finite number above 0 and at most 1\n"),
        (["Hi", "--seed", "x"], 2, "sidestream run: --seed: got 'x', must be an integer between -9223372036854775808 and"),
        (["Hi", "--kv-tokens", "0"], 2, "sidestream run: --kv-tokens: got 0, must be an integer of at least 1\n"),
        (["Hi", "--stop-token-ids", "1,,2"], 2, "sidestream run: --stop-token-ids: got '1,,2', must be a list of integers"),
        (["Hi", "--logit-bias", "1=2,"], 2, "sidestream run: --logit-bias: got '1=2,', must be a mapping from token id"),
        (["Hi", "--logit-bias", "1=2", "--logit-bias", "1=3"], 2, "sidestream: --logit-bias: got token id 1 more than once, must name"),
        (
            ["Hi", "--min-new-tokens", "5", "--max-new-tokens", "4"],
            2,
            "sidestream: --min-new-tokens: got 5, must be at most --max-new-tokens, 4\n",
        ),
        (["Hi", "--kv-tokens", "5", "--mem-fraction", "0.5"], 2, "sidestream: --kv-tokens: got --kv-tokens=5 and --mem-fraction=0.5, must"),
        (
            ["Hi", "--overlap-schedule", "--disable-overlap-schedule"],
            2,
            "sidestream run: --disable-overlap-schedule: not allowed with --overlap-schedule\n",
        ),
        (["Hi", "--hidden-states-layers", "-1", "--json"], 2, "sidestream run: --hidden-states-layers needs --return-hidden-states\n"),
        (
            ["Hi", "--return-hidden-states", "first"],
            2,
            "sidestream run: --return-hidden-states: got 'first', must be true, false or \"last\". If",
        ),
        (
            ["Hi", "--return-hidden-states=first"],
            2,
            "sidestream run: --return-hidden-states: got 'first', must be true, false or \"last\"\n",
        ),
        (["Hi", "--system", "x"], 2, "sidestream run: --system needs --chat"),
        (["Hi", "--return-logprob"], 2, "sidestream run: logprobs and hidden states are printed as JSON only. Add --json"),
        (["Hi", "--n", "2", "--stream"], 2, "sidestream run: --stream cannot show several outputs at once."),
        (["m", "Hi", "--prompt-ids", "1"], 2, "sidestream run: got a prompt and --prompt-ids."),
        (["--prompt-ids", "1", "--chat"], 2, "sidestream run: --prompt-ids and --chat exclude each other"),
        (["--prompt-ids", "a"], 2, "sidestream run: --prompt-ids: got 'a', must be token ids"),
        (["-5+3"], 2, "sidestream run: unknown flag -5+3. See sidestream run --help; words that begin with a dash go after --"),
        (["bad\udcff"], 2, "sidestream: prompt: got bytes that are not UTF-8, must be UTF-8 text"),
        (["Hi", "--page-size", "3"], 2, "sidestream: --page-size: got 3, must be a power of two between 1 and 256\n"),
        (["Hi", "--dtype", "top_p"], 2, "sidestream run: --dtype: got 'top_p', must be one of auto, float32, bfloat16, float16\n"),
    ],
)
def test_mistakes_are_one_line_and_start_no_engine(engine, capsys, words, status, message):
    assert cli.main(["run", *words]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1
    assert engine.calls == []


@pytest.mark.parametrize(
    ("failure", "status", "message"),
    [
        (InvalidRequest("prompt", "got 0 tokens, must be 1 or more"), 2, "sidestream: prompt: got 0 tokens, must be 1 or more\n"),
        (InvalidRequest("messages", "got top_k, 'top_k'"), 2, "sidestream: --chat: got --top-k, 'top_k'\n"),
        (ConfigError("no room", hint="Set --kv-tokens."), 2, "sidestream: no room. Set --kv-tokens.\n"),
        (ModelError("no such model: /top_k/top_k"), 1, "sidestream: no such model: /top_k/top_k\n"),
        (EngineDead("the engine stopped:\nout of memory."), 1, "sidestream: the engine stopped: out of memory.\n"),
        (KeyboardInterrupt(), 130, "sidestream: interrupted\n"),
        (RuntimeError("two\nlines"), 1, "sidestream: RuntimeError: two lines. --log-level debug shows where\n"),
    ],
)
def test_failures_are_one_line_with_the_hint(engine, capsys, failure, status, message):
    engine.failure = failure
    assert cli.main(["run", "Hi"]) == status
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("words", "variable", "shown"),
    [([], "", False), (["--log-level", "info"], "", True), ([], "info", True), (["--log-level", "error"], "info", False)],
)
def test_the_log_is_shown_on_demand(engine, capsys, monkeypatch, words, variable, shown):
    monkeypatch.setenv("SIDESTREAM_LOG_LEVEL", variable)
    monkeypatch.setattr(engine, "stats", lambda self: logging.getLogger("sidestream").info("model loaded") or STATS)
    assert cli.main(["run", "Hi", "--json", *words]) == 0
    assert capsys.readouterr().err == ("model loaded\n" if shown else "")
    assert logging.getLogger("sidestream").handlers == []


def test_a_word_beside_prompt_ids_is_the_model(engine, capsys):
    engine.failure = ModelError("model 'Hello': there is no such file or directory", hint="Give a .gguf file.")
    assert cli.main(["run", "Hello", "--prompt-ids", "1"]) == 1
    hint = "With --prompt-ids there is no PROMPT: the one word is the model. Give a .gguf file."
    assert capsys.readouterr().err == f"sidestream: model 'Hello': there is no such file or directory. {hint}\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("words", [["--version"], ["--help"], ["run", "--help"]])
def test_output_that_cannot_be_written(words):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "sidestream", *words]
        finished = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert (finished.returncode, finished.stderr) == (1, "sidestream: standard output cannot be written: No space left on device\n")


def test_debugging_shows_where(engine, capsys):
    engine.failure = RuntimeError("inside")
    with pytest.raises(RuntimeError, match="inside"):
        cli.main(["run", "Hi", "--log-level", "debug"])


def test_a_bad_variable_is_named(engine, capsys, monkeypatch):
    monkeypatch.setenv("SIDESTREAM_PAGE_SIZE", "big")
    assert cli.main(["run", "Hi"]) == 2
    assert capsys.readouterr().err == "sidestream: SIDESTREAM_PAGE_SIZE: got 'big', must be an integer between 1 and 256\n"


def test_pull_prints_the_path_last(monkeypatch, capsys):
    names = []
    hub = types.ModuleType("sidestream.models.hub")
    hub.pull = lambda name: names.append(name) or f"/models/{name}"
    monkeypatch.setitem(sys.modules, "sidestream.models.hub", hub)
    assert cli.main(["pull"]) == 0
    assert cli.main(["pull", "a/b"]) == 0
    assert names == ["smollm2", "a/b"]
    assert capsys.readouterr().out.splitlines()[-1] == "/models/a/b"
    assert cli.main(["pull", "a", "b"]) == 2

    def fails(name):
        raise DownloadError("no network", hint="Give the path of a local file.")

    hub.pull = fails
    assert cli.main(["pull", "a/b"]) == 1
    assert capsys.readouterr().err.endswith("sidestream: no network. Give the path of a local file.\n")
