"""What a pass over the model finds, layer by layer: what matters in it, and at what cost."""
