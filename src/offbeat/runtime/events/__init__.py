"""Events of a run, written down by the processes that take part in it."""
