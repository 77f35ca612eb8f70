from __future__ import annotations

import re
import subprocess
import sys
import types

import pytest

from sidestream import cli
from sidestream.config import EngineConfig, ServeConfig, declared_options
from sidestream.errors import ConfigError, DownloadError, EngineDead, ModelError


@pytest.fixture
def served(monkeypatch):
    """The configurations that a server was started with. `failure` is raised by it."""
    for field in declared_options():
        monkeypatch.delenv(field.variable, raising=False)
    calls: list[tuple[EngineConfig, ServeConfig]] = []
    module = types.ModuleType("sidestream.serve")

    def serve(engine, server):
        calls.append((engine, server))
        if module.failure is not None:
            raise module.failure
        return module.status

    module.serve, module.failure, module.status, module.calls = serve, None, 0, calls
    monkeypatch.setitem(sys.modules, "sidestream.serve", module)
    return module


def test_defaults(served):
    assert cli.main(["serve"]) == 0
    assert served.calls == [(EngineConfig(), ServeConfig())]
    served.status = 1
    assert cli.main(["serve"]) == 1


def test_flags_and_variables_and_file(served, monkeypatch, tmp_path):
    file = tmp_path / "server.toml"
    file.write_text('model = "file.gguf"\nport = 1\ncontext-length = 100\n')
    monkeypatch.setenv("SIDESTREAM_API_KEY", "one,two")
    monkeypatch.setenv("SIDESTREAM_THREADS", "1")
    assert cli.main(["serve", "--config", str(file), "--port", "0", "--cors-origin", "http://a", "--cors-origin", "http://b"]) == 0
    engine, server = served.calls[0]
    assert (engine.model, engine.context_length, engine.threads) == ("file.gguf", 100, 1)
    assert (server.port, server.api_key, server.cors_origin) == (0, ("one", "two"), ("http://a", "http://b"))
    assert cli.main(["serve", "mine.gguf", "--config", str(file), "--api-key", "three", "--api-key", "four"]) == 0
    engine, server = served.calls[1]
    assert (engine.model, server.api_key) == ("mine.gguf", ("three", "four"))


def test_other_engines_names(served):
    words = (
        "--model-path m.gguf --tokenizer-path t.json --max-model-len 100 --block-size 8 --max-total-tokens 800 --max-num-seqs 4"
        " --max-num-batched-tokens 64 --no-enable-prefix-caching --no-async-scheduling --otlp-traces-endpoint http://x:4318"
        " --allowed-origins http://a --enable-return-hidden-states --enable-metrics --enable-cache-report --skip-server-warmup"
    )
    assert cli.main(["serve", *words.split()]) == 0
    engine, server = served.calls[0]
    assert engine == EngineConfig(
        "m.gguf",
        tokenizer="t.json",
        context_length=100,
        page_size=8,
        kv_tokens=800,
        max_running_requests=4,
        chunked_prefill_size=64,
        disable_radix_cache=True,
        overlap=False,
    )
    assert server == ServeConfig(otlp_endpoint="http://x:4318", cors_origin=["http://a"])
    assert cli.main(["serve", "--model", "n.gguf", "--async-scheduling"]) == 0
    assert served.calls[1][0] == EngineConfig("n.gguf", overlap=True)


