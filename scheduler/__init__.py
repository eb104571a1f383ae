"""Train any PyTorch module under a real peak-memory budget."""
