"""The file of cost curves, one for each model and machine, and what was learned about speculation there."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lookfar.core.files import read_json, update_json
from lookfar.core.plan import RunnerLimits
from lookfar.speculation.cost_curve import NO_LIMITS, CostCurve

VERSION = 5  # files of other versions are dropped


@dataclass(frozen=True)
class Experience:
    """What was learned about speculation in steps of one kind."""

    speculating: bool  # whether it paid
    fixed: float  # host seconds of a speculative step
    per_row: float  # and for each of its rows


def nearest_experience(known: Mapping[str, Experience], kind: str) -> Experience | None:
    """Return what is known of steps of a kind, or else of the nearest number of requests, sampled alike.

    Whether speculation pays for one sampled request says nothing about several, whose rows cost more to sample.
    """
    requests, _, sampled = kind.partition(" ")
    like = {int(other.split()[0]): found for other, found in known.items() if other.partition(" ")[2] == sampled}
    if not like:
        return None
    nearest = min(like, key=lambda number: abs(math.log2(number / int(requests))))
    found, more = like[nearest], int(requests) / nearest
    tells = nearest > 1 or requests == "1" or not sampled
    return Experience(found.speculating and tells, found.fixed * more, found.per_row)


@dataclass
class KnownCosts:
    """What is known of a model on a machine."""

    curve: CostCurve
    experience: Mapping[str, Experience] = field(default_factory=dict)  # by the kind of step


def read_costs(path: Path, key: str, limits: RunnerLimits = NO_LIMITS) -> KnownCosts | None:
    """Return what the file knows of a model on a machine; None if that is nothing, or nonsense."""
    found = read_json(path)
    try:
        if found["version"] != VERSION:
            return None
        kept = found["curves"][_digest(key)]
        seconds = _numbers(kept["seconds"])
        if min(seconds) != 1 or len(seconds) < 2 or not all(value > 0 for value in seconds.values()):
            return None
        curve = CostCurve(seconds, limits, _numbers(kept["visits"]))
        experience = {
            kind: Experience(bool(on), float(fixed), float(per_row))
            for kind, (on, fixed, per_row) in kept["experience"].items()
        }
        return KnownCosts(curve, experience)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def write_costs(path: Path, key: str, curve: CostCurve, experience: Mapping[str, Experience]) -> None:
    """Keep what is known for later processes. If it cannot be written, it is measured again next time."""
    record = {
        "of": key,
        "seconds": curve.as_measured(),
        "visits": {int(n): float(v) for n, v in zip(curve.rows, curve.visits, strict=True)},
        "experience": {kind: (one.speculating, one.fixed, one.per_row) for kind, one in experience.items()},
    }

    def add(found: Any) -> dict[str, Any]:
        known = isinstance(found, dict) and found.get("version") == VERSION and isinstance(found.get("curves"), dict)
        return {"version": VERSION, "curves": (found["curves"] if known else {}) | {_digest(key): record}}

    with suppress(OSError):
        update_json(path, add)


def _numbers(kept: Mapping[str, Any]) -> dict[int, float]:
    found = {int(rows): float(value) for rows, value in kept.items()}
    if not all(map(math.isfinite, found.values())):
        raise ValueError
    return found


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]
