"""Captured steps by their shape, and the shapes that larger steps have stood in for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lookfar.runners.base import PendingStep, StepResult, StepShape
from lookfar.runners.cuda_graph.graph_step import GraphStep

PATIENCE = 1.0  # seconds that larger steps run in place of one before it is captured between two steps


@dataclass
class CapturedSteps:
    """The captured steps of one KV cache.

    A step can run as a larger one: with more rows, room for more requests, more predictions. While several requests
    share the engine, that is better than a capture, which would stall them all.
    """

    steps: dict[tuple[int, int], GraphStep] = field(default_factory=dict)  # by rows and requests
    wanted: dict[StepShape, float] = field(default_factory=dict)  # seconds of the larger steps that stood in
    refused: set[StepShape] = field(default_factory=set)  # capturing them failed

    def clear(self) -> None:
        """Forget everything: the KV cache or the model has changed."""
        self.steps.clear()
        self.wanted.clear()
        self.refused.clear()

    def __iter__(self) -> Iterator[GraphStep]:
        return iter(self.steps.values())

    def find(self, shape: StepShape) -> tuple[GraphStep, int] | None:
        """Return the step of this shape, and its number of predictions.

        Where a step is more than one row for each request, predictions that nobody asked for cost next to nothing.
        """
        step = self.steps.get((shape.rows, shape.requests))
        if step is None:
            return None
        if shape.predictions == 0 and shape.rows > shape.requests:
            return step, min(step.captured)
        return (step, shape.predictions) if shape.predictions in step.captured else None

    def larger(self, shape: StepShape) -> tuple[GraphStep, int] | None:
        """Return the smallest step that can run one of this shape, and its number of predictions."""
        able = [
            (step.rows, step.batch, k)
            for step in self
            for k in step.captured
            if step.rows >= shape.rows and step.batch >= shape.requests and k >= shape.predictions
        ]
        if not able:
            return None
        rows, requests, k = min(able)
        return self.steps[rows, requests], k

    def should_wait(self, shape: StepShape) -> bool:
        """Whether a larger step should go on to stand in for one of this shape."""
        return shape in self.refused or self.wanted.setdefault(shape, 0.0) < PATIENCE

    def next_wanted(self) -> StepShape | None:
        """Return the shape that larger steps have stood in for the longest."""
        return max(self.wanted, key=self.wanted.__getitem__, default=None)

    def refuse(self, shape: StepShape) -> None:
        """Leave a shape to larger steps for good."""
        self.wanted.pop(shape, None)
        self.refused.add(shape)


@dataclass
class StandIn:
    """A launched step that is larger than the one that was asked for."""

    pending: PendingStep
    shape: StepShape  # the one that was asked for
    wanted: dict[StepShape, float]

    def result(self) -> StepResult:
        """Wait for the step, and note how long it took."""
        result = self.pending.result()
        if self.shape in self.wanted:
            self.wanted[self.shape] += result.seconds
        return result
