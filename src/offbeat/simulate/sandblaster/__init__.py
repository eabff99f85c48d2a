"""Sandblaster in virtual time: paused workers, and who says what to whom in an iteration."""
