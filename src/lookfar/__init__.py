"""lookfar: the same text, in fewer steps."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lookfar.version import __version__

if TYPE_CHECKING:
    from lookfar.config import Jacobi, Lookahead
    from lookfar.errors import LookfarError
    from lookfar.lm import LM, Completion
    from lookfar.loading import load
    from lookfar.stats import Stats

__all__ = ["LM", "Completion", "Jacobi", "Lookahead", "LookfarError", "Stats", "__version__", "load"]

# Looked up when first used, so that `lookfar --help` does not wait for torch.
_HOME = {
    "LM": "lm",
    "Completion": "lm",
    "Jacobi": "config",
    "Lookahead": "config",
    "LookfarError": "errors",
    "Stats": "stats",
    "load": "loading",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lookfar' has no attribute {name!r}")
    return getattr(import_module(f"lookfar.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
