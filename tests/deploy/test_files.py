"""What can be said of the container and service files without running them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PORT = 30000
OPEN_REQUESTS_SECONDS = 30  # how long the server itself waits for them when it is stopped


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line]


def last_stage() -> list[tuple[str, str]]:
    stages = instructions()
    return stages[max(i for i, (word, _) in enumerate(stages) if word == "FROM") :]


def only(word: str) -> str:
    (value,) = [arguments for name, arguments in last_stage() if name == word]
    return value


def environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for word, arguments in last_stage() if word == "ENV" for pair in arguments.split())


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / name).read_text())


COMPOSE = load("compose.yaml")
SERVICES = COMPOSE["services"]


def test_the_image_runs_as_nobody_special():
    assert only("USER") == "1000:1000"
    words = [word for word, _ in last_stage()]
    assert words.index("USER") > max(i for i, word in enumerate(words) if word in ("RUN", "COPY"))
    assert "--uid 1000" in only("RUN") and "--owner=sidestream" in only("RUN")


def test_the_image_listens_on_all_addresses_by_its_command_only():
    assert json.loads(only("ENTRYPOINT")) == ["sidestream"]
    assert json.loads(only("CMD")) == ["serve", "--host", "0.0.0.0"]
    assert [word for word, arguments in instructions() if "0.0.0.0" in arguments] == ["CMD"]
    assert only("EXPOSE") == str(PORT)


def test_the_image_keeps_models_in_its_volume():
    assert only("VOLUME") == "/cache"
    assert environment()["SIDESTREAM_CACHE"] == "/cache"
    assert environment()["HF_HOME"].startswith("/cache/")


def test_the_image_has_the_torch_that_is_tested():
    tested = re.search(r"torch==(\S+)", (ROOT / "scripts" / "setup").read_text())
    assert ("ARG", f"TORCH_VERSION={tested[1]}") in instructions()


def test_the_image_is_slim_and_gets_only_what_it_needs():
    stages = [arguments.split()[0] for word, arguments in instructions() if word == "FROM"]
    assert len(stages) == 2 and all(re.fullmatch(r"python:3\.\d+-slim", stage) for stage in stages)
    assert only("COPY").startswith("--from=build ")
    kept = [line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")]
    assert kept == ["pyproject.toml", "README.md", "LICENSE", "sidestream"]
    assert all((ROOT / name).exists() for name in kept)


class Health(BaseHTTPRequestHandler):
    status = 200
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(self.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def health_check(port: int) -> int:
    command = json.loads(only("HEALTHCHECK").split("CMD ", 1)[1])
    assert command[:2] == ["python", "-c"]
    proxied = {"SIDESTREAM_PORT": str(port), "http_proxy": "http://127.0.0.1:9"}  # a proxy is not for the container itself
    return subprocess.run([sys.executable, *command[1:]], env={**os.environ, **proxied}, capture_output=True, timeout=60).returncode


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (500, 1)])
def test_the_health_check_asks_the_server(status, code):
    handler = type("Handler", (Health,), {"status": status, "asked": []})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            assert health_check(server.server_port) == code
        finally:
            server.shutdown()
            thread.join()
    assert handler.asked == ["/health"]


def test_the_health_check_fails_where_nobody_listens():
    with HTTPServer(("127.0.0.1", 0), Health, bind_and_activate=False) as server:
        server.server_bind()  # the port is taken, and nobody answers there
        assert health_check(server.server_port) == 1


def test_compose_starts_three_services_for_this_machine_only():
    assert set(SERVICES) == {"sidestream", "prometheus", "grafana"}
    for name, service in SERVICES.items():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert name == "sidestream" or re.fullmatch(r"\S+:v?\d+\.\d+\.\d+", service["image"]), "an exact version"
    assert SERVICES["sidestream"]["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]


def test_compose_names_files_and_volumes_that_exist():
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], volume
    build = SERVICES["sidestream"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
    assert "cache:/cache" in SERVICES["sidestream"]["volumes"]


def test_compose_gives_the_server_few_rights_and_time_to_end():
    server = SERVICES["sidestream"]
    assert server["cap_drop"] == ["ALL"] and server["security_opt"] == ["no-new-privileges:true"]
    assert server["read_only"] is True and server["tmpfs"] == ["/tmp"]
    assert "privileged" not in server and "user" not in server
    assert int(server["stop_grace_period"].removesuffix("s")) > OPEN_REQUESTS_SECONDS


def test_prometheus_and_grafana_find_each_other():
    (job,) = load("prometheus.yml")["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": [f"sidestream:{PORT}"]}]
    (source,) = load("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert (source["url"], source["type"], source["isDefault"]) == ("http://prometheus:9090", "prometheus", True)
    assert source["jsonData"]["timeInterval"] == load("prometheus.yml")["global"]["scrape_interval"]
    (provider,) = load("grafana/provisioning/dashboards/sidestream.yaml")["providers"]
    mounted = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert str(Path(mounted).parent) == provider["options"]["path"]
    assert f"./grafana/sidestream.json:{mounted}:ro" in SERVICES["grafana"]["volumes"]


def unit() -> dict[str, str]:
    lines = (DEPLOY / "sidestream.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def test_the_unit_waits_for_the_server_and_lets_it_end():
    assert unit()["Type"] == "notify"
    assert unit()["ExecStart"].endswith("/sidestream serve"), "no address: 127.0.0.1 unless the administrator says otherwise"
    assert unit()["KillMode"] == "mixed"
    assert int(unit()["TimeoutStopSec"].removesuffix("s")) > OPEN_REQUESTS_SECONDS
    assert unit()["Restart"] == "on-failure" and unit()["RestartPreventExitStatus"] == "2 78"


def test_the_unit_gives_the_server_few_rights():
    yes = ("DynamicUser", "NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "RestrictNamespaces", "RestrictSUIDSGID")
    assert all(unit()[name] == "yes" for name in yes)
    assert unit()["ProtectSystem"] == "strict" and unit()["CapabilityBoundingSet"] == ""
    assert "MemoryDenyWriteExecute" not in unit(), "PyTorch makes code at run time"
    assert unit()["CacheDirectory"] == "sidestream" and "SIDESTREAM_CACHE=/var/cache/sidestream" in unit()["Environment"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_reads_the_unit(tmp_path):
    copy = tmp_path / "sidestream.service"
    text = (DEPLOY / "sidestream.service").read_text()
    copy.write_text(text.replace("/opt/sidestream/bin/sidestream", "/bin/true"))
    checked = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
    assert (checked.returncode, checked.stderr) == (0, "")
