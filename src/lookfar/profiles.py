"""Profiles: the settings that `lookfar tune` found, kept for each model and machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lookfar.core.cache_dir import cache_dir
from lookfar.core.files import read_json, update_json
from lookfar.drafters.base import Strategy
from lookfar.drafters.registry import strategy_class
from lookfar.engine.costs import machine_and_model
from lookfar.errors import ConfigError
from lookfar.runners.base import ModelRunner
from lookfar.speculation.row_budget import Budget

FORMAT = "lookfar profile 1"


@dataclass
class Profile:
    """The settings that `load` uses when it is given none."""

    strategies: tuple[Strategy, ...]
    budget: Budget
    speed_up: float  # over the defaults, on prompts that were not used for choosing
    over_none: float  # over decoding without speculation
    tried: list[tuple[str, float, int]] = field(default_factory=list)  # name, tokens per second, rounds


def save_profile(runner: ModelRunner, profile: Profile, path: Path | None = None) -> Path:
    """Keep a profile where `load` finds it; return the file."""
    path = path or profiles_file()
    record = {
        "strategies": [{"name": strategy.name} | vars(strategy) for strategy in profile.strategies],
        "budget": profile.budget,
        "speed_up": profile.speed_up,
        "over_none": profile.over_none,
    }

    def add(found: Any) -> dict[str, Any]:
        return {"format": FORMAT, "profiles": _profiles(found) | {machine_and_model(runner): record}}

    try:
        update_json(path, add)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error
    return path


def find_profile(runner: ModelRunner, path: Path | None = None) -> Profile | None:
    """Return the profile of this model on this machine; None if there is none, or it cannot be read."""
    found = _profiles(read_json(path or profiles_file())).get(machine_and_model(runner))
    try:
        if found is None:
            return None
        strategies = []
        for item in found["strategies"]:
            values = {key: tuple(v) if isinstance(v, list) else v for key, v in item.items() if key != "name"}
            strategies.append(strategy_class(item["name"])(**values))
        return Profile(tuple(strategies), found["budget"], float(found["speed_up"]), float(found["over_none"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def profiles_file() -> Path:
    return cache_dir() / "profiles.json"


def _profiles(found: Any) -> dict[str, Any]:
    """Return the profiles of a file's contents; none if it is not one of ours."""
    try:
        return dict(found["profiles"]) if found["format"] == FORMAT else {}
    except (ValueError, KeyError, TypeError):
        return {}
