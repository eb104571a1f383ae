"""What scheduling costs where it has nothing to do: a budget above the plain peak, against plain eager.

Passes where nothing is recomputed, the step takes at most 1.02 of plain eager's (taken in turns, median of the ratios),
and the peak is at most that of ``torch.compile(backend="aot_eager")``. That backend recomputes where its min-cut
partition sees a gain, as in HF GPT-2: then ``aot_eager_default_partitioner``, which keeps what autograd keeps, is the
bar. A second plain model is timed as a control: the interval of its ratio, which is 1 by construction, says how small
a difference the run can see.

The model is HF GPT-2 (12 layers of width 768, batch 2 × 256). ``--model gpt`` takes a small one (4 layers, width 256),
where what Python does per op weighs most: its figures go to a page of their own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._ops import OpOverload

from benchmarks.common import Table, arguments, finish, interleave, median_ratio, ratio_interval, write_results
from benchmarks.sweep import make_hf_gpt2, step_peak
from scheduler import plan_of, schedule
from tests.models import Case, make_gpt


def training_step(case: Case) -> Callable[[], None]:
    """Forward, backward and dropping of the gradients, always on the same batch."""
    args, kwargs = case.make_batch(0)

    def step() -> None:
        case.loss_of(case.model(*args, **kwargs)).backward()
        case.model.zero_grad(set_to_none=True)

    return step


def ops_computed_again(case: Case) -> int:
    """Ops, views left out, that the backward of aot_eager's min-cut partition shares with its forward."""
    halves: list[set[str]] = []

    def note(gm: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        nodes = [n for n in gm.graph.nodes if n.op == "call_function" and isinstance(n.target, OpOverload)]
        halves.append({n.name for n in nodes if not (n.target.is_view or n.target is torch.ops.aten.detach.default)})
        return make_boxed_func(gm.forward)

    backend = aot_autograd(fw_compiler=note, bw_compiler=note, partition_fn=min_cut_rematerialization_partition)
    case.model.compile(backend=backend, fullgraph=True)
    training_step(case)()
    forward, backward = halves
    return len(forward & backward)


def _fast(times: list[float]) -> float:
    """The time below which a tenth of the steps lie: what the machine does when nobody disturbs it."""
    return statistics.quantiles(times, n=10)[0]


def make_model(name: str) -> Case:
    """The model that the command line names."""
    if name == "hf":
        case = make_hf_gpt2()
        case.model.loss_type = "ForCausalLM"  # else the library logs, which breaks aot_eager's graph
        return case
    return make_gpt(batch=4, context=128, width=256, heads=4, layers=4, vocabulary=1024)


def shown(name: str, times: dict[str, list[float]], peaks: dict[str, int]) -> tuple[str, ...]:
    """The row of one way of running the step."""
    return (
        name,
        f"{1e3 * statistics.median(times[name]):.2f}",
        f"{median_ratio(times, name, 'plain eager'):.4f}",
        "{:.3f} to {:.3f}".format(*ratio_interval(times, name, "plain eager")),
        f"{_fast(times[name]) / _fast(times['plain eager']):.4f}",
        f"{peaks[name] / 1e6:.2f}",
    )


def main() -> None:
    options = arguments(__doc__, rounds=300, seconds=420.0, model="hf", clock="wall")
    plain, control, compiled, partitioned, scheduled = (make_model(options.model) for _ in range(5))
    compiled.model.compile(backend="aot_eager", fullgraph=True)
    partitioned.model.compile(backend="aot_eager_default_partitioner", fullgraph=True)
    peaks = {"plain eager": max(step_peak(plain, seed) for seed in range(2))}
    args, kwargs = scheduled.make_batch(0)
    schedule(scheduled.model, f"{2 * peaks['plain eager']}B", sample_args=args, sample_kwargs=kwargs)
    plan = plan_of(scheduled.model)
    peaks["plain again"] = max(step_peak(control, seed) for seed in range(2))
    peaks["aot_eager"] = max(step_peak(compiled, seed) for seed in range(3))
    keeping_peak = max(step_peak(partitioned, seed) for seed in range(3))
    peaks["scheduled"] = max(step_peak(scheduled, seed) for seed in range(3))
    cases = {"plain eager": plain, "plain again": control, "aot_eager": compiled, "scheduled": scheduled}
    times = interleave(
        {name: training_step(case) for name, case in cases.items()},
        rounds=options.rounds,
        warm_up=3,
        seconds=options.seconds,
        processor_time=options.clock == "processor",
    )
    parameters = sum(p.numel() for p in plain.model.parameters())
    table = Table(
        f"Step of a GPT of {parameters / 1e6:.0f} M parameters without anything to recompute",
        ("step", "median ms", "ratio to plain", "95 % interval", "ratio of fastest tenths", "peak MB"),
    )
    for name in cases:
        table.add(*shown(name, times, peaks))
    table.show()
    failures = []
    if plan is None or not plan.is_noop:
        failures.append("the plan recomputes something, or there is none")
    ratio = median_ratio(times, "scheduled", "plain eager")
    if ratio > 1.02:
        failures.append(f"step time ratio {ratio:.4f}")
    again = ops_computed_again(make_model(options.model))
    if peaks["scheduled"] > (keeping_peak if again else peaks["aot_eager"]):
        failures.append(f"peak {peaks['scheduled']:,} B > aot_eager's {peaks['aot_eager']:,} B")
    if not options.no_write:
        notes = [
            f"{len(times['scheduled'])} rounds, taken in turns; {options.clock} time; torch {torch.__version__}",
            f"aot_eager's backward computes {again} ops of the forward again",
            f"with the default partition, which computes none again, its peak is {keeping_peak / 1e6:.2f} MB",
        ]
        page = "noop" if options.model == "hf" else "noop_small"
        print(write_results(page, "Overhead where nothing is recomputed", [table], notes))
    finish(failures)


if __name__ == "__main__":
    main()
