"""Request ids for the proposer, which vLLM does not hand over.

    llm = LLM(..., worker_extension_cls="lookfar.integrations.vllm.RequestIds")
    llm.collective_rpc("give_request_ids")

Without them the proposer recognises requests by their text.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any


class RequestIds:
    """A worker extension: vLLM adds this class to its worker's base classes."""

    model_runner: Any

    def give_request_ids(self) -> bool:
        """Show the ids of the batch to the proposer; returns whether there is one in this worker."""
        runner = self.model_runner
        drafter: Any = getattr(runner, "drafter", None)
        drafter = getattr(drafter, "user_proposer", drafter)  # some versions wrap the class
        if not hasattr(drafter, "request_ids"):
            return False

        def read() -> Seq[str]:
            ids: Seq[str] = runner.input_batch.req_ids
            return ids

        drafter.request_ids = read
        return True