def test_at_most_35_flags_and_no_other_engines_names(capsys):
    assert cli.main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    flags = re.findall(r"^  (--[a-z-]+)", text, flags=re.MULTILINE)
    assert len(flags) == len(set(flags)) <= 35
    visible = [field for field in declared_options() if not field.option.hidden]
    assert set(flags) == {flag for field in visible for flag in (field.flag, field.option.off_flag) if not field.option.positional} - {None}
    hidden = [flag for field in declared_options() for flag in (*field.option.aliases, *field.option.off_aliases)]
    for flag in [*hidden, "--enable-return-hidden-states", "--trust-remote-code"]:
        assert not re.search(rf"{flag}(?![a-z-])", text), flag
    for field in declared_options():
        assert (field.variable in text) != field.option.hidden


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["a", "b"], 2, "sidestream serve: got 2 models. Give one\n"),
        (["a", "--model", "b"], 2, "sidestream serve: got 2 models. Give one\n"),
        (["--prot", "1"], 2, "sidestream serve: unknown flag --prot. Did you mean --port?\n"),
        (["--max-model-length", "1"], 2, "sidestream serve: unknown flag --max-model-length. Did you mean --context-length?\n"),
        (["--port", "65536"], 2, "sidestream serve: --port: got 65536, must be an integer between 0 and 65535\n"),
        (["--api-key", ""], 2, "sidestream serve: --api-key: got a value that is not shown here, must be a text or a list of texts"),
        (["--trust-remote-code"], 2, "sidestream serve: --trust-remote-code: code that comes with a model is never run"),
        (["--enable-trace"], 2, "sidestream serve: --enable-trace: requests are traced as soon as it is known where"),
        (["--uds", "s", "--port", "30000"], 78, "sidestream: --uds: got port too, must be alone: a server listens on one or the other\n"),
        (["--page-size", "3"], 78, "sidestream: --page-size: got 3, must be a power of two between 1 and 256\n"),
        (["--chat-template", "/nowhere"], 78, "sidestream: --chat-template: /nowhere cannot be read: No such file or directory\n"),
        (["--config", "/nowhere.toml"], 78, "sidestream: --config: /nowhere.toml cannot be read: No such file or directory\n"),
    ],
)
def test_mistakes_are_one_line_and_start_nothing(served, capsys, words, status, message):
    assert cli.main(["serve", *words]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1
    assert served.calls == []


def test_a_mistake_in_the_environment_or_a_file(served, capsys, monkeypatch, tmp_path):
    file = tmp_path / "server.toml"
    file.write_text("page_size = 3\n")
    assert cli.main(["serve", "--config", str(file)]) == 78
    assert (
        capsys.readouterr().err
        == f"sidestream: --page-size: got 3, must be a power of two between 1 and 256. --page-size comes from {file}.\n"
    )
    file.write_text("page_size = 1000\n")
    assert cli.main(["serve", "--config", str(file)]) == 78
    assert capsys.readouterr().err == f"sidestream: {file}: key 'page_size': got 1000, must be an integer between 1 and 256\n"
    monkeypatch.setenv("SIDESTREAM_PORT", "http")
    assert cli.main(["serve"]) == 78
    assert capsys.readouterr().err == "sidestream: SIDESTREAM_PORT: got 'http', must be an integer between 0 and 65535\n"
    assert served.calls == []


@pytest.mark.parametrize(
    ("failure", "status", "message"),
    [
        (ConfigError("kv_tokens: got 1", hint="State at least 16."), 78, "sidestream: --kv-tokens: got 1. State at least 16.\n"),
        (ModelError("model 'x': there is no such file or directory"), 78, "sidestream: model 'x': there is no such file or directory\n"),
        (DownloadError("x: cannot be fetched"), 1, "sidestream: x: cannot be fetched\n"),
        (EngineDead("the engine stopped"), 1, "sidestream: the engine stopped\n"),
        (RuntimeError("inside"), 1, "sidestream: RuntimeError: inside. --log-level debug shows where\n"),
        (KeyboardInterrupt(), 130, "sidestream: interrupted\n"),
    ],
)
def test_a_server_that_cannot_start(served, capsys, failure, status, message):
    served.failure = failure
    assert cli.main(["serve"]) == status
    assert capsys.readouterr().err == message


def test_keys_are_shown_nowhere(served, capsys, monkeypatch):
    monkeypatch.setenv("SIDESTREAM_ADMIN_API_KEY", "geheim ")
    assert cli.main(["serve", "--log-level", "debug"]) == 78
    assert "geheim" not in capsys.readouterr().err


def test_the_module_of_the_server_is_imported_last():
    code = (
        "import sys; from sidestream import cli; cli.main(['serve', '--uds', 's', '--port', '1']); print('sidestream.serve' in sys.modules)"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert finished.stdout == "False\n"
