"""The command line without a model: help, mistakes, verdicts."""

from __future__ import annotations

import io
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import lookfar
from families import tiny_model
from helpers import byte_tokenizer
from lookfar.cli import app, main
from lookfar.cli.colours import coloured
from lookfar.detokenizer import detokenizer
from lookfar.version import __version__


@pytest.fixture(autouse=True)
def _warnings_as_before() -> Iterator[None]:
    """`main` sets how warnings are shown; the other tests want them as errors."""
    with warnings.catch_warnings():
        yield


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line in this process; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["lookfar", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def save(family: str, folder: Path) -> str:
    """Save a tiny model of a family with a tokenizer; returns the directory."""
    tokenizer = byte_tokenizer()
    tiny_model(family, torch.float32, vocab_size=len(tokenizer)).save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    return str(folder / "tiny")


@pytest.fixture
def saved(tmp_path: Path) -> str:
    return save("llama", tmp_path)


def test_help_names_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--help") == 0
    shown = capsys.readouterr().out
    commands = {command.callback.__name__ for command in app.registered_commands}
    assert commands == {"generate", "chat", "compare", "check", "explain", "tune", "serve", "top", "doctor"}
    assert all(name in shown for name in (*commands, "bench", "store"))


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.strip() == f"lookfar {__version__}"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate", "Hi", "--strategy", "magic"], "Unknown strategy 'magic'"),
        (["generate", "Hi", "--set", "window"], "--set takes key=value"),
        (
            ["generate", "Hi", "--strategy", "lookahead", "--set", "window=0"],
            "window must be a whole number of at least 1, not 0",
        ),
        (
            ["generate", "Hi", "--strategy", "lookahead", "--set", "ngram=1"],
            "ngram must be a whole number of at least 2, not 1",
        ),
        (["generate", "Hi", "--set", "speed=9"], "Unknown setting 'speed'"),
        (["compare", "Hi", "--model", "./nowhere"], "./nowhere does not exist"),
        (["check", "./nowhere"], "./nowhere does not exist"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert run(monkeypatch, *arguments) == 2
    shown = capsys.readouterr()
    assert sentence in shown.err
    assert shown.err.startswith("Error: ")
    assert len(shown.err.strip().splitlines()) == 1
    assert shown.out == ""


def test_mistakes_with_a_directory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], saved: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    weights = Path(saved) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    for model, sentence in ((str(tmp_path / "empty"), "without a config.json"), (saved, "cannot be loaded")):
        assert run(monkeypatch, "generate", "Hi", "--model", model) == 2
        shown = capsys.readouterr().err
        assert sentence in shown
        assert "Traceback" not in shown


def test_a_whole_run_on_a_tiny_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], saved: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert run(monkeypatch, "generate", "-", "--raw", "--json", "--max-new-tokens", "5", "--model", saved) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["stats"]["prompt_tokens"] == len("from a pipe")
    assert len(record["token_ids"]) == 5


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "rwkv"}, ["none: decoded by transformers", "cannot be put back"]),
        ({"model_type": "mamba"}, ["none: decoded by transformers", "single tokens only"]),
        ({"model_type": "mamba2"}, ["draft chains", "cannot be rolled back", "fed again"]),
        ({"model_type": "gemma2"}, ["draft trees", "sliding window of 4096", "full attention"]),
        ({"model_type": "bloom"}, ["ALiBi bias", "no limit"]),
        ({"model_type": "mpt"}, ["each request in a forward pass of its own"]),
        ({"model_type": "qwen3_next"}, ["draft chains", "1: the strategy mtp"]),
    ],
)
def test_check_reads_a_config_file(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    config: dict[str, str],
    said: list[str],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for where in (tmp_path, tmp_path / "config.json"):
        assert run(monkeypatch, "check", str(where)) == 0
        shown = capsys.readouterr().out
        assert all(words in shown for words in said)


def test_a_character_split_over_steps_is_printed_whole() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("né €!").input_ids
    growing = detokenizer(tokenizer)
    pieces = [growing.add([token]) for token in ids]
    assert pieces == ["n", "", "é", " ", "", "", "€", "!"]
    assert coloured(tokenizer, ids, [3, 4, 1]).plain == "né €!"


def test_tokens_of_one_step_share_a_colour() -> None:
    tokenizer = byte_tokenizer()
    text = coloured(tokenizer, tokenizer("abcdef").input_ids, [1, 3, 2])
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(text, end="")
    assert [text.plain[span.start : span.end] for span in text.spans] == ["a", "bcd", "ef"]
    assert len({span.style for span in text.spans}) == 3


def test_compare_never_hides_a_difference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], saved: str
) -> None:
    """A strategy that breaks the promise is shown with the place and the margin of the first difference."""
    from lookfar.engine import verify

    arguments = ("compare", "abc", "--raw", "--model", saved, "--max-new-tokens", "6", "--strategy", "jacobi")
    assert run(monkeypatch, *arguments, "--json") == 0
    assert json.loads(capsys.readouterr().out)["first_difference"] is None
    monkeypatch.setattr("lookfar.lm.LM.warmup", lambda self, **_: None)  # its steps are not to be counted
    right, steps = verify._walk_all, iter(range(1000))
    wrong = [7], [], [1], np.array([[-1], [7]], np.int32)
    monkeypatch.setattr(verify, "_walk_all", lambda *a: wrong if next(steps) > 12 else right(*a))
    assert run(monkeypatch, *arguments) == 0
    shown = capsys.readouterr().out
    assert "Different from token" in shown
    assert "The two highest logits there are" in shown


