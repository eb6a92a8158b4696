"""Prompts to measure with: suites from a directory of jsonl files or from the hub, or a file of prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from lookfar.errors import ConfigError
from lookfar.lm import LM


@dataclass(frozen=True)
class Prompt:
    """One prompt: a user's message for a chat template, or a text to continue."""

    id: str
    text: str
    chat: bool

    def ids(self, lm: LM) -> list[int]:
        """Return its token ids. Models without a chat template get messages as they are."""
        if self.chat and getattr(lm.tokenizer, "chat_template", None):
            return lm.chat_ids([{"role": "user", "content": self.text}])
        return lm.encode(self.text)


@dataclass(frozen=True)
class HubSuite:
    """Where a suite is on the hub, and how one of its rows becomes a prompt."""

    path: str
    split: str
    text: Callable[[Mapping[str, Any]], str]
    name: str | None = None
    chat: bool = True


def _summary(field: str, sentences: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: f"Article: {row[field]}\n\nSummarize the above article in {sentences}."


HUB = {
    "mt_bench": HubSuite("HuggingFaceH4/mt_bench_prompts", "train", lambda row: str(row["prompt"][0])),
    "humaneval": HubSuite("openai/openai_humaneval", "test", lambda row: str(row["prompt"]), chat=False),
    "humaneval_x": HubSuite("THUDM/humaneval-x", "test", lambda row: str(row["prompt"]), "cpp", chat=False),
    "gsm8k": HubSuite("openai/gsm8k", "test", lambda row: str(row["question"]), "main"),
    "mbpp": HubSuite("google-research-datasets/mbpp", "test", lambda row: str(row["text"])),
    "classeval": HubSuite("FudanSELab/ClassEval", "test", lambda row: f"Complete this class:\n\n{row['skeleton']}"),
    "xsum": HubSuite("EdinburghNLP/xsum", "test", _summary("document", "1 sentence")),
    "cnn_dailymail": HubSuite("abisee/cnn_dailymail", "test", _summary("article", "3 sentences"), "3.0.0"),
    "dolly": HubSuite(
        "databricks/databricks-dolly-15k", "train", lambda row: f"{row['context']}\n\n{row['instruction']}".strip()
    ),
}


def read_suite(name: str, data: Path | None, limit: int) -> list[Prompt]:
    """Return the first prompts of a suite: from `data/NAME.jsonl` if a directory is given, otherwise from the hub."""
    if data is not None:
        path = data / f"{name}.jsonl"
        if not path.is_file():
            known = ", ".join(sorted(p.stem for p in data.glob("*.jsonl"))) or "no jsonl files"
            raise ConfigError(f"There is no {name}.jsonl in {data}: it has {known}.")
        return read_prompts(path, limit)
    if name not in HUB:
        raise ConfigError(f"Unknown suite {name!r}: use one of {', '.join(HUB)}, or give a directory with --data.")
    try:
        import datasets
    except ImportError:
        raise ConfigError("Suites come from the hub with `pip install datasets`, or from --data DIR.") from None
    suite = HUB[name]
    try:
        rows = datasets.load_dataset(suite.path, suite.name, split=suite.split, streaming=True)
        return [Prompt(f"{name}/{i}", suite.text(row), suite.chat) for i, row in enumerate(islice(rows, limit))]
    except Exception as error:
        raise ConfigError(f"{name} cannot be read from the hub ({suite.path}): give --data DIR instead.") from error


def read_prompts(path: Path, limit: int) -> list[Prompt]:
    """Return the prompts of a file: jsonl with `prompt` or `turns` (and perhaps `id`, `format`), or one per line."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    prompts = []
    for number, line in enumerate(lines[:limit], 1):
        name = f"{path.stem}/{number}"
        if path.suffix != ".jsonl":
            prompts.append(Prompt(name, line, chat=True))
            continue
        try:
            item = json.loads(line)
            text = item["turns"][0] if "turns" in item else item["prompt"]
        except (ValueError, KeyError, IndexError, TypeError):
            raise ConfigError(f'Line {number} of {path} is not an object like {{"prompt": "…"}}.') from None
        if not isinstance(text, str) or not text:
            raise ConfigError(f"Line {number} of {path} has no prompt.")
        prompts.append(Prompt(str(item.get("id", name)), text, item.get("format", "chat") == "chat"))
    if not prompts:
        raise ConfigError(f"{path} holds no prompts.")
    return prompts
