"""What reads the memory of a device while a step runs, the user's own code included."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from graphs.costs.memory_events import ThreadRecording


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """Memory at one point of a step, in bytes.

    Attributes:
        live: live then.
        peak: most that was live at once from the start of the step up to then.

    """

    live: int
    peak: int


class Meter(Protocol):
    """Reads the memory of a device at points of a step."""

    @property
    def can_stop(self) -> bool:
        """Whether :meth:`stop` may be called here and now."""

    def start(self, give_way: Callable[[], None]) -> bool:
        """Begin; ``False`` where that is not possible. ``give_way`` is called where something else needs its place."""

    def read(self) -> None:
        """Note the memory at this point."""

    def stop(self) -> Sequence[Mark] | None:
        """End: the memory at the start and at each reading, or ``None`` where the peak is not known."""


class CpuMeter:
    """Adds up the memory events of the calling thread, beginning at what is known to be live."""

    def __init__(self, baseline_bytes: int) -> None:
        self.baseline_bytes = baseline_bytes
        self.recording = ThreadRecording()

    @property
    def can_stop(self) -> bool:
        """Whether this is the thread that is recorded, and in no backward."""
        return self.recording.can_stop

    def start(self, give_way: Callable[[], None]) -> bool:
        """Start to record, where no profiler runs."""
        return self.recording.start(give_way)

    def read(self) -> None:
        """Mark this point."""
        self.recording.mark()

    def stop(self) -> Sequence[Mark] | None:
        """End the recording, and add it up; ``None`` where it was lost."""
        recorded = self.recording.stop()
        if recorded is None:
            return None
        marks = [Mark(self.baseline_bytes, self.baseline_bytes)]
        *pieces, _after = recorded
        for piece in pieces:
            levels = list(itertools.accumulate(piece, initial=marks[-1].live))
            marks.append(Mark(levels[-1], max(marks[-1].peak, *levels)))
        return marks


class CudaMeter:
    """Reads the allocator's statistics, which it leaves as they are."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.earlier_peak = 0
        self.marks: list[Mark] = []

    @property
    def can_stop(self) -> bool:
        """Always."""
        return True

    def start(self, give_way: Callable[[], None]) -> bool:
        """Note the peak of the process so far; nothing else needs the place of this meter."""
        del give_way
        self.earlier_peak = torch.cuda.max_memory_allocated(self.device)
        self.read()
        return True

    def read(self) -> None:
        """Note the statistics: a peak that is not a new one of the process says nothing."""
        live = torch.cuda.memory_allocated(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        self.marks.append(Mark(live, peak if peak > self.earlier_peak else live))

    def stop(self) -> Sequence[Mark] | None:
        """The readings, if the last one shows a new peak."""
        return self.marks if torch.cuda.max_memory_allocated(self.device) > self.earlier_peak else None
