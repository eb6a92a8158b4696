"""The runner of rank 0: every rank computes a share of each step, and rank 0 puts the results together."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
import torch

from lookfar.core.arrays import Int32s, Ints
from lookfar.core.plan import RunnerLimits, StepPlan
from lookfar.errors import ModelError
from lookfar.kvcache.slots import SlotKVCache
from lookfar.models.weight_changes import ModelChange
from lookfar.parallel.answers import frame_of, read_answer
from lookfar.parallel.followers import Followers
from lookfar.parallel.identity import model_identity
from lookfar.parallel.kv import MirroredKVCache
from lookfar.parallel.messages import Op, encode_step
from lookfar.parallel.split import RankShare, split_step
from lookfar.runners.base import ModelRunner, PendingStep, StepResult, StepShape

SHARE_RATE = 0.05  # how fast the share of the busiest rank is learned


@dataclass
class StepCounts:
    """Totals of the decoding steps that were shared, those of prefills left out."""

    steps: int = 0
    rows: int = 0  # of the rank with the most, in each step
    bytes: int = 0  # sent and received by rank 0, rows of logits left out
    fetched: int = 0  # bytes of rows of logits and hidden states


class ParallelRunner:
    """Splits steps over the ranks; steps on a KV cache that is not mirrored run on rank 0 alone."""

    def __init__(self, own: ModelRunner, followers: Followers) -> None:
        self.own, self.model = own, own.model
        self.counts = StepCounts()
        self._followers = followers
        self._ranks = followers.group.size
        self._share = 1 / self._ranks  # of the draft rows that the busiest rank computes, on average
        self._change = ModelChange.NONE  # that other ranks have not followed yet

    @property
    def name(self) -> str:
        return f"{self.own.name} on {self._ranks} ranks"

    @property
    def limits(self) -> RunnerLimits:
        return replace(self.own.limits, ranks=self._ranks, share=self._share)

    def create_cache(self) -> SlotKVCache:
        return MirroredKVCache(self._followers, self.own.create_cache().sizing)

    def refresh(self, everything: bool = False) -> ModelChange:
        change = max(self.own.refresh(everything), self._change)
        if everything or change is not ModelChange.NONE:
            self._change = change
            self._followers.post(Op.REFRESH, 0, [everything])
            same = model_identity(self.own)
            for rank, other in enumerate(self._followers.ask(), 1):
                if not np.array_equal(other, same):
                    raise ModelError(
                        f"The model was changed on rank 0 and not on rank {rank}: start all ranks with the new one."
                    )
            self._change = ModelChange.NONE
        return change

    def launch(self, plan: StepPlan, cache: SlotKVCache) -> PendingStep:
        if not isinstance(cache, MirroredKVCache):
            return self.own.launch(plan, cache)
        before = self._followers.group.exchanged
        shares = split_step(plan, cache.fit(plan))
        cache.use(shares)
        top_k = min(plan.top_k, self.model.vocab_size)
        for rank, share in enumerate(shares[1:], 1):
            self._followers.post_to(rank, Op.STEP, cache.id, encode_step(share))
        self._followers.flush([frame_of(len(share.places), top_k) for share in shares[1:]])
        self._learn_share(plan, shares)
        return ParallelStep(plan, shares, self.own.launch(shares[0].plan, cache), self, before)

    def _learn_share(self, plan: StepPlan, shares: Seq[RankShare]) -> None:
        """Learn which share of the draft rows the busiest rank gets."""
        busiest = max(sum(share.plan.lengths) for share in shares)
        fed = sum(len(rows.pending) for rows in plan.requests)
        drafts = sum(plan.lengths) - fed
        if drafts:
            share = min(max((busiest - fed) / drafts, 1 / self._ranks), 1.0)
            self._share += SHARE_RATE * (share - self._share)
        if not plan.prefills:
            self.counts.steps += 1
            self.counts.rows += busiest

    @property
    def followers(self) -> Followers:
        return self._followers

    def missing(self, cache: SlotKVCache, requests: int, predictions: Seq[int]) -> list[StepShape]:
        return self.own.missing(cache, requests, predictions)

    def capture(self, cache: SlotKVCache, shape: StepShape) -> None:
        assert isinstance(cache, MirroredKVCache)
        self._followers.post(Op.CAPTURE, cache.id, shape)
        self.own.capture(cache, shape)

    def next_wanted(self) -> StepShape | None:
        return self.own.next_wanted()


class ParallelStep:
    """A step that all ranks are computing."""

    def __init__(
        self, plan: StepPlan, shares: Seq[RankShare], pending: PendingStep, runner: ParallelRunner, before: int
    ) -> None:
        self.plan, self.shares = plan, shares
        self.pending = pending
        self.runner = runner
        self.before = before  # bytes that rank 0 had exchanged
        self.starts: Ints = np.cumsum(plan.num_rows) - plan.num_rows

    def result(self) -> StepResult:
        own = self.pending.result()
        started = perf_counter()
        top_k = min(self.plan.top_k, self.runner.model.vocab_size)
        followers = self.runner.followers
        answers = followers.answers()
        self.own = own
        result = StepResult(
            self.starts,
            np.full(sum(self.plan.lengths), -1),
            self.logits,
            num_rows=own.num_rows,
            launch_seconds=own.launch_seconds,
            hidden=self.hidden if own.hidden is not None else None,
            is_warm=own.is_warm,
        )
        if top_k:
            result.top_ids = np.zeros((len(result.choices), top_k), np.int32)
            result.top_logits = np.zeros((len(result.choices), top_k), np.float32)
        self._add_own(result)
        for share, answer in zip(self.shares[1:], answers, strict=True):
            read_answer(answer, share.places, result)
        result.seconds = own.seconds + perf_counter() - started
        if not self.plan.prefills:
            self.runner.counts.bytes += followers.group.exchanged - self.before
        return result

    def _add_own(self, result: StepResult) -> None:
        """Enter the results of rank 0's own rows."""
        share, own = self.shares[0], self.own
        rows = np.concatenate([start + rows for start, rows in zip(own.starts, share.reported, strict=True)])
        result.choices[share.places] = own.choices[rows]
        for into, found in ((result.top_ids, own.top_ids), (result.top_logits, own.top_logits)):
            if into is not None and found is not None:
                into[share.places, : found.shape[1]] = found[rows]

    def logits(self, request: int, rows: Ints) -> torch.Tensor:
        """Return the logits of some rows of a request, [rows, vocabulary]; rows of other ranks are sent for."""
        return self._rows(Op.LOGITS, request, rows, self.own.logits(request, np.array([self._last_row(request)])))

    def hidden(self, request: int, rows: Ints) -> torch.Tensor:
        """Return the last hidden states of some rows of a request, [rows, hidden]."""
        assert self.own.hidden is not None
        return self._rows(Op.HIDDEN, request, rows, self.own.hidden(request, np.array([self._last_row(request)])))

    def _last_row(self, request: int) -> int:
        """Return the row of the last token of the text in rank 0's share, which always has it."""
        return self.shares[0].plan.requests[request].last_row

    def _rows(self, code: Op, request: int, rows: Ints, like: torch.Tensor) -> torch.Tensor:
        """Collect rows from the ranks that have computed them."""
        found = like.new_empty(len(rows), *like.shape[1:])
        missing: Int32s | Ints = np.arange(len(rows))
        for rank, share in enumerate(self.shares):
            if not len(missing):
                break
            held = share.rows[request]
            places = np.searchsorted(held, rows[missing])
            here = (places < len(held)) & (held[np.minimum(places, len(held) - 1)] == rows[missing])
            if not here.any():
                continue
            into, own = torch.from_numpy(missing[here]).to(like.device), places[here]
            if rank:
                fetched = self.runner.followers.rows(rank, code, request, own, like)
                self.runner.counts.fetched += fetched.nbytes
                found[into] = fetched
            else:
                read = self.own.logits if code is Op.LOGITS else self.own.hidden
                assert read is not None
                found[into] = read(request, own)
            missing = missing[~here]
        return found
