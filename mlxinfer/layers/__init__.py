"""What decoders are made of: mixers, feed-forward blocks, projections, norms and ropes."""
