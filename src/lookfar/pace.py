"""Is guessing worth its time? Drafters cost host time for every sequence, which no cost of rows tells.

The tokens per second of recent steps with guesses are compared with what plain steps are expected to give; if those
might be better, a few are tried, and the better way is taken. The other one is tried again later, more and more rarely.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

RECENT = 12  # steps that a rate is taken over
TRIES = 6  # steps in a row, to see how fast the other way is
FIRST, LAST = 64, 4096  # steps until it is tried again


@dataclass
class Rate:
    """Tokens per second, lately. The median of the times: single steps may wait for anything."""

    tokens: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens.append(tokens)
        self.seconds.append(seconds)

    @property
    def value(self) -> float:
        return sum(self.tokens) / (len(self.tokens) * median(self.seconds)) if self.tokens else 0.0


class Pace:
    """For one number of sequences in a step."""

    def __init__(self) -> None:
        self.guessing = True  # the better way, as far as is known
        self._rates = {True: Rate(), False: Rate()}
        self._wait = RECENT  # steps until the other way may be tried
        self._interval = FIRST
        self._trying = 0  # how many steps of a trial are left

    def guess_next(self, plain_rate: float) -> bool:
        """Should the next step guess? `plain_rate` is what plain steps would give if the host took no time."""
        if self._trying:
            return not self.guessing
        if self._wait <= 0:
            if not self.guessing or plain_rate > self._rates[True].value:
                self._trying = TRIES
                self._rates[not self.guessing] = Rate()
                return not self.guessing
            self._wait = RECENT  # nothing speaks for plain steps; the next look is a little later
        return self.guessing

    def learn(self, guessed: bool, tokens: int, seconds: float) -> None:
        """A step is done."""
        self._rates[guessed].add(tokens, seconds)
        if not self._trying:
            self._wait -= 1
        elif guessed != self.guessing:
            self._trying -= 1
            if not self._trying:
                self._decide()

    def _decide(self) -> None:
        better = self._rates[True].value >= self._rates[False].value
        self._interval = FIRST if better != self.guessing else min(2 * self._interval, LAST)
        self.guessing, self._wait = better, self._interval
