"""Data servers of a run: processes that hold, read, decode and collate examples for the workers."""
