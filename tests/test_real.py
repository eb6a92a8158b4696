"""The demo model, a real one: the tokens of its own `generate`, alone and in a ragged batch, and the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lookfar
from helpers import reference

pytestmark = pytest.mark.real

CHATS = [
    "Write a haiku about the sea.",
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train travels 60 km in 45 minutes. How fast is it in km/h? Think step by step.",
    "Rewrite this sentence in the past tense: The cat sits on the mat and watches the birds in the garden.",
    "List five fruits and one use for each of them.",
    "Hi!",
    "Translate to French: Good morning, how are you today?",
]
NEW = 48


@pytest.fixture(scope="module")
def lm() -> lookfar.LM:
    return lookfar.load("demo")


@pytest.fixture
def all_cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def prompts(lm: lookfar.LM) -> list[list[int]]:
    return [lm.chat_ids([{"role": "user", "content": text}]) for text in CHATS]


@pytest.fixture(scope="module")
def expected(lm: lookfar.LM, prompts: list[list[int]]) -> list[list[int]]:
    return [reference(lm.model, prompt, NEW) for prompt in prompts]


@pytest.mark.parametrize(
    "arguments",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 0, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 0, "min_p": 0.05, "repetition_penalty": 1.1},
    ],
    ids=["temperature", "top_p", "min_p-penalty"],
)
def test_the_sampled_tokens_of_generate(lm: lookfar.LM, prompts: list[list[int]], arguments: dict[str, float]) -> None:
    for seed, prompt in enumerate(prompts[1:4]):
        ids = torch.tensor([prompt])
        torch.manual_seed(seed)
        out = lm.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=True, **arguments
        )
        done = lm.generate(prompt, max_new_tokens=24, seed=seed, **arguments)
        assert done.token_ids == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "strategy",
    ["auto", "none", "jacobi", "suffix", "recycle", "trie", "prompt_lookup", "jacobi+lookahead", "auto+trie+lookahead"],
)
def test_the_tokens_of_generate(
    lm: lookfar.LM, prompts: list[list[int]], expected: list[list[int]], strategy: str
) -> None:
    lm.forget()
    for prompt, tokens in zip(prompts[1:4], expected[1:4], strict=True):
        assert lm.generate(prompt, max_new_tokens=NEW, strategy=strategy).token_ids == tokens


@pytest.mark.usefixtures("all_cores")
def test_the_tokens_of_generate_on_all_cores(lm: lookfar.LM, prompts: list[list[int]]) -> None:
    lm.forget()
    assert lm.generate(prompts[4], max_new_tokens=24).token_ids == reference(lm.model, prompts[4], 24)


@pytest.mark.parametrize("budget", ["auto", 16])
def test_a_ragged_batch_with_all_sources(
    lm: lookfar.LM, prompts: list[list[int]], expected: list[list[int]], budget: object
) -> None:
    lm.forget()
    done = lm.generate(prompts, max_new_tokens=NEW, budget=budget)
    assert [one.token_ids for one in done] == expected
    if budget == 16:
        assert sum(one.stats.tokens for one in done) > 1.5 * sum(one.stats.steps for one in done)


def test_a_ragged_batch_of_eight(lm: lookfar.LM, prompts: list[list[int]], expected: list[list[int]]) -> None:
    done = lm.generate(prompts, max_new_tokens=NEW, strategy=lookfar.Lookahead(window=5, ngram=4, guesses=5))
    assert [one.token_ids for one in done] == expected
    assert sum(one.stats.tokens for one in done) > 1.2 * sum(one.stats.steps for one in done)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from lookfar.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_compare_as_a_user_runs_it() -> None:
    shown = run(
        "compare",
        CHATS[0],
        "--max-new-tokens",
        "16",
        "--strategy",
        "lookahead",
        "--set",
        "window=3",
        "--set",
        "ngram=3",
    )
    assert shown.returncode == 0, shown.stderr
    assert "Identical: the same 16 tokens" in shown.stdout
    assert shown.stdout.count("one colour per step") == 2


def test_compare_and_generate_as_json(expected: list[list[int]]) -> None:
    shown = run(
        "compare",
        CHATS[0],
        "--max-new-tokens",
        "16",
        "--strategy",
        "lookahead",
        "--set",
        "window=3",
        "--json",
        "--repeats",
        "2",
    )
    record = json.loads(shown.stdout)
    assert record["identical"] is True
    assert record["none"]["token_ids"] == expected[0][:16] == record["strategy"]["token_ids"]
    seconds = {side: record[side]["stats"]["seconds"] for side in ("none", "strategy")}
    assert record["speed_up"] == pytest.approx(seconds["none"] / seconds["strategy"])
    shown = run("generate", CHATS[0], "--max-new-tokens", "16", "--strategy", "none", "--json")
    assert json.loads(shown.stdout)["token_ids"] == expected[0][:16]


def test_generate_prints_the_text(lm: lookfar.LM) -> None:
    shown = run("generate", CHATS[0], "--max-new-tokens", "24", "--strategy", "jacobi")
    assert shown.stdout.rstrip("\n") == lm.chat([{"role": "user", "content": CHATS[0]}], max_new_tokens=24).text
    assert "24 tokens in" in shown.stderr


def test_check_the_demo() -> None:
    assert json.loads(run("check", "demo", "--json").stdout)["trees"] is True
    assert "draft trees" in run("check", "demo").stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate", ""], "The prompt is empty"),
        (["generate", "Hi", "--max-new-tokens", "0"], "max_new_tokens must be"),
        (["generate", "Hi", "--max-new-tokens", "9000"], "do not fit in 8192"),
        (["generate", "Hi", "--max-length", "10"], "do not fit in 10"),
    ],
)
def test_mistakes_with_a_real_model(arguments: list[str], sentence: str) -> None:
    shown = run(*arguments)
    assert shown.returncode == 2
    assert sentence in shown.stderr
    assert "Traceback" not in shown.stderr
    assert [line for line in shown.stderr.splitlines() if not line.endswith("…")] == [shown.stderr.splitlines()[-1]]


def python_blocks(page: str) -> list[str]:
    text = (Path(__file__).parent.parent / page).read_text()
    blocks = [part.split("```")[0] for part in text.split("```python\n")[1:]]
    assert blocks
    return blocks


def test_examples_of_the_docs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every block of docs/generation.md marked as python runs; those that need other models are marked as py."""
    from lookfar.compat import lade
    from lookfar.models.demo import demo_model

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("USE_LADE", raising=False)
    lm = lookfar.load("demo", device="cpu")
    session: dict[str, object] = {
        "lookfar": lookfar,
        "model": lm.model,
        "tokenizer": lm.tokenizer,
        "path": demo_model(),
    }
    session["inputs"] = lm.tokenizer("One, two,", return_tensors="pt")  # type: ignore[misc]
    try:
        for block in python_blocks("docs/generation.md"):
            exec(compile(block.replace("=256", "=12").replace("=64", "=12"), "generation.md", "exec"), session)
    finally:
        lade.restore_all()


def test_readme_examples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every Python block of the README runs, in order, in one session."""
    monkeypatch.chdir(tmp_path)
    session: dict[str, object] = {}
    for block in python_blocks("README.md"):
        exec(compile(block, "README.md", "exec"), session)
