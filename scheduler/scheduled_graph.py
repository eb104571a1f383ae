"""The modules that a scheduled step runs: readable code, with a comment above what is recomputed or copied."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import fx


class ScheduledGraph(fx.GraphModule):
    """One half of a scheduled step. Copies of the scheduled module share it, pickles leave it out."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ScheduledGraph:
        memo[id(self)] = self
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def graph_module(root: fx.GraphModule, graph: fx.Graph, comments: dict[str, str], class_name: str) -> fx.GraphModule:
    """The module of a graph, whose attributes are those of ``root``; comments are by the name of a node."""
    graph.on_generate_code(lambda _: _comment_writer(comments))
    module = ScheduledGraph(root, graph, class_name)
    module.recompile()
    return module


_ASSIGNMENT = re.compile(r"^\s*(\w+)\s*(?::[^=]*)?=")


def _comment_writer(comments: dict[str, str]) -> Callable[[list[str]], list[str]]:
    """Code transformer that writes a comment line above each node named in ``comments``."""

    def transform(body: list[str]) -> list[str]:
        lines: list[str] = []
        for line in body:
            match = _ASSIGNMENT.match(line)
            if match and match.group(1) in comments:
                lines.append(f"# {comments[match.group(1)]}\n")
            lines.append(line)
        return lines

    return transform
