"""The hosts of a run: their links, and which processes run where.

`Hosts` specifies them, in a file or in Python. `placed(hosts)` creates them for the duration of a context, with their
addresses. The only kind of host so far is a network namespace of this machine. See docs/hosts.md.
"""

from offbeat.runtime.hosts._namespaces import (
    Placed,
    PlacedHost,
    Seat,
    abandoned,
    enter,
    existing,
    made_here,
    placed,
    why_not,
)
from offbeat.runtime.hosts._specification import Host, Hosts

__all__ = ["Host", "Hosts", "Placed", "PlacedHost", "Seat", "abandoned", "enter", "existing", "made_here", "placed"]
__all__ += ["why_not"]
