"""The interface of drafters. It speaks token ids and NumPy arrays; docs/writing-a-drafter.md builds one.

A `Strategy` holds the settings of a drafter and creates the drafters of each request. A `Drafter` belongs to one
request: it proposes continuations before a step and observes the outcome afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from lookfar.core.arrays import Floats, Int32s, Ints
from lookfar.core.plan import NO_WINDOW, FlatPlan, WindowRows
from lookfar.core.tree import ROOT, DraftTree
from lookfar.errors import ConfigError
from lookfar.retrieval.recycle_table import RecycleTable
from lookfar.retrieval.sources import DraftSources

if TYPE_CHECKING:
    from lookfar.models.binding import BoundModel

MAX_SETTING = 65_536  # of whole numbers; what a model and the memory allow is checked with each request
MAX_SCORE = 15  # match scores go from 0 to this

NO_DRAFTS: Int32s = np.zeros((0, 0), np.int32)
NO_TOKENS: Int32s = np.zeros(0, np.int32)
NO_FLOATS: Floats = np.zeros(0, np.float32)


@dataclass(slots=True)
class Proposal:
    """The drafts, window rows and predictions that a drafter proposes for one step."""

    drafts: Int32s = field(default_factory=lambda: NO_DRAFTS)  # [k, depth] continuations, -1 behind the end of each
    scores: Int32s = field(default_factory=lambda: NO_TOKENS)  # [k] match score: 0 … 15 on the drafter's own scale
    weights: Floats = field(default_factory=lambda: NO_FLOATS)  # [k] weight among drafts with the same score
    window: WindowRows = NO_WINDOW  # rows that are not verified but produce future drafts
    table: RecycleTable | None = None  # predictions that continue any path of the tree
    runner_ups: Int32s = field(default_factory=lambda: NO_TOKENS)  # alternatives to the last token, most likely first
    runner_up_logits: Floats = field(default_factory=lambda: NO_FLOATS)

    @classmethod
    def of(cls, paths: Seq[Seq[int]], score: int = 0, window: WindowRows = NO_WINDOW) -> Proposal:
        """Propose continuations, best first, given as lists of token ids with one match score."""
        drafts = np.full((len(paths), max(map(len, paths), default=0)), -1, np.int32)
        for row, path in zip(drafts, paths, strict=True):
            row[: len(path)] = path
        return cls(drafts, np.full(len(paths), score, np.int32), np.ones(len(paths), np.float32), window)


@dataclass(slots=True)
class Predictions:
    """The most likely next tokens after rows of the text and of the tree, most likely first."""

    before: Int32s  # [n] the token before each row's token, -1 for none
    tokens: Int32s  # [n] the row's token
    top_ids: Int32s  # [n, k]
    top_logits: Floats  # [n, k]


@dataclass(slots=True)
class HiddenRows:
    """The last hidden states of tokens that a step has fed and that are part of the text now, one behind the other."""

    start: int  # the position of the first token
    rows: Ints  # the row of each token in the step
    read: Callable[[Ints], Any]  # some of these rows → their states, a tensor [rows, hidden]

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.rows)

    def since(self, position: int) -> Any:
        """Return the states of the tokens from a position on, at most all of them."""
        return self.read(self.rows[max(position - self.start, 0) :])


@dataclass(slots=True)
class Outcome:
    """The result of one step for one request, as its drafters observe it."""

    emitted: list[int]  # the accepted tokens and the bonus token; empty after a prefill chunk
    tree: DraftTree  # what was verified
    choices: Ints  # [1 + nodes] the model's choice after the last token, then after each node of the tree
    window_choices: Ints = field(repr=False)  # [window rows of this drafter] the model's choices where wanted
    predictions: Predictions | None = None  # for drafters with `wants_predictions`
    last: int = -1  # the row of `predictions` from which the last emitted token was chosen
    finished: bool = False  # the request ends with this step
    # For drafters with `wants_hidden`; tokens may come again when they are fed again. None if the runner keeps none.
    hidden: HiddenRows | None = None

    def along(self, path: Seq[int]) -> list[int]:
        """Return the model's choices after the last token and after each token of `path` that the tree holds."""
        return [int(self.choices[1 + node]) for node in [ROOT, *self.tree.path_of(path)]]


@dataclass(slots=True)
class BatchProposal:
    """The proposals of several drafters of one class."""

    drafts: Int32s = field(default_factory=lambda: NO_DRAFTS)  # as of `Proposal`, those of all drafters
    scores: Int32s = field(default_factory=lambda: NO_TOKENS)
    weights: Floats = field(default_factory=lambda: NO_FLOATS)
    owners: Int32s = field(default_factory=lambda: NO_TOKENS)  # [k] which of the drafters proposes each
    sources: Int32s = field(default_factory=lambda: NO_TOKENS)  # [k] index into the class's `source_names`
    runner_ups: tuple[Int32s, Floats] | None = None  # [drafters, k] tokens, -1 for none, and their logits
    off_path: Int32s | None = None  # [drafters, 2, positions, k] predictions of the last step off the accepted path


