"""The host's time of a step is learned as a fixed part and a part for each row."""

from __future__ import annotations

import numpy as np
import pytest

from lookfar.speculation.host_cost import ALONE_SHARE, ROWS_SHARE, HostCost


def test_both_parts_are_found_in_noisy_steps() -> None:
    cost, random = HostCost(), np.random.default_rng(0)
    for _ in range(300):
        rows = int(random.integers(1, 64))
        cost.learn(rows, (100e-6 + 5e-6 * rows) * random.uniform(0.9, 1.1))
    assert cost.fixed == pytest.approx(100e-6, rel=0.2)
    assert cost.per_row == pytest.approx(5e-6, rel=0.2)
    assert cost.table(64)[64] == pytest.approx(420e-6, rel=0.1)


def test_a_share_is_for_rows_where_steps_do_not_tell() -> None:
    cost = HostCost()
    for _ in range(50):
        cost.learn(32, 100e-6)
    assert 32 * cost.per_row == pytest.approx(ROWS_SHARE * 100e-6)
    assert cost.table(32)[32] == pytest.approx(100e-6)
    for step in range(100):
        cost.learn(10 + 40 * (step % 2), 50e-6 - 20e-6 * (step % 2))  # larger steps that take less time
    assert cost.per_row > 0.0
    assert cost.fixed > 0.0


def test_one_request_alone_pays_mostly_for_calls() -> None:
    cost, random = HostCost(alone=True), np.random.default_rng(0)
    for _ in range(50):
        cost.learn(16, 290e-6)
    assert 16 * cost.per_row == pytest.approx(ALONE_SHARE * 290e-6)
    for _ in range(300):
        rows = int(random.integers(8, 128))
        cost.learn(rows, (235e-6 + 3e-6 * rows) * random.uniform(0.9, 1.1))
    assert cost.per_row == pytest.approx(3e-6, rel=0.25)


def test_a_faster_host_is_followed() -> None:
    cost = HostCost(fixed=5e-3)
    for _ in range(10):
        cost.learn(16, 1e-4)
    assert cost.table(16)[16] == pytest.approx(1e-4)


def test_steps_that_waited_for_something_else_count_little() -> None:
    cost = HostCost()
    for seconds in [20e-3, 1e-4, 1e-4, 50e-3, *[1e-4] * 20]:
        cost.learn(16, seconds)
    assert cost.table(16)[16] == pytest.approx(1e-4, rel=0.2)


def test_a_slower_host_is_followed() -> None:
    cost = HostCost()
    for seconds in [1e-4] * 50 + [8e-4] * 100:
        cost.learn(16, seconds)
    assert cost.table(16)[16] == pytest.approx(8e-4, rel=0.1)
