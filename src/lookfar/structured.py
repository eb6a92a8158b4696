"""Answers that follow a JSON schema, a regular expression or a grammar, through llguidance (`lookfar[structured]`).

llguidance says at every place which tokens may follow; a logits processor forbids the others, in transformers' own
loop as in lookfar's, so what comes out is the same. Where only one text can follow, it knows that too: such text is
offered as a draft, and a step that would have given one token gives a whole piece of punctuation and field names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from lookfar.arrays import Bools
from lookfar.choose import shared
from lookfar.config import Strategy
from lookfar.drafters.base import Drafter, Outcome, Proposal
from lookfar.errors import RequestError
from lookfar.memory import Memory
from lookfar.sequence import Request

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_FORCED = 32  # tokens of a draft; longer pieces come in several steps
_tokenizers: WeakKeyDictionary[Any, dict[tuple[int, ...], LLTokenizer]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Grammar:
    """A constraint, compiled and checked; one matcher follows one text."""

    source: str
    tokenizer: LLTokenizer
    end_ids: frozenset[int]

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase | None,
        end_ids: Seq[int] = (),
        *,
        json_schema: Mapping[str, Any] | str | None = None,
        regex: str | None = None,
        grammar: str | None = None,
    ) -> Grammar:
        """Exactly one of a JSON schema (as an object or text), a regular expression and a Lark grammar."""
        if sum(given is not None for given in (json_schema, regex, grammar)) != 1:
            raise RequestError("Give one of json_schema, regex and grammar.")
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise RequestError("Structured output needs llguidance: pip install 'lookfar[structured]'.") from None
        if tokenizer is None or not getattr(tokenizer, "is_fast", False):
            raise RequestError("Structured output needs a fast tokenizer: pass one to lookfar.LM(model, tokenizer).")
        ends = sorted(set(end_ids) or {tokenizer.eos_token_id})
        known = _ll_tokenizer(tokenizer, tuple(ends))
        try:
            if json_schema is not None:
                schema = json_schema if isinstance(json_schema, str) else json.dumps(dict(json_schema))
                source = LLMatcher.grammar_from_json_schema(schema)
            elif regex is not None:
                source = LLMatcher.grammar_from_regex(regex)
            else:
                source = LLMatcher.grammar_from_lark(str(grammar))
            failed, messages = LLMatcher.validate_grammar_with_warnings(source, known)
        except ValueError as error:
            failed, messages = True, [str(error)]
        if failed:
            raise RequestError(f"The constraint cannot be used: {' '.join(' '.join(messages).split())}")
        return cls(source, known, frozenset(ends))

    def matcher(self) -> LLMatcher:
        from llguidance import LLMatcher

        return LLMatcher(self.tokenizer, self.source)


class Follower:
    """Keeps a matcher where a text is, forwards and backwards."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.matcher = grammar.matcher()
        self._read: list[int] = []

    def go_to(self, tokens: list[int]) -> bool:
        """Read a text from its beginning; False if it is over, by an end token or because it broke the rules."""
        same = shared(self._read, tokens)
        if same < len(self._read):
            self.matcher.rollback(len(self._read) - same)
        new = tokens[same:]
        read = self.matcher.try_consume_tokens(new) if new else 0
        self._read = tokens[: same + read]
        return read == len(new) and not self.grammar.end_ids.intersection(self._read[-1:])

    def allowed(self) -> Bools:
        """[vocabulary]: what may come next."""
        packed = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(packed, bitorder="little").astype(bool)

    def forced(self) -> list[int]:
        """The tokens of the text that has to come next."""
        tokens: list[int] = self.matcher.compute_ff_tokens()
        if not tokens and (text := self.matcher.compute_ff_bytes()):
            tokens = self.grammar.tokenizer.tokenize_bytes(text)
        return tokens[:MAX_FORCED]


class Constrained(LogitsProcessor):
    """Forbids whatever the grammar does not allow. An answer begins where it is first called with a prompt."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self._followers: list[Follower] = []
        self._prompts = torch.zeros(0, 0, dtype=torch.long)

    def for_row(self, row: int) -> Constrained:
        return Constrained(self.grammar)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        start = self._prompts.shape[1]
        if not self._followers or not torch.equal(input_ids[:, :start], self._prompts):
            self._followers = [Follower(self.grammar) for _ in scores]
            self._prompts, start = input_ids.clone(), input_ids.shape[1]
        forbidden = np.ones(tuple(scores.shape), bool)
        for row, tokens in enumerate(input_ids[:, start:].tolist()):
            if self._followers[row].go_to(tokens):
                allowed = self._followers[row].allowed()[: scores.shape[1]]
                forbidden[row, : len(allowed)] = ~allowed
            else:
                forbidden[row, list(self.grammar.end_ids)] = False
        return scores.masked_fill(torch.from_numpy(forbidden).to(scores.device), -torch.inf)


@dataclass(frozen=True)
class Forced(Strategy):
    """What the grammar leaves no choice about."""

    name: ClassVar[str] = "grammar"
    grammar: Grammar

    def start(self, request: Request, memory: Memory) -> list[Drafter]:
        return [ForcedDrafter(self.grammar, len(request.prompt))]

    @property
    def max_rows(self) -> int:
        return MAX_FORCED


class ForcedDrafter:
    name = Forced.name
    wants_predictions = False

    def __init__(self, grammar: Grammar, prompt_length: int) -> None:
        self.follower = Follower(grammar)
        self.prompt_length = prompt_length

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        if not self.follower.go_to(list(ids[self.prompt_length :])):
            return Proposal()
        tokens = self.follower.forced()[:limit]
        return Proposal.of([tokens], grade=15) if tokens else Proposal()

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        pass


def forced_by(processors: Seq[Any]) -> tuple[Strategy, ...]:
    """What constraints among some processors can guess by themselves."""
    return tuple(Forced(p.grammar) for p in processors if isinstance(p, Constrained))


def constrain(
    tokenizer: PreTrainedTokenizerBase,
    *,
    json_schema: Mapping[str, Any] | str | None = None,
    regex: str | None = None,
    grammar: str | None = None,
) -> Constrained:
    """A logits processor for `model.generate(logits_processor=[…])`, plain or accelerated; make one for each call."""
    return Constrained(Grammar.of(tokenizer, json_schema=json_schema, regex=regex, grammar=grammar))


def _ll_tokenizer(tokenizer: PreTrainedTokenizerBase, ends: tuple[int, ...]) -> LLTokenizer:
    """Made once for a tokenizer: it takes a second."""
    from llguidance.hf import from_tokenizer

    made = _tokenizers.setdefault(tokenizer, {})
    if ends not in made:
        made[ends] = from_tokenizer(tokenizer, eos_token=list(ends))
    return made[ends]
