"""Settings and fixtures of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

if os.environ.get("LOOKFAR_TEST_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run without a GPU; set before torch imports triton

# One thread, also in processes that tests start: two test processes with two threads each would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import transformers
from transformers import PreTrainedModel

from browser import browser  # noqa: F401  a fixture
from families import DEVICE, tiny_model
from helpers import eager_engine
from lookfar.engine.engine import Engine

transformers.logging.set_verbosity_error()
hypothesis.settings.register_profile("lookfar", deadline=None)  # the first call may compile
hypothesis.settings.load_profile("lookfar")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if DEVICE == "cpu" and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU (LOOKFAR_TEST_DEVICE=cuda)"))


@pytest.fixture(autouse=True, scope="session")
def own_cache_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep cost curves and profiles of tiny models out of the user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lookfar.engine.costs.cache_dir", lambda: folder)
        patch.setattr("lookfar.engine.prior.cache_dir", lambda: folder)
        patch.setattr("lookfar.profiles.cache_dir", lambda: folder)
        patch.setattr("lookfar.core.compile_ahead.is_compiled", lambda: True)  # no second processes
        yield


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def engine(llama: PreTrainedModel) -> Engine:
    return eager_engine(llama, prefill_chunk=16)
