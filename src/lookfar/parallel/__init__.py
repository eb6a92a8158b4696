"""Lookahead parallelism: ranks that hold the whole model share the rows of each step and exchange tokens only.

`torchrun --nproc-per-node 2 script.py`, where the script calls `lookfar.parallel.load` (docs/parallel.md).
"""

from __future__ import annotations

import atexit
import signal
import threading
import warnings
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from lookfar import loading
from lookfar.engine.driver import Driver
from lookfar.engine.engine import Engine
from lookfar.engine.request import Request
from lookfar.errors import ConfigError, LookfarError, LookfarWarning, ModelError, RankError, first_sentence
from lookfar.lm import LM
from lookfar.parallel.follower import Follower, send_answer, send_failure
from lookfar.parallel.followers import Followers
from lookfar.parallel.group import Group
from lookfar.parallel.identity import model_identity
from lookfar.parallel.runner import ParallelRunner
from lookfar.ranks import Ranks, find_ranks, own_rank, world_size
from lookfar.runners.base import ModelRunner

__all__ = ["attach", "follow", "load", "own_rank", "world_size"]

TIMEOUT = 300.0  # seconds
NO_MEDIA = "prompts with images, audio or video are not shared by ranks"
_groups: list[Group] = []  # at most one


def load(name: str, *, device: str | None = None, timeout: float = TIMEOUT, follows: bool = True, **options: Any) -> LM:
    """Load a model on every rank that torchrun has started; options are those of `lookfar.load`.

    On rank 0 this returns an LM whose steps are shared by all ranks. On the other ranks it does not return: they
    compute their shares until rank 0 ends, then their process ends. With `follows=False` it does return there, and
    `follow` has to be called. Without torchrun it is `lookfar.load`. `timeout` is the most seconds to wait for a rank.
    """
    ranks = find_ranks(device)
    if ranks.size == 1:
        return loading.load(name, device=device, **options)
    group = _join(ranks, timeout)
    if group.rank:
        options |= dict.fromkeys(("store", "share"))  # rank 0 drafts
    try:
        lm = loading.load(name, device=ranks.device, **options)
    except Exception as error:
        if group.rank:
            send_failure(group, f"{first_sentence(error)}.")
            raise SystemExit(1) from None
        followers = Followers(group)
        with suppress(RankError):
            followers.hello()
        _end(None, followers)
        raise
    return _share(lm, group, follows)


def attach(lm: LM, *, timeout: float = TIMEOUT, follows: bool = True) -> LM:
    """Share the steps of an LM, on every rank, with the same model; otherwise as `load`. Before its first request."""
    ranks = find_ranks(lm.device.type)
    if ranks.size == 1:
        return lm
    if str(lm.device) != ranks.device:
        raise ConfigError(f"The model is on {lm.device}: load it on {ranks.device} on this rank.")
    return _share(lm, _join(ranks, timeout), follows)


def follow(lm: LM) -> int:
    """Compute shares of rank 0's steps until it ends; returns the exit code. On ranks that follow."""
    engine = lm.engine
    if not isinstance(engine, FollowingEngine):
        raise ConfigError("Only ranks that follow rank 0 call `follow`: it is for ranks above 0 under torchrun.")
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):  # torchrun passes them to all ranks: rank 0 decides when to end
            before[number] = signal.signal(number, signal.SIG_IGN)
    try:
        return Follower(engine.runner, engine.group).run()
    except RankError:
        if engine.group.rank > 1:  # rank 1 says so
            return 1
        raise
    finally:
        engine.group.leave()
        for number, handler in before.items():
            signal.signal(number, handler)


class FollowingEngine(Engine):
    """The engine of a rank that follows: it takes no requests."""

    def __init__(self, engine: Engine, group: Group) -> None:
        super().__init__(engine.runner, engine.config, engine.draft_state)
        self.group = group

    def check(self, request: Request) -> None:
        raise RankError(f"Rank {self.group.rank} follows rank 0: call generate on rank 0, and parallel.follow here.")


def why_alone(runner: ModelRunner) -> str:
    """Return why the steps of a model cannot be shared; empty if they can."""
    support = runner.model.support
    if support.encoder_decoder:
        return "the KV of its encoder is computed on one rank"
    if support.mode == "chain":
        return "its drafts are verified as one chain, which has no branches to share"
    return support.reason if support.mode == "none" else ""


def _join(ranks: Ranks, timeout: float) -> Group:
    if _groups:
        raise ConfigError("The ranks share one model already: start another torchrun for another model.")
    if ranks.device.startswith("cuda"):
        torch.cuda.set_device(ranks.device)
    _groups.append(Group(ranks, timeout))
    return _groups[0]


def _share(lm: LM, group: Group, follows: bool) -> LM:
    """Make the engine of rank 0 use all ranks, or follow."""
    identity = model_identity(lm.engine.runner)
    if group.rank:
        lm.engine = FollowingEngine(lm.engine, group)
        lm.driver = Driver(lm.engine)
        send_answer(group, identity)
        if follows:
            raise SystemExit(follow(lm))
        return lm
    followers = Followers(group)
    try:
        for rank, other in enumerate(followers.hello(), 1):
            if not np.array_equal(other, identity):
                raise ModelError(
                    f"Rank {rank} has another model than rank 0, or other versions of lookfar, torch or transformers: "
                    "all ranks need the same."
                )
    except LookfarError:
        _end(None, followers)
        raise
    atexit.register(_end, lm, followers)
    reason = why_alone(lm.engine.runner)
    if reason:
        warnings.warn(
            f"{lm.engine.runner.model.support.model_type} decodes on rank 0 alone: {reason}.", LookfarWarning, 3
        )
        return lm
    return use_ranks(lm, followers)


def use_ranks(lm: LM, followers: Followers) -> LM:
    """Let the steps of an LM be shared by ranks that follow."""
    lm.engine.runner.model.first_pass_refused = NO_MEDIA
    lm.engine = Engine(ParallelRunner(lm.engine.runner, followers), lm.engine.config, lm.engine.draft_state)
    lm.driver = Driver(lm.engine)
    return lm


def _end(lm: LM | None, followers: Followers) -> None:
    """End the group, after the step that is under way."""
    if not followers.group.is_own:
        return
    if lm is not None:
        lm.driver.close()
    followers.end()
    followers.group.leave()
