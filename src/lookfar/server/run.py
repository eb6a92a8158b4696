"""Running the application with uvicorn: sockets, signals, draining."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
from math import ceil
from types import FrameType

import uvicorn
from fastapi import FastAPI

from lookfar.errors import ConfigError
from lookfar.server.service import Service

# The driver's thread and the event loop share one interpreter: a loop that is busy with many streams must not keep the
# driver waiting for the 5 ms that a thread may hold the interpreter by default.
SWITCH_SECONDS = 0.0005
BACKLOG = 2048
ENDING_SECONDS = 5  # for the last bytes of requests that were ended when the draining was over


class DrainingServer(uvicorn.Server):
    """Stops in two stages: new requests are refused and running ones go on; then those that are left are ended."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.drain()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.drain()
        timer = asyncio.get_running_loop().call_later(self._service.config.drain_seconds, self._service.end_all)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def check_address(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on, before a model is loaded for it."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind(address)
    except OSError as error:
        fixes = {
            errno.EADDRINUSE: f"port {port} is in use: stop the other server or use another --port",
            errno.EACCES: f"port {port} is for root only: use a --port above 1023",
        }
        other = f"{host} is not an address of this machine: use another --host, such as 127.0.0.1"
        raise ConfigError(f"The server cannot start, {fixes.get(error.errno or 0, other)}.") from error


def make_server(app: FastAPI, service: Service, host: str, port: int) -> DrainingServer:
    """Return a server that is ready to run."""
    sys.setswitchinterval(SWITCH_SECONDS)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=ceil(service.config.drain_seconds) + ENDING_SECONDS,
    )
    return DrainingServer(config, service)
