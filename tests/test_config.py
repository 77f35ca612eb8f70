from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path

import pytest

from sidestream.config import EngineConfig, ServeConfig, configured, declared_options
from sidestream.errors import ConfigError
from sidestream.options import did_you_mean, disclosed, fields_of, read_size, variable_of, written_size

ROOT = Path(__file__).parent.parent


def test_defaults_are_those_of_the_contract():
    assert vars(EngineConfig()) == {
        "model": "smollm2",
        "tokenizer": None,
        "dtype": "auto",
        "quantization": "auto",
        "device": "auto",
        "context_length": None,
        "page_size": 16,
        "kv_tokens": None,
        "kv_memory": None,
        "mem_fraction": None,
        "max_running_requests": None,
        "max_queued_requests": 512,
        "chunked_prefill_size": None,
        "schedule_policy": "fcfs",
        "disable_radix_cache": False,
        "overlap": None,
        "threads": None,
        "max_output_bytes": 4 * 2**30,
        "arena_memory": 64 * 2**20,
        "log_level": "info",
    }


def test_defaults_of_the_server():
    assert vars(ServeConfig()) == {
        "host": "127.0.0.1",
        "port": 30000,
        "uds": None,
        "api_key": (),
        "admin_api_key": None,
        "cors_origin": (),
        "served_model_name": None,
        "chat_template": None,
        "tool_call_parser": "auto",
        "reasoning_parser": "auto",
        "hidden_states": "full",
        "max_body_size": 64 * 2**20,
        "shutdown_timeout": 30.0,
        "metrics_compat": None,
        "otlp_endpoint": None,
        "log_format": "text",
        "config": None,
    }


def test_the_model_is_the_only_positional_argument():
    assert EngineConfig("model.gguf").model == "model.gguf"
    with pytest.raises(TypeError):
        EngineConfig("model.gguf", "tokenizer.json")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model", "", "model: got '', must be a text that is not empty"),
        ("model", None, "model: got None, must be a text that is not empty"),
        ("dtype", "int8", "dtype: got 'int8', must be one of auto, float32, bfloat16, float16"),
        ("quantization", "w4a16", "quantization: got 'w4a16', must be one of auto, w8a8, w4a8"),
        ("device", "tpu", "device: got 'tpu', must be one of auto, cpu, cuda"),
        ("context_length", 0, "context_length: got 0, must be an integer of at least 1, or None"),
        ("page_size", 3, "page_size: got 3, must be a power of two between 1 and 256"),
        ("page_size", 512, "page_size: got 512, must be an integer between 1 and 256"),
        ("page_size", True, "page_size: got True, must be an integer between 1 and 256"),
        ("page_size", 16.0, "page_size: got 16.0, must be an integer between 1 and 256"),
        ("kv_memory", "2G", "kv_memory: got '2G', must be a number of bytes such as 2GiB, of at least 1B, or None"),
        ("kv_tokens", -1, "kv_tokens: got -1, must be an integer of at least 1, or None"),
        ("mem_fraction", 0, "mem_fraction: got 0.0, must be a finite number above 0 and at most 1, or None"),
        ("mem_fraction", 1.01, "mem_fraction: got 1.01, must be a finite number above 0 and at most 1, or None"),
        ("mem_fraction", float("nan"), "mem_fraction: got nan, must be a finite number above 0 and at most 1, or None"),
        ("disable_radix_cache", 1, "disable_radix_cache: got 1, must be true or false"),
        ("overlap", "yes", "overlap: got 'yes', must be true or false, or None"),
        ("max_output_bytes", 0, "max_output_bytes: got 0, must be a number of bytes such as 2GiB, of at least 1B"),
    ],
)
def test_a_bad_value_is_refused_with_field_value_and_limit(name, value, message):
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**{name: value})
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("port", 65536, "port: got 65536, must be an integer between 0 and 65535"),
        ("port", -1, "port: got -1, must be an integer between 0 and 65535"),
        ("host", "", "host: got '', must be a text that is not empty"),
        ("hidden_states", "none", "hidden_states: got 'none', must be one of off, last, full"),
        ("metrics_compat", "tgi", "metrics_compat: got 'tgi', must be one of sglang, vllm, or None"),
        ("log_format", "xml", "log_format: got 'xml', must be one of text, json"),
        ("max_body_size", 0, "max_body_size: got 0, must be a number of bytes such as 2GiB, of at least 1B"),
        ("shutdown_timeout", 0, "shutdown_timeout: got 0.0, must be a finite number above 0"),
        ("cors_origin", "localhost:3000", "cors_origin: got 'localhost:3000', must be an origin such as https://example.com, or *"),
        ("cors_origin", "https://a.b/c", "cors_origin: got 'https://a.b/c', must be an origin such as https://example.com, or *"),
        ("otlp_endpoint", "localhost:4317", "otlp_endpoint: got 'localhost:4317', must be a URL such as http://localhost:4318"),
        ("chat_template", "/nowhere/x.jinja", "chat_template: /nowhere/x.jinja cannot be read: No such file or directory"),
        ("chat_template", "/", "chat_template: / cannot be read: Is a directory"),
    ],
)
def test_a_bad_value_of_the_server_is_refused(name, value, message):
    with pytest.raises(ConfigError) as refused:
        ServeConfig(**{name: value})
    assert str(refused.value) == message


