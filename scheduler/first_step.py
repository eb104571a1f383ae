"""The first run of a plan, measured and held against what the plan predicts.

A step is measured from the start of its forward to the end of its backward, with what the user's code does in between:
an external loss that allocates beside the module is seen. On CUDA the allocator's statistics are read at four points;
they are never reset, so that a peak is known only where it is a new one of the process. On CPU the memory events of the
calling thread are recorded, unless a profiler runs there; one that the user starts ends the recording. Where a step
could not be measured the next one is tried. After that, steps cost nothing.
"""

from __future__ import annotations

import atexit
import dataclasses
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from scheduler._torch import compiled_node_of
from scheduler.memory import bytes_of, tensors_in
from scheduler.meters import CpuMeter, CudaMeter, Mark, Meter
from scheduler.pieces import OTHER_PIECES
from scheduler.plan import Plan
from scheduler.units import format_bytes

logger = logging.getLogger(__name__)

#: Share of the predicted peak by which a measured one may exceed it without a warning.
TOLERANCE: Final = 0.02

_MOST_ATTEMPTS: Final = 8  # steps that could not be measured before giving up
_MOST_GRAPHS: Final = 8  # forwards before a backward up to which one step is followed


@dataclasses.dataclass(slots=True, weakref_slot=True)
class _Window:
    """One step that is being measured.

    Attributes:
        meter: reads the memory.
        thread: where the step runs.
        ahead_bytes: planned for and not allocated yet: state that the optimizer's first step will make.
        readings: how many were taken: at the start, after the forward, before and after the backward.
        graphs: forwards whose backward has not run.
        most_graphs: most of them at once.
        has_ended: the backward has run.
        plan: what the step is held against, once its forward has run.

    """

    meter: Meter
    thread: int
    ahead_bytes: int
    readings: int = 1
    graphs: int = 1
    most_graphs: int = 1
    has_ended: bool = False
    plan: Plan | None = None


