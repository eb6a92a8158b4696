"""A small version of benchmarks/serve_load.py: mixed requests, a fifth of them cancelled, leave nothing behind."""

from __future__ import annotations

import pytest
import serve_load


# Clients drop connections on purpose.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.slow
def test_mixed_requests_are_answered_or_cancelled_exactly_once_and_leave_nothing() -> None:
    found = serve_load.measure(requests=300, clients=16)
    ends = found["ends"]
    assert sum(ends.values()) == 300
    assert {end.split(": ")[1] for end in ends} <= {"right text", "left", "refused"}, ends
    assert found["wrong_texts"] == []
    completed = sum(count for end, count in ends.items() if end.endswith("right text"))
    assert found["server_outcomes"]["completed"] == completed
    assert set(found["server_outcomes"]) <= {"completed", "cancelled"}
    assert not any(found["left_behind"].values()), found["left_behind"]
    assert found["memory_mib"][-1] - found["memory_mib"][0] < 60