def test_what_a_server_may_be_told(tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    config = ServeConfig(
        port=0, api_key="one", cors_origin=["*", "http://localhost:3000"], chat_template=str(template), max_body_size="1MiB"
    )
    assert (config.port, config.api_key, config.max_body_size) == (0, ("one",), 2**20)
    assert config.cors_origin == ("*", "http://localhost:3000")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"api_key": ["good", ""]}, "api_key: got a value that is not shown here, must be a text or a list of texts, none of them empty"),
        ({"api_key": ["sec ret"]}, "api_key: got a key that no header can carry, must be visible ASCII characters without spaces"),
        (
            {"admin_api_key": "schlüssel"},
            "admin_api_key: got a key that no header can carry, must be visible ASCII characters without spaces",
        ),
        ({"admin_api_key": 5}, "admin_api_key: got a value that is not shown here, must be a text that is not empty, or None"),
    ],
)
def test_keys_are_not_shown(options, message):
    with pytest.raises(ConfigError) as refused:
        ServeConfig(**options)
    assert str(refused.value) == message
    config = ServeConfig(api_key=["hush1", "hush2"], admin_api_key="hush3")
    assert "hush" not in repr(config)
    assert [disclosed(config)[name] for name in ("api_key", "admin_api_key", "port")] == ["***", "***", 30000]
    assert disclosed(ServeConfig())["api_key"] == ()


def test_a_socket_excludes_host_and_port():
    with pytest.raises(ConfigError, match="uds: got port too, must be alone: a server listens on one or the other"):
        ServeConfig(uds="/tmp/s", port=1)
    assert ServeConfig(uds="/tmp/s").host == "127.0.0.1"
    # Given is given, be it the default.
    with pytest.raises(ConfigError, match=r"uds: got host and port \(from SIDESTREAM_PORT\) too"):
        configured({"uds": "/tmp/s", "host": "127.0.0.1"}, environ={"SIDESTREAM_PORT": "30000"})
    assert configured({"uds": None, "port": 1}, environ={}).serve.port == 1


