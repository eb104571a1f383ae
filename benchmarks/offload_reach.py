"""How far copies to the host lower the least budget of GPT-2, where everything may be recomputed.

Twelve layers in several shapes, captured without memory. What can be recomputed from the input need not be kept while
an op runs, and so what binds is a stretch of ops that cannot be broken: what it makes may only leave for the host. The
table states the least budget found without copies, that with copies, and what no schedule fits below. The link is so
slow that everything may be copied: a faster one has a larger least size.
"""

from __future__ import annotations

import dataclasses

import torch

from benchmarks.common import Table, arguments, finish, write_results
from graphs.links import parse_link
from scheduler import plan
from solvers import Problem, find_floor
from solvers.offload_floor import lower_with_copies

LINK = "1GB/s"


@dataclasses.dataclass(frozen=True)
class Shape:
    """A GPT-2 and its batch."""

    width: int
    heads: int
    batch: int
    tokens: int
    vocabulary: int


SHAPES = (
    Shape(64, 2, 1, 1024, 256),  # attention takes most
    Shape(128, 4, 16, 128, 256),  # the MLP does
    Shape(256, 4, 128, 32, 256),
    Shape(64, 2, 64, 64, 8192),  # the logits do
    Shape(768, 12, 1, 128, 50257),  # the weights do
)


def main() -> None:
    options = arguments(__doc__, layers=12, seconds=30.0)
    table = Table(
        f"GPT-2, {options.layers} layers, everything may be recomputed; MB",
        (
            "width × batch × tokens, vocabulary",
            "static",
            "keep all",
            "least without copies",
            "least with copies",
            "saved %",
            "proven to be needed",
            "of the least without %",
            "binds",
        ),
    )
    for shape in SHAPES:
        problem = captured(shape, options.layers)
        known = find_floor(problem, time_limit_s=options.seconds).plan
        alone = known.peak_bytes
        linked = problem.with_link(parse_link(LINK), 10**12)
        found, bound = lower_with_copies(linked, known, time_limit_s=options.seconds)
        least = alone if found is None else found.peak_bytes
        table.add(
            f"{shape.width} × {shape.batch} × {shape.tokens}, {shape.vocabulary}",
            *(f"{size / 1e6:.2f}" for size in (problem.static_bytes, problem.budget_bytes, alone, least)),
            f"{100 * (1 - least / alone):.1f}",
            f"{bound.bytes / 1e6:.2f}",
            f"{100 * bound.bytes / alone:.1f}",
            problem.describe_op(bound.op),
        )
    table.show()
    note = f"Each search has {options.seconds:g} s; copies over {LINK}, host memory without limit."
    if not options.no_write:
        print(write_results("offload_reach", "The least budget of GPT-2 with copies to the host", [table], [note]))
    finish([])


def captured(shape: Shape, layers: int) -> Problem:
    """The step's problem, its budget the keep-all peak."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_embd=shape.width,
        n_head=shape.heads,
        vocab_size=shape.vocabulary,
        n_positions=shape.tokens,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    with torch.device("meta"):
        model = GPT2LMHeadModel(config).train()
    ids = torch.empty(shape.batch, shape.tokens, dtype=torch.long)
    return plan(model, None, kwargs={"input_ids": ids, "labels": ids}, device="h100-sxm").problem


if __name__ == "__main__":
    main()
