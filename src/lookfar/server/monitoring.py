"""GET /v1/models, /health, /version, /metrics, and /lookfar/status for the page and `lookfar top`."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from lookfar.drafters.registry import name_of
from lookfar.lm import LM
from lookfar.server.errors import ApiError
from lookfar.server.limits import check_model
from lookfar.server.service import Service
from lookfar.server.status import Status
from lookfar.version import __version__

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def add_monitoring(app: FastAPI, service: Service, status: Status) -> None:
    lm, name = service.lm, service.config.model_name

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [served_model(lm, name)]}

    @app.get("/v1/models/{model:path}", responses={404: {"description": "Another model."}})
    async def model(model: str) -> dict[str, Any]:
        check_model(model, name)
        return served_model(lm, name)

    @app.get("/health", responses={503: {"description": "The server is shutting down."}})
    async def health() -> Response:
        if service.is_draining:
            error = ApiError(503, "The server is shutting down.")
            return JSONResponse(error.body(), error.status)
        return JSONResponse({"status": "ok"})

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.exposition(), media_type=METRICS_TYPE)

    @app.get("/lookfar/status")
    async def status_endpoint(since: float = 0.0) -> dict[str, Any]:
        return {
            "version": __version__,
            "model": name,
            "device": str(lm.device),
            "strategy": name_of(lm.strategy),
            "max_model_len": lm.engine.max_length,
            "has_chat_template": bool(getattr(lm.tokenizer, "chat_template", None)),
            "now": status.snapshot(),
            "history": [one for one in status.history if one["time"] > since],
        }


def served_model(lm: LM, name: str) -> dict[str, Any]:
    """Return the entry of the model in /v1/models."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "lookfar",
        "root": name,
        "parent": None,
        "max_model_len": lm.engine.max_length,
    }