def test_flags_and_variables_and_file_and_defaults(tmp_path):
    file = tmp_path / "server.toml"
    file.write_text('model = "file.gguf"\nport = 1\nthreads = 1\npage-size = 1\nhost = "file"\n')
    environ = {"SIDESTREAM_CONFIG": str(file), "SIDESTREAM_PORT": "2", "SIDESTREAM_THREADS": "2", "SIDESTREAM_PAGE_SIZE": ""}
    engine, server, sources = configured({"port": 3}, environ=environ)
    assert (server.port, engine.threads, engine.page_size, server.host, server.log_format) == (3, 2, 1, "file", "text")
    assert (engine.model, server.config) == ("file.gguf", str(file))
    assert sources == {
        "model": str(file),
        "port": "",
        "threads": "SIDESTREAM_THREADS",
        "page_size": str(file),
        "host": str(file),
        "config": "SIDESTREAM_CONFIG",
    }
    other = tmp_path / "other.yaml"
    other.write_text("port: 4\n")
    assert configured({"config": str(other)}, environ={"SIDESTREAM_CONFIG": str(file)}).serve.port == 4
    assert EngineConfig.from_env(environ=environ).page_size == 1  # a file is for every engine, and for its own options
    assert EngineConfig.from_env(environ=environ | {"SIDESTREAM_PORT": "no port"}).threads == 2


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_page_sizes_are_powers_of_two(size):
    assert EngineConfig(page_size=size).page_size == size


def test_only_one_option_may_set_the_size_of_the_cache():
    with pytest.raises(ConfigError, match=r"kv_tokens=100 and mem_fraction=0\.5, must be only one of them"):
        EngineConfig(kv_tokens=100, mem_fraction=0.5)


def test_an_explicit_argument_goes_before_the_environment_and_that_before_the_default():
    environ = {"SIDESTREAM_PAGE_SIZE": "8", "SIDESTREAM_THREADS": "3", "SIDESTREAM_MODEL": "env.gguf"}
    config = EngineConfig.from_env(page_size=4, environ=environ)
    assert (config.model, config.page_size, config.threads, config.dtype) == ("env.gguf", 4, 3, "auto")
    assert EngineConfig.from_env("mine.gguf", environ=environ).model == "mine.gguf"
    assert EngineConfig.from_env(threads=None, environ=environ).threads is None


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("SIDESTREAM_KV_MEMORY", "2GiB", "kv_memory", 2**31),
        ("SIDESTREAM_MEM_FRACTION", "0.5", "mem_fraction", 0.5),
        ("SIDESTREAM_DISABLE_RADIX_CACHE", "1", "disable_radix_cache", True),
        ("SIDESTREAM_DISABLE_RADIX_CACHE", "off", "disable_radix_cache", False),
        ("SIDESTREAM_OVERLAP_SCHEDULE", "true", "overlap", True),
        ("SIDESTREAM_OVERLAP_SCHEDULE", "0", "overlap", False),
        ("SIDESTREAM_DISABLE_OVERLAP_SCHEDULE", "1", "overlap", False),
        ("SIDESTREAM_PAGE_SIZE", "", "page_size", 16),
    ],
)
def test_environment_variables(variable, text, name, value):
    assert getattr(EngineConfig.from_env(environ={variable: text}), name) == value


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("SIDESTREAM_PAGE_SIZE", "big", "SIDESTREAM_PAGE_SIZE: got 'big', must be an integer between 1 and 256"),
        ("SIDESTREAM_PAGE_SIZE", "0", "SIDESTREAM_PAGE_SIZE: got 0, must be an integer between 1 and 256"),
        ("SIDESTREAM_DISABLE_RADIX_CACHE", "maybe", "SIDESTREAM_DISABLE_RADIX_CACHE: got 'maybe', must be true or false"),
    ],
)
def test_a_bad_variable_is_named(variable, text, message):
    with pytest.raises(ConfigError) as refused:
        EngineConfig.from_env(environ={variable: text})
    assert str(refused.value) == message


def test_contradictory_variables_are_refused():
    environ = {"SIDESTREAM_OVERLAP_SCHEDULE": "1", "SIDESTREAM_DISABLE_OVERLAP_SCHEDULE": "1"}
    with pytest.raises(ConfigError, match="contradicts SIDESTREAM_OVERLAP_SCHEDULE=1"):
        EngineConfig.from_env(environ=environ)


