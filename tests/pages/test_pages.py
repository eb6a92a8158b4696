"""The pages that are written to files: one base, every word explained, and legible on any screen and on paper."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from browser import needs_browser, show_at
from lookfar.bench.curve import HEADINGS, CurveCheck
from lookfar.bench.page import PAGE_HEADINGS, page
from lookfar.bench.records import Results, Run
from lookfar.bench.steps import StepCosts, steps_page
from lookfar.explain import Explanation, Node, Step, explain_page
from lookfar.pages import theme
from lookfar.pages.glossary import GLOSSARY

METHODS = ["hf generate", "none", "auto"]
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTRAST = """
const luminance = (colour) => {
  const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const paper = luminance(getComputedStyle(document.documentElement).backgroundColor);
return Math.min(...[...document.querySelectorAll("h1, h2, p, td, th, dt, svg text")].filter((e) => e.textContent.trim())
  .map((element) => {
    const style = getComputedStyle(element);
    const ink = luminance(element instanceof SVGElement ? style.fill : style.color);
    return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  }));
"""


def bench_page() -> str:
    runs = [
        Run(
            suite,
            [f"{suite}/{number}"],
            method,
            1,
            0,
            [list(range(40))],
            2.0,
            0.1,
            [(0.05, 9, 2)] * 20,
            {"suffix": [(9, 5), (6, 3)], "recycle": [(7, 2)]} if method == "auto" else {},
            peak_bytes=1 << 29,
        )
        for suite in ("mt_bench", "cnn_dailymail", "humaneval_x")
        for number in range(6)
        for method in METHODS
    ]
    settings = {"model": "a-model-with-quite-a-long-name-instruct-v2", "methods": METHODS, "max_new_tokens": 40}
    return page(Results(settings, {"processor": "a long name " * 5}, {str(n): 0.02 + 0.001 * n for n in ROWS}, runs))


def cost_page() -> str:
    times = {context: {rows: 20 + rows * context / 500 for rows in ROWS} for context in (128, 512, 2048)}
    curve = {rows: 20.0 + rows for rows in ROWS}
    return steps_page(
        StepCosts("a-model", "CPU, 2 threads", "flat", times, 1 << 29, 25e9), CurveCheck(curve, curve, curve)
    )


def explained() -> Explanation:
    def step(words: str, drafts: int) -> Step:
        emitted = [f" {word}" for word in words.split()]
        right = [Node(text, i - 1, "suffix", 2, 0.8, True) for i, text in enumerate(emitted[:-1])]
        wrong = [Node(" other", -1, "recycle", 1, 0.1, False) for _ in range(drafts)]
        return Step(" the", emitted, right + wrong, 1 + len(right) + drafts, 0, 0, 0.03, 1.5)

    return Explanation("auto", [step("one", 0), step("one two", 3), step("a b c d e f", 2), step("a b", 20)])


PAGES: dict[str, Callable[[], str]] = {
    "bench": bench_page,
    "steps": cost_page,
    "explain": lambda: explain_page(explained(), "A prompt " * 40, "demo"),
}


@pytest.fixture(params=PAGES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    file = tmp_path / f"{request.param}.html"
    file.write_text(PAGES[request.param](), encoding="utf-8")
    return file.as_uri()


@pytest.mark.parametrize("name", PAGES)
def test_pages_share_a_theme_and_explain_their_words(name: str) -> None:
    text = PAGES[name]()
    assert theme().decode().strip() in text
    assert '<meta name="viewport"' in text
    assert "What the words mean" in text
    assert GLOSSARY["row budget"] in text.replace("&#39;", "'")


def test_every_heading_is_in_the_glossary() -> None:
    assert not {*PAGE_HEADINGS, *HEADINGS} - GLOSSARY.keys()


def test_explain_opens_on_the_step_that_emitted_most() -> None:
    assert explained().most_telling == 2
    assert Explanation("auto", []).most_telling == 0


@pytest.mark.slow
@needs_browser
def test_nothing_overflows_or_fails_at_any_width(browser: Any, url: str) -> None:
    for width in (400, 800, 1200):
        for scheme in ("light", "dark"):
            show_at(browser, width, scheme)
            browser.get(url)
            browser.execute_script("document.querySelector('.terms').open = true")
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
            assert browser.execute_script(CONTRAST) >= 4.5, (width, scheme)  # as WCAG asks for
            if width == 1200:
                hidden = "return [...document.querySelectorAll('.scroll')].map((e) => e.scrollWidth - e.clientWidth)"
                assert max(browser.execute_script(hidden), default=0) <= 0
    assert browser.get_log("browser") == []


@pytest.mark.slow
@needs_browser
def test_paper_is_white_and_holds_the_whole_table(browser: Any, url: str) -> None:
    browser.get(url)
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": features})
    paper = "return getComputedStyle(document.documentElement).backgroundColor"
    assert browser.execute_script(paper) == "rgb(255, 255, 255)"
    assert browser.execute_script(CONTRAST) >= 4.5
    shown = "return document.querySelector('.terms dl').getBoundingClientRect().height"
    assert browser.execute_script(shown) > 0  # without a click
    printed = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {})["data"])
    assert printed.startswith(b"%PDF")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


@pytest.mark.slow
@needs_browser
def test_explain_steps_through_the_answer(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By

    file = tmp_path / "explain.html"
    file.write_text(PAGES["explain"](), encoding="utf-8")
    show_at(browser, 400)
    browser.get(file.as_uri())
    which = browser.find_element(By.ID, "which")
    assert which.text == "step 3 of 4"
    assert len(browser.find_elements(By.CSS_SELECTOR, "#tree .node.yes")) == 5
    browser.find_element(By.ID, "on").click()
    assert which.text == "step 4 of 4"
    browser.execute_script("document.querySelector('#text span').click()")
    assert which.text == "step 1 of 4"
    assert "No draft tokens" in browser.find_element(By.ID, "tree").text
    assert "suffix" in browser.find_element(By.ID, "legend").text
    assert browser.get_log("browser") == []
