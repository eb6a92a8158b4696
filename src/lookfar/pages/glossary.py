"""The words of the pages, each explained in a sentence or two where it occurs."""

from __future__ import annotations

GLOSSARY = {
    "method": "A way to decode: model.generate of transformers (hf generate), lookfar without speculation (none), "
    "or lookfar with a strategy such as auto.",
    "tokens/s": "New tokens per second of all prompts together, prefill included; medians over repeats.",
    "× generate": "The speed divided by that of transformers' model.generate in the same run.",
    "× none": "The speed divided by that of lookfar without speculation in the same run. In brackets: natural "
    "outputs only.",
    "natural outputs": "Outputs that do not repeat themselves. Small models fall into loops, which any drafter "
    "predicts, so figures are also given without them.",
    "tokens per step": "Tokens that one forward pass of the model emits on average: 1 without speculation. In "
    "brackets: natural outputs only.",
    "rows per step": "Positions that one forward pass computes on average: the last token and the draft tokens that "
    "are verified with it.",
    "row budget": "The number of rows that lookfar feeds in a step: as many as pay, by the cost curve and the "
    "estimates.",
    "first token": "The time until the first token, which is mostly prefill.",
    "ms per token": "Milliseconds per token: the median, and the 95th percentile after it.",
    "peak memory": "The most memory that was in use.",
    "identical": "Outputs that equal the reference token by token.",
    "step": "One forward pass of the model. It verifies a draft tree and emits at least one token.",
    "rows": "Positions that a step computes: the last token of the text and the draft tokens that are verified "
    "with it.",
    "context": "Tokens before the step, whose keys and values are cached.",
    "draft tree": "Draft tokens that may come next. A path from the left is one guess of the next tokens; guesses that "
    "begin alike share their beginning.",
    "accepted": "A draft token that is what the model itself chooses at its place. The others are dropped, so drafts "
    "never change the text.",
    "drafter": "A source of draft tokens, such as the prompt and past texts (suffix) or earlier predictions (recycle).",
    "estimate": "The probability of a draft token to be accepted, estimated before the step, its whole path included.",
    "expected": "Tokens that the step should emit by the estimates: 1 and the sum over the draft tree.",
    "last token": "The token that the tree continues.",
    "window rows": "Rows of the lookahead window, which make new n-grams instead of verifying draft tokens.",
    "floor": "The time to read all weights once at the measured memory bandwidth: no step is faster.",
    "nearly free": "The most rows of a step that takes at most 1.2 times as long as a step of one row.",
    "of the floor": "The floor divided by the time of a step of one row: 100 % would be as fast as memory allows.",
    "cost curve": "Seconds of a step by its rows, measured on first use and refined by real steps. The row budget is "
    "chosen by it.",
    "drift": "By how much all steps are slower now than the curve says. It changes no decision: the shape alone does.",
    "in use": "Milliseconds by the cost curve, as kept for this model and machine.",
    "now": "Milliseconds of the same steps, measured for this page.",
    "now ÷ in use": "Above 1: steps are slower now than the curve says.",
    "without drift": "The same without the drift: 1 where the row budget is right about what more rows cost.",
    "real steps": "Steps of real requests that have refined this point.",
}
