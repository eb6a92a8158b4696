"""The facts of `lookfar doctor`: versions, machine, caches, what is accelerated. A probe that fails is a fact, too."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from lookfar.core import compile_ahead
from lookfar.core.cache_dir import cache_dir
from lookfar.core.compiled_dir import compiled_dir
from lookfar.core.cores import cores
from lookfar.version import __version__

Facts = dict[str, str]
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "numba", "triton", "accelerate")
EXTRAS = {
    "demo": ("gguf",),
    "structured": ("llguidance",),
    "serve": ("fastapi", "httpx", "prometheus_client", "uvicorn"),
    "redis": ("redis",),
    "gpu": ("triton",),
    "vllm": ("vllm",),
}
VARIABLES = re.compile(r"LOOKFAR_|NUMBA_|TRITON_|HF_|TRANSFORMERS_|CUDA_|OMP_|MKL_|PYTORCH_|TORCH|USE_LADE$")
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.I)


def diagnose() -> dict[str, Facts]:
    """Return all facts by section."""
    probes: dict[str, Callable[[], Facts]] = {
        "versions": versions,
        "machine": machine,
        "caches": caches,
        "accelerated": accelerated,
        "extras": extras,
        "environment": environment,
    }
    found = {}
    for name, probe in probes.items():
        try:
            found[name] = probe()
        except Exception as error:  # a broken installation is what this command is for
            found[name] = {"failed": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
    return found


def versions() -> Facts:
    return {"lookfar": __version__, "python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def machine() -> Facts:
    """Return the system, the processor and the GPUs."""
    import psutil
    import torch

    memory = psutil.virtual_memory()
    facts = {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "processor": f"{_processor()}, {cores()} cores, torch uses {torch.get_num_threads()} threads",
        "memory": f"{_size(memory.available)} free of {_size(memory.total)}",
    }
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(i)
        major, minor = torch.cuda.get_device_capability(i)
        facts[f"cuda:{i}"] = f"{torch.cuda.get_device_name(i)}, {_size(free)} free of {_size(total)}, sm_{major}{minor}"
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        facts["GPU"] = "none that torch can use" + ("" if built else ": this torch was built without CUDA")
    return facts


def _processor() -> str:
    try:
        described = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        described = None
    return described.group(1) if described else platform.processor() or platform.machine()


def caches() -> Facts:
    """Return the directories in use, their sizes, and whether they can be written."""
    ours = cache_dir()
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface")) / "hub")
    return {
        "lookfar": _directory(ours),
        "compiled code": _directory(compiled_dir()),
        "demo model": _directory(ours / "SmolLM2-135M-Instruct"),
        "hub": f"{_shown(hub.expanduser())}, {_writable(hub.expanduser())}",
    }


def _directory(path: Path) -> str:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else 0
    return f"{_shown(path)}, {_size(size) if path.is_dir() else 'not there yet'}, {_writable(path)}"


def _shown(path: Path) -> str:
    """Return a path without the name of the user."""
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)


def _writable(path: Path) -> str:
    existing = next((folder for folder in (path, *path.parents) if folder.exists()), path)
    return "writable" if os.access(existing, os.W_OK) else "NOT writable: set LOOKFAR_CACHE, or HF_HOME for the hub"


def accelerated() -> Facts:
    """Return what makes steps fast, and why it does not."""
    import torch

    from lookfar.models.compiled_families import FAMILIES, why_no_compiler

    gpu = torch.cuda.is_available()
    no_gpu = "no: there is no GPU that torch can use"
    packing: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    no_triton = "" if find_spec("triton") else 'no: triton is missing (pip install "lookfar[gpu]")'
    graphs = "yes, where the model allows it" if gpu and not no_triton else no_triton if gpu else no_gpu
    return {
        "compiled CPU steps": f"no: {why}" if (why := why_no_compiler()) else f"in float32: {', '.join(FAMILIES)}",
        "packed weights": "other models on a CPU in float32" if packing else "no: torch lacks oneDNN",
        "CUDA graphs": graphs,
        "torch.compile": ("on request (--compile)" if graphs.startswith("yes") else graphs),
        "exact": "always in float32" + ("; in half precision where the model allows it" if gpu else ""),
        "compiled host code": _host_code(),
        "cost curves": "kept" if (cache_dir() / "costs.json").exists() else "none yet: measured on first use",
    }


def _host_code() -> str:
    if compile_ahead.is_compiled():
        return "yes, kept on disk"
    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        return "no: NUMBA_DISABLE_JIT is set"
    if _writable(compiled_dir()) != "writable":
        return "in every process again: the cache cannot be written"
    return "not yet: the first command compiles it, once"


def extras() -> Facts:
    """Return which optional parts are installed."""
    found = {}
    for extra, modules in EXTRAS.items():
        missing = [name for name in modules if find_spec(name) is None]
        found[extra] = f'no {", ".join(missing)}: pip install "lookfar[{extra}]"' if missing else "installed"
    return found


def environment(variables: Mapping[str, str] = os.environ) -> Facts:
    """Return the variables that change how lookfar runs, without secrets."""
    return {name: _harmless(name, variables[name]) for name in sorted(variables) if VARIABLES.match(name)}


def _harmless(name: str, value: str) -> str:
    """Return a value that can be pasted in public: of a URL its scheme, and its host if nothing else is in it."""
    if SECRET.search(name):
        return "(set, not shown)"
    if "://" not in value:
        home = str(Path.home())
        shown = value.replace(home, "~") if len(home) > 1 else value
        return shown if not set("@?") & set(value) else "(set, not shown)"
    if re.fullmatch(r"\w+://[\w.-]+(:\d+)?/?", value):
        return value
    return f"{value.partition('://')[0]}://… (the rest is not shown)"


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
