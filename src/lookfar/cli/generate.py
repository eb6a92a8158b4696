"""`lookfar generate`: text as it is decoded, coloured by step, and what it took."""

from __future__ import annotations

import json

from rich.console import Console

from lookfar.cli import options


def generate(
    prompt: options.Prompt,
    model: options.Model = "demo",
    strategy: options.StrategyName = None,
    settings: options.Settings = None,
    budget: options.Budget = None,
    store: options.StoreFile = None,
    pack: options.Pack = None,
    max_new_tokens: options.MaxNewTokens = 128,
    max_length: options.MaxLength = None,
    raw: options.Raw = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    as_json: options.Json = False,
) -> None:
    """Decode PROMPT and print the answer as it comes; tokens of one step share a colour."""
    chosen, rows = options.strategies(strategy, settings), options.rows(budget)
    lm = options.load_model(model, device, dtype, max_length, store, pack)
    ids, _ = options.prompt_ids(lm, prompt, raw)
    if as_json:
        from lookfar.progress import bar

        with bar("Decoding", max_new_tokens) as advance:
            done = lm.generate(
                ids,
                max_new_tokens=max_new_tokens,
                strategy=chosen,
                budget=rows,
                on_tokens=lambda _, new: advance(len(new)),
            )
        record = {"text": done.text, "token_ids": done.token_ids, "finish_reason": done.finish_reason}
        print(json.dumps(record | {"stats": done.stats.as_dict()}, ensure_ascii=False))
        return
    from lookfar.cli.steps import StepPrinter

    out, printer = Console(highlight=False), StepPrinter(lm.tokenizer)
    done = lm.generate(
        ids,
        max_new_tokens=max_new_tokens,
        strategy=chosen,
        budget=rows,
        on_tokens=lambda _, new: out.print(printer.piece(new), end="", soft_wrap=True),
    )
    out.print()
    stats = done.stats
    Console(stderr=True, highlight=False).print(
        f"[dim]{stats.tokens} tokens in {stats.steps} steps: {stats.tokens_per_step:.2f} tokens a step, "
        f"{stats.rows_per_step:.1f} rows a step, {stats.tokens_per_second:.1f} tokens/s ({done.finish_reason})[/]"
    )
