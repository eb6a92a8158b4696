"""The speculation controller: turns speculation on or off from measured throughput.

Drafting costs host time for every request, which the cost of rows does not include. The controller compares the tokens
of recent speculative steps, over what the cost curve expects of them, with those of steps without speculation, and
measures the slowdown that the host adds. If the other mode might be faster it tries a few steps of it and keeps the
faster mode. A trial that fails has cost something; the next one waits until that is a small share of the time since,
and longer each time. The tokens of a speculative step vary a lot, so one request needs many steps for a decision and a
large batch needs few.
"""

from __future__ import annotations

from collections import deque
from math import exp, log
from statistics import median

from lookfar.speculation.cost_file import Experience
from lookfar.speculation.host_cost import HostCost

SPECULATIVE_STEPS = 64  # steps of one request that the speculative rate is measured over
MIN_STEPS = 6  # however many requests there are
EARLY_STEPS = 24  # steps, divided by the requests, after which a rate that is clearly lower is believed
MIN_EARLY, MAX_EARLY = 3, 8
BASE_STEPS = 6  # steps without speculation that tell their rate: each emits one token per request
RECENT_STEPS = 12  # steps whose times count: the load of a machine changes
MAX_TRIALS, PRIOR_TRIALS = 8, 0.25  # trials that the slowdown is averaged over, and what a slowdown of 1 is worth
OUTLIER = 3.0  # times the median: what a single step counts as at the most
CLEARLY_SLOWER = 0.8  # of the other rate
REGRET, BATCH_REGRET = 0.01, 0.005  # of the time may be lost to trials; a batch has less to gain
MIN_INTERVAL, MAX_INTERVAL = 16, 4096  # steps until the other mode is tried again
LOOK_INTERVAL = 4  # steps after which a full rate is looked at again
BATCH_GAIN = 1.05  # that a batch has to gain: its last requests gain less than the others
IDLE_STEPS = 16  # speculative steps in a row without a draft, after which drafting rests
NEXT_REQUEST = 32  # steps after which the next request tries speculation, if the one before did without


class Rate:
    """Recent tokens per second.

    Tokens and costs are averaged over many steps, because speculative steps differ. How a step's time compares with its
    cost is taken from the last ones alone, because the load of the machine changes. Single steps may wait for anything:
    none counts as more than a few usual ones.
    """

    def __init__(self, steps: int) -> None:
        self._tokens: deque[float] = deque(maxlen=steps)
        self._costs: deque[float] = deque(maxlen=steps)
        self._slowness: deque[float] = deque(maxlen=RECENT_STEPS)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def is_full(self) -> bool:
        return len(self._tokens) == self._tokens.maxlen

    def add(self, tokens: float, seconds: float, cost: float) -> None:
        """Add a step: its tokens, its seconds, and the seconds that the cost curve expects of it."""
        self._tokens.append(tokens)
        self._costs.append(cost)
        self._slowness.append(seconds / cost)

    @property
    def slowness(self) -> float:
        """How many times longer than expected the last steps took."""
        if not self._slowness:
            return 1.0
        longest = OUTLIER * median(self._slowness)
        return sum(min(slowness, longest) for slowness in self._slowness) / len(self._slowness)

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(self._costs) / len(self._costs) * self.slowness if self._costs else 0.0

    @property
    def per_cost(self) -> float:
        """Tokens over the seconds that the cost curve expects."""
        return sum(self._tokens) / sum(self._costs) if self._costs else 0.0

    @property
    def value(self) -> float:
        return self.per_cost / self.slowness


class Slowdown:
    """How many times longer speculative steps take than others of the same cost: what the host adds, for example.

    Measured in trials and averaged over them, because the load may have changed in the middle of one.
    """

    def __init__(self) -> None:
        self._log = self._trials = 0.0

    @property
    def value(self) -> float:
        return exp(self._log)

    def learn(self, speculative: Rate, base: Rate) -> None:
        """Learn from a trial."""
        self._trials = min(self._trials + 1, MAX_TRIALS)
        self._log += (log(speculative.slowness / base.slowness) - self._log) / (self._trials + PRIOR_TRIALS)


