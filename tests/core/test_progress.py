"""One progress bar at a time, which says what is being done."""

from __future__ import annotations

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
