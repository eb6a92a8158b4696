"""lookfar: the same text, in fewer steps."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lookfar.version import __version__

if TYPE_CHECKING:
    from lookfar import bench
    from lookfar.config import DraftModel, Jacobi, Lookahead, PromptLookup, Recycle, Suffix, Trie
    from lookfar.errors import LookfarError
    from lookfar.integrations.attached import last_stats
    from lookfar.integrations.transformers import accelerate, generate, restore
    from lookfar.lm import LM, Chunk, Completion
    from lookfar.loading import load
    from lookfar.stats import Stats
    from lookfar.store import Store

__all__ = [
    "LM",
    "Chunk",
    "Completion",
    "DraftModel",
    "Jacobi",
    "Lookahead",
    "LookfarError",
    "PromptLookup",
    "Recycle",
    "Stats",
    "Store",
    "Suffix",
    "Trie",
    "__version__",
    "accelerate",
    "bench",
    "generate",
    "last_stats",
    "load",
    "restore",
]

# Looked up when first used, so that `lookfar --help` does not wait for torch.
_HOME = {
    "LM": "lm",
    "Chunk": "lm",
    "Completion": "lm",
    "DraftModel": "config",
    "Jacobi": "config",
    "Lookahead": "config",
    "LookfarError": "errors",
    "PromptLookup": "config",
    "Recycle": "config",
    "Stats": "stats",
    "Store": "store",
    "Suffix": "config",
    "Trie": "config",
    "accelerate": "integrations.transformers",
    "generate": "integrations.transformers",
    "last_stats": "integrations.attached",
    "load": "loading",
    "restore": "integrations.transformers",
}


def __getattr__(name: str) -> Any:
    if name == "bench":
        return import_module("lookfar.bench")
    if name not in _HOME:
        raise AttributeError(f"module 'lookfar' has no attribute {name!r}")
    return getattr(import_module(f"lookfar.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
