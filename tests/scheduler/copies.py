"""Copies to the host under test: what moves a model's storages, delays, and CUDA streams that are simulated."""

from __future__ import annotations

import collections
import contextlib

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from scheduler import graphs_of
from scheduler.runtime import transfers
from scheduler.runtime.host_pool import HostPool
from scheduler.runtime.transfers import CudaTransfers, ThreadTransfers


def transfers_behind(model):
    """What moves the storages of the step that was scheduled last."""
    number = next(n.args[1] for n in graphs_of(model)[0].graph.nodes if n.target is transfers.OFFLOAD)
    return transfers._known[number]


def delay(moving, draw):
    """Have each copy begin late by what ``draw`` returns, in seconds; until then what comes back is no number."""
    start = type(moving)._start

    def late(target, source, after, *, outward):
        if not outward:
            target.fill_(255)
        if isinstance(moving, CudaTransfers):
            with torch.cuda.stream(moving._out if outward else moving._back):
                torch.cuda._sleep(int(1e9 * draw()))  # cycles
        return start(moving, target, source, after, outward=outward)

    moving._start = late
    if isinstance(moving, ThreadTransfers):
        moving.delay = draw


def fail_copies(moving, message):
    """Have each copy raise an ``OSError`` on the worker, or what torch raises of a CUDA call."""
    if isinstance(moving, ThreadTransfers):

        def fail():
            raise OSError(message)

        moving.delay = fail
    else:

        def start(*args, **options):
            raise RuntimeError(message)

        moving._start = start


def refuse_memory(self, size):
    raise RuntimeError(f"no {size} bytes of host memory")


class Stream:
    """A stream as lazy as CUDA allows: nothing queued runs before someone waits for an event behind it."""

    current = None  # of this thread of tests; None: computation, which is eager

    def __init__(self, device=None):
        self.queued = collections.deque()

    def wait_stream(self, stream):
        assert stream is COMPUTATION, "copies of one direction are ordered behind others by events"

    def wait_event(self, event):
        self.queued.append(event.finish)

    def synchronize(self):
        while self.queued:
            self.queued.popleft()()


class Event:
    """The end of what a stream had queued when it was recorded."""

    def record(self, stream):
        self.stream, self.over = stream, False
        stream.queued.append(self._mark)

    def _mark(self):
        self.over = True

    def query(self):
        return self.over

    def finish(self):
        while not self.over:
            self.stream.queued.popleft()()

    synchronize = finish


class _Computation(Stream):
    """The stream of computation, which has nothing queued: it waits at once."""

    def wait_event(self, event):
        event.finish()


COMPUTATION = _Computation()


@contextlib.contextmanager
def _stream(stream):
    previous, Stream.current = Stream.current, stream
    yield
    Stream.current = previous


def simulate_cuda(monkeypatch):
    """Have :class:`CudaTransfers` run on simulated streams, and steps on the CPU use it."""
    copy = torch.Tensor.copy_

    def copy_(target, source, non_blocking=False):
        if Stream.current is None:
            return copy(target, source, non_blocking)
        assert non_blocking

        def late():  # in whatever mode: streams are drained where garbage is collected
            with unset_fake_temporarily():
                copy(target, source)

        Stream.current.queued.append(late)
        return target

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    for name, stand_in in (("Stream", Stream), ("Event", Event), ("stream", _stream)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: COMPUTATION)
    monkeypatch.setattr(HostPool, "_memory", lambda self, size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(
        "scheduler.backend.transfers_of", lambda capture, plan, slots: CudaTransfers(slots, capture.device)
    )
    start, let_go = CudaTransfers._start, CudaTransfers._let_go

    def poisoned(self, target, source, after, *, outward):
        if not outward:
            target.fill_(255)
        return start(self, target, source, after, outward=outward)

    def checked(self, handle):
        assert handle.end.over, "dropped while a copy may still use it"
        let_go(self, handle)

    monkeypatch.setattr(CudaTransfers, "_start", poisoned)
    monkeypatch.setattr(CudaTransfers, "_let_go", checked)
