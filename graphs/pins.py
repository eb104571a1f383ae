"""Storages that a plan may not copy to the host, and ops that run once because a result of theirs is marked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx

from graphs import recomputability
from graphs._torch import storage_identity
from graphs.constraints import is_from_user, mark_label, marks_here, marks_once
from graphs.ir import Op, Storage


def apply_marks(
    marks: Iterable[tuple[torch.Tensor, str, str]],
    ops: list[Op],
    storages: list[Storage],
    by_identity: Mapping[int, int],
) -> None:
    """Note in ops and storages what :func:`graphs.marks.take_marks` found. What never runs again anyway stays so.

    ``by_identity``: the storage index of each storage of the graph's fake values.
    """
    for value, what, source in marks:
        index = by_identity.get(storage_identity(value))
        producer = None if index is None else storages[index].producer
        if producer is None:
            continue
        op, label = ops[producer], mark_label(what, source)
        if marks_once(what) and (op.recomputable or is_from_user(op.reason)):
            ops[producer] = dataclasses.replace(op, recomputable=False, reason=_joined(op.reason, label))
        if marks_here(what):
            _pin(storages, op.outputs, label)


def pin_what_changes(
    nodes: Sequence[fx.Node | None],
    snapshots: Iterable[int],
    ops: Sequence[Op],
    storages: list[Storage],
    storage_of: Mapping[fx.Node, int],
) -> None:
    """Keep on the device what an op writes to again, and snapshots (by op), which may be the static tensor itself."""
    for op in snapshots:
        _pin(storages, ops[op].outputs, "a snapshot of what the step overwrites")
    for node in nodes:
        if node is not None and recomputability.is_mutating(node):
            touched = [storage_of[n] for n in (node, *recomputability.written_by(node)) if n in storage_of]
            _pin(storages, touched, "written to again after it is made")


def _pin(storages: list[Storage], chosen: Iterable[int], why: str) -> None:
    for index in chosen:
        before = storages[index].pinned
        if not before or is_from_user(before):
            pinned = _joined(before, why) if is_from_user(why) else why
            storages[index] = dataclasses.replace(storages[index], pinned=pinned)


def _joined(before: str, label: str) -> str:
    return label if not before or label in before.split(" and ") else f"{before} and {label}"
