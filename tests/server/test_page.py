"""The page in a real browser: both panes finish with the same text, a tree opens, and nothing is logged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from browser import needs_browser
from helpers import wait_until
from live_server import LiveServer, byte_lm, live_server, slow_down
from lookfar.server.config import ServerConfig
from lookfar.server.keys import load_keys

pytestmark = [pytest.mark.slow, needs_browser]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(byte_lm()) as running:
        yield running


def wait_for(browser: Any, script: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 60, 0.05).until(lambda driver: driver.execute_script(f"return {script}"))


def type_into(browser: Any, element: str, text: str) -> None:
    from selenium.webdriver.common.by import By

    field = browser.find_element(By.ID, element)
    field.clear()
    field.send_keys(text)


VERDICT = "document.getElementById('verdict').textContent"


@pytest.mark.parametrize("width", [1200, 390])
def test_both_panes_show_the_same_text_and_a_step_shows_its_tree(browser: Any, server: LiveServer, width: int) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser.set_window_size(width, 1000)
    browser.get(server.url)
    wait_for(browser, "document.getElementById('model').textContent.startsWith('tiny')")
    type_into(browser, "prompt", "one two three one two three one two")
    browser.find_element(By.ID, "prompt").send_keys(Keys.CONTROL, Keys.ENTER)
    wait_for(browser, f"{VERDICT}.startsWith('The same text')")
    texts = [
        browser.execute_script(f"return document.querySelector('#{pane} .answer').textContent")
        for pane in ("fast", "plain")
    ]
    assert texts[0] == texts[1] != ""
    steps = browser.find_elements(By.CSS_SELECTOR, "#fast .answer span")
    assert len(steps) < len(browser.find_elements(By.CSS_SELECTOR, "#plain .answer span"))
    browser.execute_script("arguments[0].click()", steps[-1])
    assert browser.find_element(By.ID, "tree-title").text == f"Draft tree of step {len(steps)} of {len(steps)}"
    browser.find_element(By.CSS_SELECTOR, "#fast .answer").send_keys(Keys.HOME, Keys.ARROW_RIGHT)
    assert "step 2 of" in browser.find_element(By.ID, "tree-title").text
    assert browser.find_elements(By.CSS_SELECTOR, "#tree .node")
    overflow = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    assert not browser.execute_script(f"return {overflow}")
    assert browser.get_log("browser") == []


def test_a_run_can_be_stopped(browser: Any, server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from selenium.webdriver.common.by import By

    slow_down(server.service.lm, monkeypatch)
    browser.get(server.url)
    type_into(browser, "prompt", "A")
    browser.execute_script("document.querySelector('details').open = true")
    type_into(browser, "max_tokens", "420")
    browser.find_element(By.ID, "run").click()
    browser.find_element(By.ID, "stop").click()
    wait_for(browser, f"{VERDICT} === 'Stopped.'")
    wait_until(lambda: server.is_idle)


def test_errors_are_shown_and_keys_can_be_typed(browser: Any) -> None:
    from selenium.webdriver.common.by import By

    with live_server(byte_lm(), ServerConfig(model_name="tiny"), load_keys(None, "secret")) as server:
        browser.get(server.url)
        browser.find_element(By.ID, "run").click()
        wait_for(browser, f"{VERDICT}.includes('API key')")
        type_into(browser, "key", "secret")
        type_into(browser, "max_tokens", "5000")
        browser.find_element(By.ID, "run").click()
        wait_for(browser, f"{VERDICT}.includes('at most 512')")
        browser.get("about:blank")
    assert all("401" in entry["message"] or "400" in entry["message"] for entry in browser.get_log("browser"))
