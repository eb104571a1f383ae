"""What a training step is: capture, the torch-free graph, and what its ops cost."""
