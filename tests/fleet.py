"""Replicas behind a real reverse proxy, for tests: processes of `lookfar serve` and nginx or HAProxy."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from helpers import wait_until
from redis_server import free_port

CONFIGS = Path(__file__).parent.parent / "contrib" / "replicas"
SERVE = [sys.executable, "-c", "from lookfar.cli import main; main()", "serve"]
PROXIES = [
    pytest.param(name, marks=pytest.mark.skipif(not shutil.which(name), reason=f"needs {name} (apt install {name})"))
    for name in ("nginx", "haproxy")
]


class Process:
    """A process that listens on a port; its output goes to a file."""

    def __init__(self, command: list[str], log: Path, health: str, environment: dict[str, str] | None = None) -> None:
        self.command, self.log, self.health, self.environment = command, log, health, environment or {}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"} | self.environment
            )

    def wait_until_ready(self) -> None:
        wait_until(self.is_ready, 120)

    def is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()
        try:
            return httpx.get(self.health, timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait(60)

    def kill(self) -> None:
        """End the process as a crash would."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class Replica(Process):
    """`lookfar serve` on a free port."""

    def __init__(self, model: Path, folder: Path, number: int, share: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        options = "--no-warmup --device cpu --dtype float64 --strategy suffix --budget 8 --drain 30 --name tiny"
        command = [*SERVE, str(model), "--port", str(self.port), "--share", share, *options.split()]
        super().__init__(command, folder / f"replica{number}.log", f"{self.url}/health")

    def metric(self, name: str) -> float:
        """Return a metric, with its labels in the name; 0 if it is not there yet."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.M)
        return float(found.group(1)) if found else 0.0

    @property
    def answered(self) -> int:
        """The chat requests that were answered, in whatever way."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        lines = re.findall(r'^lookfar_http_responses_total\{path="/v1/chat/completions",.*\} (\S+)$', text, re.M)
        return int(sum(map(float, lines)))


class Proxy(Process):
    """nginx or HAProxy with the configuration of contrib/replicas, on a free port."""

    def __init__(self, name: str, folder: Path, replicas: list[Replica]) -> None:
        self.name, port = name, free_port()
        self.url = f"http://127.0.0.1:{port}"
        places = [f"127.0.0.1:{replica.port}" for replica in replicas]
        if name == "haproxy":
            command = ["haproxy", "-db", "-f", str(CONFIGS / "haproxy.cfg")]
            environment = {"LISTEN": f"127.0.0.1:{port}", "REPLICA1": places[0], "REPLICA2": places[1]}
        else:
            config = folder / "nginx.conf"
            config.write_text(nginx_config(folder, port, places))
            command, environment = ["nginx", "-e", "stderr", "-c", str(config)], {}
        super().__init__(command, folder / f"{name}.log", f"{self.url}/version", environment)

    def kill(self) -> None:
        """End the proxy; nginx then ends its workers, which would outlive it otherwise."""
        self.send(signal.SIGTERM)
        self.wait()


def nginx_config(folder: Path, port: int, places: list[str]) -> str:
    """Return a main configuration with our file in it, with other ports and with all files in a folder."""
    ours = (CONFIGS / "nginx.conf").read_text().replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    for number, place in enumerate(places, start=1):
        ours = ours.replace(f"127.0.0.1:800{number}", place)
    temporary = " ".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return (
        f"daemon off; pid {folder}/nginx.pid; worker_processes 1; events {{}}\n"
        f"http {{ access_log off; {temporary}\n{ours}\n}}\n"
    )
