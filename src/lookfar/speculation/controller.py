"""The speculation controller: turns speculation on or off from measured throughput.

Drafting costs host time for every request, which the cost of rows does not include. The controller compares the tokens
per second of recent speculative steps with what steps without speculation are expected to give. If those might be
faster it tries a few, and keeps the faster mode; the other mode is tried again later, more and more rarely. The tokens
of a speculative step vary a lot, so one request needs many steps for a decision and a large batch needs few.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from lookfar.speculation.cost_file import Experience

SPECULATIVE_STEPS = 96  # steps of one request that the speculative rate is measured over
BASE_STEPS = 6  # steps without speculation that tell their rate: each emits one token per request
MIN_STEPS = 12  # however many requests there are
CLEARLY_SLOWER = 0.75  # of the other rate: a trial that is below it ends after the minimum of steps
FIRST_INTERVAL, MAX_INTERVAL = 64, 4096  # steps until the other mode is tried again


class Rate:
    """Recent tokens per second. Uses the median of the step times, because single steps may wait for anything."""

    def __init__(self, steps: int) -> None:
        self._tokens: deque[int] = deque(maxlen=steps)
        self._seconds: deque[float] = deque(maxlen=steps)

    def add(self, tokens: int, seconds: float) -> None:
        self._tokens.append(tokens)
        self._seconds.append(seconds)

    @property
    def value(self) -> float:
        return sum(self._tokens) / (len(self._tokens) * median(self._seconds)) if self._tokens else 0.0


class SpeculationController:
    """Decides for steps with one number of requests."""

    def __init__(self, requests: int = 1, earlier: Experience | None = None) -> None:
        self.speculating = earlier is None or earlier.speculating  # the faster mode, as far as is known
        self.overhead = earlier.overhead if earlier is not None else 0.0  # recent host seconds of a speculative step
        self._steps = {True: max(MIN_STEPS, SPECULATIVE_STEPS // requests), False: BASE_STEPS}
        self._rates = {mode: Rate(steps) for mode, steps in self._steps.items()}
        self._wait = self._steps[True] if self.speculating else FIRST_INTERVAL  # steps until the other mode is tried
        self._first = max(FIRST_INTERVAL, 2 * self._steps[True])
        self._interval = self._first
        self._trial = 0  # steps left of a trial of the other mode
        # The cost of steps is measured with one request, so the expected rate of a batch is not to be relied on.
        self._must_try = requests > 1 and self.speculating

    def decide(self, base_rate: float) -> bool:
        """Decide whether the next step speculates.

        `base_rate` is the expected rate of steps without speculation if the host took no time.
        """
        if self._trial:
            return not self.speculating
        if self._wait <= 0:
            if not self.speculating or self._must_try or base_rate > self._rates[True].value:
                self._must_try = False
                other = not self.speculating
                self._trial = self._steps[other]
                self._rates[other] = Rate(self._steps[other])
                return other
            self._wait = MIN_STEPS  # nothing speaks for the other mode; look again a little later
        return self.speculating

    def learn(self, speculated: bool, tokens: int, seconds: float, overhead: float) -> None:
        """Learn from a step: its tokens, its seconds, and the host's part of those."""
        self._rates[speculated].add(tokens, seconds)
        if speculated:
            self.overhead += 0.1 * (overhead - self.overhead)
        if not self._trial:
            self._wait -= 1
        elif speculated != self.speculating:
            self._trial -= 1
            tried = self._steps[speculated] - self._trial
            if (
                tried == MIN_STEPS
                and self._rates[speculated].value < CLEARLY_SLOWER * self._rates[not speculated].value
            ):
                self._trial = 0
            if not self._trial:
                self._choose()

    def _choose(self) -> None:
        """Keep the faster mode after a trial."""
        faster = self._rates[True].value >= self._rates[False].value
        self._interval = self._first if faster != self.speculating else min(2 * self._interval, MAX_INTERVAL)
        self.speculating, self._wait = faster, self._interval