def test_a_model_of_the_fallback_is_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = save("rwkv", tmp_path)
    capsys.readouterr()
    assert run(monkeypatch, "generate", "abc", "--model", model, "--max-new-tokens", "3") == 0
    shown = capsys.readouterr().err
    assert "Note: rwkv decodes without speculation: its recurrent state" in shown
    assert "3 tokens in 3 steps" in shown


def test_a_fault_of_ours_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], saved: str
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("out of cheese\nin line 7")

    capsys.readouterr()
    monkeypatch.setattr("lookfar.speculation.speculator.plan_pending", broken)
    monkeypatch.delenv("LOOKFAR_DEBUG", raising=False)
    assert run(monkeypatch, "generate", "abc", "--model", saved) == 1
    shown = capsys.readouterr().err
    assert "Error: RuntimeError: out of cheese (set LOOKFAR_DEBUG=1 for the traceback)" in shown
    assert "Traceback" not in shown


def test_a_store_is_built_shown_merged_and_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, saved: str
) -> None:
    (tmp_path / "a.txt").write_text("the cat sat on the mat")
    (tmp_path / "b.jsonl").write_text('{"reference": "the dog sat"}\n\n{"reference": "on the log"}\n')
    one, two, both = (str(tmp_path / name) for name in ("one.store", "two.store", "both.store"))
    assert run(monkeypatch, "store", "build", one, str(tmp_path / "a.txt"), "--model", saved) == 0
    assert run(monkeypatch, "store", "build", two, str(tmp_path / "b.jsonl"), "--model", saved) == 0
    assert run(monkeypatch, "store", "merge", both, one, two) == 0
    capsys.readouterr()
    assert run(monkeypatch, "store", "info", both, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["tokens"], facts["texts"]) == (22 + 11 + 10, 3)
    assert run(monkeypatch, "store", "info", both) == 0
    assert "tokenizer" in capsys.readouterr().out
    asked = ("generate", "the", "--model", saved, "--raw", "--max-new-tokens", "8", "--json")
    texts = []
    for more in ((), ("--store", both), ("--budget", "5"), ("--no-pack",)):
        assert run(monkeypatch, *asked, *more) == 0
        texts.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert all(tokens == texts[0] for tokens in texts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("store", "info", "{tmp}/nothing"), "cannot be read"),
        (("store", "info", "{tmp}/a.txt"), "is not a lookfar store"),
        (("store", "build", "{tmp}/out", "{tmp}/nothing", "--model", "{saved}"), "cannot be read"),
        (("store", "build", "{tmp}/out", "{tmp}/bad.jsonl", "--model", "{saved}"), "line 1, is not JSON"),
        (("store", "build", "{tmp}/out", "{tmp}/other.jsonl", "--model", "{saved}"), "has no 'reference'"),
        (("store", "build", "{tmp}/no/out", "{tmp}/a.txt", "--model", "{saved}"), "cannot be written"),
        (("generate", "hello", "--budget", "none"), "budget must be auto or a number of rows"),
        (("generate", "hello", "--budget", "0"), "budget must be auto or a number of rows"),
        (("generate", "hello", "--model", "{saved}", "--store", "{tmp}/a.txt"), "is not a lookfar store"),
        (("generate", "hello", "--strategy", "draft_model"), "give the smaller model"),
        (("generate", "hello", "--strategy", "trie", "--set", "shape=round"), "shape must be one of"),
        (("explain", "hello", "--html", "{tmp}/no/page.html"), "is not a directory"),
        (("bench", "--suite", "mt_bench", "--html", "{tmp}/no/page.html"), "is not a directory"),
        (("bench", "steps", "--shape", "smollm2-135m", "--html", "{tmp}/no/page.html"), "is not a directory"),
    ],
)
def test_mistakes_with_stores_and_budgets_end_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    saved: str,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "bad.jsonl").write_text("not json")
    (tmp_path / "other.jsonl").write_text('{"text": "x"}')
    assert run(monkeypatch, *(a.format(tmp=tmp_path, saved=saved) for a in arguments)) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err


