"""Measurements of the acceptance: ``python -m benchmarks.NAME``. Results are written to ``benchmarks/results``."""

import os

# torch's profiler, which measures peaks on CPU, otherwise logs two lines to standard error each time it runs.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
