"""vLLM engines for the tests, with prompts for them. Imported where vLLM is installed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams

from helpers import byte_tokenizer
from lookfar.bench.suites import Prompt, read_prompts
from lookfar.models.demo import demo_model

K = 5
NEW_TOKENS = 64
SUITES = ("mt_bench", "gsm8k", "edit_eval", "humaneval", "xsum", "dolly", "mbpp", "clapnq")
TASKS = (
    "Write a short story about {}.",
    "Explain {} to a child. Then explain {} again in other words.",
    "Write a Python function about {} with a docstring, and then its tests.",
    "Repeat this sentence five times: We all like {} and {} likes us.",
    "List ten facts about {} as numbered sentences.",
    "Rewrite this in the past tense: {} is near the house. The children see {} and they walk to {}.",
    "Write a dialogue of two friends about {}.",
    "Translate to French: I know {} and {} knows me.",
)
THINGS = ("the river", "a fox", "the old bridge", "bread", "the moon")
IDS = "lookfar.integrations.vllm.RequestIds"

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB


def prompts() -> list[list[int]]:
    """Return the tokens of 40 prompts: five of each suite in LOOKFAR_TEST_DATA, or simple ones."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    if folder := os.environ.get("LOOKFAR_TEST_DATA"):
        found = [prompt for suite in SUITES for prompt in read_prompts(Path(folder) / f"{suite}.jsonl", 5)]
    else:
        texts = [task.replace("{}", thing) for task in TASKS for thing in THINGS]
        found = [Prompt(str(i), text, chat=True) for i, text in enumerate(texts)]
    return [ids_of(tokenizer, prompt) for prompt in found]


def ids_of(tokenizer: Any, prompt: Prompt) -> list[int]:
    text = prompt.text
    if prompt.chat:
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=not prompt.chat).input_ids
    return ids


def tiny_llama(folder: Path) -> Path:
    """Write a random model whose heads can be divided by two, with a tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def speculation(proposer: str = "lookfar.integrations.vllm.Proposer") -> dict[str, Any]:
    return {"method": "custom_class", "model": proposer, "num_speculative_tokens": K}


class Engine:
    """An engine of vLLM, in processes of its own."""

    def __init__(self, model: Path, lookfar: dict[str, Any] | None = None, **options: Any) -> None:
        """Start it; with `lookfar`, the settings of the proposer, it speculates."""
        if lookfar is not None:
            options = {
                "speculative_config": speculation(),
                "additional_config": {"lookfar": lookfar},
                "worker_extension_cls": IDS,
                **options,
            }
        self.llm = LLM(
            str(model),
            dtype="float32",
            max_num_seqs=8,
            enforce_eager=True,
            disable_log_stats=False,
            **{"max_model_len": 2048, **options},
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def tokens(self, prompts: list[list[int]], new: int = NEW_TOKENS) -> list[list[int]]:
        """Decode greedily, up to eight requests at once."""
        done = self.llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            SamplingParams(temperature=0, max_tokens=new),
            use_tqdm=False,
        )
        return [list(each.outputs[0].token_ids) for each in done]

    def counts(self) -> list[dict[str, Any]]:
        """Return the counters of each worker's proposer."""
        found: list[dict[str, Any]] = self.llm.collective_rpc("lookfar_counts")
        return found

    def metric(self, name: str) -> int:
        """Return a counter of vLLM."""
        return sum(int(each.value) for each in self.llm.get_metrics() if each.name == f"vllm:spec_decode_{name}")
