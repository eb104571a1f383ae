"""A plan as a trace in Chrome's event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process with one thread of executions, recomputed ones in a thread of their own below it so that they stand out, one
for the copies of each direction where there are any, and a counter track of live bytes by category. Times are
predicted, in microseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from scheduler.export.files import write_whole
from scheduler.report.timeline import Category

if TYPE_CHECKING:
    from scheduler.plan import Plan

_PROCESS: Final = 1
_FIRST, _AGAIN, _OUT, _BACK = 1, 2, 3, 4


def to_trace(plan: Plan) -> dict[str, Any]:
    """The plan as a JSON-ready object in the "JSON object format" of Chrome's trace events."""
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [*_names(plan), *_executions(plan), *_copies(plan), *_counters(plan)],
        "otherData": {
            "device": plan.device,
            "costs": plan.costs.source,
            "budget_bytes": plan.budget_bytes,
            "peak_bytes": plan.peak_bytes,
            "step_time_ns": plan.step_time_ns,
            "overhead": plan.overhead,
            "gap": plan.gap,
        },
    }


def save_trace(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write :func:`to_trace` as a file; an earlier one is replaced."""
    write_whole(path, json.dumps(to_trace(plan), separators=(",", ":")).encode())


def _names(plan: Plan) -> Iterator[dict[str, Any]]:
    labels = {"process_name": (0, f"{plan.graph.name or 'training step'} on {plan.device} (predicted)")}
    yield _metadata("process_name", 0, labels["process_name"][1])
    yield _metadata("thread_name", _FIRST, "compute")
    yield _metadata("thread_name", _AGAIN, "compute, run again")
    if plan.host_use.copies:
        yield _metadata("thread_name", _OUT, "copies to the host")
        yield _metadata("thread_name", _BACK, "copies from the host")


def _copies(plan: Plan) -> Iterator[dict[str, Any]]:
    for copy in plan.host_use.copies:
        storage = plan.graph.storages[copy.storage]
        yield {
            "ph": "X",
            "name": storage.name,
            "cat": "offload" if copy.outward else "prefetch",
            "pid": _PROCESS,
            "tid": _OUT if copy.outward else _BACK,
            "ts": copy.start_ns / 1e3,
            "dur": (copy.end_ns - copy.start_ns) / 1e3,
            "args": {"module": storage.module_path, "bytes": storage.bytes},
        }


def _metadata(name: str, thread: int, label: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": _PROCESS, "tid": thread, "args": {"name": label}}


def _executions(plan: Plan) -> Iterator[dict[str, Any]]:
    for sample in plan.samples:
        op = plan.graph.ops[sample.op]
        yield {
            "ph": "X",
            "name": op.target,
            "cat": "recompute" if sample.again else op.phase.value,
            "pid": _PROCESS,
            "tid": _AGAIN if sample.again else _FIRST,
            "ts": sample.start_ns / 1e3,
            "dur": (sample.end_ns - sample.start_ns) / 1e3,
            "args": {
                "op": op.name,
                "module": op.module_path,
                "source": op.source,
                "makes": [plan.graph.storages[s].name for s in op.outputs],
                "live_bytes": sample.total_bytes,
            },
        }


def _counters(plan: Plan) -> Iterator[dict[str, Any]]:
    """Live bytes at the start of each execution, and 0 of what dies at the very end."""
    for sample in plan.samples:
        live = {category.value: sample.live[category] for category in Category}
        yield {"ph": "C", "name": "live bytes", "pid": _PROCESS, "ts": sample.start_ns / 1e3, "args": live}
