"""The gate in front of all endpoints: request ids, hosts, API keys, body sizes, security headers, access log."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from time import monotonic
from typing import Any

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lookfar.server.config import Limits, ServerConfig
from lookfar.server.errors import ApiError
from lookfar.server.keys import ANYONE, ApiKeys
from lookfar.server.metrics import Metrics

REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
HOST = re.compile(r"(?:\[([^\]]*)\]|([^:]*))(?::\d*)?")
OPEN_PATHS = frozenset({"/", "/health", "/version", "/favicon.ico"})  # need no key; so do the files of the page
PAGE_FILES = "/page/"
WATCHED_PATHS = frozenset({"/health", "/metrics", "/lookfar/status"})  # asked every few seconds: logged as debug
SECURITY_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
log = logging.getLogger("lookfar.server.access")


class Gate:
    """ASGI middleware. Sets `request_id` and `tenant` in the state of a request, and `log` for fields of its log."""

    def __init__(self, app: ASGIApp, config: ServerConfig, keys: ApiKeys, metrics: Metrics) -> None:
        self._app = app
        self._config = config
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        fields: dict[str, Any] = {"id": request_id, "method": scope["method"], "path": scope["path"]}
        scope.setdefault("state", {}).update(request_id=request_id, tenant=ANYONE, log=fields)
        started, status = monotonic(), 499  # that of a client that left before the response began

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update({"X-Request-Id": request_id, **SECURITY_HEADERS})
            await send(message)

        try:
            try:
                self._check(scope, headers)
                await self._app(scope, _Body(receive, self._config.limits), answer)
            except ApiError as error:
                await _refuse(error, answer)
        finally:
            route = scope.get("route")
            self._metrics.answered(getattr(route, "path", "other"), status)
            fields |= {"status": status, "seconds": round(monotonic() - started, 4)}
            level = logging.DEBUG if scope["path"] in WATCHED_PATHS and status < 400 else logging.INFO
            log.log(level, "request", extra={"fields": fields})

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Refuse a request before its body is read."""
        hosts = self._config.allowed_hosts
        if hosts and not {headers.get("host", "").lower(), host_name(headers.get("host", ""))} & set(hosts):
            raise ApiError(421, "This host name is not served here: start the server with --allowed-host for it.")
        path = scope["path"]
        if path not in OPEN_PATHS and not path.startswith(PAGE_FILES) and scope["method"] != "OPTIONS":
            scheme, _, key = headers.get("authorization", "").partition(" ")
            tenant = self._keys.tenant(key.strip() if scheme.lower() == "bearer" else None)
            if tenant is None:
                raise ApiError(
                    401, "Give a valid API key: Authorization: Bearer KEY.", code="invalid_api_key", param=None
                )
            scope["state"]["tenant"] = tenant
            if self._keys.required:
                scope["state"]["log"]["tenant"] = tenant.name
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._config.limits.body_bytes:
            raise _too_large(self._config.limits.body_bytes)


def host_name(header: str) -> str:
    """Return the name in a Host header, without a port and the brackets of IPv6 addresses."""
    found = HOST.fullmatch(header.lower())
    return (found[1] or found[2]) if found is not None else ""


class _Body:
    """Receives a body up to a limit, whatever its headers say."""

    def __init__(self, receive: Receive, limits: Limits) -> None:
        self._receive = receive
        self._limits = limits
        self._size = 0
        self._is_complete = False

    async def __call__(self) -> Message:
        # FastAPI would turn exceptions of other types into a 400.
        if self._is_complete:
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), self._limits.body_seconds)
        except asyncio.TimeoutError:
            raise HTTPException(408, f"Nothing came for {self._limits.body_seconds:g} s") from None
        if message["type"] == "http.request":
            self._is_complete = not message.get("more_body", False)
            self._size += len(message.get("body", b""))
            if self._size > self._limits.body_bytes:
                raise HTTPException(413, _too_large(self._limits.body_bytes).message.rstrip("."))
        return message


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The body of a request has at most {limit} bytes on this server.")


async def _refuse(error: ApiError, send: Send) -> None:
    body = json.dumps(error.body()).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers()}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
