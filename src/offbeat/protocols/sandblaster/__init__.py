"""Sandblaster: L-BFGS whose vectors stay on shards, commanded by a coordinator that sees numbers only."""
