"""Sandblaster on real processes: the registers of a shard, its process, and that of the coordinator."""
