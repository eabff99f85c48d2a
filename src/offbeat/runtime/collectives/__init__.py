"""Schedules on real processes: by messages (`two_sided`) and in shared memory (`one_sided`)."""
