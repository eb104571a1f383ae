"""Writing a plan or an export whole or not at all."""

from __future__ import annotations

import os
import pathlib
import secrets


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file through a temporary one beside it, so that a reader never sees half of it."""
    target = pathlib.Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
