"""The local launcher: roles as real processes, forked from a server that has already imported torch."""

from offbeat.runtime.launch._cause import obituary
from offbeat.runtime.launch._control import Control
from offbeat.runtime.launch._launcher import GRACE, PRELOAD, Launcher
from offbeat.runtime.launch._logs import LogFollower, last_lines
from offbeat.runtime.launch._rendezvous import (
    EVERYWHERE,
    PrivateStore,
    free_port,
    private_store,
    serve_store,
    threads_for,
    worker_environment,
)
from offbeat.runtime.launch._roles import RemoteError, Role, RoleOutcome

__all__ = [
    "EVERYWHERE",
    "GRACE",
    "PRELOAD",
    "Control",
    "Launcher",
    "LogFollower",
    "PrivateStore",
    "RemoteError",
    "Role",
    "RoleOutcome",
    "free_port",
    "last_lines",
    "obituary",
    "private_store",
    "serve_store",
    "threads_for",
    "worker_environment",
]
