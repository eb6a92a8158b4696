"""Whisper through transformers' speech recognition pipeline, with a feature extractor and a tokenizer made here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import (
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
    pipeline,
)

import lookfar
from families import randomise

END = "<|endoftext|>"
SPECIAL = ["<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>", "<|notimestamps|>"]


def tokenizer() -> WhisperTokenizer:
    """One token for each byte, those of Whisper, and timestamps."""
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = WhisperTokenizer(vocab=vocab, merges=[], unk_token=END, bos_token=END, eos_token=END, pad_token=END)
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    made.add_tokens([f"<|{i * 0.02:.2f}|>" for i in range(21)])
    return made


def recogniser() -> Any:
    words = tokenizer()
    end, start, english, german, translate, transcribe, no_timestamps = words.convert_tokens_to_ids([END, *SPECIAL])
    small = {"d_model": 32, "num_mel_bins": 8, "max_source_positions": 100, "max_target_positions": 48}
    for part in ("encoder", "decoder"):
        small |= {f"{part}_layers": 2, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 48}
    ids = {"pad_token_id": end, "bos_token_id": end, "eos_token_id": end, "decoder_start_token_id": start}
    config = WhisperConfig(vocab_size=len(words), suppress_tokens=[], begin_suppress_tokens=[], **small, **ids)
    torch.manual_seed(0)
    model = randomise(WhisperForConditionalGeneration(config), torch.float32)
    rules = {"lang_to_id": {"<|en|>": english, "<|de|>": german}, "no_timestamps_token_id": no_timestamps}
    rules |= {"task_to_id": {"transcribe": transcribe, "translate": translate}, "is_multilingual": True}
    rules |= {"max_length": 40, **ids}
    for name, value in rules.items():
        setattr(model.generation_config, name, value)
    features = WhisperFeatureExtractor(feature_size=8, chunk_length=2)
    return pipeline("automatic-speech-recognition", model=model, tokenizer=words, feature_extractor=features)


def clips(count: int) -> list[Any]:
    return [np.sin(np.arange(16000 + 800 * i) * 0.05 * (i + 1)).astype(np.float32) for i in range(count)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("task", [{}, {"language": "de", "task": "translate"}])
@pytest.mark.parametrize("timestamps", [False, True])
def test_the_pipeline_gives_the_same_text(task: dict[str, str], timestamps: bool) -> None:
    recognise = recogniser()
    options = {"generate_kwargs": {"num_beams": 1, **task}, "return_timestamps": timestamps, "batch_size": 2}
    for count in (1, 2):
        expected = recognise(clips(count), **options)
        lookfar.accelerate(recognise.model, budget=8)
        assert recognise(clips(count), **options) == expected
        stats = lookfar.last_stats(recognise.model)
        assert stats.tokens >= 20 * count
        assert stats.tokens_per_step > 1
        lookfar.restore(recognise.model)