class _Watcher:
    """Lives as long as autograd's graph of the measured call does, and ends the measurement with it."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.end = end

    def __del__(self) -> None:
        self.end()


class FirstStep:
    """Measures the first run of a plan that can be measured, and warns where it needs more than the plan says.

    Args:
        plan: receives what was measured, see :attr:`scheduler.Plan.measured_peak_bytes`.
        device: where it runs.
        name: of the module, for messages.
        warned: what the module's user has been warned of; later plans of which the same is true are logged as
            information only.

    """

    def __init__(self, plan: Plan, device: torch.device, name: str, warned: set[str]) -> None:
        self.plan = plan
        self.whole: Callable[[], Plan] = lambda: plan  # the plan that stands for the step, where it has several
        self.warned = warned
        self.device = device
        self.name = name
        self.is_done = False
        self._attempts = 0
        self._window: _Window | None = None
        self._lock = threading.RLock()  # a graph may die, and end its window, anywhere

    def run(self, compiled: Callable[..., Any], inputs: tuple[Any, ...], resident: Sequence[Any]) -> Any:
        """Run the forward of a step, measured where that is possible.

        Args:
            compiled: runs it.
            inputs: its inputs.
            resident: what is live before it: modules, optimizer, inputs.

        """
        window = self._open(resident)
        if window is None:
            return compiled(*inputs)
        try:
            outputs = compiled(*inputs)
        except BaseException:
            self._end(window)
            raise
        node = compiled_node_of(outputs)
        if node is None:
            self._end(window)
            return outputs
        self._read(window)
        reference = weakref.ref(window)
        node.metadata["checkpoint-scheduler"] = _Watcher(lambda: self._end(reference()))
        return outputs

    def backward_begins(self) -> None:
        """Read the memory before the compiled backward: what is live then was left by code outside of the module."""
        window = self._window_here()
        if window is not None and window.readings == 2:
            window.plan = self.whole()
            window.plan.settle_measurement_with(self.settle)
            self._read(window)

    def backward_has_run(self) -> None:
        """Read the memory after the compiled backward, if it was the last one that was due."""
        window = self._window_here()
        if window is None or window.has_ended or window.readings < 3:
            return
        window.graphs -= 1
        if window.graphs == 0:
            self._read(window)
            window.has_ended = True
            self.settle()

    def settle(self) -> None:
        """End the measurement of a step that has run, where that is possible: outside of a backward, on its thread."""
        window = self._window_here()
        if window is not None and window.has_ended:
            self._end(window)

    def _window_here(self) -> _Window | None:
        window = self._window
        return window if window is not None and window.thread == threading.get_ident() else None

    def _open(self, resident: Sequence[Any]) -> _Window | None:
        """The window of a step that can be measured, or ``None``: it cannot, or an earlier one still goes on."""
        _settle_all("stop", {})
        with self._lock:
            if self.is_done:
                return None
            if self._window is not None and self._window.thread not in {t.ident for t in threading.enumerate()}:
                self._window = None  # its thread ended before its step did
            if self._window is not None:
                self._note_another_graph(self._window)
                return None
            meter: Meter
            if self.device.type == "cuda":
                meter = CudaMeter(self.device)
            else:
                meter = CpuMeter(bytes_of(tensors_in(resident), self.device))
            if not meter.start(lambda: self._end(window)):
                self._not_now("a profiler is running")
                return None
            planned = self.plan.static.get("optimizer", 0)
            optimizers = [x for x in resident if isinstance(x, torch.optim.Optimizer)]
            ahead = max(0, planned - bytes_of(tensors_in(optimizers), self.device))
            window = self._window = _Window(meter, threading.get_ident(), ahead)
            _keep_in_view(self)
            self.plan.settle_measurement_with(self.settle)
            return window

    def _note_another_graph(self, window: _Window) -> None:
        if window.thread == threading.get_ident():
            window.graphs += 1
            window.most_graphs = max(window.most_graphs, window.graphs)
            if window.graphs > _MOST_GRAPHS:
                self._end(window)

    def _read(self, window: _Window) -> None:
        window.meter.read()
        window.readings += 1

    def _end(self, window: _Window | None) -> None:
        """Close a window, if it is still open and can be closed here, and report what it saw."""
        with self._lock:
            if window is None or self._window_here() is not window or not window.meter.can_stop:
                return
            marks = window.meter.stop()
            self._window = None
            _out_of_view(self)
            for plan in (self.plan, window.plan):
                if plan is not None:
                    plan.settle_measurement_with(None)
            if not window.has_ended:
                self._not_now("its backward did not run before its graph was gone, a profiler started or others ran")
            elif marks is None:
                self._not_now("an earlier peak of this process hides it, or the recording was lost")
            else:
                self._report(window, marks)

    def _not_now(self, reason: str) -> None:
        self._attempts += 1
        self.is_done = self._attempts >= _MOST_ATTEMPTS
        then = "no more is tried" if self.is_done else "the next one will be tried"
        logger.info("%s: the peak of this step was not measured: %s; %s", self.name, reason, then)

    def _report(self, window: _Window, marks: Sequence[Mark]) -> None:
        """Record the peak, and warn where it is too high."""
        self.is_done = True
        plan = window.plan or self.plan
        peak = marks[-1].peak + window.ahead_bytes  # as it will be once the optimizer has its state
        plan.record_measured_peak(peak)
        predicted = plan.peak_bytes
        excess = peak - predicted
        if excess <= TOLERANCE * predicted:
            logger.info("%s: %s measured, %s predicted", self.name, format_bytes(peak), format_bytes(predicted))
            return
        budget = plan.budget_bytes
        over = "" if budget is None or peak <= budget else ", which exceeds the budget"
        level = logging.INFO if over in self.warned else logging.WARNING
        self.warned.add(over)
        logger.log(
            level,
            "%s: the first step of this plan peaked at %s%s: %s bytes (%.1f %%) more than the %s predicted. Likely "
            "cause: %s.",
            *(self.name, format_bytes(peak), over, f"{excess:,}", 100 * excess / predicted, format_bytes(predicted)),
            self._cause(window, marks, excess),
        )

    def _cause(self, window: _Window, marks: Sequence[Mark], excess: int) -> str:
        """In words, where most of the excess was seen."""
        before, forward, between, _ = marks
        if window.most_graphs > 1:
            return (
                f"{window.most_graphs} forwards of the module ran before a backward, and each keeps a graph of its own "
                "alive; the plan covers one"
            )
        static = (window.plan or self.plan).static
        uncounted = {OTHER_PIECES, "other"} if self.device.type == "cpu" else {OTHER_PIECES}
        counted = sum(size for name, size in static.items() if name not in uncounted)
        surplus = before.live + window.ahead_bytes - counted
        if 2 * surplus > excess:
            return f"{format_bytes(surplus)} more than planned was live before the step, such as another graph"
        outside = max(between.live, between.peak if between.peak > forward.peak else 0) - forward.live
        if between.peak > forward.peak or 2 * outside > excess:
            return (
                "code outside of the module, such as a loss of its output or another model, allocated "
                f"{format_bytes(outside)} between its forward and its backward; loss_fn= puts a loss inside the "
                "scheduled step"
            )
        return "the module's ops took more than was counted for them, such as workspaces of a library"


#: Steps whose measurement goes on. One that has run is settled at the next garbage collection where nothing else does
#: so sooner, and all are at exit, before torch takes its profilers down.
_in_view: set[FirstStep] = set()


def _keep_in_view(step: FirstStep) -> None:
    if not _in_view:
        gc.callbacks.append(_settle_all)
    _in_view.add(step)


def _out_of_view(step: FirstStep) -> None:
    _in_view.discard(step)
    if not _in_view and _settle_all in gc.callbacks:
        gc.callbacks.remove(_settle_all)


def _settle_all(phase: str, _info: dict[str, int]) -> None:
    if phase == "stop":
        for step in tuple(_in_view):
            step.settle()


@atexit.register
def end_measurements() -> None:
    """End what is measured on this thread, as where a step fails half-way; its next step is tried."""
    for step in tuple(_in_view):
        step._end(step._window)  # noqa: SLF001 - the same module
