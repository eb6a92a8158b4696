"""Errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

from lookfar.errors import ConfigError, LookfarError, RequestError

# The names of options of `LM.requests` that clients know under another name.
FIELD_NAMES = {"max_new_tokens": "max_tokens", "stop_strings": "stop", "sequence_bias": "logit_bias"}


class ApiError(Exception):
    """An error to answer a request with."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message.encode("utf-8", "replace").decode()  # it may quote half a character of the request
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def type(self) -> str:
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        if self.status == 504:
            return "timeout_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def invalid(param: str | None, message: str) -> ApiError:
    """Return the error of a field with a wrong value."""
    return ApiError(400, message, param)


def as_api_error(error: BaseException) -> ApiError:
    """Return the answer to any error. Errors that are not meant for users do not show what they say."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (RequestError, ConfigError)):
        message = str(error)
        for ours, theirs in FIELD_NAMES.items():
            message = message.replace(ours, theirs)
        return ApiError(400, message)
    if isinstance(error, LookfarError):
        return ApiError(503, str(error), retry_after=1)
    return ApiError(500, "The request failed inside the server; its log says why, under the request's id.")
