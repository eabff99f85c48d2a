"""The local launcher: roles as real processes, forked from a server that has already imported torch."""

from offbeat.runtime.launch._child import Control
from offbeat.runtime.launch._children import ForkServerLink, ServerGoneError
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
from offbeat.runtime.launch._roles import RemoteError, Role, RoleOutcome, obituary
from offbeat.runtime.launch._run import GRACE, PRELOAD, Launcher

__all__ = ["EVERYWHERE", "GRACE", "PRELOAD", "Control", "Launcher", "LogFollower", "PrivateStore", "RemoteError"]
__all__ += ["Role", "RoleOutcome", "free_port", "last_lines", "obituary", "private_store", "serve_store"]
__all__ += ["ForkServerLink", "ServerGoneError", "threads_for", "worker_environment"]
