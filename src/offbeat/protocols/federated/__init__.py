"""Federated learning without tensors: who has which data, who takes part in a round, whose update counts."""
