"""Time and workspace of each op, measured on the device that is to run it.

Each distinct op (:func:`graphs.costs.signature.op_signature`) runs a few times on made-up arguments
(:mod:`graphs.costs.samples`), one op after the other, so that no more than one op's arguments, results and workspace
are on the device at a time. What was measured is kept on disk (:mod:`graphs.costs.cache`).

Measuring happens on a thread of its own. Fake-tensor modes, functorch levels, autocast, a default device, Dynamo's
hooks and profilers are all bound to the thread that set them, so the ops run as plain eager ones even when this is
called from inside a ``torch.compile`` backend, and nothing of the caller's has to be taken down and put back.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import fx

from graphs._torch import packet_name
from graphs.costs.cache import CostCache, Measured, cache_directory, device_name, environment
from graphs.costs.devices import DEVICES, DeviceSpec, spec_of_reported_name
from graphs.costs.measure import measure_call
from graphs.costs.roofline import estimate, makes_view
from graphs.costs.samples import Sampler
from graphs.costs.signature import op_signature, target_name
from graphs.ir import Costs
from graphs.kernels import as_executed
from graphs.threads import on_own_thread

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with the number of distinct ops done and their total after each one."""

_RUNNABLE_NAMESPACES: Final = frozenset({"aten", "prims", "torchvision", "quantized_decomposed"})
"""Ops that may run on made-up arguments. A custom op may have effects, wait for other processes, or take integers that
must be valid in ways not known here (on CUDA an invalid one ends the process's context)."""

_READ_WORKSPACES: Final = frozenset({"aten._cudnn_rnn_backward", "aten.miopen_rnn_backward"})
"""Ops that read library states of which only some are filled by their forward: made-up bytes end the process."""


def profiled(
    nodes: Sequence[fx.Node | None],
    device: torch.device | str,
    *,
    cache_dir: pathlib.Path | str | None = None,
    time_budget_s: float = 60.0,
    progress: Progress | None = None,
) -> Costs:
    """Measure what each op costs on ``device``.

    Ops that cannot run on made-up arguments, and those left when the time is up, are estimated by the roofline of the
    device, scaled by what those measured took against theirs, with a warning in the log that names them and a note in
    the costs. Global random state is left as it was. On CUDA the allocator's
    peak statistics of the device are reset.

    Args:
        nodes: the fx node of each op, with a fake tensor in ``meta["val"]``; ``None`` for an op without a kernel, which
            costs nothing. Ops that only make views cost nothing either.
        device: a CPU or CUDA device.
        cache_dir: directory of the cache; by default :func:`graphs.costs.cache.cache_directory`.
        time_budget_s: no op is started after this many seconds of measuring. Ops that weigh most come first.
        progress: called after each distinct op.

    Returns:
        Costs in op order, ``source="profiled"``.

    Raises:
        ValueError: a device of another type, or one that is not there.

    """
    device = _checked(device)
    keys = [op_signature(n) if n is not None and _has_kernel(n) else None for n in nodes]
    counts = collections.Counter(key for key in keys if key is not None)
    representatives = {key: node for key, node in zip(keys, nodes, strict=True) if key is not None and node is not None}
    cache = CostCache(pathlib.Path(cache_dir) if cache_dir is not None else cache_directory(), environment(device))
    cached = cache.load()
    costs = {key: cached[key] for key in counts if key in cached}
    missing = {key: node for key, node in representatives.items() if key not in costs}
    notes: tuple[str, ...] = ()
    if missing:
        spec = _nearest_spec(device)
        estimates = {key: estimate(node, spec) for key, node in missing.items()}
        order = sorted(missing, key=lambda key: -counts[key] * estimates[key][0])
        retarget = not any(t.device.type == device.type for node in representatives.values() for t in _tensors_of(node))
        session = _Session(device, {key: missing[key] for key in order}, retarget, time_budget_s, progress)
        measured = session.run()
        if measured:
            cache.add(measured)
        costs |= measured
        guesses = {key: estimates[key] for key in missing if key not in measured}
        known = {key: (representatives[key], costs[key][0]) for key in costs} if guesses else {}
        costs |= _scaled(guesses, known, spec)
        guessed = sum("_assert" not in packet_name(missing[key].target) for key in guesses)
        if guessed:
            notes = (f"the times of {guessed} of {len(counts)} distinct ops are estimates: they were not measured",)
    return Costs(
        time_ns=tuple(0 if key is None else costs[key][0] for key in keys),
        workspace_bytes=tuple(0 if key is None else costs[key][1] for key in keys),
        device=device_name(device),
        source="profiled",
        notes=notes,
    )


