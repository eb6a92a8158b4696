"""One progress bar at a time, which says what is being done."""

from __future__ import annotations

import time

import pytest
from rich.progress import Progress

from lookfar.core import progress
from lookfar.core.progress import progress_bar


def test_an_inner_bar_changes_the_text_of_the_outer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    update = Progress.update

    def watched(self: Progress, task: object, **changes: object) -> None:
        texts.append(str(changes["description"]))
        update(self, task, **changes)  # type: ignore[arg-type]

    monkeypatch.setattr(Progress, "update", watched)
    with progress_bar("all", 2) as advance:
        with progress_bar("one"), progress_bar("a part of it") as inner:
            inner(5)
        advance(1)
        with pytest.raises(ValueError, match="no"), progress_bar("two"):
            raise ValueError("no")
    assert texts == ["one", "a part of it", "one", "all", "two", "all"]
    assert progress._shown == []


def test_an_inner_bar_says_how_far_along_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    monkeypatch.setattr(Progress, "update", lambda self, task, **changes: texts.append(changes["description"]))
    with progress_bar("all"), progress_bar("packing", 4) as advance:
        advance(1)
        advance(3)
    assert texts == ["packing", "packing, 25 %", "packing, 100 %", "all"]


def test_without_a_terminal_commands_print_a_line_for_each_long_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def waits() -> list[str]:
        with progress_bar("all"), progress_bar("a part"), progress_bar("a part"):
            time.sleep(0.3)
        with progress_bar("a moment"):
            pass
        with progress_bar("a part"):
            time.sleep(0.3)
        return capsys.readouterr().err.splitlines()

    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    monkeypatch.setattr(progress, "_as_lines", False)  # a command that another test ran may have changed it
    assert waits() == []  # a library says nothing
    progress.say_as_lines()
    assert waits() == ["a part …", "a part …"]
