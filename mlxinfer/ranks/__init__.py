"""One model over several processes or machines: tensor parallelism on MLX's `distributed`.

Rank 0 has the requests: it schedules and samples. It sends the inputs of a step to the
others as a few bytes over a control connection, so that all run the same collective operations in
the same order.
"""
