"""The command line: ``checkpoint-scheduler``, or ``python -m scheduler``."""

from scheduler.cli.app import app, main

__all__ = ["app", "main"]
