"""Which ops may run twice: a recomputed op must give the bits of its first execution.

Random ops may: they are replayed from the generator state recorded before their first execution. Ops that pick among
equal values (ties flip between kernels), that write to memory, talk to other processes, or are unknown to us, may
not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from graphs._torch import OpOverload, schema_of

#: Ops that select by value. Ties and NaNs may resolve differently when they run again, on some devices.
SELECTION_OPS = frozenset(
    {
        "topk",
        "argmax",
        "argmin",
        "sort",
        "argsort",
        "msort",
        "nonzero",
        "nonzero_static",
        "unique_consecutive",
        "unique_dim",
        "_unique2",
        "_unique",
        "kthvalue",
        "mode",
        "median",
        "nanmedian",
        "masked_select",
    }
)

#: Namespaces of ops that compute with tensors only and are known to be functions of their inputs.
PURE_NAMESPACES = frozenset({"aten", "prims"})


def is_random(node: fx.Node) -> bool:
    """Whether the op draws from a generator (attention and recurrent kernels with a dropout of 0 do not)."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for position, argument in enumerate(schema_of(target).arguments):
        value = (
            node.args[position] if position < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        )
        if argument.name in ("dropout_p", "dropout") and value == 0.0:  # native_dropout's p draws even at 0
            return False
        if argument.name == "train" and value is False:
            return False
    return True


def is_mutating(node: fx.Node) -> bool:
    """Whether the op writes to one of its arguments."""
    target = node.target
    return isinstance(target, OpOverload) and schema_of(target).is_mutable


def written_by(node: fx.Node) -> tuple[fx.Node, ...]:
    """The arguments that the schema of an op marks as written, in order; none where nothing is known of it."""
    if not is_mutating(node):
        return ()
    assert isinstance(node.target, OpOverload)
    written: list[Any] = []
    for position, argument in enumerate(schema_of(node.target).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(node.args[position] if position < len(node.args) else node.kwargs.get(argument.name))
    return tuple(leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, fx.Node))


def names_of(node: fx.Node) -> tuple[str, ...]:
    """What a user may call an op: ``aten.mm.default``, ``aten.mm`` or ``mm``."""
    target = node.target
    if not isinstance(target, OpOverload):
        return (str(target),)
    return (str(target), str(target).rsplit(".", 1)[0], schema_of(target).name.split("::")[-1])


def reason_not_recomputable(node: fx.Node) -> str:
    """Why an op (a call_function node of the joint graph) must not run twice, or ``""`` where it may."""
    target = node.target
    if not isinstance(target, OpOverload):
        return f"{target} is not an operator with a schema: it may have side effects"
    name, _, base = names_of(node)
    selects = base in SELECTION_OPS or (base in ("max", "min") and len(schema_of(target).returns) > 1)
    rules = (
        (is_mutating(node), "writes to its argument"),
        (target.namespace not in PURE_NAMESPACES, f"custom operator {name}: not known to give the same result twice"),
        (selects, f"{base} selects by value: ties may resolve differently when it runs again"),
        (
            torch.Tag.data_dependent_output in target.tags or torch.Tag.dynamic_output_shape in target.tags,
            f"{base}: its result's shape or value steers the program",
        ),
    )
    return next((reason for applies, reason in rules if applies), "")
