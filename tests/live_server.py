"""A real server in a thread, for tests: uvicorn on a free port."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from families import tiny_model
from helpers import byte_tokenizer, wait_until
from lookfar.lm import LM
from lookfar.server.app import create_app
from lookfar.server.config import ServerConfig
from lookfar.server.keys import ApiKeys
from lookfar.server.run import DrainingServer, make_server
from lookfar.server.service import Service

TOOL_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
)


def byte_lm(**options: object) -> LM:
    """A tiny random model that speaks bytes, with a chat template that takes tools."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    model = tiny_model("llama", vocab_size=258, max_position_embeddings=512)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return LM(model, tokenizer, **{"budget": 8, "max_batch": 4, "prefill_chunk": 64, **options})  # type: ignore[arg-type]


def slow_down(lm: LM, patch: pytest.MonkeyPatch, seconds: float = 0.01) -> None:
    """Make every step take a while, so that requests are still running when the test looks."""
    step = lm.engine.step

    def slower(*arguments: Any) -> Any:
        time.sleep(seconds)
        return step(*arguments)

    patch.setattr(lm.engine, "step", slower)


@dataclass
class LiveServer:
    """A running server."""

    url: str
    service: Service
    server: DrainingServer
    thread: threading.Thread

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left of any request."""
        scheduler, admission = self.service.lm.engine.scheduler, self.service.admission
        return (
            scheduler.is_idle
            and not (self.service.open or admission.active or admission.waiting)
            and not self.service.lm.driver._submissions
        )


@contextmanager
def live_server(lm: LM, config: ServerConfig | None = None, keys: ApiKeys | None = None) -> Iterator[LiveServer]:
    """Serve an LM until the end of the block."""
    service = Service(lm, config or ServerConfig(model_name="tiny"))
    app = create_app(service, keys)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = make_server(app, service, "127.0.0.1", port)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive(), 60)
    try:
        yield LiveServer(f"http://127.0.0.1:{port}", service, server, thread)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
