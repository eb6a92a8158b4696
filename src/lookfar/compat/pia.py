"""The interface of `pia` (Lookahead, Zhao et al. 2024): models whose `generate` takes `decoding_kwargs`.

Any causal model class of transformers can be imported from here:

    from lookfar.compat.pia import LlamaForCausalLM
    model = LlamaForCausalLM.from_pretrained(path)
    model.generate(**inputs, max_new_tokens=256, decoding_kwargs={"use_lookahead": True, "branch_length": 12})

With `return_dict_in_generate` the output's `kwargs` hold what `pia` reports: `dls`, `edls`, `fts`, `qts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
import transformers
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from lookfar.drafters.base import Strategy
from lookfar.drafters.trie import Trie
from lookfar.engine.outputs import StepOutput
from lookfar.errors import ConfigError
from lookfar.integrations.transformers.loop import generate as decode, on_step_of_call
from lookfar.integrations.transformers.state import state_of
from lookfar.models.stock_loop import stock_attributes

SHAPES = {"hier": "hierarchical", "par": "parallel", "one": "single"}
SOURCES = {"mix": "mixed", "input": "prompt", "output": "output"}
SETTINGS = {"use_lookahead", "decoding_length", "branch_length", "decoding_mode", "stop_words", "debug_lookahead"}
_strategy_of_call: ContextVar[tuple[Strategy, ...]] = ContextVar("_strategy_of_call", default=())


@dataclass
class LookaheadDecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """The output of `generate`, with the statistics of its steps in `kwargs`."""

    kwargs: dict[str, list[Any]] | None = None


class LookaheadCache:
    """The trie that all requests of a model share, as `model.lookahead_cache`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def put(self, token_ids: Iterable[int], branch_length: int = 8, mode: str = "output", **ignored: Any) -> None:
        """Remember an answer, to draft from it later."""
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
        return state_of(self._model).lm_of(self._model)

    @property
    def _store(self) -> Any:
        return self._lm.store


class _StepLog:
    """Collects what `pia` reports about every step."""

    def __init__(self) -> None:
        self.kwargs: dict[str, list[Any]] = {"dls": [], "edls": [], "fts": [], "qts": []}

    def __call__(self, output: StepOutput) -> None:
        self.kwargs["dls"].append(output.num_rows)
        self.kwargs["edls"].append(len(output.tokens))
        self.kwargs["fts"].append(output.seconds)
        self.kwargs["qts"].append(output.host_seconds)


class LookaheadMixin(GenerationMixin):
    """Adds `decoding_kwargs` to `generate`."""

    @property
    def lookahead_cache(self) -> LookaheadCache:
        return LookaheadCache(self)

    def generate(self, *args: Any, decoding_kwargs: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        token = _strategy_of_call.set(_strategy(decoding_kwargs or {}))
        try:
            return super().generate(*args, **kwargs)
        finally:
            _strategy_of_call.reset(token)

    def _sample(self, input_ids: torch.Tensor, **prepared: Any) -> Any:
        log = _StepLog()
        token = on_step_of_call.set(log)
        try:
            out = decode(self, input_ids, strategy=_strategy_of_call.get(), **prepared)
        finally:
            on_step_of_call.reset(token)
        if isinstance(out, torch.Tensor):
            return out
        return LookaheadDecoderOnlyOutput(**out, kwargs=log.kwargs)


def _strategy(wanted: Mapping[str, Any]) -> tuple[Strategy, ...]:
    """Return the strategy that `decoding_kwargs` ask for; there `decoding_length` includes the last token."""
    if unknown := set(wanted) - SETTINGS:
        raise ConfigError(f"Unknown decoding_kwargs {sorted(unknown)}: use some of {', '.join(sorted(SETTINGS))}.")
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
    """Return a model class of transformers whose `generate` takes `decoding_kwargs`."""
    if name.startswith("_") or name not in dir(transformers):
        raise AttributeError(f"transformers has no model class {name!r}")
    stock = getattr(transformers, name)
    if name == "AutoModelForCausalLM":
        return _AutoModel
    if not (isinstance(stock, type) and issubclass(stock, GenerationMixin)):
        raise AttributeError(f"{name} is not a model class that can generate")
    return _class_for(stock)


def _class_for(stock: Any) -> Any:
    if stock.__name__ not in _made:
        _made[stock.__name__] = type(stock.__name__, (LookaheadMixin, stock), stock_attributes(stock))
    return _made[stock.__name__]


class _AutoModel:
    """`AutoModelForCausalLM`, for whatever class a model turns out to be."""

    @staticmethod
    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(*args, **kwargs)
        model.__class__ = _class_for(type(model))
        return model
