"""The requests that share one step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from lookfar.engine.request import RequestState


@dataclass
class StepBatch:
    """The requests of one step, how many pending tokens each may feed, and the times of the step."""

    requests: list[RequestState]
    chunks: list[int]
    started: float
    others_wait: bool = False  # for a place in the batch
    is_first_pass: bool = False  # transformers runs the prompts of the requests
    decodes: bool = False  # every request is known to be past its prompt
    seconds: float = 0.0
    host_seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def prefills(self) -> bool:
        """Whether the step processes a prompt, or as many tokens as if it were one."""
        return not self.decodes and any(state.is_prefilling for state in self.requests)

    def catch_up(self) -> None:
        """Keep neighbours that have tokens to feed again, and the same number of tokens for each.

        Without drafts to fill up a step, requests with less to feed could not be cached by it, and would never be even.
        """
        pending = [state.num_pending for state in self.requests]
        if len(set(pending)) > 1:
            first = next(i for i, count in enumerate(pending) if count > 1)
            group = list(takewhile(lambda state: state.num_pending > 1, self.requests[first:]))
            self.requests = group
            self.chunks = [min(state.num_pending for state in group)] * len(group)
