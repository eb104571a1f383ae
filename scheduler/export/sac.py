"""A plan as a policy of torch's selective activation checkpointing (SAC), for code that must stay eager.

``torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=policy)`` asks a policy about every op of
the block and keeps what it says. SAC decides op by op, once per checkpointed region, and rebuilds a whole region before
its backward starts; so the region should be a block, and the peak is that of torch, not of the plan.

Ops are told apart by their target and by how many of that target ran before in the region: eager execution runs the
same kernels in the same order as the captured graph. Dropout alone is another: where the device has no fused kernel for
it (the CPU), eager mode draws a mask and multiplies by it. An op that the graph does not know (a view, or a kernel that
capture replaces by another) is recomputed.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from graphs.ir import Phase
from scheduler.decisions import Action
from scheduler.explain import under

if TYPE_CHECKING:
    from scheduler.plan import Plan

logger = logging.getLogger(__name__)

_DROPOUT: Final = "aten.native_dropout.default"
_MASK: Final = "aten.bernoulli_.float"
_PRODUCT: Final = "aten.mul.Tensor"


def to_sac_policy(plan: Plan, module: str = "") -> Callable[[], tuple[Any, Any]]:
    """The ``context_fn`` for ``torch.utils.checkpoint.checkpoint`` around one module.

    Args:
        plan: the plan.
        module: dotted path of the checkpointed module; ``""`` for the whole model.

    Returns:
        A function without arguments that makes the two contexts of
        ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.

    Raises:
        ValueError: no forward op of the plan lies in that module, or the plan copies what it makes to the host: SAC in
            eager mode knows no such thing, and recomputes silently what a policy says to offload.

    """
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    saved = saved_occurrences(plan, module)

    def context_fn() -> tuple[Any, Any]:
        contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(  # type: ignore[no-untyped-call]  # torch's
            _Policy(saved, module)
        )
        return contexts

    return context_fn


def saved_occurrences(plan: Plan, module: str = "") -> Mapping[str, tuple[bool, ...]]:
    """For each target the forward ops of a module in order, and whether the plan keeps what each makes.

    An op with several results counts as kept where more than half of their bytes are.

    Raises:
        ValueError: as :func:`to_sac_policy`.

    """
    moved = [d for d in plan.decisions if d.action is Action.OFFLOADED and under(d.module_path, module)]
    if moved:
        raise ValueError(
            f"the plan copies {len(moved)} tensors of {module or 'the model'} to the host, {moved[0].name} first, "
            "which eager checkpointing cannot do: plan without a link (offload=False)"
        )
    kept = {d.storage for d in plan.decisions if d.action is Action.KEPT}
    saved: dict[str, list[bool]] = collections.defaultdict(list)
    for op in plan.graph.captured.ops:  # eager execution keeps the order of plain training
        if op.phase is not Phase.FORWARD or not under(op.module_path, module):
            continue
        sizes = {s: plan.graph.storages[s].bytes for s in op.outputs}
        held = sum(size for s, size in sizes.items() if s in kept)
        saved[op.target].append(2 * held > sum(sizes.values()))
    if not saved:
        raise ValueError(f"the plan has no forward op in a module {module!r}")
    return {target: tuple(flags) for target, flags in saved.items()}


class _Policy:
    """Counts the ops of one run of a region, in its forward and in its recomputation."""

    def __init__(self, saved: Mapping[str, tuple[bool, ...]], module: str) -> None:
        self.saved = saved
        self.module = module
        self.seen: dict[bool, collections.Counter[str]] = {
            False: collections.Counter(),
            True: collections.Counter(),
        }
        self.mask_drawn = {False: False, True: False}

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        """``MUST_SAVE`` or ``PREFER_RECOMPUTE`` for one execution."""
        from torch.utils.checkpoint import CheckpointPolicy

        del args, kwargs
        again = bool(ctx.is_recompute)
        name = self._as_captured(str(op), again=again)
        known = self.saved.get(name, ())
        seen = self.seen[again]
        position = seen[name]
        seen[name] += 1
        if known and position == len(known):
            logger.warning(
                "%s runs more often in %s than in the planned step: the rest of it is recomputed", name, self.module
            )
        keep = position < len(known) and known[position]
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def _as_captured(self, name: str, *, again: bool) -> str:
        """The captured op that an op of eager mode stands for: the product with a mask is the dropout."""
        if name == _MASK and _DROPOUT in self.saved:
            self.mask_drawn[again] = True
        elif name == _PRODUCT and self.mask_drawn[again]:
            self.mask_drawn[again] = False
            return _DROPOUT
        return name
