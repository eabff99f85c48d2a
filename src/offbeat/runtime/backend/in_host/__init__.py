"""The collectives of a group whose ranks are all on one host."""
