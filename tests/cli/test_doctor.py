"""`lookfar` alone, and `lookfar doctor`: one screen without secrets, on any installation."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lookfar.cli import app, diagnosis

SECTIONS = ["versions", "machine", "caches", "accelerated", "extras", "environment"]


def test_no_arguments_are_a_welcome() -> None:
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0
    assert all(f"lookfar {command}" in result.stdout for command in ("compare", "chat", "explain", "doctor"))
    assert len(result.stdout.splitlines()) < 20


def test_the_screen_and_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 0
    assert len(shown.stdout.splitlines()) < 60
    record = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert list(record) == SECTIONS
    assert record["versions"]["torch"] in shown.stdout
    assert "writable" in record["caches"]["lookfar"]
    assert record["extras"]["demo"] == "installed"
    assert (
        "no: there is no GPU" in record["accelerated"]["CUDA graphs"] or "yes" in record["accelerated"]["CUDA graphs"]
    )


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {
        "LOOKFAR_SHARE": "redis://user:hunter2@cache.example:6379/0?password=hunter2",
        "LOOKFAR_API_KEYS": "hunter2",
        "LOOKFAR_API_KEY": "hunter2",
        "HF_TOKEN": "hunter2",
        "LOOKFAR_CACHE": "user:hunter2@host",
        "CUDA_VISIBLE_DEVICES": "0",
        "UNRELATED": "hunter2",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    for options in ([], ["--json"]):
        result = CliRunner().invoke(app, ["doctor", *options])
        assert result.exit_code == 0
        text = result.stdout.replace(str(Path("user:hunter2@host")), "")  # the cache directory itself
        assert "hunter2" not in text
        assert "redis://… (the rest is not shown)" in text
    for url in (
        "redis://tok/hunter2@host",
        "redis://:p[hunter2@host",
        "host:1?password=hunter2",
        "redis://u:hunter2℀@host",
    ):
        assert "hunter2" not in str(diagnosis.environment({"LOOKFAR_SHARE": url}))
    assert diagnosis.environment({"LOOKFAR_SHARE": "redis://host:1"}) == {"LOOKFAR_SHARE": "redis://host:1"}
    shown = diagnosis.environment(secrets)
    assert shown["CUDA_VISIBLE_DEVICES"] == "0"
    assert shown["HF_TOKEN"] == "(set, not shown)"
    assert "UNRELATED" not in shown


def test_a_broken_installation_is_a_fact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # an import raises
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOOKFAR_CACHE", str(tmp_path / "file" / "below"))
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    record = json.loads(result.stdout)
    assert record["machine"]["failed"].startswith("ModuleNotFoundError")
    assert record["versions"]["lookfar"]


def test_help_and_version_do_not_wait_for_torch() -> None:
    slow = "import sys; sys.argv = ['lookfar', *{}]; import lookfar.cli\ntry: lookfar.cli.main()\nfinally: "
    for arguments in (["--help"], ["--version"], []):
        code = slow.format(arguments) + "assert not {'torch', 'transformers', 'numba'} & sys.modules.keys()"
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        assert time.perf_counter() - began < 5  # 0.2 seconds on an idle machine
