"""Plan Llama-3-8B at 8,192 tokens for an 80 GB H100 on this machine, without its weights and without the device.

Passes where that takes less than 90 s and 6 GB of this process's memory, and the gap is at most 0.5 %.
"""

from __future__ import annotations

import resource
import sys
import time

import torch

from benchmarks.common import Table, arguments, finish, write_results
from scheduler import plan


def make_llama(tokens: int, layers: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Llama-3-8B in bfloat16 on the meta device, and a batch of one sequence."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        rms_norm_eps=1e-5,
        use_cache=False,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.empty(1, tokens, dtype=torch.long)
    return model.train(), {"input_ids": ids, "labels": ids}


def main() -> None:
    options = arguments(__doc__, tokens=8192, layers=32, budget=80.0)
    model, batch = make_llama(options.tokens, options.layers)
    begin = time.perf_counter()
    made = plan(model, options.budget, (), batch, device="h100-sxm")
    seconds = time.perf_counter() - begin
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    print(made.summary())
    table = Table(
        f"Llama-3-8B, {options.layers} layers, {options.tokens:,} tokens, batch 1, bf16, {options.budget:g} GB H100",
        ("figure", "value"),
    )
    table.add("ops in the graph", f"{len(made.graph.ops):,}")
    table.add("seconds in all", f"{seconds:.1f}")
    table.add("seconds solving", f"{made.solution.solve_seconds:.1f}")
    table.add("peak memory of the process", f"{rss / 1e9:.2f} GB")
    table.add("budget", f"{(made.budget_bytes or 0) / 1e9:.2f} GB")
    table.add("static", f"{made.static_bytes / 1e9:.2f} GB")
    table.add("keep-all peak", f"{made.keep_all_peak_bytes / 1e9:.2f} GB")
    table.add("predicted peak", f"{made.peak_bytes / 1e9:.2f} GB")
    table.add("keep-all step", f"{made.keep_all_time_ns / 1e9:.3f} s")
    table.add("overhead", f"{made.overhead:.3%}")
    table.add("gap", f"{made.gap:.4%}")
    table.add("status", made.status.value)
    table.show()
    failures = []
    if seconds > 90:
        failures.append(f"took {seconds:.1f} s")
    if rss > 6e9:
        failures.append(f"used {rss / 1e9:.2f} GB")
    if made.gap > 0.005:
        failures.append(f"gap {made.gap:.2%}")
    if made.budget_bytes is not None and made.peak_bytes > made.budget_bytes:
        failures.append("the plan is over its budget")
    if not options.no_write:
        print(write_results("llama8b_offline", "Planning Llama-3-8B without the device", [table]))
    finish(failures)


if __name__ == "__main__":
    main()
