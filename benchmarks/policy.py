"""Op-level plans beside selective and full recomputation, for the shapes of GPT-3 175B and MT-NLG 530B.

Layers of each shape (pre-norm, GELU, dropout, attention as separate kernels, one sequence, bf16) are captured without
weights and planned by the roofline of an A100 at exactly the activation memory that each strategy takes, and at a fifth
of what keeping everything takes. Shares are of the step that recomputes nothing: operations are those of matrix
products, as Korthikanti et al. 2022 count them; time is the roofline's. Passes where no plan adds more time than the
strategy whose memory it has, and a fifth of the memory costs less than 5 % of the operations.
"""

from __future__ import annotations

import time

from benchmarks.common import Table, arguments, finish, write_results
from scheduler.policy import Level, Transformer
from scheduler.policy_ops import op_level_rows

SHAPES = {
    "GPT-3 175B": Transformer(layers=96, hidden=12288, heads=96, seq=2048),
    "MT-NLG 530B": Transformer(layers=105, hidden=20480, heads=128, seq=2048),
}
SHRINK, AT_MOST = 5.0, 0.05


def main() -> None:
    options = arguments(__doc__, layers=12, device="a100")
    columns = (
        *("shape", "at the memory of", "of keep-all", "its operations %", "its time %"),
        *("plan's operations %", "plan's time %", "gap %"),
    )
    table = Table(f"{options.layers} layers of each shape, {options.device} roofline", columns)
    failures, notes = [], []
    for name, model in SHAPES.items():
        begin = time.process_time()
        for row in op_level_rows(model, options.device, layers=options.layers, shrink=SHRINK):
            shares = (row.strategy_flops, row.strategy_time, row.plan_flops, row.plan_time, row.gap)
            table.add(name, row.name, f"{row.share:.3f}", *("-" if s is None else f"{100 * s:.2f}" for s in shares))
            if row.plan_time is None or row.plan_flops is None:
                failures.append(f"{name}, {row.name}: no plan was found")
            elif row.strategy_time is None and row.plan_flops > AT_MOST:
                failures.append(f"{name}: {row.plan_flops:.2%} more operations at {SHRINK:g}× less memory")
            elif row.strategy_time is not None and row.plan_time > row.strategy_time + 1e-9:
                failures.append(f"{name}, {row.name}: slower than the strategy")
        seconds = time.process_time() - begin
        whole, selective = model.layer_bytes(Level.NONE), model.layer_bytes(Level.SELECTIVE)
        notes.append(
            f"{name}: a layer keeps {whole:,} bytes by the paper's formula and {selective:,} with its attention "
            f"recomputed, {whole / selective:.2f} times less; two captures and three plans took {seconds:.0f} s of "
            "processor time."
        )
    notes.append(
        "The paper reports 5 times less activation memory for under 5 % of added operations, by selective "
        "recomputation and sequence parallelism together. Here the fifth is reached by recomputation alone."
    )
    table.show()
    if not options.no_write:
        write_results("policy", "Which layers, or which ops, to recompute", [table], notes)
    finish(failures)


if __name__ == "__main__":
    main()