def _scaled(
    guesses: Mapping[str, Measured], known: Mapping[str, tuple[fx.Node, int]], spec: DeviceSpec
) -> dict[str, Measured]:
    """Estimates, their times stretched as those of measured ops are: else what was not measured would seem cheap."""
    ratios = [time_ns / guess for node, time_ns in known.values() if (guess := estimate(node, spec)[0]) > 0]
    stretch = statistics.median(ratios) if ratios else 1.0
    return {key: (round(time_ns * stretch), workspace) for key, (time_ns, workspace) in guesses.items()}


def _checked(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"ops are measured on cpu and cuda devices, not on {device}: use the roofline of a named device"
        )
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"{device} is not there to measure on: use the roofline of a named device")
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device


def _has_kernel(node: fx.Node) -> bool:
    return node.op == "call_function" and not makes_view(node.target)


def _nearest_spec(device: torch.device) -> DeviceSpec:
    """Datasheet figures to estimate from what is not measured; an unknown GPU counts as an A100."""
    if device.type == "cpu":
        return DEVICES["cpu"]
    return spec_of_reported_name(device_name(device)) or DEVICES["a100-sxm-80gb"]


@dataclasses.dataclass
class _Session:
    """One pass over the ops that are still to be measured, on a thread of its own."""

    device: torch.device
    ops: Mapping[str, fx.Node]
    retarget: bool
    time_budget_s: float
    progress: Progress | None
    measured: dict[str, Measured] = dataclasses.field(default_factory=dict)
    stopped: bool = False

    def run(self) -> dict[str, Measured]:
        """Measure and return what could be measured, by signature."""
        on_own_thread(self._work, name="checkpoint-scheduler-costs", when_interrupted=self._stop)
        return self.measured

    def _stop(self) -> None:
        self.stopped = True  # after the op that runs

    def _work(self) -> None:
        devices = [self.device.index] if self.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices=devices, device_type="cuda"):
            if self.device.type == "cuda":
                with torch.cuda.device(self.device):
                    self._measure_all()
                    torch.cuda.empty_cache()
            else:
                self._measure_all()

    def _measure_all(self) -> None:
        deadline = time.monotonic() + self.time_budget_s
        sampler = Sampler(self.device, retarget=self.retarget)
        late: list[str] = []
        for done, (key, node) in enumerate(self.ops.items(), start=1):
            if self.stopped:
                return
            if time.monotonic() > deadline:
                late.append(target_name(node.target))
            elif "_assert" in packet_name(node.target):
                pass  # made-up values would fail it, on CUDA for good; an estimate of so small an op is no news
            elif (reason := self._measure(key, node, sampler)) is not None:
                logger.warning("cost of %s (%s) is an estimate: %s", node.name, target_name(node.target), reason)
            if self.progress is not None:
                self.progress(done, len(self.ops))
        if late:
            logger.warning(
                "costs of %d of %d distinct ops are estimates: %.0f s of measuring were up (%s). Planning again "
                "measures the rest; on a busy machine wait until it is idle, or delete %s",
                len(late),
                len(self.ops),
                self.time_budget_s,
                ", ".join(sorted(set(late))),
                cache_directory(),
            )

    def _measure(self, key: str, node: fx.Node, sampler: Sampler) -> str | None:
        """Measure one op. Returns why that was not possible, or ``None``."""
        if (reason := _reason_not_to_run(node)) is not None:
            return reason
        try:
            args, kwargs = sampler.arguments(node)
            target, args = as_executed(node, tuple(args))
            self.measured[key] = measure_call(lambda: target(*args, **kwargs), self.device)
        except Exception as error:  # noqa: BLE001 - whatever an op raises, training must not end by it
            first_line = str(error).partition("\n")[0]
            return f"it does not run on made-up arguments ({type(error).__name__}: {first_line})"
        return None


def _reason_not_to_run(node: fx.Node) -> str | None:
    name = packet_name(node.target)
    if not name:
        return "it is no plain op of the dispatcher"
    if name.partition(".")[0] not in _RUNNABLE_NAMESPACES:
        return "custom ops are not run on made-up arguments"
    if name in _READ_WORKSPACES:
        return "it reads states of a library that are not made up"
    return None


def _tensors_of(node: fx.Node) -> list[torch.Tensor]:
    values = [node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)]
    return [v for v in values if isinstance(v, torch.Tensor)]
