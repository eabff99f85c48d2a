"""Protocols as pure data: no I/O, no clock, randomness only from a seed. Run, simulated, checked and drawn alike."""
