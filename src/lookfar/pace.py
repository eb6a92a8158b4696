"""Is guessing worth its time? Drafters cost host time for every sequence, which no cost of rows tells.

The tokens per second of recent steps with guesses are compared with what plain steps are expected to give; if those
might be better, a few are tried, and the better way is taken. The other one is tried again later, more and more rarely.
How many tokens a guessed step brings varies a lot, so one sequence needs many steps to tell; many sequences need few.
"""

from __future__ import annotations

from collections import deque
from statistics import median

RECENT = 96  # steps of a sequence that the rate of guesses is taken over
PLAIN = 6  # plain steps that tell how fast they are: each brings one token
LEAST = 12  # steps, however many sequences there are
CLEAR = 0.75  # of the other rate: worse than that is seen after the least number of steps
FIRST, LAST = 64, 4096  # steps until the other way is tried again


class Rate:
    """Tokens per second, lately. The median of the times: single steps may wait for anything."""

    def __init__(self, steps: int) -> None:
        self._tokens: deque[int] = deque(maxlen=steps)
        self._seconds: deque[float] = deque(maxlen=steps)

    def add(self, tokens: int, seconds: float) -> None:
        self._tokens.append(tokens)
        self._seconds.append(seconds)

    @property
    def value(self) -> float:
        return sum(self._tokens) / (len(self._tokens) * median(self._seconds)) if self._tokens else 0.0


class Pace:
    """For one number of sequences in a step."""

    def __init__(self, sequences: int = 1) -> None:
        self.guessing = True  # the better way, as far as is known
        self.overhead = 0.0  # seconds that a guessed step takes besides the model, lately
        self._steps = {True: max(LEAST, RECENT // sequences), False: PLAIN}  # that tell about each way
        self._rates = {way: Rate(steps) for way, steps in self._steps.items()}
        self._wait = self._steps[True]  # steps until the other way may be tried
        self._first = max(FIRST, 2 * self._steps[True])
        self._interval = self._first
        self._trying = 0  # how many steps of a trial are left

    def guess_next(self, plain_rate: float) -> bool:
        """Should the next step guess? `plain_rate` is what plain steps would give if the host took no time."""
        if self._trying:
            return not self.guessing
        if self._wait <= 0:
            if not self.guessing or plain_rate > self._rates[True].value:
                other = not self.guessing
                self._trying = self._steps[other]
                self._rates[other] = Rate(self._steps[other])
                return other
            self._wait = LEAST  # nothing speaks for plain steps; the next look is a little later
        return self.guessing

    def learn(self, guessed: bool, tokens: int, seconds: float, overhead: float) -> None:
        """A step is done."""
        self._rates[guessed].add(tokens, seconds)
        if guessed:
            self.overhead += 0.1 * (overhead - self.overhead)
        if not self._trying:
            self._wait -= 1
        elif guessed != self.guessing:
            self._trying -= 1
            tried = self._steps[guessed] - self._trying
            if tried == LEAST and self._rates[guessed].value < CLEAR * self._rates[not guessed].value:
                self._trying = 0
            if not self._trying:
                self._decide()

    def _decide(self) -> None:
        better = self._rates[True].value >= self._rates[False].value
        self._interval = self._first if better != self.guessing else min(2 * self._interval, LAST)
        self.guessing, self._wait = better, self._interval