@dataclass(slots=True)
class BatchOutcome:
    """The result of one step for several requests."""

    texts: Seq[Seq[int]]  # already with the emitted tokens
    finished: Seq[bool]
    plan: FlatPlan
    # [requests, 6] the place in the plan, the first row in the results, the row from which the last token was chosen,
    # the last emitted token, the token before the first row, and the one before that (-1 for none)
    about: Ints
    top_ids: Int32s | None  # [all rows, k]
    top_logits: Floats | None


class Drafter(Protocol):
    """A source of draft tokens for one request. `ids` is its whole text so far, prompt included."""

    name: str
    wants_predictions: bool  # whether `Outcome.predictions` are needed, those of prompt rows included
    # `wants_hidden = True` asks for `Outcome.hidden`, of prompts and of steps without drafts too; it may be left out.

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        """Propose what follows `ids`, at most `limit` tokens deep."""

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        """Learn from a step; `ids` already ends in the emitted tokens."""


class DrafterBatch(ABC):
    """The drafters of one class for several requests. It is kept as long as these requests share their steps."""

    tables: Seq[RecycleTable] = ()  # of each drafter, if they have one

    @abstractmethod
    def propose(self, texts: Seq[Seq[int]], limits: Int32s, rows: int) -> BatchProposal:
        """Propose what follows each text, at most `limits` tokens deep; about `rows` can be verified for each."""

    def observe(self, outcome: BatchOutcome) -> None:  # noqa: B027  not every class learns
        """Learn from a step."""


class BatchDrafter(ABC):
    """A drafter that can draft together with those of other requests, in one call: batches need that."""

    name: str
    source_names: ClassVar[tuple[str, ...]] = ()  # under which its drafts are counted
    wants_predictions: bool
    wants_steps: ClassVar[bool]  # whether it learns from every step, or from the last one of a request only

    @classmethod
    @abstractmethod
    def together(cls, drafters: Seq[Any]) -> DrafterBatch:
        """Put the drafters of several requests together."""

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        """Propose what follows one text."""
        batch = self.together([self])
        found = batch.propose([ids], np.array([limit], np.int32), MAX_SETTING)
        proposal = Proposal(found.drafts, found.scores, found.weights, table=batch.tables[0] if batch.tables else None)
        if found.runner_ups is not None:
            (tokens,), (logits,) = found.runner_ups
            proposal.runner_ups, proposal.runner_up_logits = tokens[tokens >= 0], logits[tokens >= 0]
        return proposal

    @abstractmethod
    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        """Learn from a step of one request."""


@dataclass(frozen=True)
class DraftContext:
    """Facts about a request, and the sources that all requests of a model share."""

    prompt: Seq[int]
    max_length: int  # the most tokens that the text can come to
    sources: DraftSources
    remember: bool = True  # whether later requests may draft from this one
    model: BoundModel | None = None  # that decodes the request


def wants_hidden(drafter: Drafter) -> bool:
    """Whether a drafter drafts from hidden states."""
    return getattr(drafter, "wants_hidden", False)


@dataclass(frozen=True)
class Strategy(ABC):
    """The settings of a drafter. Subclasses are frozen dataclasses that check their values when they are made."""

    name: ClassVar[str] = ""
    uses_window: ClassVar[bool] = False  # whether it needs lookahead-window rows

    @abstractmethod
    def create(self, context: DraftContext) -> list[Drafter]:
        """Create the drafters of one request."""

    def check(self, model: BoundModel) -> None:  # noqa: B027  most strategies draft for any model
        """Refuse a model that it cannot draft for, before anything is decoded."""

    @property
    @abstractmethod
    def max_rows(self) -> int:
        """The most rows that this strategy adds to one step, beside the last token."""

    def _check_choice(self, **allowed: tuple[str, ...]) -> None:
        """Refuse settings that are not one of some words."""
        for key, values in allowed.items():
            if getattr(self, key) not in values:
                raise ConfigError(f"{self.name}: {key} must be one of {', '.join(values)}, not {getattr(self, key)!r}.")

    def _check_at_least(self, **minima: int) -> None:
        """Refuse settings that are not whole numbers of at least a minimum, or beyond all use."""
        for key, minimum in minima.items():
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise ConfigError(f"{self.name}: {key} must be a whole number of at least {minimum}, not {value!r}.")
            if value > MAX_SETTING:
                raise ConfigError(f"{self.name}: {key} must be at most {MAX_SETTING}, not {value}.")
