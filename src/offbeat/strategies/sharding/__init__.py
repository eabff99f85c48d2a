"""Optimizer state, gradients and parameters of which each worker keeps slices (`allreduce(shard=...)`)."""
