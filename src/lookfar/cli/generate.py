"""`lookfar generate`: an answer as it is decoded, coloured by step, and its summary."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lookfar.cli import options
from lookfar.core.progress import progress_bar

if TYPE_CHECKING:
    from lookfar.lm import LM


def generate(
    prompt: options.Prompt,
    model: options.Model = "demo",
    strategy: options.StrategyName = None,
    settings: options.Settings = None,
    budget: options.Budget = None,
    store: options.StoreFile = None,
    share: options.Share = None,
    pack: options.Pack = None,
    compile: options.Compile = False,
    exact: options.Exact = None,
    max_new_tokens: options.MaxNewTokens = 128,
    max_length: options.MaxLength = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    json_schema: options.JsonSchema = None,
    regex: options.Regex = None,
    raw: options.Raw = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    as_json: options.Json = False,
) -> None:
    """Decode PROMPT and print the answer as it comes; tokens of one step share a colour."""
    options.prepare()
    chosen, rows = options.strategies(strategy, settings), options.rows(budget)
    asked = options.sampling(temperature, top_p, top_k, min_p, repetition_penalty, seed)
    asked |= options.constraints(stop, json_schema, regex)
    how = options.ModelOptions(device, dtype, max_length, store, pack, compile, exact, share)
    lm = options.load_model(model, how)
    options.speculate(lm, chosen, rows)
    ids, _ = options.prompt_ids(lm, prompt, raw)
    asked |= {"max_new_tokens": max_new_tokens}
    (_print_json if as_json else _print_text)(lm, ids, asked)


def _print_text(lm: LM, ids: list[int], asked: dict[str, Any]) -> None:
    from lookfar.cli.answers import show_answer, summary

    stream = lm.stream(ids, **asked)  # refuses a mistake before the warm-up
    _warm_up(lm, ids, asked)
    _, last, stopped = show_answer(stream, Console(highlight=False))
    if last is not None:
        ended = "stopped" if stopped else last.finish_reason
        Console(stderr=True, highlight=False).print(f"[dim]{summary(last.stats)} ({ended})[/]", soft_wrap=True)


def _print_json(lm: LM, ids: list[int], asked: dict[str, Any]) -> None:
    from lookfar.streams import Completion

    requests, _ = lm.requests(ids, **asked)
    _warm_up(lm, ids, asked)
    with progress_bar("Decoding", asked["max_new_tokens"]) as advance:
        result = lm.run(requests, on_step=lambda output: advance(len(output.tokens)))[0]
    done = Completion.of(result, lm.tokenizer)
    record = {"text": done.text, "token_ids": done.token_ids, "finish_reason": done.finish_reason}
    print(json.dumps(record | {"stats": done.stats.as_dict()}, ensure_ascii=False))


def _warm_up(lm: LM, ids: list[int], asked: dict[str, Any]) -> None:
    """Compile, pack and measure before the clock of the answer starts."""
    lm.warmup(
        requests=1, length=len(ids) + asked["max_new_tokens"], sampling=bool(asked.get("temperature")), prior=False
    )
