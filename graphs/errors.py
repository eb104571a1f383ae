"""Errors of the graphs package, and the root of the project's own errors."""

from __future__ import annotations


class CheckpointSchedulerError(Exception):
    """Root of every error that this project raises on purpose."""


class GraphFormatError(CheckpointSchedulerError, ValueError):
    """A training graph, or its saved form, is inconsistent. The message names the op or storage."""


class CaptureError(CheckpointSchedulerError, RuntimeError):
    """The training step could not be captured as one graph. The message names the line and the remedy."""


class UnsupportedModelError(CheckpointSchedulerError, RuntimeError):
    """The model does something that cannot be scheduled with the numbers of plain training. The message says what."""
