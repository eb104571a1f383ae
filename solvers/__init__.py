"""What to keep and what to recompute: problem, solvers, simulator and independent validator. Loads no torch."""
