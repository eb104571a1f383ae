"""``python -m scheduler``: the same as the command ``checkpoint-scheduler``."""

from __future__ import annotations

from scheduler.cli import main

if __name__ == "__main__":
    main()
