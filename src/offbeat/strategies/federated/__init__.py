"""Federated learning: clients keep their data, and send only updates of the model."""
