"""Captures of small modules, for tests that look at graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from graphs.constraints import Constraints
from graphs.joint import Capture
from scheduler import remembered, schedule, unschedule


@contextlib.contextmanager
def recorded_captures() -> Iterator[list[Capture]]:
    """Within the context, every capture that a backend plans is listed."""
    captures: list[Capture] = []
    original = remembered.make_plan

    def recording(capture: Capture, *args: Any, **kwargs: Any) -> Any:
        captures.append(capture)
        return original(capture, *args, **kwargs)

    remembered.make_plan = recording
    try:
        yield captures
    finally:
        remembered.make_plan = original


def capture_of(module: nn.Module, *args: Any, constraints: Constraints | None = None, **kwargs: Any) -> Capture:
    """The capture of one training step of a module, which is left plain."""
    with recorded_captures() as captures:
        schedule(
            module,
            "100TB",
            sample_args=args,
            sample_kwargs=kwargs,
            costs="roofline",
            **(constraints or Constraints()).to_dict(),
        )
    unschedule(module)
    return captures[0]
