"""A long training of a small GPT with dropout, a handful of lengths and accumulation: the losses of plain training, bit
for bit, and nothing that grows.

Passes where every loss agrees, and neither the live tensors nor the process's memory grow once each length was seen.
"""

from __future__ import annotations

import dataclasses
import gc
import pathlib

import torch
from torch import nn

from benchmarks.common import Table, arguments, finish, write_results
from scheduler import schedule
from tests.fuzz.budgets import Between
from tests.models import make_gpt

LENGTHS = (16, 24, 32, 20, 28)
ACCUMULATE = 2
EVERY = 10  # steps between two looks at the memory


@dataclasses.dataclass(frozen=True)
class Run:
    """What a training left behind.

    Attributes:
        losses: of each micro-batch.
        tensors: live tensors after every tenth step.
        resident_bytes: memory of the process at these times.
        plans: how many times a step was planned.

    """

    losses: list[float]
    tensors: list[int]
    resident_bytes: list[int]
    plans: int


def train(steps: int, *, scheduled: bool, fraction: float = 0.0) -> Run:
    """Train ``steps`` optimizer steps, plain or scheduled at a share of the way from the floor to the keep-all peak."""
    case = make_gpt(batch=2, context=max(LENGTHS), vocabulary=64, width=32, heads=2, layers=2, dropout=0.1)
    model: nn.Module = case.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    solver = Between(fraction=fraction)
    if scheduled:
        schedule(model, "100TB", solver=solver, costs="roofline", optimizer=optimizer)
    torch.manual_seed(0)
    losses: list[float] = []
    tensors: list[int] = []
    resident: list[int] = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        for micro in range(ACCUMULATE):
            (ids,), keywords = case.make_batch(step * ACCUMULATE + micro)
            length = LENGTHS[step % len(LENGTHS)]
            loss = model(ids[:, :length].contiguous(), labels=keywords["labels"][:, :length].contiguous())
            (loss / ACCUMULATE).backward()
            losses.append(loss.item())
            del loss
        optimizer.step()
        if step % EVERY == EVERY - 1:
            gc.collect()
            tensors.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
            resident.append(resident_bytes())
    return Run(losses, tensors, resident, len(solver.chosen))


def resident_bytes() -> int:
    """Bytes of this process in memory (Linux)."""
    pages = int(pathlib.Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def growth(figures: list[int]) -> int:
    """Last figure less the one a fifth of the way in, when every length has been planned."""
    return figures[-1] - figures[max(len(figures) // 5, 1)]


def faults(plain: Run, bounded: Run, *, memory_bytes: int = 20_000_000) -> list[str]:
    """What is not as it should be, in sentences; ``memory_bytes`` is what counts as no growth of the process."""
    found = []
    differing = [i for i, (a, b) in enumerate(zip(plain.losses, bounded.losses, strict=True)) if a != b]
    if differing:
        found.append(f"{len(differing)} losses differ, the first at micro-batch {differing[0]}")
    if growth(bounded.tensors) > 0:
        found.append(f"live tensors grew: {bounded.tensors}")
    if growth(bounded.resident_bytes) > memory_bytes:
        found.append(f"the process grew by {growth(bounded.resident_bytes):,} bytes: {bounded.resident_bytes}")
    return found


def main() -> None:
    options = arguments(__doc__, steps=500)
    table = Table("Soak", ("training", "micro-batches", "plans", "last loss", "tensors grew by", "process grew by MB"))
    runs = {"plain": train(options.steps, scheduled=False), "scheduled": train(options.steps, scheduled=True)}
    for name, run in runs.items():
        grown = growth(run.resident_bytes) / 1e6
        table.add(name, len(run.losses), run.plans, f"{run.losses[-1]:.6f}", growth(run.tensors), f"{grown:.1f}")
    table.show()
    failures = faults(runs["plain"], runs["scheduled"])
    if not options.no_write:
        print(write_results("soak", "Long training, plain against scheduled", [table], failures))
    finish(failures)


if __name__ == "__main__":
    main()
