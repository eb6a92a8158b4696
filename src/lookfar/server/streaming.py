"""Responses that follow a generation: event streams and single answers, both cancelled when the client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Send

from lookfar.server.choices import Choice, Delta, merged
from lookfar.server.errors import ApiError, as_api_error
from lookfar.server.service import Generation

DONE = b"data: [DONE]\n\n"
# Proxies must not collect a stream before they pass it on.
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
Result = TypeVar("Result")
log = logging.getLogger("lookfar.server")


def event(data: Any, name: str | None = None) -> bytes:
    """Return one server-sent event."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode("utf-8", "replace")


async def deltas(generation: Generation, choices: list[Choice]) -> AsyncIterator[list[Delta]]:
    """Yield what was added to each answer since the last time."""
    async for outputs in generation:
        yield merged([choices[output.index].add(output) for output in outputs])


class EventStream(StreamingResponse):
    """A stream of server-sent events. When it ends in whatever way, its generation is closed."""

    def __init__(self, generation: Generation, events: AsyncIterator[bytes]) -> None:
        super().__init__(_with_errors(events), media_type="text/event-stream", headers=STREAM_HEADERS)
        self._generation = generation

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        finally:
            self._generation.close()


async def _with_errors(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Send an error as the last event: the status line is gone already."""
    try:
        async for one in events:
            yield one
    except Exception as error:
        failed = as_api_error(error)
        if failed.status == 500 and not isinstance(error, ApiError):
            log.exception("A stream failed.")
        yield event(failed.body())
        yield DONE


async def unless_disconnected(request: Request, generation: Generation, answer: Awaitable[Result]) -> Result:
    """Wait for an answer, and cancel it when the client goes away."""
    task = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "The client closed the connection.")
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
        generation.close()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
