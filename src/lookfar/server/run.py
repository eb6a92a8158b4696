"""Running the application with uvicorn: sockets, signals, draining."""

from __future__ import annotations

import sys
from types import FrameType

import uvicorn
from fastapi import FastAPI

from lookfar.server.service import Service

# The driver's thread and the event loop share one interpreter: a loop that is busy with many streams must not keep the
# driver waiting for the 5 ms that a thread may hold the interpreter by default.
SWITCH_SECONDS = 0.0005
BACKLOG = 2048


class DrainingServer(uvicorn.Server):
    """Stops in two stages: at the first signal new requests are refused and running ones go on."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.drain()
        super().handle_exit(sig, frame)


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
        timeout_graceful_shutdown=int(service.config.drain_seconds),
    )
    return DrainingServer(config, service)
