"""Splitting a model: captured as a graph of calls, its layers measured, cut where it is best, run in parts."""
