"""A 12-layer GPT-2 under a fifth less memory than recomputation alone can do with, copying while it computes, on a CPU.

Worker threads copy at the stated bandwidth: what a device's link would do, with the host's bytes counted apart. Costs
are profiled on this machine, and everything may be recomputed. For each bandwidth the model trains beside a plain copy,
on the same batches with the same seeds and in turns. Passes where all losses and gradients are equal bit for bit, the
measured peak is within the budget and within 1 % of the predicted one, and the predicted step time is within 15 % of
the measured median. The plan is replayed for this with its ops as much slower or faster than they were timed as the
plain step beside it is: how fast the processor is while ops are timed, and minutes later, is no matter of the plan, and
the link stays what it is. The workers' copies take memory bandwidth from the thread that computes, which no link of a
device does, and which no plan counts.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import torch
from transformers import GPT2LMHeadModel

from benchmarks.common import Table, arguments, finish, interleave, write_results
from benchmarks.demo import make_model
from graphs.links import parse_link
from scheduler import Infeasible, Plan, measure_peak, plan, schedule
from scheduler.replan import least_budget
from solvers.bounds import floor_lower_bound
from solvers.simulate import simulate
from solvers.solution import Compute

LINKS = ("0.25GB/s", "0.5GB/s", "1GB/s")
SHARE = 0.8  # of the least budget of recomputation alone
TIME_ERROR, PEAK_ERROR = 0.15, 0.01
EQUAL_STEPS = 3


def main() -> None:
    options = arguments(__doc__, layers=12, width=256, batch=32, tokens=128, rounds=5, seconds=30.0)
    plain = make_model(options)
    batch = make_batch(options)
    whole = plan(plain, None, kwargs=batch, costs="profiled")
    alone = least_budget(whole, time_limit_s=options.seconds)
    budget = int(SHARE * alone.bytes)
    floor = floor_lower_bound(whole.problem.with_link(parse_link(LINKS[-1]), 10**12)).bytes
    title = (
        f"GPT-2, {options.layers} layers of width {options.width}, batch {options.batch} of {options.tokens} tokens: "
        f"keep-all peak {whole.keep_all_peak_bytes / 1e6:.1f} MB, least budget found for recomputation alone "
        f"{alone.bytes / 1e6:.1f} MB with a step of {alone.plan.step_time_ns / alone.plan.keep_all_time_ns:.2f} plain "
        f"ones, here {budget / 1e6:.1f} MB; with copies every schedule needs {floor / 1e6:.1f} MB"
    )
    table = Table(
        title,
        (
            "link",
            "host MB",
            "ops run again",
            "stalls ms",
            "predicted ms",
            "at today's speed",
            "measured ms",
            "of plain",
            "error %",
            "peak MB",
            "measured MB",
            "equal",
        ),
    )
    failures: list[str] = []
    for link in LINKS:
        try:
            cells, found = measure(link, plain, batch, budget, options)
        except Infeasible as error:
            failures.append(f"{link}: {error}")
            continue
        table.add(link, *cells)
        failures += [f"{link}: {failure}" for failure in found]
    table.show()
    if not options.no_write:
        notes = [
            f"The budget is {SHARE:g} of the least that the search found for plans without copies.",
            (
                "Peaks are those of the device, here what the step allocates outside of the pool of host buffers; "
                "their bytes are in the column of the host."
            ),
        ]
        print(write_results("offload_cpu", "Offload on the CPU: predicted against measured", [table], notes))
    finish(failures)


def measure(
    link: str, plain: GPT2LMHeadModel, batch: dict[str, torch.Tensor], budget: int, options: argparse.Namespace
) -> tuple[tuple[object, ...], list[str]]:
    """Train a copy under the budget beside the plain model: the row's figures, and what is wrong with them.

    Raises:
        Infeasible: no plan was found.

    """
    model = copy.deepcopy(plain)
    host = {"offload": True, "link": link, "host_budget_gb": 8, "time_limit_s": options.seconds}
    schedule(model, f"{budget}B", sample_kwargs=batch, **host)
    made: Plan = model.plan
    equal = all(same(step_of(plain, batch, seed)(), step_of(model, batch, seed)()) for seed in range(EQUAL_STEPS))
    peak = measured_peak(model, batch)
    times = interleave({"plain": step_of(plain, batch, 0), "offload": step_of(model, batch, 0)}, rounds=options.rounds)
    seconds = {name: statistics.median(taken) for name, taken in times.items()}
    speed = 1e9 * seconds["plain"] / made.keep_all_time_ns
    today = dataclasses.replace(made.problem, time_ns=tuple(round(speed * ns) for ns in made.problem.time_ns))
    predicted = simulate(today, made.steps).step_time_ns / 1e9
    error = predicted / seconds["offload"] - 1
    failures: list[str] = []
    if not equal:
        failures.append("losses or gradients differ from plain training")
    if not made.host_use.copies:
        failures.append("nothing is copied")
    if peak > budget or abs(made.peak_bytes / peak - 1) > PEAK_ERROR:
        failures.append(f"peak of {peak:,} bytes, {made.peak_bytes:,} predicted, {budget:,} allowed")
    if abs(error) > TIME_ERROR:
        failures.append(f"the predicted step time is {error:+.1%} off")
    cells = (
        f"{made.host_use.host_bytes / 1e6:.1f}",
        sum(isinstance(s, Compute) for s in made.steps) - len(made.graph.ops),
        f"{made.host_use.stall_ns / 1e6:.1f}",
        f"{made.step_time_ns / 1e6:.1f}",
        f"{1e3 * predicted:.1f}",
        f"{1e3 * seconds['offload']:.1f}",
        f"{seconds['offload'] / seconds['plain']:.3f}",
        f"{100 * error:+.1f}",
        f"{made.peak_bytes / 1e6:.2f}",
        f"{peak / 1e6:.2f}",
        "yes" if equal else "NO",
    )
    return cells, failures


def make_batch(options: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Random bytes, and themselves as labels."""
    ids = torch.randint(256, (options.batch, options.tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def step_of(model: GPT2LMHeadModel, batch: dict[str, torch.Tensor], seed: int) -> Callable[[], list[torch.Tensor]]:
    """Forward and backward; returns loss and gradients."""

    def step() -> list[torch.Tensor]:
        torch.manual_seed(seed)
        model.zero_grad()
        output = model(**batch)
        output.loss.backward()
        return [output.loss.detach(), *(p.grad for p in model.parameters())]

    return step


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Whether all are equal bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def measured_peak(model: GPT2LMHeadModel, batch: dict[str, torch.Tensor]) -> int:
    """Peak of a step, of the device's bytes alone."""
    model.zero_grad()

    def step() -> Any:
        output = model(**batch)
        output.loss.backward()
        return output  # held to the end of the step, as the plan assumes

    return measure_peak(step, resident=(model, batch)).peak_bytes


if __name__ == "__main__":
    main()
