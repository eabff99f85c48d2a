"""What can be known about a run from its events alone: their order, cuts through it, waits that never end, blame."""
