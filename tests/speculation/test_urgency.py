"""Urgency: rows of a batch that nobody waits for go to the requests that need the most steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from lookfar.speculation.urgency import INTERVAL, Urgency


def requests(*steps_left: float) -> list[Any]:
    return [SimpleNamespace(steps_left=left) for left in steps_left]


def test_requests_that_need_more_steps_are_more_urgent() -> None:
    slow, usual, fast = Urgency(requests(200, 100, 20)).of_step(others_wait=False)
    assert slow > usual > fast > 0
    assert np.isclose(slow + usual + fast, 3.0)


def test_all_are_equal_while_others_wait_and_alone() -> None:
    assert Urgency(requests(200, 100, 20)).of_step(others_wait=True).tolist() == [1, 1, 1]
    assert Urgency(requests(200)).of_step(others_wait=False).tolist() == [1]
    assert Urgency(requests(0, 0)).of_step(others_wait=False).tolist() == [1, 1]


def test_it_follows_the_requests() -> None:
    running = requests(100, 100)
    urgency = Urgency(running)
    assert urgency.of_step(others_wait=False).tolist() == [1, 1]
    running[0].steps_left = 50
    for _ in range(INTERVAL):
        found = urgency.of_step(others_wait=False)
    assert found[0] < 1 < found[1]
