"""Contract suites, for built-in and user-defined code: `offbeat check mine.py:Mine`, or in your own tests.

A strategy:

    @pytest.mark.parametrize("check", checks_for(Mine()), ids=lambda check: check.name)
    def test_mine_keeps_the_contract(check):
        with Launcher(WARM) as launcher, bench(Mine(), workers=2, launcher=launcher) as place:
            check.run(place)

A schedule, and machines:

    def test_my_ring_is_an_all_reduce():
        with Launcher(WARM) as launcher:
            check_schedule(my_ring, Collective.ALL_REDUCE, launcher=launcher)

    def test_my_machines_keep_their_contract():
        check_machine(MyContract())
"""

from offbeat.simulate.machine_contract import MachineContract, MachineReport, check_machine
from offbeat.testing._checks import CHECKS, Bench, Check, bench, checks_for, nothing_left, plain_loop, traces
from offbeat.testing._schedules import ScheduleReport, check_schedule

__all__ = [
    "CHECKS",
    "Bench",
    "Check",
    "MachineContract",
    "MachineReport",
    "ScheduleReport",
    "bench",
    "check_machine",
    "check_schedule",
    "checks_for",
    "nothing_left",
    "plain_loop",
    "traces",
]
