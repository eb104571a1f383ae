"""``make demo``: train a 12-layer GPT-2 on real text under half of its activation memory, on the CPU.

Four copies of one model train on the same batches with the same seeds, in turns: plain, scheduled under the budget,
with ``torch.utils.checkpoint`` around each block, and scheduled under the peak which that took. Printed are the plan,
the losses of each step, and for each copy the step time (forward and backward, median) and the measured peak; the plan
and its picture go to ``demo-output/``.
The exit status is 1 if the scheduled losses differ from the plain ones, if a measured peak is over its budget, or if it
is more than 1 % away from the predicted one.

The text is the language reference that ships with Python (``pydoc_data.topics``), read as bytes. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import pathlib
import platform
import statistics
import sys
import time
from pydoc_data.topics import topics

import torch
import transformers
from torch import Tensor

from scheduler import Plan, measure_peak, schedule
from scheduler.units import format_bytes


@dataclasses.dataclass
class Contestant:
    """One copy of the model with its optimizer, and what was measured of it."""

    name: str
    model: transformers.GPT2LMHeadModel
    optimizer: torch.optim.Optimizer
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    peaks: list[int] = dataclasses.field(default_factory=list)
    budget: int | None = None

    def bound(self, budget: int, batch: Tensor) -> Plan:
        """Schedule the copy under a budget in bytes."""
        self.budget = budget
        inputs = {"input_ids": batch, "labels": batch}
        schedule(self.model, f"{budget}B", sample_kwargs=inputs, optimizer=self.optimizer)
        plan: Plan = self.model.plan
        return plan

    def is_within(self, plan: Plan) -> bool:
        """Whether the measured peak is within the budget and within 1 % of the plan's."""
        assert self.budget is not None
        return self.peak_bytes <= self.budget and abs(self.peak_bytes / plan.peak_bytes - 1) <= 0.01

    def train_step(self, step: int, batch: Tensor, *, measure: bool) -> None:
        """Forward, backward and optimizer step. The randomness depends on ``step`` alone."""
        torch.manual_seed(step)

        def forward_backward() -> None:
            output = self.model(input_ids=batch, labels=batch)  # held to the end of the step, as the plan assumes
            output.loss.backward()
            self.losses.append(output.loss.item())

        if measure:
            peak = measure_peak(forward_backward, resident=(self.model, self.optimizer, batch))
            self.peaks.append(peak.peak_bytes)
        else:
            start = time.perf_counter()
            forward_backward()
            self.seconds.append(time.perf_counter() - start)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def median_seconds(self) -> float:
        """Median time of forward and backward over the steps that were not measured for memory."""
        return statistics.median(self.seconds)

    @property
    def peak_bytes(self) -> int:
        """Highest measured peak."""
        return max(self.peaks)


