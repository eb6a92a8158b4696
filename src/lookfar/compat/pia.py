"""The interface of `pia` (Lookahead, Zhao et al. 2024): models whose `generate` takes `decoding_kwargs`.

Any causal model class of transformers can be imported from here:

    from lookfar.compat.pia import LlamaForCausalLM
    model = LlamaForCausalLM.from_pretrained(path)
    model.generate(**inputs, max_new_tokens=256, decoding_kwargs={"use_lookahead": True, "branch_length": 12})

With `return_dict_in_generate` the output's `kwargs` hold what a run of `pia` reports: `dls`, `edls`, `fts`, `qts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
import transformers
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from lookfar.config import Strategy, Trie
from lookfar.errors import ConfigError
from lookfar.integrations.attached import attached
from lookfar.integrations.transformers import generate as decode
from lookfar.loops import names_of
from lookfar.sequence import Sequence
from lookfar.tree import SequencePlan

SHAPES = {"hier": "hierarchical", "par": "parallel", "one": "single"}
SOURCES = {"mix": "mixed", "input": "prompt", "output": "output"}
UNDERSTOOD = {"use_lookahead", "decoding_length", "branch_length", "decoding_mode", "stop_words", "debug_lookahead"}


@dataclass
class LookaheadDecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns, with the statistics of the run."""

    kwargs: dict[str, list[Any]] | None = None


class LookaheadCache:
    """The trie that all requests of a model share, as `model.lookahead_cache`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def put(self, token_ids: Iterable[int], branch_length: int = 8, mode: str = "output", **ignored: Any) -> None:
        """Remember an answer, to guess from it later."""
        self._store.learn([[int(token) for token in token_ids]])

    def fresh(self) -> None:
        """Forget everything."""
        self._lm.forget()

    def save_mem(self, cache_dir: str | PathLike[str]) -> None:
        self._store.save(cache_dir)

    def load_mem(self, cache_dir: str | PathLike[str]) -> None:
        self._store.load(cache_dir)

    @property
    def _lm(self) -> Any:
        return attached(self._model).lm_of(self._model)

    @property
    def _store(self) -> Any:
        return self._lm.store


class _Watch:
    """Collects what `pia` reports of every forward."""

    def __init__(self) -> None:
        self.kwargs: dict[str, list[Any]] = {"dls": [], "edls": [], "fts": [], "qts": []}
        self._host: dict[int, float] = {}

    def __call__(self, sequence: Sequence, rows: SequencePlan, tokens: list[int], seconds: float) -> None:
        host, before = sequence.stats.host_seconds, self._host.get(sequence.index, 0.0)
        self._host[sequence.index] = host
        self.kwargs["dls"].append(len(rows) - rows.root_row)  # rows of the prompt do not count
        self.kwargs["edls"].append(len(tokens))
        self.kwargs["fts"].append(seconds)
        self.kwargs["qts"].append(host - before)


class LookaheadMixin(GenerationMixin):
    """Adds `decoding_kwargs` to `generate`."""

    @property
    def lookahead_cache(self) -> LookaheadCache:
        return LookaheadCache(self)

    def generate(self, *args: Any, decoding_kwargs: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        self._lookahead_strategy = _strategy(decoding_kwargs or {})
        return super().generate(*args, **kwargs)

    def _sample(self, input_ids: torch.Tensor, **prepared: Any) -> Any:
        watch = _Watch()
        attached(self).on_step = watch
        try:
            out = decode(self, input_ids, strategy=self._lookahead_strategy, **prepared)
        finally:
            attached(self).on_step = None
        if isinstance(out, torch.Tensor):
            return out
        return LookaheadDecoderOnlyOutput(**out, kwargs=watch.kwargs)


def _strategy(wanted: Mapping[str, Any]) -> tuple[Strategy, ...]:
    """What `decoding_kwargs` ask for. They count the root among the rows."""
    if unknown := set(wanted) - UNDERSTOOD:
        raise ConfigError(f"Unknown decoding_kwargs {sorted(unknown)}: use some of {', '.join(sorted(UNDERSTOOD))}.")
    if not wanted.get("use_lookahead", False):
        return ()
    shape, _, source = str(wanted.get("decoding_mode", "hier")).partition("_")
    if shape not in SHAPES or (source or "mix") not in SOURCES:
        raise ConfigError(f"decoding_mode is hier, par or one, alone or with _mix, _input or _output, not {shape!r}.")
    branch_length = wanted.get("branch_length", 12)
    trie = Trie(
        decoding_length=max(wanted.get("decoding_length", 64) - 1, 1),
        branch_length=branch_length,
        match=min(Trie.match, branch_length),
        shape=SHAPES[shape],
        source=SOURCES[source or "mix"],
        stop_words=tuple(sorted(wanted.get("stop_words") or ())),
    )
    return (trie,)


_made: dict[str, Any] = {}


def __getattr__(name: str) -> Any:
    """A model class of transformers whose `generate` takes `decoding_kwargs`."""
    if name.startswith("_") or name not in dir(transformers):
        raise AttributeError(f"transformers has no model class {name!r}")
    plain = getattr(transformers, name)
    if name == "AutoModelForCausalLM":
        return _AutoModel
    if not (isinstance(plain, type) and issubclass(plain, GenerationMixin)):
        raise AttributeError(f"{name} is no model class that can generate")
    return _class_for(plain)


def _class_for(plain: Any) -> Any:
    if plain.__name__ not in _made:
        _made[plain.__name__] = type(plain.__name__, (LookaheadMixin, plain), names_of(plain))
    return _made[plain.__name__]


class _AutoModel:
    """`AutoModelForCausalLM`: whatever class a model turns out to be."""

    @staticmethod
    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(*args, **kwargs)
        model.__class__ = _class_for(type(model))
        return model
