"""The formulae of the paper to the byte, the choice of layers against every other choice, and the flags."""

from __future__ import annotations

import itertools
import json
import re
from fractions import Fraction

import pytest
from typer.testing import CliRunner

from scheduler.cli import app
from scheduler.policy import (
    Level,
    Policy,
    Transformer,
    best_policy,
    huggingface_lines,
    megatron_flags,
    megatron_offload,
    torch_lines,
    uniform,
)
from scheduler.policy_ops import op_level_rows

GPT3 = {"layers": 96, "hidden": 12288, "heads": 96, "seq": 2048}
MT_NLG = {"layers": 105, "hidden": 20480, "heads": 128, "seq": 2048}


def published(shape, t, *, attention, sequence):
    """Table 2 of Korthikanti et al. 2022, for one layer and one sequence, as an exact fraction."""
    s, h, a = shape["seq"], shape["hidden"], shape["heads"]
    core = Fraction(5 * a * s, h) if attention else 0
    return s * h * ((34 + core) / Fraction(t) if sequence else 10 + (24 + core) / Fraction(t))


@pytest.mark.parametrize("shape", [GPT3, MT_NLG, {"layers": 2, "hidden": 64, "heads": 8, "seq": 24}])
@pytest.mark.parametrize("t", [1, 2, 8])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("batch", [1, 4])
def test_bytes_of_a_layer_are_those_published(shape, t, sequence, batch):
    model = Transformer(**shape, batch=batch, tensor_parallel=t, sequence_parallel=sequence)
    for level, attention in ((Level.NONE, True), (Level.SELECTIVE, False)):
        if t == 1 and not sequence:
            expected = shape["seq"] * shape["hidden"] * 34
            expected += 5 * shape["heads"] * shape["seq"] ** 2 if attention else 0
        else:
            expected = published(shape, t, attention=attention, sequence=sequence)
        assert model.layer_bytes(level) == batch * expected
    assert model.layer_bytes(Level.FULL) == 2 * batch * shape["seq"] * shape["hidden"]


def test_a_fused_kernel_keeps_a_number_per_row_instead():
    plain, fused = Transformer(**GPT3), Transformer(**GPT3, flash=True)
    rows = 4 * 96 * 2048
    assert fused.layer_bytes(Level.NONE) == plain.layer_bytes(Level.SELECTIVE) + rows
    assert fused.levels == (Level.NONE, Level.FULL)


def test_parameters_and_operations_are_those_published():
    model = Transformer(**GPT3, vocabulary=51200)
    assert model.parameters() == 96 * (12 * 12288**2 + 13 * 12288) + (51200 + 2048) * 12288
    h, s = Fraction(12288), 2048
    assert model.step_flops() == 72 * 96 * s * h**2 * (1 + s / (6 * h) + Fraction(51200, 12 * 12288 * 96))
    # the paper: with everything recomputed, one more forward of every layer
    full = uniform(model, Level.FULL)
    assert full.added_flops == 96 * (24 * s * h**2 + 4 * s**2 * h)


def exhaustive_peak(model, levels):
    """Most activation bytes of a sequence of levels, replayed: backward frees from the last layer on."""
    kept = [model.pipeline_parallel * model.layer_bytes(level) for level in levels]
    fixed = model.outside_bytes() + (model.layer_bytes(Level.NONE) if Level.OFFLOAD in levels else 0)
    most = fixed
    for last in range(len(levels), 0, -1):
        rebuilt = model.layer_bytes(Level.NONE) - model.layer_bytes(levels[last - 1])
        most = max(most, fixed + sum(kept[:last]) + rebuilt)
    return most


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("pp", [1, 2])
def test_the_choice_is_the_best_of_all(flash, pp):
    model = Transformer(layers=4 * pp, hidden=64, heads=4, seq=32, vocabulary=10, flash=flash, pipeline_parallel=pp)
    choices = []
    for levels in itertools.product(model.levels, repeat=model.stage_layers):
        flops = pp * sum(model.added_flops(level) for level in levels)
        choices.append((flops, exhaustive_peak(model, levels)))
    peaks = sorted({peak for _, peak in choices})
    for memory in [peaks[0] - 1, *peaks, peaks[-1] + 1]:
        fitting = [flops for flops, peak in choices if peak <= memory]
        found = best_policy(model, memory)
        if not fitting:
            assert found is None
            continue
        assert found is not None
        assert found.added_flops == min(fitting)
        assert found.activation_bytes == exhaustive_peak(model, found.levels) <= memory


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("offloadable", [1, 2, 5])
def test_the_choice_with_copies_is_the_best_of_all(flash, offloadable):
    model = Transformer(layers=5, hidden=64, heads=4, seq=32, vocabulary=10, flash=flash)
    choices = []
    for levels in itertools.product((*model.levels, Level.OFFLOAD), repeat=5):
        if levels.count(Level.OFFLOAD) <= offloadable:
            flops = sum(model.added_flops(level) for level in levels)
            choices.append((flops, exhaustive_peak(model, levels), levels.count(Level.OFFLOAD)))
    peaks = sorted({peak for _, peak, _ in choices})
    for memory in [peaks[0] - 1, *peaks, peaks[-1] + 1]:
        fitting = [(flops, copied) for flops, peak, copied in choices if peak <= memory]
        found = best_policy(model, memory, offloadable=offloadable)
        if not fitting:
            assert found is None
            continue
        assert (found.added_flops, found.offload) == min(fitting)
        assert found.activation_bytes == exhaustive_peak(model, found.levels) <= memory


