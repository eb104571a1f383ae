"""The policy of selective checkpointing keeps what the plan keeps, and changes no number."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from graphs.links import Link
from scheduler import plan as plan_step
from scheduler.decisions import Action
from scheduler.export.sac import saved_occurrences
from scheduler.plan import Plan


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.policies = None

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            if self.policies is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=False, context_fn=self.policies[i])
        return x.square().mean()


class Mean(nn.Module):
    def forward(self, x):
        return x.square().mean()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Blocks()


@pytest.fixture(scope="module")
def x():
    return torch.randn(64, 32)


@pytest.fixture(scope="module")
def planned(model, x) -> Plan:
    keep_all = plan_step(model, None, (x,))
    share = keep_all.static_bytes + 0.7 * (keep_all.keep_all_peak_bytes - keep_all.static_bytes)
    return plan_step(model, f"{int(share)}B", (x,))


def gradients(model, x):
    model.zero_grad()
    with FlopCounterMode(display=False) as counter:
        loss = model(x)
        loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())], counter.get_total_flops()


def test_what_is_kept_is_what_the_plan_keeps(planned):
    kept = {d.storage for d in planned.decisions if d.action is Action.KEPT}
    for i in range(3):
        saved = saved_occurrences(planned, f"blocks.{i}")
        ops = [o for o in planned.graph.ops[: planned.graph.forward_ops] if o.module_path.startswith(f"blocks.{i}")]
        for target, flags in saved.items():
            same = [o for o in ops if o.target == target]
            assert flags == tuple(any(s in kept for s in o.outputs) for o in same)
    assert any(any(flags) for i in range(3) for flags in saved_occurrences(planned, f"blocks.{i}").values())


def test_numbers_are_those_of_the_plain_model_and_products_kept_are_not_run_again(model, x, planned):
    plain, flops = gradients(model, x)
    model.policies = [planned.to_sac_policy(f"blocks.{i}") for i in range(3)]
    ours, ours_flops = gradients(model, x)
    model.policies = None
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    products = [f for i in range(3) for f in saved_occurrences(planned, f"blocks.{i}").get("aten.addmm.default", ())]
    one = 2 * 64 * 32 * 128
    # a product that is not kept runs again, unless it is the last of its block, where recomputation has stopped early
    up = sum(not kept for kept in products[::2])
    assert ours_flops - flops == up * one


def test_unknown_module(planned):
    with pytest.raises(ValueError, match=r"no forward op in a module 'blocks\.7'"):
        planned.to_sac_policy("blocks.7")


def test_a_plan_with_copies_is_refused(model, x):
    keep_all = plan_step(model, None, (x,))
    share = keep_all.static_bytes + 0.7 * (keep_all.keep_all_peak_bytes - keep_all.static_bytes)
    link = Link(1e12, 1e12, latency_ns=0)
    moving = plan_step(model, f"{int(share)}B", (x,), offload="auto", link=link, host_budget_gb=1)
    paths = [d.module_path for d in moving.decisions if d.action is Action.OFFLOADED]
    moved = {path.split(".")[1] for path in paths if path}
    assert moved
    with pytest.raises(ValueError, match="which eager checkpointing cannot do"):
        moving.to_sac_policy(f"blocks.{min(moved)}")
    stays = {"0", "1", "2"} - moved
    assert stays
    moving.to_sac_policy(f"blocks.{min(stays)}")


class Dropping(nn.Module):
    """Products before and after a dropout, which eager mode on the CPU computes as a product too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        wide = self.up(x)
        return self.down(nn.functional.dropout(wide * wide.sigmoid(), 0.25)) * x


def test_products_of_dropouts_are_not_taken_for_others(caplog, x):
    torch.manual_seed(0)
    model = Dropping()
    planned = plan_step(nn.Sequential(model, Mean()), None, (x,))
    saved = saved_occurrences(planned, "0")
    assert len(saved["aten.mul.Tensor"]) == 2
    assert len(saved["aten.native_dropout.default"]) == 1
    results = []
    for context in (None, planned.to_sac_policy("0")):
        torch.manual_seed(1)
        model.zero_grad()
        y = model(x) if context is None else checkpoint(model, x, use_reentrant=False, context_fn=context)
        y.square().mean().backward()
        results.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert "runs more often" not in caplog.text
