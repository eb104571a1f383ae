"""Writing a plan or an export whole or not at all."""

from __future__ import annotations

import errno
import os
import pathlib
import secrets


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file through a temporary one beside it, so that a reader never sees half of it.

    Raises:
        OSError: it cannot be written.

    """
    target = pathlib.Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(target.parent))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