def test_layers_copied_in_time():
    model = Transformer(layers=10, hidden=64, heads=4, seq=32, tensor_parallel=2)
    whole, forward = model.layer_bytes(Level.NONE), model.forward_flops()
    # the forward of ten layers takes ten seconds at this rate on each of two devices
    assert model.layers_copied_in_time(forward / 2, whole / 2) == 5
    assert model.layers_copied_in_time(forward / 2, whole * 100) == 10
    assert model.layers_copied_in_time(forward / 2, whole / 11) == 0


def test_flags_of_copies():
    model = Transformer(**GPT3, flash=True)
    assert "cpu_offloading_num_layers=7)" in megatron_offload(Policy(model, 0, 0, 7))
    assert "cpu_offloading_num_layers=95)" in megatron_offload(Policy(model, 0, 0, 96))
    assert megatron_offload(Policy(model, 1, 0, 7)) == megatron_offload(Policy(model, 0, 0, 0)) == ""
    lines = "\n".join(torch_lines(Policy(model, 3, 0, 2)))
    assert re.search(r"save_on_cpu\(pin_memory=True\):.*\n    for layer in layers\[:2\]: x = layer\(x\)", lines)
    assert "layers[2:5]: x = checkpoint" in lines
    assert "layers[5:96]: x = layer(x)" in lines


def test_flags():
    model = Transformer(**GPT3, tensor_parallel=8, sequence_parallel=True, pipeline_parallel=8)
    ample = uniform(model, Level.NONE).activation_bytes
    assert megatron_flags(model, ample)[0] == "--tensor-model-parallel-size 8 --sequence-parallel"
    flags, policy = megatron_flags(model, uniform(model, Level.SELECTIVE).activation_bytes)
    assert flags.endswith("--recompute-granularity selective --recompute-modules core_attn")
    assert policy == Policy(model, 0, 12)
    flags, policy = megatron_flags(model, uniform(model, Level.FULL).activation_bytes)
    assert flags.endswith("--recompute-granularity full --recompute-method block --recompute-num-layers 12")
    assert policy == Policy(model, 12, 0)
    assert megatron_flags(model, 1)[1] is None
    assert "model.gradient_checkpointing_enable()" not in huggingface_lines(model, ample)
    assert "model.gradient_checkpointing_enable()" in huggingface_lines(model, 1)
    assert torch_lines(Policy(model, 0, 0)) == ("# nothing to recompute",)
    assert any("layers[:3]" in line for line in torch_lines(Policy(model, 3, 2)))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("layers", 0, "at least 1"),
        ("heads", 7, "do not divide"),
        ("tensor_parallel", 5, "cannot share 96 heads"),
        ("pipeline_parallel", 7, "cannot share 96 layers"),
    ],
)
def test_shapes_that_cannot_be_split(field, value, message):
    with pytest.raises(ValueError, match=message):
        Transformer(**(GPT3 | {field: value}))


def test_command():
    shape = ["--layers", "32", "--hidden", "4096", "--heads", "32", "--seq", "8192", "--batch", "1"]
    done = CliRunner().invoke(app, ["policy", *shape, "--memory", "80GB", "--no-flash", "--json"])
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    s, h, a = 8192, 4096, 32
    assert found["per_layer"]["none"] == {"bytes": 34 * s * h + 5 * a * s * s, "formula": "34·s·b·h + 5·a·s²·b"}
    assert found["per_layer"]["selective"]["bytes"] == 34 * s * h
    assert len(found["layers"]) == 32
    assert found["policy"]["activation_bytes"] <= 80 * 10**9
    text = CliRunner().invoke(app, ["policy", *shape, "--memory", "80GB", "--no-flash"]).stdout
    assert "Megatron-Core   --recompute-granularity selective" in text
    linked = CliRunner().invoke(app, ["policy", *shape, "--memory", "20GB", "--link", "50GB/s", "--json"])
    copied = json.loads(linked.stdout)
    assert 0 < copied["policy"]["offload"] <= copied["offloadable"] <= 32
    assert copied["policy"]["added_flops"] == 0
    assert copied["layers"][0] == "offload"
    refused = CliRunner().invoke(app, ["policy", *shape, "--memory", "1GB"])
    assert refused.exit_code == 1
    assert "No policy fits" in refused.stdout


@pytest.mark.slow
def test_op_level_plans_are_no_slower_at_the_same_memory():
    model = Transformer(layers=8, hidden=256, heads=8, seq=256)
    selective, full, fifth = op_level_rows(model, "a100", layers=8)
    assert 1 > selective.share > full.share > 0
    assert fifth.share == pytest.approx(0.2, abs=0.01)
    for row in (selective, full):
        assert row.plan_time <= row.strategy_time
        assert row.strategy_flops > 0
    step = 3 * model.forward_flops()
    assert full.strategy_flops == pytest.approx(model.added_flops(Level.FULL) / step, rel=0.1)
    assert selective.strategy_flops <= model.added_flops(Level.SELECTIVE) / step
