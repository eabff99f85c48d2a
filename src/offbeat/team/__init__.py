"""The team inside a user's loop, and its parts: prepared objects, boundaries between steps, their shared context."""
