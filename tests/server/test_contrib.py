"""The files of contrib are valid and agree with each other."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet import CONFIGS, nginx_config
from lookfar.cli.serve import serve

ROOT = CONFIGS.parent.parent


def needs(program: str, package: str = "") -> None:
    if not shutil.which(program):
        pytest.skip(f"needs {program} (apt install {package or program})")


def run(*command: str | Path, **environment: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, env={"PATH": "/usr/sbin:/usr/bin:/bin"} | environment
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def compose() -> Any:
    return yaml.safe_load((CONFIGS / "compose.yaml").read_text())


def test_haproxy_accepts_its_file() -> None:
    needs("haproxy")
    run("haproxy", "-c", "-f", CONFIGS / "haproxy.cfg")


def test_nginx_accepts_its_file(tmp_path: Path) -> None:
    needs("nginx")
    (tmp_path / "nginx.conf").write_text(nginx_config(tmp_path, 8000, ["127.0.0.1:8001", "127.0.0.1:8002"]))
    run("nginx", "-t", "-e", "stderr", "-c", tmp_path / "nginx.conf")


def test_prometheus_accepts_its_file() -> None:
    needs("promtool", "prometheus")
    run("promtool", "check", "config", "--syntax-only", CONFIGS / "prometheus.yml")


def test_compose_accepts_its_file() -> None:
    needs("docker-compose")
    run("docker-compose", "-f", CONFIGS / "compose.yaml", "config", "--quiet", SHARE_PASSWORD="secret", HOME="/nowhere")


def test_the_files_name_the_same_replicas(compose: Any) -> None:
    services = compose["services"]
    replicas = sorted(name for name in services if name.startswith("replica"))
    places = [f"{name}:8000" for name in replicas]
    environment = services["proxy"]["environment"]
    assert [environment[name.upper()] for name in replicas] == places
    names = re.findall(r'^    server (\w+) "\$\{(\w+)-', (CONFIGS / "haproxy.cfg").read_text(), re.M)
    assert names == [(name, name.upper()) for name in replicas]
    scraped = yaml.safe_load((CONFIGS / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"]
    assert [(one["targets"], one["labels"]["replica"]) for one in scraped] == [
        ([place], name) for place, name in zip(places, replicas, strict=True)
    ]
    stores = {services[name]["command"][services[name]["command"].index("--store") + 1] for name in replicas}
    assert len(stores) == len(replicas)  # a file for each


def test_only_the_proxy_and_prometheus_are_reachable_from_outside(compose: Any) -> None:
    reachable = {name: service["ports"] for name, service in compose["services"].items() if "ports" in service}
    assert set(reachable) == {"proxy", "prometheus"}
    assert all(port.startswith("127.0.0.1:") for ports in reachable.values() for port in ports)


def test_replicas_of_containers_have_what_they_need(compose: Any) -> None:
    assert "redis" in (ROOT / "Dockerfile").read_text()
    for name, service in compose["services"].items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (CONFIGS / source).is_file(), name
        assert set(service.get("secrets", ())) <= set(compose["secrets"])


UNITS = [ROOT / "contrib" / "lookfar.service", CONFIGS / "lookfar@.service"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_its_units(unit: Path, tmp_path: Path) -> None:
    needs("systemd-analyze", "systemd")
    copy = tmp_path / unit.name.replace("@", "@1")
    copy.write_text(unit.read_text().replace("/opt/lookfar/bin/lookfar", "/bin/true"))  # which has to exist
    run("systemd-analyze", "verify", "--man=no", copy)


def test_the_units_have_the_same_sandbox_and_let_numba_compile() -> None:
    one, other = (unit.read_text().partition("NoNewPrivileges")[2] for unit in UNITS)
    assert one == other
    for forbidden in ("MemoryDenyWriteExecute", "PrivateDevices", "ProtectClock"):
        assert not re.search(rf"^{forbidden}=", one, re.M)


def test_units_and_containers_use_options_that_exist(compose: Any) -> None:
    known = {"--" + name.replace("_", "-") for name in inspect.signature(serve).parameters}
    lines = [re.search(r"^ExecStart=(?:.*\\\n)*.*", unit.read_text(), re.M) for unit in UNITS]
    text = " ".join(line[0] for line in lines if line is not None)
    text += (ROOT / "Dockerfile").read_text().partition("\nENTRYPOINT")[2]
    text += " ".join(compose["services"][name]["command"][i] for name in ("replica1", "replica2") for i in range(7))
    used = set(re.findall(r"--[a-z-]+", text))
    assert {"--host", "--keys", "--store", "--drain"} <= used <= known


def test_the_image_is_built_from_what_is_let_in() -> None:
    copied = re.findall(r"^COPY (.*) \S+$", (ROOT / "Dockerfile").read_text(), re.M)
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{name}" for line in copied for name in line.split()} == {rule for rule in rules if rule.startswith("!")}
