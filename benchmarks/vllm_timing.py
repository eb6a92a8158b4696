"""A worker extension for vllm_compare.py, in a module that vLLM imports late."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from lookfar.integrations.vllm import RequestIds


class TimedWorker(RequestIds):
    """A worker extension that times the calls of any proposer."""

    timed_calls: list[tuple[int, float]]

    def time_calls(self) -> None:
        """Start to note how many requests each call had that wanted a draft, and its seconds."""
        self.timed_calls = []
        drafter = self.model_runner.drafter
        propose = drafter.propose

        def timed(*arguments: Any, **named: Any) -> Any:
            sampled = next(each for each in arguments if isinstance(each, list))
            start = perf_counter()
            found = propose(*arguments, **named)
            self.timed_calls.append((sum(1 for tokens in sampled if tokens), perf_counter() - start))
            return found

        drafter.propose = timed

    def take_calls(self) -> list[tuple[int, float]]:
        """Return the calls since the last time."""
        found, self.timed_calls = self.timed_calls, []
        return found
