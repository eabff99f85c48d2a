"""Who waits for whom in a team, and which of these waits can never end.

Workers make exchanges on several lanes, and count the exchanges of each lane that they have begun. One that waits in
exchange `number` of a lane waits for everybody whose count there is lower, or who is in another exchange under that
number. It waits in vain if they include one who has left, or one who itself waits in vain: `hopeless` finds the largest
set of workers of which that is true. In such a set nobody moves, so it stays hopeless once it is.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

HERE, WAITING, LEAVING, LEFT, FAILED = "here", "waiting", "leaving", "left", "failed"
GONE = (LEFT, FAILED)
"""States that nobody comes back from."""


class Attendance(Struct, frozen=True):
    """Where one worker is, as it tells the others."""

    state: str = HERE
    """`here`: at work, as far as is known; `waiting` in an exchange; `leaving`, and waiting for the
    others to; `left`; `failed`."""
    step: int = 0
    """Steps that it has finished."""
    what: str = ""
    """What it waits in, or why it failed."""
    lane: str = ""
    """The lane of the exchange that it waits in."""
    number: int = 0
    """Which exchange of that lane: it waits for everybody who has begun fewer."""
    spare: int = 0
    """How many may be missing there."""
    counts: dict[str, int] = {}
    """Exchanges begun, by lane."""
    look: int = 0
    """Grows while the worker stays there: it was there when it wrote this, and ever since it wrote a smaller one."""


def hopeless(team: Mapping[int, Attendance]) -> dict[int, tuple[int, ...]]:
    """Workers whose wait can never end, each with those who will never come to it."""
    stuck = {rank for rank, one in team.items() if one.state in (WAITING, LEAVING, *GONE)}
    while True:
        missing = {rank: _missing(team, rank, stuck) for rank in stuck if team[rank].state == WAITING}
        free = {rank for rank, absent in missing.items() if len(absent) <= team[rank].spare}
        if not free:
            return missing
        stuck -= free


def _missing(team: Mapping[int, Attendance], rank: int, stuck: set[int]) -> tuple[int, ...]:
    return tuple(other for other in sorted(stuck) if other != rank and _is_elsewhere(team[other], team[rank]))


def _is_elsewhere(one: Attendance, me: Attendance) -> bool:
    if one.counts.get(me.lane, 0) < me.number:
        return True
    same = one.state == WAITING and (one.lane, one.number) == (me.lane, me.number)
    return same and one.what != me.what


def same_place(before: Attendance, now: Attendance) -> bool:
    """Whether a worker has told twice, at different times, that it is at one place, and so was there in between."""
    moved = (now.state, now.lane, now.number, now.counts) != (before.state, before.lane, before.number, before.counts)
    return now.state in GONE or (now.look > before.look and not moved)


def in_words(rank: int, missing: tuple[int, ...], team: Mapping[int, Attendance]) -> str:
    """What is wrong with a worker's wait, and what to do about it."""
    me = team[rank]
    whom = ", ".join(f"worker {other}" for other in missing)
    said = f"worker {rank} waits in {me.what}, after step {me.step}, for {whom}"
    gone = [other for other in missing if team[other].state != WAITING]
    if gone:
        said += "; " + "; ".join(_departure(other, team[other]) for other in gone)
        return (
            f"{said}. The wait can never end. Workers must take the same number of steps and make the same calls: let "
            f"them decide together when to stop (`team.report` answers the same on all of them, and `team.mean` "
            f"compares what each has found), or have `team.prepare` divide the loader, which ends everywhere at once."
        )
    others = "; ".join(
        f"worker {other} waits in {team[other].what}, after step {team[other].step}" for other in missing
    )
    return (
        f"{said}, but {others}. Neither wait can ever end. Every worker must make the same calls in the same order: "
        f"does one of them take fewer steps than the others, or make a call, such as `team.report`, that they do not?"
    )


def _departure(rank: int, one: Attendance) -> str:
    if one.state == FAILED:
        return f"worker {rank} has failed after step {one.step}"
    return f"worker {rank} has left its loop after step {one.step}"
