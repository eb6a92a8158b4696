"""Only one thread of a process keeps OpenMP workers: the one that computes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lookfar.engine.thread_pool import _pause_function

SCRIPT = """
import os, torch, lookfar
from families import tiny_model
from lookfar.engine.thread_pool import release_thread_pool

def workers():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
before = workers()
torch.ones(600, 600) @ torch.ones(600, 600)
assert workers() == before + 2, "torch has no pool"
release_thread_pool()
release_thread_pool()
assert workers() == before, "the pool is still there"
torch.ones(600, 600) @ torch.ones(600, 600)
assert workers() == before + 2, "there is no new pool"
lm = lookfar.LM(tiny_model("llama"), strategy="none", pack=False)
seen = []
lm.generate([1, 2, 3], max_new_tokens=4, logits_processor=[lambda ids, scores: seen.append(workers()) or scores])
assert min(seen) <= before + 1 + 2, "the waiting thread kept its pool"
print("done")
"""


@pytest.mark.slow
@pytest.mark.skipif(_pause_function() is None, reason="torch does not use libgomp here")
def test_a_waiting_thread_gives_up_its_workers() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-c", SCRIPT]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert shown.stdout.strip() == "done", shown.stderr
