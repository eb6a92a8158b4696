"""Silencing the messages of transformers while lookfar shows its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import transformers


@contextmanager
def quiet() -> Iterator[None]:
    """Switch off the progress bars and notices of transformers while the context is open."""
    level, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        hub.setLevel(hub_level)
        if bars:
            transformers.logging.enable_progress_bar()
