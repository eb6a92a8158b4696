"""Host code is compiled once in a second process; its failure is no error, and it never outlives the command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lookfar.core import compile_ahead

COUNT = """
import numba.core.event as event
compiled = []
class Listener(event.Listener):
    def on_start(self, e): compiled.append(e.data["dispatcher"].py_func.__qualname__)
    def on_end(self, e): pass
event.register("numba:compile", Listener())
import torch
torch.set_num_threads(1)
from transformers import LlamaConfig, LlamaForCausalLM
from lookfar.lm import LM
shape = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
for batch in (1, 3):
    lm = LM(LlamaForCausalLM(LlamaConfig(vocab_size=99, max_position_embeddings=512, **shape)), max_batch=batch)
    prompts = [[5, 6, 7, 8] * 4] * batch
    lm.generate(prompts, max_new_tokens=30)
    lm.generate(prompts, max_new_tokens=30, do_sample=True, seed=1)
print(compiled)
"""


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache."""
    monkeypatch.setenv("LOOKFAR_CACHE", str(tmp_path))
    monkeypatch.setattr(compile_ahead, "compiled_dir", lambda: tmp_path / "compiled")
    monkeypatch.setattr(compile_ahead, "is_compiled", lambda: compile_ahead.marker().exists())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    return tmp_path


def command(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let the second process run this code instead."""
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: start([sys.executable, "-c", code], **options))


def test_it_runs_once_and_its_failure_is_no_error(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, "raise SystemExit(3)")
    compile_ahead.start()
    compile_ahead.start()
    assert len(compile_ahead._running) == 1
    compile_ahead.wait()
    assert not compile_ahead.is_compiled()
    compile_ahead.done()
    assert compile_ahead.is_compiled()
    compile_ahead.start()
    assert not compile_ahead._running
    compile_ahead.wait()  # nothing to wait for


def test_a_single_core_compiles_by_itself(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    compile_ahead.start()
    assert not compile_ahead._running


def test_it_ends_with_the_command(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, "import time; time.sleep(600)")
    compile_ahead.start()
    process = compile_ahead._running[0]
    compile_ahead.stop()
    assert process.returncode is not None
    assert not compile_ahead._running


@pytest.mark.slow
def test_nothing_is_left_to_compile_afterwards(cold: Path) -> None:
    """Single requests and batches, greedy and sampled, of another model."""
    environment = os.environ | {"LOOKFAR_CACHE": str(cold), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-m", "lookfar.rehearsal"], env=environment, check=True, timeout=300)
    again = subprocess.run(
        [sys.executable, "-c", COUNT], env=environment, check=True, timeout=300, capture_output=True, text=True
    )
    assert again.stdout.splitlines()[-1] == "[]"
