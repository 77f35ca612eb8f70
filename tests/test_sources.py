from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from sidestream.config import declared_options
from sidestream.errors import ConfigError
from sidestream.sources import read_file

PAGE = Path(__file__).parent.parent / "docs" / "options.md"
TOML, YAML = "server.toml", "server.yaml"
if sys.version_info < (3, 11):
    pytest.importorskip("tomli")
pytest.importorskip("yaml")


def values(directory: Path, name: str, text: str) -> dict[str, object]:
    file = directory / name
    file.write_text(text)
    return {name: given.value for name, given in read_file(file, declared_options()).items()}


def test_toml(tmp_path):
    text = 'model = "m.gguf"\nkv-memory = "2GiB"\npage_size = 8\nmem-fraction = 1\ndisable-radix-cache = true\napi-key = ["a", "b"]\n'
    assert values(tmp_path, TOML, text) == {
        "model": "m.gguf",
        "kv_memory": 2**31,
        "page_size": 8,
        "mem_fraction": 1.0,
        "disable_radix_cache": True,
        "api_key": ("a", "b"),
    }


def test_yaml(tmp_path):
    text = "kv_memory: 2GiB\napi-key: only\nuds:\ncors-origin:\n  - http://a\n  - http://b\nmax-body-size: 1048576\n"
    assert values(tmp_path, YAML, text) == {
        "kv_memory": 2**31,
        "api_key": ("only",),
        "uds": None,
        "cors_origin": ("http://a", "http://b"),
        "max_body_size": 2**20,
    }
    assert values(tmp_path, "server.yml", "") == {}
    assert values(tmp_path, YAML, "# nothing yet\n") == {}


@pytest.mark.parametrize(
    ("line", "overlap"),
    [("overlap: true", True), ("overlap-schedule: false", False), ("disable-overlap-schedule: true", False), ("overlap:", None)],
)
def test_a_key_may_be_the_name_or_the_flag(tmp_path, line, overlap):
    assert values(tmp_path, YAML, line) == {"overlap": overlap}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (TOML, "page-sise = 8", "FILE: key 'page-sise' is no option\nDid you mean page-size?"),
        (TOML, "page_sise = 8", "FILE: key 'page_sise' is no option\nDid you mean page_size?"),
        (YAML, "qqqqqqqqqqqq: 8", "FILE: key 'qqqqqqqqqqqq' is no option\ndocs/options.md lists them."),
        (YAML, "8: 8", "FILE: key 8 is no option\ndocs/options.md lists them."),
        (TOML, "[server]\nport = 1", "FILE: key 'server' is no option\ndocs/options.md lists them."),
        (TOML, 'port = "30000"', "FILE: key 'port': got '30000', must be an integer between 0 and 65535"),
        (YAML, "port: 30000.0", "FILE: key 'port': got 30000.0, must be an integer between 0 and 65535"),
        (YAML, "port:", "FILE: key 'port': got None, must be an integer between 0 and 65535"),
        (
            YAML,
            "api-key: ['']",
            "FILE: key 'api-key': got a value that is not shown here, must be a text or a list of texts, none of them empty",
        ),
        (YAML, "overlap: false\ndisable-overlap-schedule: true", "FILE: key 'disable-overlap-schedule' sets what key 'overlap' has set."),
        (TOML, "kv-tokens = 1\nkv_tokens = 1", "FILE: key 'kv_tokens' sets what key 'kv-tokens' has set."),
        (YAML, "port: 1\nport: 2", "FILE: key 'port' is there twice"),
        (YAML, "- port", "FILE: got ['port'], must be keys with values, one for each option"),
        (YAML, "port", "FILE: got 'port', must be keys with values, one for each option"),
        (YAML, "host: [a\nport: 1", "FILE: line 2: expected ',' or ']'"),
        (TOML, "port: 1", "FILE: Expected '=' after a key in a key/value pair (at line 1, column 5)"),
    ],
)
def test_what_a_file_cannot_say(tmp_path, name, text, message):
    with pytest.raises(ConfigError) as refused:
        values(tmp_path, name, text)
    assert str(refused.value).startswith(message.replace("FILE", str(tmp_path / name)))


def test_a_file_that_is_not_text(tmp_path):
    file = tmp_path / TOML
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read: it is not UTF-8 text"):
        read_file(file, declared_options())


def test_without_pyyaml_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError) as refused:
        values(tmp_path, YAML, "port: 1")
    assert str(refused.value) == f"{tmp_path / YAML}: yaml is not installed\npip install pyyaml"


def test_the_file_of_the_documentation(tmp_path):
    (text,) = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert values(tmp_path, TOML, text) == {
        "model": "smollm2",
        "context_length": 4096,
        "kv_memory": 2**31,
        "port": 8000,
        "api_key": ("first", "second"),
    }
