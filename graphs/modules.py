"""Where an fx node comes from: the path of its module in the user's model, and the line of the user's code."""

from __future__ import annotations

import re
from collections.abc import Set as AbstractSet

from torch import fx

_INDEX = re.compile(r"\[['\"]?([^'\"\]]+)['\"]?\]")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def module_path_of(node: fx.Node, module_names: AbstractSet[str]) -> str:
    """Dotted path of the innermost module that a node was traced in, as in ``model.named_modules()``.

    Backward nodes carry the module of the forward op that they differentiate. Dynamo writes a path as the expression
    that reaches the module (``L['fn'].transformer.h[0]``); its longest tail that names a module of the model is the
    path.

    Returns:
        The path, ``""`` for the root module or where unknown.

    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    expression = str(next(reversed(stack.values()))[0])
    parts = [p for p in _INDEX.sub(r".\1", expression).split(".") if p and p != "_modules"]
    for start in range(len(parts)):
        candidate = ".".join(parts[start:])
        if candidate in module_names:
            return candidate
    return "" if module_names else ".".join(parts[1:])


def source_of(node: fx.Node, *, skip: str = "") -> str:
    """``file:line`` of the innermost frame of the user's code that a node was traced from, or ``""``.

    Frames of the file ``skip`` do not count.
    """
    frames = [f for f in _FRAME.findall(node.meta.get("stack_trace") or "") if f[0] != skip]
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""
