"""Gossip: graphs and mixing matrices as schedules, pairwise averaging as a machine."""
