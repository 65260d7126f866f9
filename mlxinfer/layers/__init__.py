"""The parts of decoders: mixers, feed-forward blocks, projections, norms and ropes."""
