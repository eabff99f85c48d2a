"""Training with parameter servers in virtual time."""
