"""Measured costs on disk, so that each op is measured once per machine and torch version.

One JSON file per environment (:func:`environment`): device, torch version, threads and whatever else decides which
kernel runs. The file is written beside its place and renamed, after what another process has put there meanwhile has
been merged in: readers always see a whole file, and two processes at once lose at most a figure, to be measured again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pathlib
import platform
import re
import tempfile
from collections.abc import Mapping
from typing import Final

import torch

logger = logging.getLogger(__name__)

SCHEMA_VERSION: Final = 1

MEASUREMENT: Final = 4
"""Raised whenever ops are measured in another way than before: figures of earlier versions are then measured again."""

CACHE_VARIABLE: Final = "CHECKPOINT_SCHEDULER_CACHE"
"""Environment variable that names the directory of the cache."""

Measured = tuple[int, int]
"""Time in nanoseconds and workspace in bytes of one op."""


def cache_directory() -> pathlib.Path:
    """Directory for measured costs.

    ``$CHECKPOINT_SCHEDULER_CACHE``, else ``checkpoint-scheduler`` in ``$XDG_CACHE_HOME``, else in ``~/.cache``.
    """
    if named := os.environ.get(CACHE_VARIABLE):
        return pathlib.Path(named)
    parent = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(parent) if parent else pathlib.Path.home() / ".cache") / "checkpoint-scheduler"


def device_name(device: torch.device) -> str:
    """Name of the hardware: what the driver reports for a GPU, the model of the processor for a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine() or "cpu"


def environment(device: torch.device) -> dict[str, str | int | bool]:
    """Everything beside the op that decides how long it takes and what it allocates."""
    described: dict[str, str | int | bool] = {
        "measurement": MEASUREMENT,
        "device": device_name(device),
        "device_type": device.type,
        "torch": torch.__version__,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    if device.type == "cuda":
        described["cudnn_benchmark"] = torch.backends.cudnn.benchmark
        described["cudnn_deterministic"] = torch.backends.cudnn.deterministic
    else:
        described["threads"] = torch.get_num_threads()
        described["capability"] = torch.backends.cpu.get_cpu_capability()
    return described


class CostCache:
    """Measured costs of one environment.

    Args:
        directory: where the file lies; made on the first write.
        described: the environment, from :func:`environment`.

    """

    def __init__(self, directory: pathlib.Path, described: Mapping[str, str | int | bool]) -> None:
        self._described = dict(described)
        digest = hashlib.sha256(json.dumps(self._described, sort_keys=True).encode()).hexdigest()[:12]
        name = re.sub(r"[^A-Za-z0-9]+", "-", str(described.get("device", ""))).strip("-").lower()
        self.path = directory / f"costs-{name}-{digest}.json"

    def load(self) -> dict[str, Measured]:
        """Costs by signature. Empty, with a warning in the log, where the file is not one of ours."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            logger.warning("ignoring the measured costs in %s: %s", self.path, error)
            return {}
        try:
            return self._parse(text)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning("ignoring the measured costs in %s: %s; they will be measured again", self.path, error)
            return {}

    def _parse(self, text: str) -> dict[str, Measured]:
        data = json.loads(text)
        if data["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema_version {data['schema_version']!r}, this version reads {SCHEMA_VERSION}")
        if data["environment"] != self._described:
            raise ValueError("it was measured in another environment")
        entries = {}
        for signature, (time_ns, workspace) in data["costs"].items():
            if type(time_ns) is not int or type(workspace) is not int or time_ns < 0 or workspace < 0:
                raise ValueError(f"{signature} has the costs {time_ns!r}, {workspace!r}")
            entries[signature] = (time_ns, workspace)
        return entries

    def add(self, measured: Mapping[str, Measured]) -> None:
        """Put measured costs into the file. A directory that cannot be written is a warning in the log, no error."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            merged = {**(self.load() if self.path.exists() else {}), **measured}
            data = {"schema_version": SCHEMA_VERSION, "environment": self._described, "costs": merged}
            self._replace(json.dumps(data, indent=0, sort_keys=True))
        except OSError as error:
            logger.warning("measured costs are not kept: %s", error)

    def _replace(self, text: str) -> None:
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.stem}-", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            pathlib.Path(temporary).replace(self.path)
        except BaseException:
            pathlib.Path(temporary).unlink(missing_ok=True)
            raise
