"""What the worker's sides of several strategies share."""
