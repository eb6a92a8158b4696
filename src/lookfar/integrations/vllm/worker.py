"""Request ids for the proposer, which vLLM does not hand over, and its counters.

    llm = LLM(..., worker_extension_cls="lookfar.integrations.vllm.RequestIds")
    llm.collective_rpc("give_request_ids")
    llm.collective_rpc("lookfar_counts")

Without them the proposer recognises requests by their text.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import asdict
from typing import Any

from lookfar.integrations.vllm.proposer import Proposer


class RequestIds:
    """A worker extension: vLLM adds this class to its worker's base classes."""

    model_runner: Any

    def give_request_ids(self) -> bool:
        """Show the ids of the batch to the proposer; returns whether there is one in this worker."""
        runner, drafter = self.model_runner, self._lookfar_proposer()
        if drafter is None:
            return False

        def read() -> Seq[str]:
            ids: Seq[str] = runner.input_batch.req_ids
            return ids

        drafter.request_ids = read
        return True

    def lookfar_counts(self) -> dict[str, float]:
        """Return the counters of this worker's proposer, and the tokens in its store."""
        drafter = self._lookfar_proposer()
        return {} if drafter is None else {**asdict(drafter.counts), "stored_tokens": drafter.store.index.size}

    def _lookfar_proposer(self) -> Proposer | None:
        drafter: Any = getattr(self.model_runner, "drafter", None)
        drafter = getattr(drafter, "user_proposer", drafter)  # some versions wrap the class
        return drafter if isinstance(drafter, Proposer) else None
