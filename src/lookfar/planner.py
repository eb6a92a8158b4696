"""Drafters → one plan: every sequence's root, one tree of all guesses, and the riders."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from lookfar.sequence import Sequence
from lookfar.tree import Plan, SequencePlan, TokenTree


def plan_step(sequences: Seq[Sequence], first_slot: int, prefill_rows: int) -> Plan:
    """Plan the next forward of sequences in neighbouring slots."""
    return Plan([plan_sequence(sequence, prefill_rows) for sequence in sequences], first_slot)


def plan_sequence(sequence: Sequence, prefill_rows: int) -> SequencePlan:
    """A piece of the prompt while much of it is left; otherwise the rest of it, the guesses and the riders."""
    chain = sequence.chain(prefill_rows)
    if len(chain) < sequence.uncached:
        return SequencePlan(chain, sequence.cached, complete=False)
    # The bonus token is always emitted, so a guess deeper than this could never be.
    max_depth = sequence.remaining - 1
    drafters = sequence.drafters if max_depth > 0 else []
    proposals = [drafter.propose(sequence.ids, max_depth) for drafter in drafters]
    riders = tuple(proposal.riders for proposal in proposals)
    tree, max_nodes = TokenTree(), sequence.request.extra_rows - sum(map(len, riders))
    for drafter, proposal in zip(drafters, proposals, strict=True):
        for path in proposal.drafts:
            tree.insert(path, drafter.name, max_nodes, max_depth)
    return SequencePlan(chain, sequence.cached, tree=tree, riders=riders)
