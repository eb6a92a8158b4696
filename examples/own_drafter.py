"""A drafter of your own: it proposes lines of a text that the answer is expected to quote.

python examples/own_drafter.py
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import lookfar
from lookfar.testing import check_strategy


@lookfar.register
@dataclass(frozen=True)
class Quote(lookfar.Strategy):
    """Draft from a given text: what follows the last two tokens there."""

    name: ClassVar[str] = "quote"
    tokens: tuple[int, ...] = ()
    length: int = 12

    def create(self, context: lookfar.DraftContext) -> list[lookfar.Drafter]:
        return [QuoteDrafter(self)]

    @property
    def max_rows(self) -> int:
        return self.length


class QuoteDrafter:
    """Follows one request."""

    name = "quote"
    wants_predictions = False

    def __init__(self, settings: Quote) -> None:
        self.settings, tokens = settings, settings.tokens
        self.after = {pair: place + 2 for place, pair in enumerate(pairwise(tokens))}

    def propose(self, ids: list[int], limit: int) -> lookfar.Proposal:
        start = self.after.get(tuple(ids[-2:]))
        if start is None:
            return lookfar.Proposal()
        return lookfar.Proposal.of([self.settings.tokens[start : start + min(limit, self.settings.length)]])

    def observe(self, ids: list[int], outcome: lookfar.Outcome) -> None:
        """Learn nothing."""


check_strategy(Quote(tokens=(5, 6, 7, 8, 9)))  # raises AssertionError if a rule is broken

lm = lookfar.load("demo")
rules = "Rule one: wash your hands before you cook. Rule two: keep raw meat away from vegetables."
prompt = lm.chat_prompt([{"role": "user", "content": f"Repeat these rules word for word: {rules}"}])
quote = Quote(tokens=tuple(lm.encode(rules)))
base = lm.generate(prompt, max_new_tokens=40, strategy="none")
done = lm.generate(prompt, max_new_tokens=40, strategy=quote)

print(done.text)
print(f"{done.stats.tokens} tokens in {done.stats.steps} steps, drafts: {done.stats.drafters}")
assert done.token_ids == base.token_ids
