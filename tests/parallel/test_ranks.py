"""The environment that torchrun sets, and mistakes in it."""

from __future__ import annotations

import pytest
import torch

from lookfar import parallel
from lookfar.errors import ConfigError
from lookfar.ranks import Ranks, find_ranks, own_rank
from lookfar.testing import tiny_model

TORCHRUN = {
    "WORLD_SIZE": "2",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
}


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_without_torchrun_there_is_one_rank_and_the_ordinary_engine() -> None:
    assert find_ranks(None) == Ranks()
    lm = parallel.LM(tiny_model())
    engine = lm.engine
    assert parallel.attach(lm) is lm
    assert lm.engine is engine
    with pytest.raises(ConfigError, match="Only ranks that follow"):
        parallel.follow(lm)


def test_ranks_on_a_cpu(torchrun: pytest.MonkeyPatch) -> None:
    assert find_ranks("cpu") == Ranks(1, 2, "cpu")
    torchrun.setattr(torch.cuda, "is_available", lambda: False)
    assert find_ranks(None) == Ranks(1, 2, "cpu")


def test_every_rank_takes_its_gpu(torchrun: pytest.MonkeyPatch) -> None:
    torchrun.setattr(torch.cuda, "is_available", lambda: True)
    torchrun.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_ranks(None).device == find_ranks("cuda").device == "cuda:1"
    with pytest.raises(ConfigError, match="remove device='cuda:0'"):
        find_ranks("cuda:0")
    torchrun.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="2 ranks were started on a machine with 1 GPUs: .*--nproc-per-node 1"):
        find_ranks(None)


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR"])
def test_a_world_size_without_torchrun(torchrun: pytest.MonkeyPatch, name: str) -> None:
    torchrun.delenv(name)
    with pytest.raises(ConfigError, match=f"WORLD_SIZE is 2, but {name} is not set: start the ranks with torchrun"):
        find_ranks("cpu")


def test_a_rank_without_a_world_size_is_no_rank(torchrun: pytest.MonkeyPatch) -> None:
    torchrun.setenv("RANK", "1")
    torchrun.delenv("WORLD_SIZE")
    assert own_rank() == 0
    torchrun.setenv("WORLD_SIZE", "1")
    assert own_rank() == 0


def test_a_world_size_that_is_no_number(torchrun: pytest.MonkeyPatch) -> None:
    torchrun.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE must be a whole number"):
        find_ranks("cpu")
