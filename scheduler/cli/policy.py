"""``policy``: what to recompute in each layer of a transformer, from its numbers alone."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Annotated

import typer

from graphs.costs.devices import device_spec
from scheduler.cli import options
from scheduler.cli.console import output, print_json, table, working
from scheduler.policy import (
    Policy,
    Transformer,
    best_policy,
    huggingface_lines,
    megatron_flags,
    megatron_offload,
    torch_lines,
    uniform,
)
from scheduler.units import format_bytes

NAME = "policy"


def run(
    *,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the whole model.")],
    hidden: Annotated[int, typer.Option(min=1, help="Width of the model.")],
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")],
    seq: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")],
    memory: Annotated[str, typer.Option(help="Memory of a device: 80GB, 75GiB, or a number of GB.")],
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a micro-batch.")] = 1,
    vocabulary: Annotated[int, typer.Option("--vocab", min=1, help="Rows of the embedding.")] = 51200,
    flash: Annotated[bool, typer.Option(help="Whether attention is one fused kernel.")] = True,
    tp: Annotated[int, typer.Option(min=1, help="Devices that share each layer (tensor parallelism).")] = 1,
    sequence_parallel: Annotated[bool, typer.Option(help="Whether these share norms and dropouts too.")] = True,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages (1F1B); figures are of the first.")] = 1,
    bytes_per_parameter: Annotated[
        float,
        typer.Option(min=0, help="Taken off the memory per parameter: 16 for weights, gradients and Adam's state."),
    ] = 0.0,
    op_level: Annotated[
        bool, typer.Option("--op-level", help="Also capture layers of this shape and plan them op by op.")
    ] = False,
    link: Annotated[
        str | None, typer.Option(help="Also copy whole layers to the host over this link (pcie4-x16, 25GB/s).")
    ] = None,
    device: options.Device = "a100",
    as_json: options.Json = False,
) -> None:
    """Choose none, selective or full recomputation, or copies to the host, for each layer, with formulae and flags."""
    try:
        model = Transformer(
            layers=layers,
            hidden=hidden,
            heads=heads,
            seq=seq,
            batch=batch,
            vocabulary=vocabulary,
            flash=flash,
            tensor_parallel=tp,
            sequence_parallel=sequence_parallel and tp > 1,
            pipeline_parallel=pp,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    most = options.budget_bytes(memory, "--memory")
    taken = int(model.parameters() * bytes_per_parameter)
    offloadable = 0 if link is None else copied_in_time(model, link, device)
    chosen = best_policy(model, most - taken, offloadable=offloadable)
    figures = policy_figures(model, chosen, most, taken) | {"offloadable": offloadable}
    if op_level:
        from scheduler.policy_ops import op_level_rows

        with working("capturing and planning layers of this shape"):
            rows = op_level_rows(model, options.device_name(device))
        figures["op_level"] = [dataclasses.asdict(row) for row in rows]
    if as_json:
        print_json("policy", figures)
    else:
        _print(model, chosen, most, taken, offloadable)
        if op_level:
            _print_op_level(figures["op_level"], options.device_name(device))
    if chosen is None:
        raise typer.Exit(1)


def copied_in_time(model: Transformer, link: str, device: str) -> int:
    """Layers of a stage whose activations a link takes to the host beside the forward on a device, in 16 bits.

    Raises:
        typer.BadParameter: no such link or device.

    """
    bandwidth = options.link_of(link).to_host_bytes_per_s
    spec = device_spec(options.device_name(device))
    return model.layers_copied_in_time(spec.flops_per_s("bfloat16") * spec.compute_efficiency, bandwidth)


def policy_figures(model: Transformer, chosen: Policy | None, memory: int, taken: int) -> dict[str, object]:
    """What ``policy`` says, for ``--json``. Sizes are bytes."""
    left = memory - taken
    flags, nearest = megatron_flags(model, left)
    return {
        "transformer": dataclasses.asdict(model),
        "memory_bytes": memory,
        "parameter_bytes": taken,
        "fits": chosen is not None,
        "policy": None if chosen is None else _policy_figures(chosen),
        "layers": None if chosen is None else [level.value for level in chosen.levels],
        "per_layer": {
            level.value: {"bytes": model.layer_bytes(level), "formula": model.formula(level)} for level in model.levels
        },
        "uniform": {level.value: _policy_figures(uniform(model, level)) for level in model.levels},
        "megatron_core": {"flags": flags, "policy": None if nearest is None else _policy_figures(nearest)},
        "megatron_core_offload": "" if chosen is None else megatron_offload(chosen),
        "huggingface": list(huggingface_lines(model, left)),
        "torch": [] if chosen is None else list(torch_lines(chosen)),
    }


def _policy_figures(policy: Policy) -> dict[str, object]:
    return {
        "none": policy.none,
        "selective": policy.selective,
        "full": policy.full,
        "offload": policy.offload,
        "activation_bytes": policy.activation_bytes,
        "added_flops": policy.added_flops,
        "overhead": policy.overhead,
    }


def _print(model: Transformer, chosen: Policy | None, memory: int, taken: int, offloadable: int) -> None:
    console = output()
    left = memory - taken
    if taken:
        console.print(
            f"{format_bytes(max(left, 0))} of {format_bytes(memory)} are left for activations", highlight=False
        )
    else:
        adam = format_bytes(16 * model.parameters())
        console.print(
            f"{format_bytes(memory)} for activations. Nothing is taken off for parameters: weights, gradients and "
            f"Adam's state would be {adam} (--bytes-per-parameter 16).",
            highlight=False,
        )
    console.print("Activations of one layer and micro-batch, in bytes:", highlight=False)
    made = table("per layer", "bytes", "formula", "added operations")
    made.columns[2].justify = "left"
    for level in model.levels:
        share = model.added_flops(level) / (3 * model.forward_flops())
        made.add_row(level.value, f"{model.layer_bytes(level):,}", model.formula(level), f"{share:.2%}")
    console.print(made, highlight=False)
    whole = table("all layers", "activations", "added operations", "fits")
    for level in model.levels:
        _add_policy(whole, f"{level.value} everywhere", uniform(model, level), left)
    if chosen is not None:
        _add_policy(whole, "chosen", chosen, left)
    console.print(whole, highlight=False)
    if offloadable:
        console.print(f"The link takes at most {offloadable} layers to the host while they compute.", highlight=False)
    if chosen is None:
        console.print(
            "No policy fits: use more devices, a smaller micro-batch, or shorter sequences.", style="bold red"
        )
        return
    console.print(f"layers of a stage: {_runs(chosen)}", style="bold", highlight=False)
    flags, nearest = megatron_flags(model, left)
    cost = "" if nearest is None else f"   # adds {nearest.overhead:.2%}"
    console.print(f"Megatron-Core   {flags or '(no recomputation flags)'}{cost}", highlight=False, markup=False)
    if megatron_offload(chosen):
        console.print(f"or, with copies  {megatron_offload(chosen)}", highlight=False, markup=False, soft_wrap=True)
    for name, lines in (("Hugging Face", huggingface_lines(model, left)), ("torch", torch_lines(chosen))):
        for i, line in enumerate("\n".join(lines).splitlines()):
            console.print(f"{name if not i else '':<15} {line}", highlight=False, markup=False, soft_wrap=True)


def _add_policy(made: object, name: str, policy: Policy, left: int) -> None:
    fits = "yes" if policy.activation_bytes <= left else "no"
    made.add_row(name, format_bytes(policy.activation_bytes), f"{policy.overhead:.2%}", fits)  # type: ignore[attr-defined]


def _runs(policy: Policy) -> str:
    """``0–11 full, 12–31 none``."""
    parts, start = [], 0
    for level, run_ in itertools.groupby(policy.levels):
        count = len(list(run_))
        span = f"{start}" if count == 1 else f"{start}–{start + count - 1}"
        parts.append(f"{span} {level.value}")
        start += count
    return ", ".join(parts)


def _print_op_level(rows: object, device: str) -> None:
    def percent(value: float | None) -> str:
        return "" if value is None else f"{value:.2%}"

    made = table(
        "memory of",
        "share of keep-all",
        "its operations",
        "its time",
        "op-level operations",
        "op-level time",
    )
    output().print(f"Op-level plans at equal activation memory (added shares, roofline of {device}):", highlight=False)
    assert isinstance(rows, list)
    for row in rows:
        made.add_row(
            row["name"],
            percent(row["share"]),
            percent(row["strategy_flops"]),
            percent(row["strategy_time"]),
            percent(row["plan_flops"]) or "none found",
            percent(row["plan_time"]),
        )
    output().print(made, highlight=False)