def test_a_wrong_url_for_sharing_ends_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "generate", "hi", "--share", "http://host") == 2
    assert "looks like redis://user:password@host:6379" in capsys.readouterr().err


def test_stores_of_two_tokenizers_are_not_merged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for size in (90, 91):
        store = lookfar.DraftStore(size)
        store.learn([1, 2, 3])
        store.save(tmp_path / f"{size}.store")
    out = str(tmp_path / "out")
    assert run(monkeypatch, "store", "merge", out, str(tmp_path / "90.store"), str(tmp_path / "91.store")) == 2
    assert "different tokenizers" in capsys.readouterr().err


def test_explain_as_text_json_and_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, saved: str
) -> None:
    asked = ("explain", "</script><b>abcabcabc", "--model", saved, "--raw", "--max-new-tokens", "12", "--budget", "9")
    assert run(monkeypatch, *asked, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    steps = record["steps"]
    assert sum(len(step["emitted"]) for step in steps) == 12
    for step in steps:
        assert step["rows"] == 1 + len(step["nodes"]) + step["window_rows"] <= 9
        assert sum(node["accepted"] for node in step["nodes"]) in (len(step["emitted"]) - 1, len(step["emitted"]))
        assert all(0 <= node["probability"] <= 1 and node["parent"] < i for i, node in enumerate(step["nodes"]))
    assert run(monkeypatch, *asked) == 0
    shown = capsys.readouterr().out
    assert "step 1:" in shown
    assert f"12 tokens in {len(steps)} steps" in shown
    page = tmp_path / "page.html"
    assert run(monkeypatch, *asked, "--html", str(page)) == 0
    text = page.read_text()
    assert text.count("</script>") == 3  # the prompt's is data, not markup
    assert "http" not in text
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert data["prompt"] == "</script><b>abcabcabc"
    assert len(data["steps"]) == len(steps)


def test_options_for_sampling_stops_and_constraints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], saved: str, tmp_path: Path
) -> None:
    def answer(*options: str) -> dict[str, Any]:
        arguments = ("generate", "abc", "--raw", "--json", "--model", saved, "--max-new-tokens", "12")
        assert run(monkeypatch, *arguments, *options) == 0
        record: dict[str, Any] = json.loads(capsys.readouterr().out)
        return record

    sampled = (
        "--temperature",
        "1.5",
        "--top-k",
        "0",
        "--top-p",
        "0.9",
        "--min-p",
        "0.01",
        "--repetition-penalty",
        "1.1",
    )
    first = answer(*sampled, "--seed", "1")
    assert answer(*sampled, "--seed", "1", "--strategy", "none")["token_ids"] == first["token_ids"]
    assert answer(*sampled, "--seed", "2")["token_ids"] != first["token_ids"]
    greedy = answer()
    assert answer("--temperature", "0")["token_ids"] == greedy["token_ids"]
    assert len(answer("--regex", "[a-z]{4}")["text"]) == 4
    (tmp_path / "schema").write_text('{"enum": ["yes", "no"]}')
    assert answer("--json-schema", str(tmp_path / "schema"))["text"] in ('"yes"', '"no"')
    assert answer("--regex", "[a-z]{9}xyz", "--stop", "zz", "--stop", "x")["text"].endswith("x")
    arguments = ("compare", "abc", "--raw", "--json", "--model", saved, "--max-new-tokens", "12", *sampled)
    assert run(monkeypatch, *arguments) == 0
    assert json.loads(capsys.readouterr().out)["identical"] is True


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--json-schema", "./nowhere.json"], "nowhere.json cannot be read"),
        (["--regex", "("], "The regular expression ( cannot be used (unclosed group): correct it"),
        (["--temperature", "-1"], "A generation argument cannot be used"),
    ],
)
def test_bad_options_for_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], saved: str, options: list[str], sentence: str
) -> None:
    assert run(monkeypatch, "generate", "abc", "--raw", "--model", saved, *options) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--seed", str(1 << 70), "--temperature", "1"], "seed must fit into 64 bits"),
        (["--top-p", "2"], "top_p must be above 0 and at most 1"),
        (["--temperature", "inf"], "temperature must be a finite number"),
        (["--stop", ""], "stop_strings holds an empty text"),
    ],
)
def test_values_without_a_meaning(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    saved: str,
    arguments: list[str],
    sentence: str,
) -> None:
    assert run(monkeypatch, "generate", "hello", "--model", saved, *arguments) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("stream", [None, io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), "utf-8")])
def test_standard_input_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], saved: str, stream: Any
) -> None:
    monkeypatch.setattr(sys, "stdin", stream)
    assert run(monkeypatch, "generate", "-", "--model", saved) == 2
    assert "cannot be read from standard input" in capsys.readouterr().err


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "bench", "steps", "--shape", "llama-3-8b", "--device", "tpu") == 2
    assert "Device 'tpu' is not available" in capsys.readouterr().err
