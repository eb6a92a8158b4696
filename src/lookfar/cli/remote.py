"""A server of `lookfar serve`, or another one with OpenAI's API, as the commands use it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any
from weakref import finalize

import typer

from lookfar.errors import LookfarError, RequestError

if TYPE_CHECKING:
    import httpx

KEY_VARIABLE = "LOOKFAR_API_KEY"
Key = Annotated[str | None, typer.Option("--key", envvar=KEY_VARIABLE, help="An API key of the server.")]

GET_SECONDS = 10  # a server that is busy with answers still has its state at hand


class Server:
    """Requests to one server; every failure is one sentence."""

    def __init__(self, url: str, key: str | None = None) -> None:
        try:
            import httpx
        except ImportError:
            raise LookfarError("Talking to a server needs httpx: pip install 'lookfar[serve]'.") from None
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise RequestError(f"{url} is not an address: write it as in http://127.0.0.1:8000.")
        key = key or os.environ.get(KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(base_url=self.url, headers=headers, timeout=httpx.Timeout(600, connect=10))
        finalize(self, self._client.close)
        self._failures = (httpx.HTTPError, httpx.InvalidURL, ValueError)

    def get(self, path: str) -> Any:
        """Return the JSON at a path."""
        try:
            response = self._client.get(path, timeout=GET_SECONDS)
            self._check(response)
            return response.json()
        except self._failures as error:
            raise self._failed(error) from None

    def stream(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a streamed answer. Closing the iterator closes the connection."""
        try:
            with self._client.stream("POST", path, json=body, headers=headers) as response:
                if response.status_code != 200:
                    response.read()
                self._check(response)
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        chunk = json.loads(line.removeprefix("data: "))
                        if "error" in chunk:
                            raise RequestError(chunk["error"]["message"])
                        yield chunk
        except self._failures as error:
            raise self._failed(error) from None

    def _check(self, response: httpx.Response) -> None:
        if response.status_code == 401:
            raise RequestError(f"The server wants an API key: give --key, or set {KEY_VARIABLE}.")
        if response.status_code >= 400:
            try:
                message = response.json()["error"]["message"]
            except (ValueError, KeyError, TypeError):
                message = f"{self.url} answered with status {response.status_code}: is it a server of lookfar?"
            raise RequestError(message)

    def _failed(self, error: Exception) -> LookfarError:
        if isinstance(error, LookfarError):
            return error
        return RequestError(f"{self.url} cannot be reached ({type(error).__name__}): is the server running there?")
