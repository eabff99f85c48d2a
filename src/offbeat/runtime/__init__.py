"""Where bytes move: processes, process groups, data, checkpoints and the records of a run."""
