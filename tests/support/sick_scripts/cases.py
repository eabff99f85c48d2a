"""Sick runs: what ails each, and what must be said of it. Shared by the tests and `benchmarks/sick_runs.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
SLOW_LINE = """\
[[host]]
name = "a"

[[host]]
name = "b"
rate = "12Mbit"

[[host]]
name = "c"
"""
"""Hosts of which one has a slow line."""


@dataclass(frozen=True)
class Sick:
    """One sick run."""

    kind: str
    """The verdict."""
    words: tuple[str, ...]
    """What it must say."""
    script: str = ""
    """Which script, if not the one of the same name."""
    workers: int = 2
    strategy: str | None = None
    disturb: tuple[str, ...] = ()
    after: float = 0.0
    """Seconds that belong to the illness itself: nobody is said to be silent before."""
    hosts: str | None = None
    """A file of hosts, if it needs them (and root)."""


_SERVED = "server(shards=2, replicas=1, consistency=ssp(3))"
SICK: dict[str, Sick] = {
    "order": Sick("desync", ("all_reduce #2", "broadcast #2", "worker 0", "worker 1", "order.py:")),
    "shape": Sick("desync", ("float32 x 5", "float32 x 4", "shape.py:10", "different shape")),
    "dtype": Sick("desync", ("float64", "float32", "worker 1", "different dtype")),
    "root": Sick("desync", ("root worker 0", "root worker 1", "different root")),
    "skipped_barrier": Sick("desync", ("barrier #2", "all_reduce #2", "different operation")),
    "early": Sick("ended", ("worker 0 waits for worker 1 in all_reduce #", "worker 1 has ended its program")),
    "uneven": Sick("ended", ("worker 0 waits for worker 1 in all_reduce #", "worker 1 has ended its program")),
    "caught": Sick("ended", ("worker 0 waits for worker 1 in all_reduce #", "worker 1 has ended its program")),
    "cycle": Sick(
        "deadlock",
        ("worker 0 waits for worker 1 in receive from worker 1 #1", "worker 1 waits for worker 0", "cycle.py:9"),
    ),
    "tags": Sick("deadlock", ("worker 0 waits for worker 1 in receive from worker 1 #1 with tag 7", "barrier #2")),
    "starving": Sick(
        "deadlock",
        ("worker 0 waits for any of worker 1, worker 2 in receive from anybody #3", "waits for worker 0 in barrier #2"),
        workers=3,
    ),
    "groups": Sick("deadlock", ("of group 1", "of group 2", "worker 0 waits for worker 1", "worker 1 waits for")),
    "dead_worker": Sick(
        "dead",
        ("worker 1 was ended by signal 9 after step 2", "the run went on without it (worker 0, worker 2)"),
        "killed",
        workers=3,
        strategy="server(consistency=ssp(3))",
        disturb=("worker 1: kill at step 20",),
    ),
    "dead_server": Sick(
        "dead",
        ("server 0.0 was ended by signal 9", "server 0.1 has taken over its part of the parameters"),
        "killed",
        strategy=_SERVED,
        disturb=("server 0: kill at step 20",),
    ),
    "only_server": Sick(
        "dead",
        ("server 0.0 was ended by signal 9", "no other server is known to have its part"),
        "killed",
        strategy="server(consistency=ssp(3))",
        disturb=("server 0: kill at step 20",),
    ),
    "asleep": Sick(
        "silent",
        ("worker 1 has waited 10 s for worker 0 in a pull of ssp(3) for step 1", "worker 0 has finished step 9"),
        strategy="server(consistency=ssp(3))",
        after=10.0,
    ),
    "stopped": Sick("silent", ("worker 1 is stopped", "worker 0 waits for it in all_reduce #")),
    "slow_input": Sick("straggler", ("worker 1 was last in", "ms input", "without it a step would take")),
    "slow_compute": Sick("straggler", ("worker 1 was last in", "ms computing", "without it a step would take")),
    "slow_network": Sick(
        "straggler", ("worker 1 was last in", "ms network", "without it the run"), workers=3, hosts=SLOW_LINE
    ),
    "nan_push": Sick(
        "nan",
        ("worker 1 pushed numbers that are not fit to be used in step 9", "server 0.0 refused its part"),
        strategy="server(shards=2, consistency=ssp(3))",
    ),
    "nan_ddp": Sick("nan", ("worker 1 gave NaN or infinite numbers in all_reduce #", "in step 10", "worker 0")),
}


def script_of(name: str) -> Path:
    """Where the script of a sick run is."""
    return FOLDER / f"{SICK[name].script or name}.py"
