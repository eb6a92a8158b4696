"""The records of a benchmark, one for each call, in one JSON file; every number is derived from them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lookfar.core.files import replace_file
from lookfar.errors import ConfigError

FORMAT = "lookfar bench 2"


@dataclass
class Run:
    """One call of one method: a prompt, or as many as the batch has."""

    suite: str
    prompts: list[str]  # their ids
    method: str
    batch: int  # prompts at once; the last call of a suite may have fewer
    repeat: int
    outputs: list[list[int]]  # the tokens of each prompt
    seconds: float
    first_token: float  # seconds until the first token
    steps: list[tuple[float, int, int]]  # of every sequence: seconds, rows, tokens
    drafts: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # source → by depth: verified, accepted
    host_seconds: float = 0.0
    peak_bytes: int = 0

    @property
    def key(self) -> tuple[str, tuple[str, ...], str, int, int]:
        return self.suite, tuple(self.prompts), self.method, self.batch, self.repeat

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))


@dataclass
class Results:
    """All runs of a benchmark, and the settings that they were made with."""

    settings: dict[str, Any]  # have to be the same for a benchmark to be resumed
    machine: dict[str, Any] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)  # rows → seconds of a step
    runs: list[Run] = field(default_factory=list)

    def save(self, path: Path) -> None:
        try:
            replace_file(path, [json.dumps({"format": FORMAT} | asdict(self)).encode()])
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read a file; other files are refused."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
        except ValueError:
            raise ConfigError(
                f"{path} is not JSON, perhaps cut off: give another file, or delete it and measure again."
            ) from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ConfigError(f"{path} is not a file of `lookfar bench`: give another one.")
        try:
            results = cls(dict(found["settings"]), dict(found["machine"]), dict(found["costs"]))
            results.runs = [_run(item) for item in found["runs"]]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ConfigError(f"{path} is damaged: measure again.") from None
        if len({run.key for run in results.runs}) < len(results.runs):
            raise ConfigError(f"{path} holds a run twice: measure again.")
        return results

    def to_pandas(self) -> Any:
        """Return a data frame with one row for each run, without the tokens. Needs pandas."""
        try:
            import pandas
        except ImportError:
            raise ConfigError("to_pandas needs pandas: pip install pandas.") from None
        left_out = ("outputs", "steps", "drafts", "prompts")
        rows = [{k: v for k, v in asdict(run).items() if k not in left_out} for run in self.runs]
        for row, run in zip(rows, self.runs, strict=True):
            row |= {"prompts": " ".join(run.prompts), "tokens": run.tokens, "steps": len(run.steps)}
        return pandas.DataFrame(rows)


def _run(item: dict[str, Any]) -> Run:
    run = Run(**{f.name: item[f.name] for f in fields(Run)})
    run.steps = [(float(seconds), int(rows), int(tokens)) for seconds, rows, tokens in run.steps]
    run.drafts = {name: [(int(a), int(b)) for a, b in depths] for name, depths in run.drafts.items()}
    run.outputs = [[int(token) for token in output] for output in run.outputs]
    if len(run.outputs) != len(run.prompts) or not run.seconds >= 0:
        raise ValueError
    return run