class SpeculationController:
    """Decides for steps with one number of requests."""

    def __init__(self, requests: int = 1, earlier: Experience | None = None, speculates: bool = True) -> None:
        # The faster mode, as far as is known; without experience, the one to begin with.
        self.speculating = earlier.speculating if earlier is not None else speculates
        known = (earlier.fixed, earlier.per_row) if earlier is not None else (0.0, 0.0)
        self.host = HostCost(*known, alone=requests == 1)
        self._steps = {True: max(MIN_STEPS, SPECULATIVE_STEPS // requests), False: BASE_STEPS}
        self._early = min(max(MIN_EARLY, EARLY_STEPS // requests), MAX_EARLY)
        self._rates = {mode: Rate(steps) for mode, steps in self._steps.items()}
        self._slowdown = Slowdown()
        self._wait = self._steps[True] if self.speculating else MIN_INTERVAL  # steps until the other mode is tried
        self._interval = MIN_INTERVAL
        self._since = 0  # steps since the last trial
        self._trial = 0  # steps left of a trial of the other mode
        self._after = 0  # steps of the usual mode until the trial is judged
        self._idle = 0  # the last speculative steps without a draft worth its row
        self._tried = False  # whether steps without speculation were tried for this request
        self._alone = requests == 1
        self._least = 1.0 if self._alone else BATCH_GAIN  # speed-up by which speculation stays on
        self._regret = REGRET if self._alone else BATCH_REGRET
        # The cost of steps is measured with one request, so the expected rate of a batch is not to be relied on.
        self._must_try = requests > 1 and self.speculating

    def decide(self, base_rate: float) -> bool:
        """Decide whether the next step speculates.

        `base_rate` is the expected rate of steps without speculation if the host took no time: tokens of a request per
        second, as all rates here.
        """
        if not (self._trial or self._after) and self._should_try(base_rate):
            self._must_try, self._tried = False, True
            other = not self.speculating
            self._trial = self._steps[other]
            self._rates[other] = Rate(self._steps[other])
        return self.speculating != bool(self._trial)

    def _should_try(self, base_rate: float) -> bool:
        """Whether it is time to try the other mode, and something speaks for it."""
        rate = self._rates[True]
        enough = self.speculating and not self._tried and self._wait % self._early == 0 and len(rate) >= self._early
        if enough and rate.value < CLEARLY_SLOWER * base_rate:
            return True
        full = self.speculating and rate.is_full and self._since >= MIN_INTERVAL
        if full and self._since % LOOK_INTERVAL == 0 and self._speed_up < self._least:
            return True  # other texts, perhaps
        if self._wait > 0:
            return False
        if not self.speculating or self._must_try or base_rate > rate.value:
            return True
        self._wait = self._early  # look again a little later
        return False

    @property
    def _speed_up(self) -> float:
        """The rate of speculative steps over that of others, whatever the load of the machine."""
        speculative, base = self._rates[True].per_cost, self._rates[False].per_cost
        return speculative / (base * self._slowdown.value) if speculative and base else 1.0

    def learn(self, speculated: bool, tokens: float, seconds: float, cost: float = 1.0, drafted: bool = True) -> None:
        """Learn from a step: the tokens of a request, its seconds and those expected of it, and if it had drafts."""
        if tokens <= 0 or seconds <= 0:  # all of its requests failed
            return
        self._rates[speculated].add(tokens, seconds, cost)
        if speculated:
            self._idle = 0 if drafted else self._idle + 1
            if self._idle >= (self._early if self._trial else IDLE_STEPS):
                self._rest()
                return
        if self._trial:
            if speculated != self.speculating:
                self._learn_in_trial()
        elif self._after:
            self._after -= 1
            if not self._after:
                self._choose()
        else:
            self._wait -= 1
            self._since += 1

    def _learn_in_trial(self) -> None:
        """Count a step of a trial, which ends sooner if it is clearly slower, and is judged at once if it is clear."""
        self._trial -= 1
        tried, usual = self._rates[not self.speculating], self._rates[self.speculating]
        by_costs = 1 / self._speed_up if self.speculating else self._speed_up
        ratios = tried.value / usual.value, by_costs
        if len(tried) == self._early and max(ratios) < CLEARLY_SLOWER:
            self._trial = 0
        if not self._trial:
            if max(ratios) < CLEARLY_SLOWER or min(ratios) > 1 / CLEARLY_SLOWER:
                self._choose()
            else:  # with steps of the usual mode behind it as well, a load that rises or falls affects both modes
                self._after = self._early

    def _choose(self) -> None:
        """Keep the faster mode after a trial."""
        self._slowdown.learn(self._rates[True], self._rates[False])
        speed_up = self._speed_up
        faster = speed_up >= self._least
        kept, other = self._rates[faster], self._rates[not faster]
        lost = len(other) * other.seconds * (1 - min(speed_up, 1 / speed_up))
        is_clear = faster or speed_up < CLEARLY_SLOWER  # a rate just below the other may soon be above it
        least = 2 * self._interval if faster == self.speculating and is_clear else MIN_INTERVAL
        self._interval = int(min(max(least, lost / max(self._regret * kept.seconds, 1e-9)), MAX_INTERVAL))
        self._wait, self._since = self._interval, 0
        self.speculating, self._tried = faster, True

    def _rest(self) -> None:
        """Stop drafting, because no draft is worth its row: what drafting costs is lost, which is little."""
        if self._trial and len(self._rates[False]) == BASE_STEPS:
            self._slowdown.learn(self._rates[True], self._rates[False])
        lost = self._idle * (self._slowdown.value - 1)  # in steps
        self._interval = int(min(max(NEXT_REQUEST, lost / self._regret), MAX_INTERVAL))
        self._wait, self._since, self._trial, self._after, self._idle = self._interval, 0, 0, 0, 0
        self.speculating, self._tried = False, True

    def restart(self) -> None:
        """Note that another request begins: if it is alone, what was learned from the ones before says less."""
        if self._alone:
            self._wait, self._tried = min(self._wait, NEXT_REQUEST), False
