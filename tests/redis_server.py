"""A real Redis or Valkey server for tests."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")
needs_server = pytest.mark.skipif(
    PROGRAM is None, reason="needs redis-server or valkey-server (apt install redis-server)"
)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class RedisServer:
    """A server on a free port, with its files in a folder. Options are those of redis.conf."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.options, self.port = folder, options, free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> RedisServer:
        assert PROGRAM is not None
        command = [PROGRAM, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--save", ""]
        for name, value in self.options.items():
            command += [f"--{name.replace('_', '-')}", *str(value).split()]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port = int(self.options.get("tls_port", self.port))
        for _ in range(500):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    return self
            assert self._process.poll() is None, "the server ended"
            time.sleep(0.02)
        raise AssertionError("the server did not start")

    def kill(self) -> None:
        """End the server as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> RedisServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()
