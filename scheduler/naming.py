"""Module paths of a step, and those that are near to one that is not there."""

from __future__ import annotations

import difflib

from graphs.ir import TrainingGraph


def module_paths(graph: TrainingGraph) -> list[str]:
    """Paths of the modules that have ops in a step, and of those around them, sorted."""
    paths: set[str] = set()
    for op in graph.ops:
        parts = op.module_path.split(".")
        paths.update(".".join(parts[:i]) for i in range(1, len(parts) + 1))
    return sorted(paths - {""})


def did_you_mean(graph: TrainingGraph, path: str) -> str:
    """`` Did you mean ...?`` with up to three paths that are near, those of the same parent first; or ``""``."""
    known = module_paths(graph)
    parent, _, name = path.rpartition(".")
    siblings = {p.rpartition(".")[2]: p for p in known if p.rpartition(".")[0] == parent}
    near = [siblings[n] for n in difflib.get_close_matches(name, siblings, n=3)]
    near = near or difflib.get_close_matches(path, known, n=3)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
