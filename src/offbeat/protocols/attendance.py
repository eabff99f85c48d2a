"""Who waits for whom in a team, and which of these waits can never end.

Workers make exchanges on several lanes, and count the exchanges begun on each lane. A worker in exchange `number` of a
lane waits for all workers whose count there is lower, or that are in another exchange under that number. It waits in
vain if they include one that has left, or that itself waits in vain: `hopeless` finds the largest such set of workers.
In such a set nobody moves, so it stays hopeless once it is.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

HERE, WAITING, LEAVING, LEFT, FAILED = "here", "waiting", "leaving", "left", "failed"
GONE = (LEFT, FAILED)  # Final states.


class Attendance(Struct, frozen=True):
    """Where one worker is, as it reports to the others."""

    state: str = HERE
    """`here`: at work, as far as is known; `waiting` in an exchange; `leaving` once the others do; `left`; `failed`."""
    step: int = 0  # Finished steps.
    what: str = ""  # What it waits in, or why it failed.
    lane: str = ""  # The lane of the exchange that it waits in.
    number: int = 0  # Which exchange of that lane: it waits for all that have begun fewer.
    spare: int = 0  # How many workers may be missing there.
    counts: dict[str, int] = {}  # Exchanges begun, by lane.
    look: int = 0  # Grows while the worker stays there: it has been there since it wrote a smaller one.


def hopeless(team: Mapping[int, Attendance]) -> dict[int, tuple[int, ...]]:
    """Workers whose wait can never end, each with those that will never come to it."""
    stuck = {rank for rank, worker in team.items() if worker.state in (WAITING, LEAVING, *GONE)}
    while True:
        missing = {
            rank: tuple(other for other in sorted(stuck) if other != rank and _is_elsewhere(team[other], team[rank]))
            for rank in stuck
            if team[rank].state == WAITING
        }
        free = {rank for rank, absent in missing.items() if len(absent) <= team[rank].spare}
        if not free:
            return missing
        stuck -= free


def _is_elsewhere(other: Attendance, me: Attendance) -> bool:
    if other.counts.get(me.lane, 0) < me.number:
        return True
    same = other.state == WAITING and (other.lane, other.number) == (me.lane, me.number)
    return same and other.what != me.what


def same_place(before: Attendance, now: Attendance) -> bool:
    """Whether two reports show that a worker has been at the same place all the time in between."""
    moved = (now.state, now.lane, now.number, now.counts) != (before.state, before.lane, before.number, before.counts)
    return now.state in GONE or (now.look > before.look and not moved)


def in_words(rank: int, missing: tuple[int, ...], team: Mapping[int, Attendance]) -> str:
    """What is wrong with a worker's wait, and what to do about it."""
    me = team[rank]
    whom = ", ".join(f"worker {other}" for other in missing)
    wait = f"worker {rank} waits in {me.what}, after step {me.step}, for {whom}"
    gone = [other for other in missing if team[other].state != WAITING]
    if gone:
        departures = [
            f"worker {other} has {'failed' if team[other].state == FAILED else 'left its loop'} after step "
            f"{team[other].step}"
            for other in gone
        ]
        return (
            f"{'; '.join([wait, *departures])}. The wait can never end. Workers must take the same number of steps and "
            f"make the same calls: let them decide together when to stop (`team.report` answers the same on all of "
            f"them, and `team.mean` compares what each has found), or have `team.prepare` divide the loader, which "
            f"ends everywhere at once."
        )
    others = "; ".join(
        f"worker {other} waits in {team[other].what}, after step {team[other].step}" for other in missing
    )
    return (
        f"{wait}, but {others}. Neither wait can ever end. Every worker must make the same calls in the same order: "
        f"does one of them take fewer steps than the others, or make a call, such as `team.report`, that they do not?"
    )
