"""What runs beside the rewritten graphs while training."""
