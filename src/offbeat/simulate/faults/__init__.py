"""Protocols under injected faults, in virtual time: what must hold is checked in every run."""
