"""lookfar: the same text, in fewer steps."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lookfar.version import __version__

if TYPE_CHECKING:
    from lookfar import bench
    from lookfar.drafters.base import DraftContext, Drafter, HiddenRows, Outcome, Predictions, Proposal, Strategy
    from lookfar.drafters.draft_model import DraftModel
    from lookfar.drafters.jacobi import Jacobi
    from lookfar.drafters.lookahead import Lookahead
    from lookfar.drafters.mtp import Mtp
    from lookfar.drafters.prompt_lookup import PromptLookup
    from lookfar.drafters.recycle import Recycle
    from lookfar.drafters.registry import register
    from lookfar.drafters.suffix import Suffix
    from lookfar.drafters.trie import Trie
    from lookfar.engine.outputs import StepOutput
    from lookfar.engine.stats import Stats
    from lookfar.errors import (
        CapacityError,
        ConfigError,
        DemoError,
        LookfarError,
        LookfarWarning,
        ModelError,
        RankError,
        RequestError,
        StoreError,
    )
    from lookfar.integrations.transformers.loop import accelerate, generate, restore
    from lookfar.integrations.transformers.state import last_stats, refresh
    from lookfar.lm import LM
    from lookfar.loading import load
    from lookfar.retrieval.draft_store import DraftStore
    from lookfar.sampling.grammar import constrain
    from lookfar.sharing.share import Share
    from lookfar.streams import Chunk, Completion, Stream

# Where each public name is defined. Names are imported on first use, so that `lookfar --help` does not wait for torch.
_MODULES = {
    "lm": ("LM",),
    "streams": ("Chunk", "Completion", "Stream"),
    "loading": ("load",),
    "engine.outputs": ("StepOutput",),
    "engine.stats": ("Stats",),
    "retrieval.draft_store": ("DraftStore",),
    "integrations.transformers.loop": ("accelerate", "generate", "restore"),
    "integrations.transformers.state": ("last_stats", "refresh"),
    "drafters.base": ("DraftContext", "Drafter", "HiddenRows", "Outcome", "Predictions", "Proposal", "Strategy"),
    "drafters.registry": ("register",),
    "drafters.draft_model": ("DraftModel",),
    "drafters.jacobi": ("Jacobi",),
    "drafters.lookahead": ("Lookahead",),
    "drafters.mtp": ("Mtp",),
    "drafters.prompt_lookup": ("PromptLookup",),
    "drafters.recycle": ("Recycle",),
    "drafters.suffix": ("Suffix",),
    "drafters.trie": ("Trie",),
    "sampling.grammar": ("constrain",),
    "sharing.share": ("Share",),
    "errors": (
        "CapacityError",
        "ConfigError",
        "DemoError",
        "LookfarError",
        "LookfarWarning",
        "ModelError",
        "RankError",
        "RequestError",
        "StoreError",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "LM",
    "CapacityError",
    "Chunk",
    "Completion",
    "ConfigError",
    "DemoError",
    "DraftContext",
    "DraftModel",
    "DraftStore",
    "Drafter",
    "HiddenRows",
    "Jacobi",
    "Lookahead",
    "LookfarError",
    "LookfarWarning",
    "ModelError",
    "Mtp",
    "Outcome",
    "Predictions",
    "PromptLookup",
    "Proposal",
    "RankError",
    "Recycle",
    "RequestError",
    "Share",
    "Stats",
    "StepOutput",
    "StoreError",
    "Strategy",
    "Stream",
    "Suffix",
    "Trie",
    "__version__",
    "accelerate",
    "bench",
    "constrain",
    "generate",
    "last_stats",
    "load",
    "refresh",
    "register",
    "restore",
]


def __getattr__(name: str) -> Any:
    if name == "bench":
        return import_module("lookfar.bench")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'lookfar' has no attribute {name!r}")
    return getattr(import_module(f"lookfar.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
