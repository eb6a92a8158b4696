"""The ASGI application: all endpoints on one service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from lookfar.server import chat, completions, responses
from lookfar.server.errors import ApiError, as_api_error
from lookfar.server.gate import Gate
from lookfar.server.identity import Identity
from lookfar.server.jobs import Job
from lookfar.server.keys import ANYONE, ApiKeys
from lookfar.server.limits import check_model
from lookfar.server.monitoring import add_monitoring
from lookfar.server.page import add_page
from lookfar.server.schemas import ChatBody, CompletionBody, DetokenizeBody, ResponsesBody, TokenizeBody
from lookfar.server.service import Service
from lookfar.server.status import Status
from lookfar.server.streaming import EventStream, unless_disconnected
from lookfar.server.tokens import detokenize, tokenize
from lookfar.server.validation import validation_error

log = logging.getLogger("lookfar.server")
ERRORS: Any = {400: {"description": "A field is wrong; the error names it."}}
Body = CompletionBody | ChatBody | ResponsesBody


def create_app(service: Service, keys: ApiKeys | None = None) -> FastAPI:
    """Return the application. Its lifespan starts and closes the service."""
    status = Status(service)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        history = asyncio.create_task(status.keep_history())
        try:
            yield
        finally:
            history.cancel()
            await service.close()

    app = FastAPI(title="lookfar", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(ApiError, _failed)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    _add_generation(app, service)
    _add_tokens(app, service)
    add_monitoring(app, service, status)
    add_page(app)
    config = service.config
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(config.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(Gate, config=config, keys=keys or ApiKeys(), metrics=service.metrics)
    return app


class _Endpoint:
    """How the endpoints that generate text go from a body to a response."""

    def __init__(self, service: Service, prepare: Callable[..., Job], respond: Any, stream: Any) -> None:
        self._service = service
        self._prepare = prepare
        self._respond = respond
        self._stream = stream

    async def __call__(self, body: Body, request: Request) -> Response:
        service, lm, state = self._service, self._service.lm, request.state
        check_model(body.model, service.config.model_name)
        job = await service.in_thread(partial(self._prepare, lm, body, state.tenant, service.config.limits))
        state.log.update(answers=job.answers, prompt_tokens=job.prompt_tokens, stream=job.stream)
        if state.tenant is ANYONE and request.client is not None:
            job = replace(job, client=request.client.host)
        identity = Identity(state.request_id, service.config.model_name)
        generation = await service.submit(job)
        if job.stream:
            return EventStream(generation, self._stream(lm, body, generation, identity))
        made = await unless_disconnected(request, generation, self._respond(lm, body, generation, identity))
        state.log["usage"] = made["usage"]
        return JSONResponse(made)


def _add_generation(app: FastAPI, service: Service) -> None:
    complete = _Endpoint(
        service, completions.completion_job, completions.completion_response, completions.completion_events
    )
    talk = _Endpoint(service, chat.chat_job, chat.chat_response, chat.chat_events)
    respond = _Endpoint(service, responses.responses_job, responses.response, responses.response_events)

    @app.post("/v1/completions", responses=ERRORS)
    async def completions_endpoint(body: CompletionBody, request: Request) -> Response:
        return await complete(body, request)

    @app.post("/v1/chat/completions", responses=ERRORS)
    async def chat_endpoint(body: ChatBody, request: Request) -> Response:
        return await talk(body, request)

    @app.post("/v1/responses", responses=ERRORS)
    async def responses_endpoint(body: ResponsesBody, request: Request) -> Response:
        return await respond(body, request)


def _add_tokens(app: FastAPI, service: Service) -> None:
    lm, name = service.lm, service.config.model_name

    @app.post("/tokenize", responses=ERRORS)
    async def tokenize_endpoint(body: TokenizeBody) -> dict[str, Any]:
        check_model(body.model, name)
        return await service.in_thread(partial(tokenize, lm, body))

    @app.post("/detokenize", responses=ERRORS)
    async def detokenize_endpoint(body: DetokenizeBody) -> dict[str, Any]:
        check_model(body.model, name)
        return await service.in_thread(partial(detokenize, lm, body))


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _as_response(validation_error(error))


async def _failed(_: Request, error: Exception) -> Response:
    return _as_response(as_api_error(error))


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = _as_response(ApiError(error.status_code, f"{error.detail}."))
    response.headers.update(error.headers or {})
    return response


async def _unexpected(request: Request, error: Exception) -> Response:
    log.error("A request failed.", exc_info=error, extra={"fields": {"id": request.state.request_id}})
    return _as_response(as_api_error(error))


def _as_response(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers())
