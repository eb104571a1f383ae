"""What a user forbids a plan to do with some tensors: by patterns of ops and modules, or by marks in the forward.

- ``keep``: what the op makes stays on the device from its production to its last use: the op runs once, and its results
  are not copied to the host.
- ``never_recompute``: the op runs once; its results may be copied to the host.
- ``never_offload``: its results are not copied to the host; they may be recomputed.

``never_recompute`` holds for ops of both phases, the others for what the forward makes.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Self

KINDS: Final = ("keep", "never_recompute", "never_offload")
_RUN_ONCE: Final = ("keep", "never_recompute")
_STAY: Final = ("keep", "never_offload")
_MARKED: Final = "mark "


@dataclasses.dataclass(frozen=True, slots=True)
class Constraints:
    """A user's patterns (shell style) by kind.

    A pattern is matched against an op's name (``aten.mm.default``, ``aten.mm`` or ``mm``) and against its module's
    path; the pattern of a module covers what is inside it.
    """

    keep: tuple[str, ...] = ()
    never_recompute: tuple[str, ...] = ()
    never_offload: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is any."""
        return any(getattr(self, kind) for kind in KINDS)

    def why_once(self, names: Sequence[str], module_path: str, *, forward: bool) -> str:
        """Why an op of these names must run once, or ``""``: every pattern that says so."""
        kinds = _RUN_ONCE if forward else ("never_recompute",)
        return " and ".join(self._matching(kinds, names, module_path))

    def why_here(self, names: Sequence[str], module_path: str, *, forward: bool) -> str:
        """Why what an op of these names makes must not be copied to the host, or ``""``."""
        kinds = _STAY if forward else ("never_offload",)
        return " and ".join(self._matching(kinds, names, module_path))

    def labels(self) -> tuple[str, ...]:
        """Every pattern, as messages name it."""
        return tuple(_label(kind, pattern) for kind in KINDS for pattern in getattr(self, kind))

    def used(self, names: Sequence[str], module_path: str) -> set[str]:
        """Labels of the patterns that match an op."""
        return set(self._matching(KINDS, names, module_path))

    def to_dict(self) -> dict[str, list[str]]:
        """Plain JSON-ready form; kinds without patterns are left out."""
        return {kind: list(getattr(self, kind)) for kind in KINDS if getattr(self, kind)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_dict`."""
        return cls(**{kind: tuple(patterns) for kind, patterns in data.items()})

    def _matching(self, kinds: Iterable[str], names: Sequence[str], path: str) -> Iterator[str]:
        for kind in kinds:
            for pattern in getattr(self, kind):
                inside = fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, f"{pattern}.*")
                if inside or any(fnmatch.fnmatchcase(name, pattern) for name in names):
                    yield _label(kind, pattern)


def mark_label(kind: str, source: str) -> str:
    """How messages name a mark; ``source`` is the line that sets it."""
    return f"{_MARKED}{kind!r}" + (f" at {source}" if source else "")


def marks_once(kind: str) -> bool:
    """Whether a mark of this kind has an op run once."""
    return kind in _RUN_ONCE


def marks_here(kind: str) -> bool:
    """Whether a mark of this kind forbids a copy to the host."""
    return kind in _STAY


def is_from_user(reason: str) -> bool:
    """Whether a reason (of an op or a storage) is a user's constraint, rather than the op's nature."""
    return reason.startswith((_MARKED, *(f"{kind}=" for kind in KINDS)))


def _label(kind: str, pattern: str) -> str:
    return f"{kind}={pattern!r}"
