"""What a plan does with the host: the copies, when they are on the link, and how long computation waits for them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from scheduler.units import format_bytes, format_time
from solvers.solution import Offload, Prefetch

if TYPE_CHECKING:
    from scheduler.plan import Plan


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """One copy over the link.

    Attributes:
        storage: its index in the graph.
        outward: to the host, or else back.
        start_ns: when it starts on the link, from the start of the step.
        end_ns: when it ends.

    """

    storage: int
    outward: bool
    start_ns: int
    end_ns: int


@dataclasses.dataclass(frozen=True, slots=True)
class Stall:
    """Computation waiting for copies.

    Attributes:
        start_ns: from when, from the start of the step.
        end_ns: until when.

    """

    start_ns: int
    end_ns: int


@dataclasses.dataclass(frozen=True)
class HostUse:
    """The host tier of a plan, as its replay predicts it; all zero in a plan without copies.

    Attributes:
        copies: by the order of the steps.
        stalls: by time.
        host_bytes: bytes of the copies on the host; each stays until the step ends.
        out_bytes: bytes copied to the host.
        back_bytes: bytes copied back; a storage may come back several times.
        out_ns: time for which the link is busy outward.
        back_ns: the same, back.
        stall_ns: time for which computation waits, part of the step time.

    """

    copies: tuple[Copy, ...]
    stalls: tuple[Stall, ...]
    host_bytes: int
    out_bytes: int
    back_bytes: int
    out_ns: int
    back_ns: int
    stall_ns: int

    def rows(self, plan: Plan) -> list[tuple[str, str]]:
        """Label and sentence of each headline about the host; none for a plan without a host tier."""
        if plan.link is None:
            return []
        if not self.copies:
            return [("host", f"nothing is copied: with {plan.link.name} no copy makes this step faster")]
        storages = len({copy.storage for copy in self.copies})
        step = max(plan.step_time_ns, 1)
        copied = f"{format_bytes(self.host_bytes)} of {storages} tensors, {format_bytes(plan.host_bytes)} allowed"
        busy = f"{self.out_ns / step:.0%} of the step to the host and {self.back_ns / step:.0%} back"
        waits = f"stalls {format_time(self.stall_ns)} ({self.stall_ns / step:.2%})" if self.stall_ns else "no stall"
        return [("host", copied), ("link", f"{plan.link.name}, busy {busy}; {waits}")]


def host_use(plan: Plan) -> HostUse:
    """Read the copies and the stalls off a plan's replay."""
    replay, link, storages = plan.replay, plan.link, plan.graph.storages
    copies = []
    for step, start in zip(plan.graph_steps, replay.start_ns, strict=True):
        if isinstance(step, Offload | Prefetch) and link is not None:
            outward, size = isinstance(step, Offload), storages[step.storage].bytes
            took = link.to_host_ns(size) if outward else link.to_device_ns(size)
            copies.append(Copy(step.storage, outward, start, start + took))
    return HostUse(
        copies=tuple(copies),
        stalls=_stalls(plan),
        host_bytes=replay.host_bytes,
        out_bytes=sum(storages[copy.storage].bytes for copy in copies if copy.outward),
        back_bytes=sum(storages[copy.storage].bytes for copy in copies if not copy.outward),
        out_ns=sum(copy.end_ns - copy.start_ns for copy in copies if copy.outward),
        back_ns=sum(copy.end_ns - copy.start_ns for copy in copies if not copy.outward),
        stall_ns=replay.stall_ns,
    )


def _stalls(plan: Plan) -> tuple[Stall, ...]:
    """The gaps between executions, and before the end: nothing else takes computation's time."""
    found = []
    before = 0
    for sample in plan.samples:
        if sample.start_ns > before:
            found.append(Stall(before, sample.start_ns))
        before = sample.end_ns
    if plan.step_time_ns > before:
        found.append(Stall(before, plan.step_time_ns))
    return tuple(found)
