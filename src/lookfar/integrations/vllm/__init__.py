"""Drafts for vLLM's speculative method `custom_class` (docs/vllm.md). Nothing here imports vLLM."""

from lookfar.integrations.vllm.proposer import Proposer
from lookfar.integrations.vllm.worker import RequestIds

__all__ = ["Proposer", "RequestIds"]
