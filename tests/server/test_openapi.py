"""Random requests from the OpenAPI schema, valid and not, over all endpoints: never a 5xx, never a hang."""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import hypothesis
import pytest

from live_server import LiveServer, byte_lm, live_server

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    schemathesis = pytest.importorskip("schemathesis")

EXAMPLES = int(os.environ.get("LOOKFAR_FUZZ_EXAMPLES", "30"))  # of each endpoint
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(byte_lm(max_length=96)) as running:
        yield running


@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_no_request_is_answered_with_a_server_error(server: LiveServer, mode: str) -> None:
    api = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    statuses = {}
    for found in api.get_all_operations():
        operation = found.ok()
        strategy = operation.as_strategy(generation_mode=schemathesis.GenerationMode[mode])
        with suppress(hypothesis.errors.Unsatisfiable):  # nothing of a request without parameters can be wrong
            statuses[operation.path] = send_cases(strategy)
    assert set(statuses) >= {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"}
    if mode == "POSITIVE":
        assert statuses["/tokenize"][200]
    print(statuses)


def send_cases(strategy: Any) -> Counter[int]:
    """Send requests of a strategy; how often each status came."""
    statuses: Counter[int] = Counter()

    @hypothesis.settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(strategy)
    def send(case: Any) -> None:
        answer = case.call(timeout=60)
        statuses[answer.status_code] += 1
        assert answer.status_code < 500, (case.as_curl_command(), answer.text)
        if answer.status_code >= 400 and answer.headers["content-type"] == "application/json":
            error = json.loads(answer.content)["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert "Traceback" not in error["message"]

    send()
    return statuses


def test_nothing_is_left_of_them(server: LiveServer) -> None:
    from helpers import wait_until

    wait_until(lambda: server.is_idle)
