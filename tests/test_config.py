from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path

import pytest

from sidestream.config import EngineConfig
from sidestream.errors import ConfigError
from sidestream.options import did_you_mean, fields_of, read_size, variable_of, written_size

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


def test_an_unknown_variable_is_warned_of_once(caplog):
    known = ["MODEL", "DISABLE_OVERLAP_SCHEDULE", "CACHE", "CPU_ISA", "TEST_ANYTHING"]
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
    fields = fields_of(EngineConfig)
    assert all(field.option.help.endswith(".") for field in fields)
    assert len({field.variable for field in fields}) == len(fields)
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
