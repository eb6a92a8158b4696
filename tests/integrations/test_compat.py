"""Scripts written for `lade` and for `pia` run with their import line changed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin, PreTrainedModel

from families import tiny_model
from helpers import random_prompts
from lookfar.compat import lade, pia
from lookfar.errors import ConfigError, LookfarWarning
from lookfar.integrations.transformers.state import state_of

PROMPT = torch.tensor(random_prompts(14))


@pytest.fixture
def augmented(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    plain = GenerationMixin._sample
    monkeypatch.setattr(lade, "CONFIG_MAP", {"log": []})
    lade.augment_all()
    lade.augment_all()  # twice is once
    monkeypatch.setenv("USE_LADE", "1")
    yield monkeypatch
    lade.restore_all()
    assert GenerationMixin._sample is plain


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


def decode(model: PreTrainedModel, **arguments: Any) -> list[int]:
    torch.manual_seed(0)
    out: list[int] = model.generate(PROMPT, max_new_tokens=30, pad_token_id=0, **arguments)[0, 14:].tolist()
    return out


def test_lade_as_its_readme_has_it(
    model: PreTrainedModel, augmented: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    augmented.setenv("USE_LADE", "0")
    expected = decode(model), decode(model, do_sample=True, temperature=0.7, top_k=50, top_p=0.9)
    augmented.setenv("USE_LADE", "1")
    lade.config_lade(LEVEL=5, WINDOW_SIZE=7, GUESS_SET_SIZE=7, DEBUG=1, POOL_FROM_PROMPT=True, USE_FLASH=False)
    assert (decode(model), decode(model, do_sample=True, temperature=0.7, top_k=50, top_p=0.9)) == expected
    steps = [stats.steps for stats in state_of(model).stats]
    assert steps[0] < 30
    shown = capsys.readouterr().out
    assert shown.count("ACCELERATION===SUMMARY") == 2
    assert f"Generated tokens:  30 Total steps:  {steps[0]}  Compression ratio:  {round(30 / steps[0], 2)}" in shown
    assert set(state_of(model).stats[0].drafters) == {"lookahead"}


def test_lade_keeps_a_log(
    model: PreTrainedModel, augmented: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lade.config_lade(LEVEL=3, WINDOW_SIZE=3, GUESS_SET_SIZE=3, DEBUG=1)
    decode(model)
    decode(model)
    steps = state_of(model).stats[0].steps
    lade.save_log(tmp_path / "log")
    assert json.loads((tmp_path / "log").read_text()) == [[30, steps, round(30 / steps, 2)]] * 2
    capsys.readouterr()
    lade.log_history(clear=True)
    lade.log_history()
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"LADE LOG - OVERALL GEN:  60  STEPS:  {2 * steps}  AVG COMPRESS RATIO:  {30 / steps}"
    assert said[1] == "LADE LOG - OVERALL GEN:  0  STEPS:  0  AVG COMPRESS RATIO:  0"


def test_lade_is_off_without_the_variable(model: PreTrainedModel, augmented: pytest.MonkeyPatch) -> None:
    augmented.delenv("USE_LADE")
    state_of(model).stats = []
    decode(model)
    assert state_of(model).stats == []


def test_lade_settings_are_checked(augmented: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="ngram must be"):
        lade.config_lade(LEVEL=1)
    with pytest.warns(LookfarWarning, match="DIST_WORKERS above 1 is not supported"):
        lade.config_lade(DIST_WORKERS=4)
    lade.config_lade(WINDOW_SIZE=4)
    assert lade._strategy(lade.CONFIG_MAP).window == 4
    assert lade._strategy(lade.CONFIG_MAP).ngram == 8


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("saved")
    model.save_pretrained(where)
    return where


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "AutoModelForCausalLM"])
def test_pia_reports_what_it_reported(name: str, folder: Path, model: PreTrainedModel) -> None:
    fast = getattr(pia, name).from_pretrained(folder, dtype=torch.float64)
    expected = decode(model)
    assert decode(fast) == expected
    for mode in ("hier", "par", "one", "hier_mix", "hier_output"):
        wanted = {
            "use_lookahead": True,
            "debug_lookahead": False,
            "decoding_mode": mode,
            "decoding_length": 16,
            "branch_length": 6,
            "stop_words": {4, 5},
        }
        assert decode(fast, decoding_kwargs=wanted, use_cache=True, repetition_penalty=1.0) == expected
    for use_lookahead in (False, True):
        out = fast.generate(
            input_ids=PROMPT,
            attention_mask=torch.ones_like(PROMPT),
            position_ids=None,
            pad_token_id=0,
            max_new_tokens=30,
            do_sample=False,
            return_dict_in_generate=True,
            decoding_kwargs={"use_lookahead": use_lookahead, "decoding_length": 16, "branch_length": 6},
        )
        assert out.sequences[0, 14:].tolist() == expected
        reported = out.kwargs
        assert set(reported) == {"dls", "edls", "fts", "qts"}
        assert sum(reported["edls"]) == 30
        assert {len(values) for values in reported.values()} == {len(reported["edls"])}
        assert all(time >= 0 for time in reported["fts"] + reported["qts"])
        if use_lookahead:
            assert len(reported["edls"]) < 30
            assert 1 < max(reported["dls"]) <= 16
        else:
            assert set(reported["edls"]) == set(reported["dls"]) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 5])
def test_pia_counts_the_last_token_among_the_rows(folder: Path, model: PreTrainedModel, rows: int) -> None:
    fast = pia.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    fast.lookahead_cache.put(decode(model))
    wanted = {"use_lookahead": True, "decoding_length": rows, "branch_length": 8}
    out = fast.generate(PROMPT, max_new_tokens=30, pad_token_id=0, return_dict_in_generate=True, decoding_kwargs=wanted)
    assert max(out.kwargs["dls"]) == max(out.kwargs["edls"]) == rows


def test_pia_batches_and_sampling(folder: Path, model: PreTrainedModel) -> None:
    fast = pia.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    ids = torch.tensor([[0, 0, 0, *random_prompts(6)[0]], random_prompts(9)[0]])
    arguments = {"attention_mask": (ids > 0).long(), "max_new_tokens": 20, "pad_token_id": 0}
    for do_sample in (False, True):
        torch.manual_seed(3)
        expected = model.generate(ids, do_sample=do_sample, **arguments)
        torch.manual_seed(3)
        got = fast.generate(ids, do_sample=do_sample, decoding_kwargs={"use_lookahead": True}, **arguments)
        assert torch.equal(expected, got)


def test_the_trie_of_pia_is_kept_and_saved(folder: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    fast = pia.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    answer = decode(model)
    wanted = {"use_lookahead": True, "decoding_length": 16, "branch_length": 8}

    def steps() -> int:
        assert decode(fast, decoding_kwargs=wanted) == answer
        return state_of(fast).stats[0].steps

    cold = steps()
    fast.lookahead_cache.fresh()
    fast.lookahead_cache.put(answer, branch_length=8, mode="output", idx=-1)
    fast.lookahead_cache.save_mem(tmp_path / "trie")
    warm = steps()
    assert warm < cold
    fast.lookahead_cache.fresh()
    fast.lookahead_cache.load_mem(tmp_path / "trie")
    assert steps() == warm


@pytest.mark.slow
def test_pia_mistakes_are_one_sentence(folder: Path) -> None:
    fast = pia.LlamaForCausalLM.from_pretrained(folder)
    with pytest.raises(ConfigError, match=r"Unknown decoding_kwargs \['speed'\]"):
        decode(fast, decoding_kwargs={"speed": 9})
    with pytest.raises(ConfigError, match="decoding_mode is hier, par or one"):
        decode(fast, decoding_kwargs={"use_lookahead": True, "decoding_mode": "tree"})
    with pytest.raises(AttributeError, match="not a model class that can generate"):
        _ = pia.BertModel
    with pytest.raises(AttributeError, match="no model class 'QWenLMHeadModel'"):
        _ = pia.QWenLMHeadModel


@pytest.mark.real
def test_the_readme_of_lade_with_a_real_model(augmented: pytest.MonkeyPatch) -> None:
    """Its own lines, with the demo model's directory for a name and float32 for float16."""
    from lookfar.models.demo import demo_model

    torch_device, model_name, input_text = "cpu", str(demo_model()), "The quick brown fox"
    lade.augment_all()
    lade.config_lade(LEVEL=5, WINDOW_SIZE=7, GUESS_SET_SIZE=7, DEBUG=0)
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32, device_map=torch_device)
    model_inputs = tokenizer(input_text, return_tensors="pt").to(torch_device)
    greedy_output = model.generate(**model_inputs, max_new_tokens=24)
    assert state_of(model).stats[0].steps < 24
    torch.manual_seed(1)
    sample_output = model.generate(**model_inputs, max_new_tokens=24, do_sample=True, temperature=0.7)
    os.environ["USE_LADE"] = "0"
    assert torch.equal(greedy_output, model.generate(**model_inputs, max_new_tokens=24))
    torch.manual_seed(1)
    again = model.generate(**model_inputs, max_new_tokens=24, do_sample=True, temperature=0.7)
    assert torch.equal(sample_output, again)


@pytest.mark.real
def test_the_readme_of_pia_with_a_real_model() -> None:
    from lookfar.compat.pia import LlamaForCausalLM
    from lookfar.models.demo import demo_model

    model_dir = str(demo_model())
    model = LlamaForCausalLM.from_pretrained(
        model_dir, cache_dir="./", dtype=torch.float32, low_cpu_mem_usage=True, device_map="cpu"
    )
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    inputs = tokenizer("Hello, I'm am conscious and", return_tensors="pt")
    outputs = [
        model.generate(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            max_new_tokens=32,
            decoding_kwargs={"use_lookahead": use_lookahead},
            return_dict_in_generate=True,
        )
        for use_lookahead in (False, True, True)
    ]
    assert all(torch.equal(outputs[0].sequences, out.sequences) for out in outputs)
    assert max(outputs[2].kwargs["edls"]) > 4  # the second time it knows its answer
