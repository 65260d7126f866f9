"""A checkpoint's tensors, and how they become the matrices of a model."""
