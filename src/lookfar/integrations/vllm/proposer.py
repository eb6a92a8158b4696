"""`Proposer`: draft chains for vLLM's `custom_class` method.

vLLM shows tokens only: no logits, no sampling parameters, no request ids. The proposer indexes the text of each row,
looks it up in itself and in the draft store, and proposes as many tokens as are likely, or none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence as Seq
from dataclasses import dataclass
from threading import Lock, Thread
from time import perf_counter, sleep
from typing import Any

import numpy as np
import numpy.typing as npt

from lookfar.core.arrays import Int32s
from lookfar.drafters.suffix import PROMPT_TAIL
from lookfar.errors import ConfigError
from lookfar.integrations.vllm.row_texts import RowText, RowTexts
from lookfar.integrations.vllm.settings import ProposerSettings
from lookfar.retrieval.draft_store import DraftStore
from lookfar.sharing.share import Share
from lookfar.speculation.chain_builder import TokenRows
from lookfar.speculation.chain_proposer import ChainProposer

log = logging.getLogger("vllm.lookfar")  # below vLLM's own, so that its handlers and its level apply
IDLE_SECONDS = 1.0  # after which the answers of the last batch are shared


@dataclass
class ProposerCounts:
    """Counts since the start."""

    calls: int = 0
    rows: int = 0  # that a chain was wanted for
    drafted: int = 0  # tokens
    accepted: int = 0
    seconds: float = 0.0  # in `propose`
    texts: int = 0  # kept
    failures: int = 0

    def sentence(self, stored: int) -> str:
        """Return the line for the log."""
        rows, calls = max(self.rows, 1), max(self.calls, 1)
        return (
            f"lookfar: {self.accepted / rows:.2f} of {self.drafted / rows:.2f} draft tokens accepted in a step, "
            f"{1e6 * self.seconds / calls:.0f} µs for {self.rows / calls:.1f} requests, "
            f"{self.texts} texts learned, {stored} tokens in the store"
        )


class Proposer:
    """Proposes draft tokens to vLLM, which verifies them. Settings come from `additional_config["lookfar"]`."""

    def __init__(self, vllm_config: Any) -> None:
        settings = ProposerSettings.of(getattr(vllm_config, "additional_config", None))
        model, longest = vllm_config.model_config, vllm_config.speculative_config.num_speculative_tokens
        if not isinstance(longest, int) or longest < 1:
            raise ConfigError("Give num_speculative_tokens, the most tokens to draft, in speculative_config.")
        self.settings = settings
        self.max_length = int(model.max_model_len)
        self.counts = ProposerCounts()
        self.request_ids: Callable[[], Seq[str]] | None = None  # set by the worker extension
        tokenizer = read_tokenizer(model) if settings.store or settings.share else None
        self.store = DraftStore(int(model.get_vocab_size()), tokenizer)
        if settings.store:
            self.store.load(settings.store)
        self.share: Share | None = None
        if settings.share and is_first_of_group(vllm_config):
            self.share = Share(settings.share)
            self.share.attach(self.store, settings.namespace)
        self._longest = longest
        self._lock = Lock()
        self._complained = False
        self._begin()
        self._logged = self._called = perf_counter()
        if self.share is not None and settings.remember:
            Thread(target=self._share_when_idle, name="lookfar-idle", daemon=True).start()

    def _begin(self) -> None:
        """Start without any texts of requests."""
        self.chains = ChainProposer(self.store, self._longest, self.settings.min_probability, self.settings.remember)
        self.texts = RowTexts(lambda: self.chains.new_text(self.max_length), self._keep)
        self._proposed: list[tuple[RowText, int]] = []  # of the last call: texts, and the length of their chains

    def load_model(self, *_: Any, **__: Any) -> None:
        """Compile now, so that no request waits for it: there is no model to load."""
        store, counts = self.store, self.counts
        try:
            self.store, self.counts = DraftStore(store.vocab_size), ProposerCounts()
            self._begin()
            text: Int32s = np.tile(np.arange(4, dtype=np.int32) % store.vocab_size, 8)
            self.store.add(text.tolist())
            for length in range(24, 28):
                self.propose([[int(text[length - 1])]], np.array([length]), text[None])
        finally:
            self.store, self.counts = store, counts
            self._begin()

    def propose(
        self,
        sampled_token_ids: Seq[Seq[int]],
        num_tokens_no_spec: npt.NDArray[Any],
        token_ids_cpu: npt.NDArray[Any],
        slot_mappings: Any = None,
        **_: Any,
    ) -> list[list[int]]:
        """Return a draft for each row, empty where nothing is likely.

        Row i holds `num_tokens_no_spec[i]` tokens, the last of which are those that were just sampled; without sampled
        tokens it is in the middle of its prompt.
        """
        start = perf_counter()
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        with self._lock:
            try:
                self._propose(
                    drafts, sampled_token_ids, np.asarray(num_tokens_no_spec), np.asarray(token_ids_cpu, np.int32)
                )
            except Exception:  # the engine can do without drafts
                if not self._complained:
                    log.exception("lookfar cannot draft; the engine goes on without drafts")
                self._complained = True
                self.counts.failures += 1
                drafts = [[] for _ in sampled_token_ids]
                self._begin()
        self.counts.calls += 1
        self._called = now = perf_counter()
        self.counts.seconds += now - start
        if 0 < self.settings.log_seconds < now - self._logged:
            self._logged = now
            log.info(self.counts.sentence(self.store.index.size))
        return drafts

    def _propose(
        self, drafts: list[list[int]], sampled: Seq[Seq[int]], lengths: npt.NDArray[Any], tokens: npt.NDArray[Any]
    ) -> None:
        emitted = np.fromiter(map(len, sampled), np.int64, len(sampled))
        places = np.flatnonzero((emitted > 0) & (lengths[: len(sampled)] < self.max_length))
        if not len(places):
            return
        rows, emitted = TokenRows(tokens, places, lengths[places].astype(np.int64)), emitted[places]
        wanted = places.tolist()
        keys = self._keys(len(sampled))
        matched = self.texts.match([keys[i] for i in wanted], rows, emitted.tolist())
        self._learn({id(text): sampled[i] for text, i in zip(matched, wanted, strict=True)})
        limits = self.max_length - 1 - rows.sizes  # one is for the next token
        chains = self.chains.propose([text.index for text in matched], rows, emitted, limits)
        counts = chains.lengths.tolist()
        for i, draft, count in zip(wanted, chains.tokens.tolist(), counts, strict=True):
            drafts[i] = draft[:count]
        self._proposed = list(zip(matched, counts, strict=True))
        self.counts.rows += len(wanted)
        self.counts.drafted += sum(counts)

    def _keys(self, rows: int) -> Seq[Hashable]:
        """Return the ids of the requests if they are known, otherwise the numbers of the rows."""
        if self.request_ids is not None:
            try:
                ids = list(self.request_ids()[:rows])
                if len(set(ids)) == rows and None not in ids:
                    return ids
            except Exception:  # another version of vLLM keeps them elsewhere
                log.warning("lookfar cannot read request ids any more and recognises requests by their text.")
            self.request_ids = None
        return range(rows)

    def _learn(self, emitted: dict[int, Seq[int]]) -> None:
        """Learn from what followed the last proposals; `emitted` are tokens by the identity of their text."""
        if not self._proposed:
            return
        following = [emitted.get(id(text), ()) for text, _ in self._proposed]
        self.chains.learn(following)
        pairs = zip(following, self._proposed, strict=True)
        self.counts.accepted += sum(min(len(tokens) - 1, count) for tokens, (_, count) in pairs if len(tokens))
        self._proposed = []

    def _keep(self, text: RowText) -> None:
        """Keep what is new in a text to draft from."""
        start = max(text.answer_start, text.learned)
        if self.settings.remember and text.index.size > start:
            self.store.add(text.index.text[max(start - PROMPT_TAIL, 0) :].tolist())
            self.counts.texts += text.learned == 0
            text.learned = text.index.size

    def _share_when_idle(self) -> None:
        """Share the answers of the last batch when no other follows: only another call shows that they have ended."""
        while True:
            sleep(IDLE_SECONDS / 2)
            if perf_counter() - self._called > IDLE_SECONDS:
                with self._lock:
                    self.texts.learn_all()


def is_first_of_group(vllm_config: Any) -> bool:
    """Whether this process is the one of its tensor-parallel group that shares what it learns; all learn the same."""
    parallel = getattr(vllm_config, "parallel_config", None)
    size = int(getattr(parallel, "tensor_parallel_size", 1) or 1)
    return int(getattr(parallel, "rank", 0) or 0) % size == 0


def read_tokenizer(model: Any) -> Any:
    """Return the model's tokenizer, which says whose stores and texts can be used."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        model.tokenizer or model.model,
        revision=getattr(model, "tokenizer_revision", None),
        trust_remote_code=bool(getattr(model, "trust_remote_code", False)),
    )
