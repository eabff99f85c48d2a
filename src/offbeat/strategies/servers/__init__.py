"""The worker's side of parameter servers."""