def read_text() -> Tensor:
    """The text as bytes, in a one-dimensional tensor of int64 tokens."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8).long()


def make_batch(text: Tensor, step: int, options: argparse.Namespace) -> Tensor:
    """Random excerpts, (batch, tokens)."""
    generator = torch.Generator().manual_seed(1000 + step)
    starts = torch.randint(len(text) - options.tokens, (options.batch,), generator=generator)
    return torch.stack([text[start : start + options.tokens] for start in starts])


def make_contestant(name: str, model: transformers.GPT2LMHeadModel) -> Contestant:
    """A copy of the model with an optimizer of its own."""
    own = copy.deepcopy(model).train()
    return Contestant(name, own, torch.optim.AdamW(own.parameters(), lr=6e-4))


def make_model(options: argparse.Namespace) -> transformers.GPT2LMHeadModel:
    """GPT-2 with a vocabulary of bytes, seeded random weights and its usual dropout of 0.1."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256,
        bos_token_id=0,
        eos_token_id=0,
        n_positions=options.tokens,
        n_embd=options.width,
        n_layer=options.layers,
        n_head=max(1, options.width // 64),
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # the default, said so that transformers does not warn about it
    return model


def checkpoint_each_block(model: transformers.GPT2LMHeadModel) -> None:
    """Put ``torch.utils.checkpoint`` around each block, under the name that this version of transformers has for it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def parse_options() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description="Train a GPT-2 under half of its activation memory, on the CPU.")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=192, help="a multiple of 64")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="bytes of text per sequence")
    parser.add_argument("--steps", type=int, default=20, help="at least 3")
    parser.add_argument("--fraction", type=float, default=0.5, help="of the activation memory, that the budget allows")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("demo-output"))
    options = parser.parse_args()
    if options.steps < 3:
        parser.error("--steps must be at least 3: two are measured for memory, the others for time")
    return options


def choose_budget(plain: Contestant, batch: Tensor, fraction: float) -> int:
    """Bytes that are there before the step, and a fraction of what the plain step adds to them at its measured peak."""
    state = (t for values in plain.optimizer.state.values() for t in values.values() if torch.is_tensor(t))
    static = sum(t.nbytes for t in (*plain.model.parameters(), *plain.model.buffers(), *state, batch))
    activations = plain.peak_bytes - static
    budget = static + int(fraction * activations)
    print(
        f"plain peak {format_bytes(plain.peak_bytes)} = {format_bytes(static)} static (parameters, optimizer, batch) "
        f"+ {format_bytes(activations)}; budget {format_bytes(budget)} = static + {fraction:g} of the rest\n"
    )
    return budget


def print_contestants(contestants: list[Contestant]) -> None:
    """One line for each copy of the model, against the first."""
    plain = contestants[0]
    print(f"\n{'':<29}{'step time':>12}{'of plain':>10}{'budget':>12}{'measured peak':>16}{'of plain':>10}")
    for one in contestants:
        budget = "" if one.budget is None else format_bytes(one.budget)
        print(
            f"{one.name:<29}{one.median_seconds * 1e3:>9.0f} ms{one.median_seconds / plain.median_seconds:>10.3f}"
            f"{budget:>12}{format_bytes(one.peak_bytes):>16}{one.peak_bytes / plain.peak_bytes:>10.3f}"
        )
    times = len(plain.seconds)
    print(f"(forward and backward, medians of {times} steps taken in turns; peaks are the highest of 2 steps)")


def train(contestants: list[Contestant], batches: list[Tensor]) -> bool:
    """Train all copies in turns, printing the loss of each step; whether plain and scheduled losses are the same."""
    plain, scheduled, _, tight = contestants
    print(f"\n{'step':>4}{'plain loss':>14}{'scheduled':>14}")
    for step, batch in enumerate(batches):
        for one in contestants:
            if len(one.losses) == step:  # two copies have taken their first two steps already
                one.train_step(step, batch, measure=step < 2)
        a, b = plain.losses[step], scheduled.losses[step]
        print(f"{step:>4}{a:>14.6f}{b:>14.6f}{'' if a == b else '   differs'}", flush=True)
    same = plain.losses == scheduled.losses == tight.losses
    print(f"losses: {'equal, bit for bit' if same else 'NOT equal'}\n")
    return same


def write_plan(plan: Plan, folder: pathlib.Path) -> None:
    """Save the plan and its picture."""
    folder.mkdir(parents=True, exist_ok=True)
    plan.save(folder / "plan.json")
    plan.plot().figure.savefig(folder / "plan.png", dpi=150)
    print(f"wrote {folder / 'plan.json'} and {folder / 'plan.png'}", flush=True)


def main() -> int:
    """Run the demo and return the exit status."""
    options = parse_options()
    torch.set_num_threads(1)
    started = time.perf_counter()
    text, model = read_text(), make_model(options)
    print(
        f"GPT-2, {options.layers} layers × {options.width}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M "
        f"parameters, batch {options.batch} × {options.tokens} bytes out of {len(text):,}; "
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, one thread\n"
        "two steps, plain and with per-block checkpointing, to see how much memory they take ...",
        flush=True,
    )
    batches = [make_batch(text, step, options) for step in range(options.steps)]
    names = ("plain", "scheduled", "per-block checkpoint", "scheduled at per-block's peak")
    contestants = [make_contestant(name, model) for name in names]
    plain, scheduled, per_block, tight = contestants
    checkpoint_each_block(per_block.model)

    # Two steps of these say how much memory they take: in the second, the optimizer has its state.
    for step in (0, 1):
        plain.train_step(step, batches[step], measure=True)
        per_block.train_step(step, batches[step], measure=True)
    budget = choose_budget(plain, batches[0], options.fraction)

    print("planning: trace the step, time each distinct op, solve (half a minute on a quiet machine) ...", flush=True)
    planning = time.perf_counter()
    plan = scheduled.bound(budget, batches[0])
    print(f"captured, profiled and solved in {time.perf_counter() - planning:.1f} s\n\n{plan.summary()}\n")
    write_plan(plan, options.output)
    tight_plan = tight.bound(per_block.peak_bytes, batches[0])
    same = train(contestants, batches)
    plan.record_measured_peak(scheduled.peak_bytes)
    print(
        f"budget {format_bytes(budget)}, predicted peak {format_bytes(plan.peak_bytes)}, "
        f"measured peak {format_bytes(scheduled.peak_bytes)} ({scheduled.peak_bytes / plan.peak_bytes - 1:+.2%})"
    )
    print_contestants(contestants)
    print(f"{time.perf_counter() - started:.0f} s in all")
    return 0 if same and scheduled.is_within(plan) and tight.is_within(tight_plan) else 1


if __name__ == "__main__":
    sys.exit(main())
