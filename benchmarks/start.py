"""Cold and warm starts: seconds to the first token, and until full speed, each in a process of its own.

    python benchmarks/start.py --device cpu                  # on a GPU: --device cuda --compile

First from an empty cache directory, then in a second process that finds what the first one kept; without and with
`lm.warmup()`. All seconds count from the start of the process. Full speed is reached with the first of a row of equal
requests from which on all take at most 1.2 times the median of the last ones; START_REQUESTS and START_TOKENS set their
number and length. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter, time
from typing import Any

PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle."
SLOWER = 1.2
NEW, REQUESTS = (int(os.environ.get(name, usual)) for name, usual in (("START_TOKENS", 32), ("START_REQUESTS", 8)))


def measure(device: str, compiled: bool, dtype: str | None = None) -> Iterator[dict[str, Any]]:
    """Run all starts, one after the other, and yield their results."""
    for warm in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            for which in ("empty cache", "second process"):
                result = _in_a_process(Path(folder), device, compiled, dtype, warm)
                yield {"cache": which, "warmup": warm, "compiled": compiled} | result


def _in_a_process(folder: Path, device: str, compiled: bool, dtype: str | None, warm: bool) -> dict[str, Any]:
    from lookfar.core.cache_dir import cache_dir

    for kept in cache_dir().glob("SmolLM2*"):  # the model itself is there already
        if not (folder / kept.name).exists():
            (folder / kept.name).symlink_to(kept)
    caches = {"LOOKFAR_CACHE": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
    asked = {"device": device, "compiled": compiled, "dtype": dtype, "warm": warm, "began": time()}
    command = [sys.executable, __file__, "--child", json.dumps(asked)]
    done = subprocess.run(command, env=os.environ | caches, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def child(asked: dict[str, Any]) -> dict[str, Any]:
    """Start, decode, and return when each thing was done."""
    earlier = time() - asked["began"] - perf_counter()
    now = lambda: earlier + perf_counter()  # noqa: E731  seconds since the process was started
    import lookfar

    options: dict[str, Any] = {"compile": True} if asked["compiled"] else {}
    lm = lookfar.load("demo", device=asked["device"], dtype=asked["dtype"], max_batch=1, **options)
    ids = lm.chat_ids([{"role": "user", "content": PROMPT}])
    seconds = {"loaded": now()}
    if asked["warm"]:
        lm.warmup(length=len(ids) + NEW)
        seconds["warmed_up"] = now()
    starts, took = [], []
    for _ in range(REQUESTS):
        lm.forget()
        starts.append(now())
        with lm.stream(ids, max_new_tokens=NEW) as stream:
            next(iter(stream))
            seconds.setdefault("first_token", now())
            for _chunk in stream:
                pass
        took.append(now() - starts[-1])
    usual = median(took[REQUESTS // 2 :])
    slow = [i for i, one in enumerate(took) if one > SLOWER * usual]
    full = starts[min(slow[-1] + 1, REQUESTS - 1)] if slow else starts[0]
    return seconds | {"full_speed": full, "first_request": took[0], "usual_request": usual}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(json.loads(options.child))))
        return
    found = []
    for result in measure(options.device, options.compile, options.dtype):
        found.append(result)
        print(" · ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in result.items()), flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
