"""State that survives: checkpoints, snapshots, random state."""
