"""Structured output: JSON schemas, regular expressions and Lark grammars, through llguidance (`lookfar[structured]`).

llguidance says at every position which tokens may follow. A logits processor forbids the others, in transformers' own
loop as in lookfar's, so the output is the same. Where only one text can follow, llguidance knows it too: the `grammar`
drafter proposes that text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from lookfar.core.arrays import Bools
from lookfar.core.ids import common_prefix
from lookfar.errors import ConstraintError, RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LEXER_FUEL = 100_000  # work of the lexer before the first token: at most 50 ms; a schema of 64 KiB needs a third of it
_tokenizers: WeakKeyDictionary[Any, dict[tuple[int, ...], LLTokenizer]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Grammar:
    """A compiled and checked constraint; one matcher follows one text."""

    source: str
    tokenizer: LLTokenizer
    end_ids: frozenset[int]

    @classmethod
    def compile(
        cls,
        tokenizer: PreTrainedTokenizerBase | None,
        end_ids: Seq[int] = (),
        *,
        json_schema: Mapping[str, Any] | str | None = None,
        regex: str | None = None,
        grammar: str | None = None,
    ) -> Grammar:
        """Compile exactly one of a JSON schema (object or text), a regular expression and a Lark grammar."""
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
                source = LLMatcher.grammar_from_json_schema(_schema_text(json_schema))
            elif regex is not None:
                source = LLMatcher.grammar_from_regex(regex)
            else:
                source = LLMatcher.grammar_from_lark(str(grammar))
            failed, messages = LLMatcher.validate_grammar_with_warnings(source, known)
        except UnicodeEncodeError:
            failed, messages = True, ["it holds half a character, a lone surrogate"]
        except ValueError as error:
            failed, messages = True, [str(error)]
        name = (
            "JSON schema" if json_schema is not None else "grammar" if regex is None else f"regular expression {regex}"
        )
        if failed:
            raise ConstraintError(f"The {name} cannot be used ({_reason(messages)}): correct it.")
        made = cls(source, known, frozenset(ends))
        if not made._is_affordable():
            raise ConstraintError(f"The {name} is too complex: use fewer or smaller counted repetitions.")
        return made

    def matcher(self) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(initial_lexer_fuel=LEXER_FUEL)
        return LLMatcher(self.tokenizer, self.source, log_level=0, limits=limits)  # 0: it prints nothing

    def _is_affordable(self) -> bool:
        """Whether llguidance stays within its limits at the first two tokens.

        Where it does not, every step would begin with a new matcher, and all requests of a batch would wait for it.
        """
        matcher = self.matcher()
        for _ in range(2):
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            if matcher.is_error():
                return False
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            if not allowed.size or int(allowed[0]) in self.end_ids:
                break
            matcher.try_consume_tokens([int(allowed[0])])
        return not matcher.is_error()


class GrammarCursor:
    """A position in a text that follows a grammar; it moves forwards and backwards."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.matcher = grammar.matcher()
        self._read: list[int] = []

    def move_to(self, tokens: list[int]) -> bool:
        """Move to the end of a text; False if the text has ended, by an end token or by breaking the grammar."""
        same = common_prefix(self._read, tokens)
        if same < len(self._read):
            self.matcher.rollback(len(self._read) - same)
        new = tokens[same:]
        read = self.matcher.try_consume_tokens(new) if new else 0
        if self.matcher.is_error():
            self.matcher = self.grammar.matcher()
            same, new = 0, tokens
            read = self.matcher.try_consume_tokens(tokens)
        self._read = tokens[: same + read]
        return read == len(new) and not self.grammar.end_ids.intersection(self._read[-1:])

    def allowed(self) -> Bools:
        """[vocabulary]: which tokens may come next."""
        bits = self.matcher.compute_bitmask()
        if self.matcher.is_error():  # its limits also count the drafts that it has followed: try without them
            self.matcher = self.grammar.matcher()
            self.matcher.try_consume_tokens(self._read)
            bits = self.matcher.compute_bitmask()
        if self.matcher.is_error():
            reason = self.matcher.get_error().partition("\n")[0]
            raise RequestError(f"The constraint is too complex for this text ({reason}): make it simpler.")
        return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little").astype(bool)

    def forced(self) -> list[int]:
        """Return the tokens of the text that has to come next."""
        tokens: list[int] = self.matcher.compute_ff_tokens()
        if not tokens and (text := self.matcher.compute_ff_bytes()):
            tokens = self.grammar.tokenizer.tokenize_bytes(text)
        return tokens


class GrammarProcessor(LogitsProcessor):
    """Forbids tokens that the grammar does not allow. An output begins where it is first called with a prompt."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self._cursors: list[GrammarCursor] = []
        self._prompts = torch.zeros(0, 0, dtype=torch.long)

    def for_row(self, row: int) -> GrammarProcessor:
        return GrammarProcessor(self.grammar)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        start = self._prompts.shape[1]
        if not self._cursors or not torch.equal(input_ids[:, :start], self._prompts):
            self._cursors = [GrammarCursor(self.grammar) for _ in scores]
            self._prompts, start = input_ids.clone(), input_ids.shape[1]
        forbidden = np.ones(tuple(scores.shape), bool)
        for row, tokens in enumerate(input_ids[:, start:].tolist()):
            if self._cursors[row].move_to(tokens):
                allowed = self._cursors[row].allowed()[: scores.shape[1]]
                forbidden[row, : len(allowed)] = ~allowed
            else:
                forbidden[row, list(self.grammar.end_ids)] = False
        return scores.masked_fill(torch.from_numpy(forbidden).to(scores.device), -torch.inf)


def constrain(
    tokenizer: PreTrainedTokenizerBase,
    *,
    json_schema: Mapping[str, Any] | str | None = None,
    regex: str | None = None,
    grammar: str | None = None,
) -> GrammarProcessor:
    """Return a logits processor for `model.generate(logits_processor=[…])`; make one for each call."""
    return GrammarProcessor(Grammar.compile(tokenizer, json_schema=json_schema, regex=regex, grammar=grammar))


def _ll_tokenizer(tokenizer: PreTrainedTokenizerBase, ends: tuple[int, ...]) -> LLTokenizer:
    """Convert a tokenizer for llguidance, once: it takes a second."""
    from llguidance.hf import from_tokenizer

    made = _tokenizers.setdefault(tokenizer, {})
    if ends not in made:
        made[ends] = from_tokenizer(tokenizer, eos_token=list(ends))
    return made[ends]


def _schema_text(schema: Mapping[str, Any] | str) -> str:
    """Return a schema as text; raises a ValueError if a text is no JSON."""
    if not isinstance(schema, str):
        return json.dumps(dict(schema))
    try:
        json.loads(schema)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from None
    return schema


def _reason(messages: Seq[str]) -> str:
    """Return the sentence of llguidance's report that says what is wrong, without its drawing of the place."""
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    errors = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
    return (errors or lines or ["no reason is given"])[0].rstrip(".:")
