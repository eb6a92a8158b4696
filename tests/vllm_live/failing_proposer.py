"""A proposer that fails in every third call."""

from __future__ import annotations

from typing import Any

from lookfar.integrations.vllm import Proposer


class FailingProposer(Proposer):
    def _propose(self, *arguments: Any) -> None:
        super()._propose(*arguments)
        if self.counts.calls % 3 == 2:
            raise RuntimeError("broken on purpose")
