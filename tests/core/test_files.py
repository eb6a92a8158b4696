"""Files are replaced as a whole, and what a killed process leaves is removed by the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lookfar.core.files import read_json, replace_file, update_json

SLOW_SAVE = """
import sys, time
from pathlib import Path
from lookfar.core.files import replace_file

def parts():
    yield b"half"
    print("writing", flush=True)
    time.sleep(60)

replace_file(Path(sys.argv[1]), parts())
"""


def save_slowly(path: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", SLOW_SAVE, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"writing\n"
    return process


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.skipif(sys.platform == "win32", reason="files of killed processes stay there")
def test_a_killed_save_is_cleaned_up_by_the_next_one(tmp_path: Path) -> None:
    path, other = tmp_path / "a.store", tmp_path / "a.store.b"
    path.write_bytes(b"old")
    killed, alive = save_slowly(path), save_slowly(path)
    try:
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        assert path.read_bytes() == b"old"
        assert len(names(tmp_path)) == 3
        replace_file(other, [b"x"])
        assert len(names(tmp_path)) == 4  # another file's are left alone
        replace_file(path, [b"new"])
        assert path.read_bytes() == b"new"
        assert len(names(tmp_path)) == 3  # one is still being written
    finally:
        alive.kill()
        alive.communicate()
    replace_file(path, [b"newer"])
    assert names(tmp_path) == ["a.store", "a.store.b"]


def test_a_failed_save_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def parts():  # type: ignore[no-untyped-def]
        yield b"some"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        replace_file(path, parts())
    assert names(tmp_path) == ["file"]
    assert path.read_bytes() == b"old"


def test_json_that_cannot_be_read_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "values.json"
    for damaged in (None, b"", b"{", b"\xff\xfe", b"[" * 100_000):
        path.parent.mkdir(exist_ok=True)
        if damaged is not None:
            path.write_bytes(damaged)
        assert read_json(path) is None
        update_json(path, lambda old: {"was": old})
        assert read_json(path) == {"was": None}
    os.remove(path)
    os.remove(f"{path}.lock")
    path.parent.rmdir()
    update_json(path, lambda old: [1])  # the directory has vanished
    assert read_json(path) == [1]


def test_processes_that_update_at_once(tmp_path: Path) -> None:
    path = tmp_path / "n.json"
    script = (
        "import sys; from pathlib import Path; from lookfar.core.files import update_json\n"
        "for _ in range(20): update_json(Path(sys.argv[1]), lambda n: (n or 0) + 1)"
    )
    started = time.monotonic()
    together = [subprocess.Popen([sys.executable, "-c", script, str(path)]) for _ in range(3)]
    assert [process.wait() for process in together] == [0, 0, 0]
    assert read_json(path) == 60
    assert time.monotonic() - started < 60
