"""A replay of recorded texts on a fleet of replicas, with a draft store each or one that they share.

The drafts are those of the proposer for vLLM: suffix matches in the request and in the store, and counts of followers
that each replica keeps for itself; at most `LONGEST` tokens in one chain. Replicas answer one request at a time, all at
once; what they learned in a round is in the stores in the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass

import numpy as np

from lookfar.drafters.suffix import PROMPT_TAIL
from lookfar.retrieval.draft_store import DraftStore
from lookfar.speculation.chain_builder import TokenRows
from lookfar.speculation.chain_proposer import ChainProposer

Text = tuple[list[int], list[int]]  # prompt and answer
VOCABULARY = 49_152
LONGEST = 8
MAX_LENGTH = 4096


@dataclass
class Counts:
    """Tokens and steps of all answers."""

    tokens: int = 0
    steps: int = 0

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps


def requests(texts: Seq[Text], number: int, repeats: float, seed: int) -> list[Text]:
    """Return texts in random order; a share of `repeats` asks a question again that was asked before."""
    rng = np.random.default_rng(seed)
    order: Iterator[int] = iter(rng.permutation(len(texts)).tolist())
    asked: list[int] = []
    for _ in range(number):
        again = asked and rng.random() < repeats
        asked.append(int(rng.choice(asked)) if again else next(order))
    return [texts[i] for i in asked]


def answer(proposer: ChainProposer, text: Text) -> tuple[int, int]:
    """Decode a text again; returns its tokens and steps. The first token comes with the prompt, without a draft."""
    prompt, output = text
    index = proposer.new_text(MAX_LENGTH)
    whole, place = np.array([[*prompt, *output]], np.int32), np.zeros(1, np.int64)
    new = output[:1]
    done, steps = 1, 1
    while done < len(output):
        rows = TokenRows(whole, place, place + len(prompt) + done)
        room = np.array([len(output) - done], np.int64)
        found = proposer.propose([index], rows, np.array([len(new)], np.int64), room)
        draft = found.tokens[0, : found.lengths[0]].tolist()
        right = 0
        while right < len(draft) and done + right < len(output) - 1 and draft[right] == output[done + right]:
            right += 1
        new = output[done : done + right + 1]
        proposer.learn([new])
        done += len(new)
        steps += 1
    return len(output), steps


def fleet(asked: Seq[Text], replicas: int, shared: bool) -> Counts:
    """Answer requests on replicas in turn."""
    stores = [DraftStore(VOCABULARY) for _ in range(1 if shared else replicas)] * (replicas if shared else 1)
    proposers = [ChainProposer(store, LONGEST) for store in stores]
    counts = Counts()
    for start in range(0, len(asked), replicas):
        now = asked[start : start + replicas]
        for proposer, text in zip(proposers, now, strict=False):
            tokens, steps = answer(proposer, text)
            counts.tokens += tokens
            counts.steps += steps
        for store, (prompt, output) in zip(stores, now, strict=False):
            store.add([*prompt[-PROMPT_TAIL:], *output])
    return counts
