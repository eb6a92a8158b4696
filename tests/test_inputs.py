"""Prompts of an LM that are more than text: images through a processor, and sources of encoder-decoder models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    BatchFeature,
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

import lookfar
from families import DEVICE, randomise
from helpers import byte_tokenizer
from media import CLIP, LLAMA, MEDIA, QWEN2_VL, media_model, media_prompts
from sources import source_model, sources

NEW = 12
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}IMAGE{% else %}{{ p['text'] }}{% endif %}{% endfor %}\n{% endfor %}assistant:"
)


def tokenizer_with(*special: str) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.pad_token, tokenizer.padding_side = "<s>", "left"
    return tokenizer


def llava() -> tuple[Any, Any]:
    """A model and its processor."""
    tokenizer = tokenizer_with("<image>")
    pictures = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    processor = LlavaProcessor(
        pictures,
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE.replace("IMAGE", "<image>"),
    )
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    text = {**LLAMA, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    config = LlavaConfig(
        text_config=text, vision_config=CLIP, image_token_id=image_token, image_token_index=image_token
    )
    return randomise(LlavaForConditionalGeneration(config), torch.float32), processor


class Qwen2VLImagesAndText:
    """What `Qwen2VLProcessor` does, which itself cannot be made without torchvision."""

    image_token = "<|image_pad|>"

    def __init__(self, tokenizer: Any) -> None:
        size = {"shortest_edge": 16, "longest_edge": 16 * 24}
        self.pictures = Qwen2VLImageProcessorPil(patch_size=4, merge_size=1, size=size, temporal_patch_size=2)
        self.tokenizer = tokenizer

    def __call__(self, text: list[str], images: list[Image.Image], **options: Any) -> BatchFeature:
        pixels = self.pictures(images=images, return_tensors="pt")
        tokens = [int(grid.prod()) for grid in pixels["image_grid_thw"]]
        whole = []
        for one in text:
            parts = one.split(self.image_token)
            whole.append(parts[0] + "".join(self.image_token * tokens.pop(0) + part for part in parts[1:]))
        words = self.tokenizer(whole, **options)
        types = (words["input_ids"] == self.tokenizer.convert_tokens_to_ids(self.image_token)).long()
        return BatchFeature({**words, **pixels, "mm_token_type_ids": types})


def qwen2_vl() -> tuple[Any, Any]:
    tokenizer = tokenizer_with("<|image_pad|>", "<|video_pad|>")
    image_token, video_token = tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"])
    text = {**QWEN2_VL["text_config"], "vocab_size": len(tokenizer)}
    settings = {**QWEN2_VL, "image_token_id": image_token, "video_token_id": video_token, "text_config": text}
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(**settings))
    return randomise(model, torch.float32), Qwen2VLImagesAndText(tokenizer)


def picture(seed: int, width: int = 20) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (16, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def question(text: str, *images: Image.Image) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def reference(model: Any, inputs: Any) -> list[list[int]]:
    out = model.generate(**inputs.to(DEVICE), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    tokens: list[list[int]] = out[:, inputs["input_ids"].shape[1] :].tolist()
    return tokens


def test_a_conversation_with_images() -> None:
    model, processor = llava()
    lm = lookfar.LM(model, processor, budget=8)
    asked = (
        question("What is it?", picture(1)),
        question("What is it?", picture(2)),
        question("And these?", *map(picture, (1, 2))),
    )
    answers = []
    for messages in asked:
        inputs = processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        done = lm.chat(messages, max_new_tokens=NEW)
        assert [done.token_ids] == reference(model, inputs)
        assert done.text == processor.tokenizer.decode(done.token_ids, skip_special_tokens=True)
        answers.append(done.token_ids)
    assert answers[0] != answers[1]  # the picture matters
    text_only = lm.chat([{"role": "user", "content": "Hello"}], max_new_tokens=NEW)
    ids = torch.tensor([lm.chat_ids([{"role": "user", "content": "Hello"}])])
    assert [text_only.token_ids] == model.generate(ids, max_new_tokens=NEW, do_sample=False)[:, ids.shape[1] :].tolist()


def test_a_picture_in_a_file(tmp_path: Path) -> None:
    model, processor = llava()
    lm = lookfar.LM(model, processor)
    picture(3).save(tmp_path / "picture.png")
    from_file = [{"type": "image", "path": str(tmp_path / "picture.png")}, {"type": "text", "text": "What?"}]
    done = lm.chat([{"role": "user", "content": from_file}], max_new_tokens=NEW)
    assert done.token_ids == lm.chat(question("What?", picture(3)), max_new_tokens=NEW).token_ids
    with pytest.raises(lookfar.RequestError, match="The processor cannot take this conversation"):
        lm.chat([{"role": "user", "content": [{"type": "image", "path": "nowhere.png"}]}])


@pytest.mark.parametrize("made", [llava, qwen2_vl])
def test_processor_outputs_as_prompts(made: Any) -> None:
    model, processor = made()
    lm = lookfar.LM(model, processor.tokenizer, budget=8)
    image_token = processor.image_token
    texts = [f"one {image_token} picture", "no picture", f"{image_token} and {image_token}, two of them"]
    inputs = processor(
        text=texts, images=[picture(1, 24), picture(2), picture(4, 28)], padding=True, return_tensors="pt"
    )
    expected = reference(model, inputs)
    assert [done.token_ids for done in lm.generate(inputs, max_new_tokens=NEW)] == expected
    chunks = list(lm.stream(inputs, max_new_tokens=NEW))
    for index, tokens in enumerate(expected):
        assert [token for chunk in chunks if chunk.index == index for token in chunk.token_ids] == tokens


def test_loading_a_multimodal_checkpoint(tmp_path: Path) -> None:
    model, processor = llava()
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    lm = lookfar.load(str(tmp_path), budget=8)
    assert type(lm.model).__name__ == "LlavaForConditionalGeneration"
    done = lm.chat(question("What is it?", picture(1)), max_new_tokens=NEW)
    expected = lookfar.LM(model, processor).chat(question("What is it?", picture(1)), max_new_tokens=NEW)
    assert done.token_ids == expected.token_ids
    assert lm.generate("Hello", max_new_tokens=NEW).stats.tokens == NEW


def test_images_need_a_processor() -> None:
    model, processor = llava()
    lm = lookfar.LM(model, processor.tokenizer)
    with pytest.raises(lookfar.RequestError, match="need a processor"):
        lm.chat(question("What is it?", picture(1)))


def test_placeholders_without_an_image_are_an_error_of_the_request() -> None:
    family = MEDIA["llava"]
    model, inputs = media_model("llava"), media_prompts("llava", [1])
    lm = lookfar.LM(model)
    good = lm.generate(inputs, max_new_tokens=NEW)
    inputs["input_ids"][0, 1] = family.placeholder  # one more than the image has features
    with pytest.raises((lookfar.RequestError, ValueError), match="(?i)image"):
        lm.generate(inputs, max_new_tokens=NEW)
    assert lm.generate(media_prompts("llava", [1]), max_new_tokens=NEW)[0].token_ids == good[0].token_ids


def test_a_prompt_that_ends_with_an_image_is_refused() -> None:
    model, inputs = media_model("qwen2_vl"), media_prompts("qwen2_vl", [1])
    end = int((inputs["input_ids"][0] == MEDIA["qwen2_vl"].placeholder).nonzero().max()) + 1
    short = {key: x[:, :end] if x.shape == inputs["input_ids"].shape else x for key, x in inputs.items()}
    with pytest.raises(lookfar.RequestError, match="cannot end with an image"):
        lookfar.LM(model).generate(short)


def test_fallback_decodes_the_image_too() -> None:
    model, inputs = media_model("llava"), media_prompts("llava", [1])
    lm = lookfar.LM(model)
    expected = lm.generate(inputs, max_new_tokens=NEW)[0].token_ids
    lm.engine.runner.model.refuse("it is told to")
    with pytest.warns(UserWarning, match="it is told to"):
        assert lm.generate(inputs, max_new_tokens=NEW)[0].token_ids == expected


@pytest.mark.parametrize("family", ["t5", "bart", "marian", "mvp"])
def test_sources_as_prompts(family: str) -> None:
    model, lengths = source_model(family), [5, 21, 12]
    lm = lookfar.LM(model, budget=8)
    alone = [sources(family, [length]) for length in lengths]
    for sampling in ({}, {"do_sample": True, "seed": 5}):
        for one in alone:
            ids = one["input_ids"][0].tolist()
            torch.manual_seed(5)
            options = {"max_new_tokens": NEW, "num_beams": 1, "do_sample": bool(sampling), "pad_token_id": 0}
            expected = model.generate(**one, **options)[0, 1:].tolist()
            done = lm.generate(ids, max_new_tokens=NEW, **sampling)
            assert done.token_ids == expected
    batch = lm.generate([one["input_ids"][0].tolist() for one in alone], max_new_tokens=NEW)
    for one, done in zip(alone, batch, strict=True):
        expected = model.generate(**one, max_new_tokens=NEW, num_beams=1, do_sample=False, pad_token_id=0)[0, 1:]
        assert done.token_ids == expected.tolist()


def test_answers_that_copy_their_source_are_drafted_from_it() -> None:
    """A decoder whose text copies the source: every draft comes from there."""
    model = source_model("bart")
    lm = lookfar.LM(model, strategy="suffix", budget=16)
    source = sources("bart", [30])["input_ids"][0].tolist()
    copied = iter(source[3:])

    class Copy(torch.nn.Module):
        row_wise = True

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            wanted = source[3 + ids.shape[1] - 1]
            return torch.full_like(scores, -1e9).index_fill(-1, torch.tensor([wanted], device=scores.device), 0.0)

    done = lm.generate(source, max_new_tokens=20, logits_processor=[Copy()])
    assert done.token_ids == [next(copied) for _ in range(20)]
    assert done.stats.drafters["suffix"].accepted > 10
    assert done.stats.tokens_per_step > 3


def test_whisper_says_how_to_use_it() -> None:
    lm = lookfar.LM(source_model("whisper"))
    with pytest.raises(lookfar.RequestError, match=r"use lookfar.accelerate\(model\)"):
        lm.generate(sources("whisper", [1]))
