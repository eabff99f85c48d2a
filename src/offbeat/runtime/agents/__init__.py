"""Agents: our process on each machine of a run, and the launcher's end of them.

An agent connects to the launcher, runs a fork server, starts and ends roles at the launcher's word, and sends logs,
metrics and checkpoints home. Whatever engine started it, it is the same program. See docs/engines.md.
"""
