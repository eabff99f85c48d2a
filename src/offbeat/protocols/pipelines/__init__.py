"""Pipelines: the order in which each stage computes, as schedules that are checked, simulated, drawn and run."""
