"""The machine: its memory, limits and health."""
