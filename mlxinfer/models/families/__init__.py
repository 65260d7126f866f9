"""One file per family: what differs from the common decoder, and how a checkpoint names things."""
