"""Federated learning where tensors are: local training, exact sums, client state, protection of updates."""
