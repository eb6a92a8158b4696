"""The benchmark's numbers follow from its records, and its records survive interruptions."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import lookfar
import lookfar.bench
from families import tiny_model
from helpers import byte_tokenizer
from lookfar.bench import plots
from lookfar.bench.methods import Method
from lookfar.bench.page import charts_of, page
from lookfar.bench.plots import Axes
from lookfar.bench.records import Results, Run
from lookfar.bench.suites import read_prompts, read_suite
from lookfar.bench.summary import summarize
from lookfar.cli import app
from lookfar.engine.stats import is_natural
from lookfar.errors import CapacityError, ConfigError

pytestmark = pytest.mark.slow

NEW = 12


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for suite in ("alpha", "beta"):
        lines = [
            {"id": f"{suite}/{i}", "format": "completion", "prompt": " ".join(f"w{(7 * i + j) % 50}" for j in range(9))}
            for i in range(3)
        ]
        (folder / f"{suite}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


@pytest.fixture
def lm() -> lookfar.LM:
    tokenizer = byte_tokenizer()
    return lookfar.LM(tiny_model("llama", torch.float32, vocab_size=len(tokenizer)), tokenizer, max_batch=2)


def measure(lm: lookfar.LM, data: Path, **changes: Any) -> Results:
    arguments: dict[str, Any] = {"suites": ["alpha", "beta"], "data": data, "max_new_tokens": NEW, "repeats": 3}
    arguments |= {"strategies": ["auto", "suffix"], "baselines": ["generate", "prompt_lookup"], "budget": 8}
    return lookfar.bench.run(lm, **arguments | changes)


def test_natural_outputs_are_told_apart_from_loops() -> None:
    """Two prompts, one of which ends in a loop: ratios over natural outputs leave it out on both sides."""
    natural, loop = list(range(64)), [1, 2] * 32
    seconds = {("none", "a"): 6.0, ("none", "b"): 8.0, ("auto", "a"): 4.0, ("auto", "b"): 1.0}
    runs = [
        Run("s", [prompt], name, 1, 0, [output], seconds[name, prompt], 0.1, [(0.1, 2, 64 // steps)] * steps)
        for name, steps in (("none", 64), ("auto", 16))
        for prompt, output in (("a", natural), ("b", loop))
    ]
    plain, auto = summarize(Results({"methods": ["none", "auto"]}, runs=runs))
    assert auto.natural == plain.natural == 1
    assert auto.over_none == pytest.approx(14 / 5)
    assert auto.over_none_natural == pytest.approx(6 / 4)
    assert auto.tokens_per_step_natural == pytest.approx(4.0)


def test_the_table_can_be_recomputed_from_the_records(lm: lookfar.LM, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    results = measure(lm, data, out=out)
    assert results.runs == Results.load(out).runs
    raw = json.loads(out.read_text())["runs"]
    assert len(raw) == 2 * 3 * 3 * 5  # suites, prompts, repeats, methods
    for line in summarize(results):
        mine = [r for r in raw if (r["suite"], r["method"]) == (line.suite, line.method)]
        ids = sorted({r["prompts"][0] for r in mine})

        def seconds(method: str, which: list[str], suite: str = line.suite) -> float:
            return sum(
                median(r["seconds"] for r in raw if (r["suite"], r["method"], r["prompts"]) == (suite, method, [p]))
                for p in which
            )

        tokens = sum(len(r["outputs"][0]) for r in mine if r["repeat"] == 0)
        assert line.tokens_per_second == pytest.approx(tokens / seconds(line.method, ids))
        assert line.over_none == pytest.approx(seconds("none", ids) / seconds(line.method, ids))
        assert line.over_generate == pytest.approx(seconds("hf generate", ids) / seconds(line.method, ids))
        expected = {
            r["prompts"][0]: r["outputs"][0]
            for r in raw
            if (r["suite"], r["method"], r["repeat"]) == (line.suite, "hf generate", 0)
        }
        natural = [p for p in ids if is_natural(expected[p])]
        assert line.natural == len(natural)
        if natural:
            ratio = seconds("none", natural) / seconds(line.method, natural)
            assert line.over_none_natural == pytest.approx(ratio)
        steps = [step for r in mine for step in r["steps"]]
        assert line.tokens_per_step == pytest.approx(sum(s[2] for s in steps) / len(steps))
        if line.method == "hf prompt_lookup":
            assert line.rows_per_step is None  # transformers does not report them
        else:
            assert line.rows_per_step == pytest.approx(sum(s[1] for s in steps) / len(steps))
            assert line.rows_per_step >= 1
        latencies = [s[0] / s[2] for s in steps for _ in range(s[2])]
        assert [line.latency_p50, line.latency_p95] == pytest.approx(np.percentile(latencies, [50, 95]))
        assert line.first_token == pytest.approx(median(r["first_token"] for r in mine))
        assert line.identical == line.outputs == 3
        for source, share in line.acceptance.items():
            verified, right = np.sum([d for r in mine for d in r["drafts"].get(source, [])], axis=0)
            assert share == pytest.approx(right / verified)
    ours = [r for r in raw if r["method"] in ("none", "auto", "suffix")]
    assert all(sum(s[2] for s in r["steps"]) == len(r["outputs"][0]) for r in ours)
    accepted = sum(right for r in raw if r["method"] == "auto" for d in r["drafts"].values() for _, right in d)
    assert accepted == sum(s[2] - 1 for r in raw if r["method"] == "auto" for s in r["steps"])


def test_an_interrupted_run_goes_on_without_counting_twice(
    lm: lookfar.LM, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, calls = tmp_path / "bench.json", []
    run = Method.run

    def until(self: Method, *rest: Any) -> Run:
        calls.append(self.name)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return run(self, *rest)

    monkeypatch.setattr(Method, "run", until)
    with pytest.raises(KeyboardInterrupt):
        measure(lm, data, out=out, repeats=1)
    before = Results.load(out).runs
    assert 0 < len(before) < 30
    done = measure(lm, data, out=out, repeats=1)
    assert done.runs[: len(before)] == before
    assert len(done.runs) == len({r.key for r in done.runs}) == 2 * 3 * 5
    again = len(calls)
    measure(lm, data, out=out, repeats=1)  # nothing is left to do
    assert len(calls) == again
    with pytest.raises(
        ConfigError, match=r"was measured with other max new tokens \(\d+, now \d+\): give another file"
    ):
        measure(lm, data, out=out, repeats=1, max_new_tokens=NEW + 1)


def test_batches_and_sampling(lm: lookfar.LM, data: Path) -> None:
    results = measure(lm, data, batch=(2,), repeats=1, baselines=["generate"])
    assert {(line.batch, line.identical, line.outputs) for line in summarize(results)} == {(2, 3, 3)}
    results = measure(lm, data, repeats=1, baselines=["generate"], temperature=0.9, top_k=0)
    assert all(line.identical == 3 for line in summarize(results))
    assert "temperature 0.9" in page(results)


def test_a_difference_is_shown_with_its_place(lm: lookfar.LM, data: Path) -> None:
    results = measure(lm, data, repeats=1)
    wrong = next(r for r in results.runs if r.method == "auto")
    wrong.outputs[0][5] += 1
    line = next(line for line in summarize(results) if (line.suite, line.method) == (wrong.suite, "auto"))
    assert line.identical == line.outputs - 1
    assert line.first_difference is not None
    assert (line.first_difference.prompt, line.first_difference.token) == (wrong.prompts[0], 5)
    assert f"first at token 5 of {wrong.prompts[0]}" in page(results)


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words = ""
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_is_complete_and_fetches_nothing(lm: lookfar.LM, data: Path) -> None:
    results = measure(lm, data, repeats=1, max_new_tokens=40, budget=None)
    reader = Reader()
    reader.feed(page(results))
    assert reader.links == ["data:,"]
    assert "script" not in reader.tags
    assert reader.tags.count("svg") == len(charts_of(results, summarize(results))) == 5
    for line in summarize(results):
        assert f"{line.tokens_per_second:.1f}" in reader.words
    for chart in charts_of(results, summarize(results)):
        ElementTree.fromstring(chart)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"format": "lookfar bench 2", "settings": {', "is not JSON, perhaps cut off"),
        ('{"runs": []}', "is not a file of `lookfar bench`"),
        ("[1, 2]", "is not a file of `lookfar bench`"),
        (
            '{"format": "lookfar bench 2", "settings": {}, "machine": {}, "costs": {}, "runs": [{"suite": "x"}]}',
            "is damaged",
        ),
        ('{"format": "lookfar bench 2", "settings": {}, "machine": {}, "costs": {}, "runs": [7]}', "is damaged"),
    ],
)
def test_files_that_are_not_ours_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        Results.load(path)


def test_a_run_that_is_there_twice_is_refused(lm: lookfar.LM, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    results = measure(lm, data, repeats=1)
    results.runs.append(results.runs[0])
    results.save(out)
    with pytest.raises(ConfigError, match="holds a run twice"):
        Results.load(out)
    with pytest.raises(ConfigError, match="cannot be written"):
        results.save(tmp_path / "missing" / "x.json")


def test_prompts_from_files(tmp_path: Path, data: Path) -> None:
    plain = tmp_path / "mine.txt"
    plain.write_text("One question?\n\nAnother?\n")
    assert [(p.id, p.text, p.chat) for p in read_prompts(plain, 9)] == [
        ("mine/1", "One question?", True),
        ("mine/2", "Another?", True),
    ]
    turns = tmp_path / "turns.jsonl"
    turns.write_text('{"turns": ["first", "second"]}')
    assert read_prompts(turns, 9)[0].text == "first"
    assert len(read_suite("alpha", data, 2)) == 2
    for bad, complaint in (
        ("{", "is not an object like"),
        ('{"prompt": ""}', "has no prompt"),
        ("", "holds no prompts"),
    ):
        turns.write_text(bad)
        with pytest.raises(ConfigError, match=complaint):
            read_prompts(turns, 9)
    with pytest.raises(ConfigError, match=r"There is no gamma.jsonl in .*: it has alpha, beta"):
        read_suite("gamma", data, 2)
    with pytest.raises(ConfigError, match="Unknown suite 'gamma': use one of mt_bench"):
        read_suite("gamma", None, 2)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"baselines": ["beam"]}, "Unknown baseline 'beam'"),
        ({"baselines": ["assisted"]}, "assisted needs a draft model"),
        ({"baselines": ["prompt_lookup"], "batch": (2,)}, "one prompt at a time"),
        ({"strategies": ["auto", "auto"]}, "Each method can be named once"),
        ({"limit": 0}, "limit must be a whole number"),
        ({"batch": ()}, "batch takes whole numbers"),
        ({"prompts": "x.txt"}, "one of the two"),
    ],
)
def test_mistakes(lm: lookfar.LM, data: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        measure(lm, data, **changes)


def test_prompts_that_are_too_long_are_named_before_anything_is_measured(lm: lookfar.LM, tmp_path: Path) -> None:
    (tmp_path / "alpha.jsonl").write_text(
        json.dumps({"id": "short", "task": "t", "format": "completion", "prompt": "hello"})
        + "\n"
        + json.dumps({"id": "long", "task": "t", "format": "completion", "prompt": "x" * 250})
    )
    with pytest.raises(CapacityError, match=r"Prompt long of alpha has 25\d tokens, .* 256 positions"):
        measure(lm, tmp_path, suites=["alpha"])


def test_the_command_says_what_is_missing() -> None:
    for arguments, complaint in (([], "Give --suite"), (["--suite", "x", "--batch", "a"], "--batch takes numbers")):
        result = CliRunner().invoke(app, ["bench", *arguments])
        assert isinstance(result.exception, ConfigError)
        assert complaint in str(result.exception)


def test_charts_are_valid() -> None:
    for chart in (
        plots.bars("a & b", {"<one>": {"x": 1.0, "y": 0.0}, "two": {"x": 3.5}}, mark=1.0),
        plots.lines("c", {"l": [(1, 2.0), (8, 4.0)]}, Axes(log=True), mark=4),
        plots.lines("flat", {"l": [(1, 0.0), (2, 0.0)]}),
    ):
        ElementTree.fromstring(chart)
    assert plots.lines("nothing", {}) == ""
    assert plots.ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert plots.ticks(0.0, 0.31) == [0.0, 0.1, 0.2, 0.3]


def test_records_as_a_table(lm: lookfar.LM, data: Path) -> None:
    results = measure(lm, data, repeats=1)
    try:
        import pandas  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match="pip install pandas"):
            results.to_pandas()
        return
    frame = results.to_pandas()
    assert len(frame) == len(results.runs)
    assert {"method", "seconds", "tokens", "steps"} <= set(frame.columns)