def test_a_variable_holds_several_values():
    environ = {"SIDESTREAM_API_KEY": "one, two", "SIDESTREAM_CORS_ORIGIN": "http://a"}
    server = configured({}, environ=environ).serve
    assert (server.api_key, server.cors_origin) == (("one", "two"), ("http://a",))
    assert configured({"api_key": ("three",)}, environ=environ).serve.api_key == ("three",)
    with pytest.raises(ConfigError, match=r"SIDESTREAM_API_KEY: got a value that is not shown here, must be") as refused:
        configured({}, environ={"SIDESTREAM_API_KEY": "one,,two"})
    assert "two" not in str(refused.value)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"SIDESTREAM_PAGE_SIZE": "3"},
            "page_size: got 3, must be a power of two between 1 and 256\npage_size comes from SIDESTREAM_PAGE_SIZE.",
        ),
        (
            {"SIDESTREAM_KV_TOKENS": "100", "SIDESTREAM_MEM_FRACTION": "0.5"},
            "kv_tokens: got kv_tokens=100 and mem_fraction=0.5, must be only one of them: each sets the size of the KV cache\n"
            "kv_tokens comes from SIDESTREAM_KV_TOKENS. mem_fraction comes from SIDESTREAM_MEM_FRACTION.",
        ),
        ({"SIDESTREAM_CONFIG": "x.ini"}, "config: got 'x.ini', must be a file that ends in .toml, .yaml or .yml"),
        ({"SIDESTREAM_CONFIG": "/nowhere/x.toml"}, "config: /nowhere/x.toml cannot be read: No such file or directory"),
    ],
)
def test_a_refusal_says_where_a_value_comes_from(environ, message):
    with pytest.raises(ConfigError) as refused:
        configured({}, environ=environ)
    assert str(refused.value) == message


def test_an_unknown_variable_is_warned_of_once(caplog):
    known = ["MODEL", "DISABLE_OVERLAP_SCHEDULE", "CACHE", "CPU_ISA", "TEST_ANYTHING", "PORT", "API_KEY"]
    environ = {f"SIDESTREAM_{name}": "1" for name in [*known, "PAGESIZE", "QQQQQQQQQQQQQQQQ"]} | {"OTHER": "1"}
    for _ in range(2):
        EngineConfig.from_env(environ=environ)
    assert [record.getMessage() for record in caplog.records] == [
        "SIDESTREAM_PAGESIZE is set, but there is no such variable. Did you mean SIDESTREAM_PAGE_SIZE?",
        "SIDESTREAM_QQQQQQQQQQQQQQQQ is set, but there is no such variable. See docs/options.md.",
    ]


def test_an_unknown_option_is_answered_with_the_nearest():
    with pytest.raises(ConfigError) as refused:
        EngineConfig.from_env(pagesize=4)
    assert refused.value.hint == "Did you mean page_size?"
    assert did_you_mean("xyz", ["page_size"]) is None


def test_every_option_has_help_and_a_variable_of_its_own():
    fields = declared_options()
    assert len(fields) == len(fields_of(EngineConfig)) + len(fields_of(ServeConfig))
    assert all(field.option.help.endswith(".") for field in fields)
    assert len({field.variable for field in fields}) == len(fields)
    assert len({field.name for field in fields}) == len(fields)
    assert variable_of("--page-size") == "SIDESTREAM_PAGE_SIZE"


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("4096", 4096), ("1B", 1), ("2GiB", 2**31), ("2 gib", 2**31), ("1.5GiB", 3 * 2**29), ("64MB", 64 * 10**6)],
)
def test_sizes_are_read(text, size):
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2G", "1e9", "two", "1.GiB", "0x10"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="^" + text.replace(".", r"\.") + "$"):
        read_size(text)


@pytest.mark.parametrize(("size", "text"), [(4 * 2**30, "4GiB"), (1536 * 2**20, "1536MiB"), (100, "100B"), (0, "0B")])
def test_sizes_are_written_exactly(size, text):
    assert written_size(size) == text
    assert read_size(text) == size


def test_the_page_of_options_is_in_step_with_the_code():
    path = str(ROOT / "scripts" / "gendocs")
    loader = importlib.machinery.SourceFileLoader("gendocs", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gendocs", loader))
    loader.exec_module(module)
    assert module.PAGE.read_text() == module.TEXT, "run scripts/gendocs"
