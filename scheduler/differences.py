"""In what two training steps differ, in words."""

from __future__ import annotations

import collections
import importlib.metadata
from collections.abc import Mapping

from graphs.ir import Op, Storage, TrainingGraph
from scheduler.units import format_bytes


def first_difference(planned: TrainingGraph, given: TrainingGraph) -> str:
    """In words, the first thing in which two graphs of different fingerprint differ."""
    for old, new in zip(planned.ops, given.ops, strict=False):
        if (old.target, old.phase, old.recomputable) != (new.target, new.phase, new.recomputable):
            return f"op {old.index} was {_describe_op(old)} and is {_describe_op(new)}"
    if len(planned.ops) != len(given.ops):
        extra = (
            collections.Counter(o.target for o in given.ops) - collections.Counter(o.target for o in planned.ops)
        ) or (collections.Counter(o.target for o in planned.ops) - collections.Counter(o.target for o in given.ops))
        names = ", ".join(sorted(extra))
        return f"it had {len(planned.ops)} ops and this one has {len(given.ops)} (the difference: {names})"
    for before, after in zip(planned.storages, given.storages, strict=False):
        if (before.bytes, before.kind, before.producer) != (after.bytes, after.kind, after.producer):
            return f"storage {before.index} was {_describe_storage(before)} and is {_describe_storage(after)}"
    for old, new in zip(planned.ops, given.ops, strict=True):
        if (old.inputs, old.outputs) != (new.inputs, new.outputs):
            return f"op {old.index}, {_describe_op(old)}, reads or makes other storages"
    return f"it had {len(planned.storages)} storages and this one has {len(given.storages)}"


def _describe_op(op: Op) -> str:
    where = f" in {op.module_path}" if op.module_path else ""
    return f"{op.target}{where} ({op.phase}{'' if op.recomputable else ', never run again'})"


def _describe_storage(storage: Storage) -> str:
    where = f" in {storage.module_path}" if storage.module_path else ""
    return f"{storage.kind} {storage.name}{where} of {format_bytes(storage.bytes)}"


def changed_versions(made_with: Mapping[str, str]) -> str:
    """The packages of which another version is installed here, in words; empty where there is none."""
    changes = []
    for name, version in made_with.items():
        try:
            here = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            here = "none"
        if here != version:
            changes.append(f"{name} {version} (here {here})")
    return ", ".join(changes)
