"""Step times and peaks of a training run, with the conditions they were taken under, for before/after comparison."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import math
import os
import pathlib
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self, TypeVar

import torch
from torch import nn

from scheduler.export.files import write_whole
from scheduler.memory import measure_peak
from scheduler.plan import Plan
from scheduler.units import format_bytes, format_time

SCHEMA_VERSION: Final = 1
_FORMAT: Final = "checkpoint-scheduler step log"
_PERCENTILES: Final = (50, 95, 99)

ResultT = TypeVar("ResultT")


@dataclasses.dataclass(frozen=True, slots=True)
class StepRecord:
    """One step.

    Attributes:
        time_ns: wall time, the device synchronised before and after.
        peak_bytes: most bytes live at once, or ``None`` where it was not measured.
        timed: whether the time counts: not for a first step, which compiles, nor where measuring the peak slows it.

    """

    time_ns: int
    peak_bytes: int | None
    timed: bool


@dataclasses.dataclass(frozen=True)
class StepLog:
    """What a run's steps took.

    Attributes:
        conditions: device, versions, threads, dtypes, the plan: what two logs must share to be compared.
        steps: in order.

    """

    conditions: Mapping[str, Any]
    steps: tuple[StepRecord, ...]

    def percentile_ns(self, percent: float) -> int | None:
        """The time that so many per cent of the timed steps did not exceed; ``None`` without a timed step."""
        times = sorted(step.time_ns for step in self.steps if step.timed)
        return times[max(0, math.ceil(len(times) * percent / 100) - 1)] if times else None

    @property
    def peak_bytes(self) -> int | None:
        """The highest peak of the steps whose peak was measured."""
        return max((step.peak_bytes for step in self.steps if step.peak_bytes is not None), default=None)

    def summary(self) -> str:
        """One line."""
        times = [(p, self.percentile_ns(p)) for p in _PERCENTILES]
        parts = [f"p{p} {format_time(t)}" for p, t in times if t is not None]
        peak = "not measured" if self.peak_bytes is None else format_bytes(self.peak_bytes)
        return f"{len(self.steps)} steps: {', '.join(parts) or 'none timed'}; peak {peak}"

    def differences(self, other: StepLog) -> dict[str, tuple[Any, Any]]:
        """Conditions in which two logs differ, the time of day aside."""
        keys = (self.conditions.keys() | other.conditions.keys()) - {"started"}
        pairs = {key: (self.conditions.get(key), other.conditions.get(key)) for key in sorted(keys)}
        return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the log as JSON; an earlier file is replaced."""
        fields = {
            "format": _FORMAT,
            "schema_version": SCHEMA_VERSION,
            "conditions": dict(self.conditions),
            "percentiles_ns": {f"p{p}": self.percentile_ns(p) for p in _PERCENTILES},
            "peak_bytes": self.peak_bytes,
            "steps": [dataclasses.asdict(step) for step in self.steps],
        }
        write_whole(path, json.dumps(fields, indent=1).encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a log that :meth:`save` wrote.

        Raises:
            ValueError: the file is something else, or of another schema version.

        """
        data = json.loads(pathlib.Path(path).read_bytes())
        if not isinstance(data, dict) or data.get("format") != _FORMAT or data.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(f"{path} is not a step log of schema version {SCHEMA_VERSION}")
        return cls(data["conditions"], tuple(StepRecord(**step) for step in data["steps"]))


class Watch:
    """Runs steps and records them; made by :func:`watch`."""

    def __init__(self, model: nn.Module, resident: Sequence[object], peak_every: int) -> None:
        self._resident = (model, *resident)
        self._peak_every = peak_every
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._model = model
        self._records: list[StepRecord] = []
        self._started = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")

    def run(self, step: Callable[[], ResultT]) -> ResultT:
        """Call ``step`` once, record its time and, where due, its peak, and return what it returns."""
        first = not self._records
        due = first or (self._peak_every > 0 and len(self._records) % self._peak_every == 0)
        results: list[ResultT] = []
        peak: int | None = None
        self._synchronize()
        begin = time.perf_counter_ns()
        if due:
            measured = measure_peak(lambda: results.append(step()), resident=self._resident, device=self._device)
            peak = measured.peak_bytes
        else:
            results.append(step())
        self._synchronize()
        slowed = due and self._device.type != "cuda"
        self._records.append(StepRecord(time.perf_counter_ns() - begin, peak, not (first or slowed)))
        return results[0]

    @property
    def log(self) -> StepLog:
        """The steps so far."""
        return StepLog(self._conditions(), tuple(self._records))

    def summary(self) -> str:
        """As :meth:`StepLog.summary`."""
        return self.log.summary()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _conditions(self) -> dict[str, Any]:
        cuda = self._device.type == "cuda"
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in self._model.parameters()})
        plan = getattr(self._model, "plan", None)
        return {
            "started": self._started,
            "model": type(self._model).__name__,
            "parameters": sum(p.numel() for p in self._model.parameters()),
            "dtypes": dtypes,
            "device": torch.cuda.get_device_name(self._device) if cuda else platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "budget_bytes": plan.budget_bytes if isinstance(plan, Plan) else None,
            "plan": plan.graph.fingerprint if isinstance(plan, Plan) else None,
        }


def watch(model: nn.Module, *resident: object, peak_every: int = 0) -> Watch:
    """Record the steps of a training run.

    >>> log = watch(model, optimizer)                      # doctest: +SKIP
    >>> for batch in data:                                 # doctest: +SKIP
    ...     loss = log.run(lambda: train_step(batch))
    >>> print(log.summary()); log.log.save("steps.json")   # doctest: +SKIP

    Args:
        model: the module that is trained, scheduled or not.
        resident: what else is on the device before each step, as in :func:`scheduler.measure_peak`: optimizer, batch.
        peak_every: measure the peak of every so many steps; 0 for the first alone. On CPU measuring slows a step, so
            that its time does not count.

    Raises:
        ValueError: ``peak_every`` is negative.

    """
    if peak_every < 0:
        raise ValueError(f"peak_every is {peak_every}: give 0 for the first step alone, or a positive number of steps")
    return Watch(model, resident, peak_every)
