"""Contract suites, for our strategies and for anybody's: `offbeat check mine.py:Mine`, or in a test of your own.

@pytest.mark.parametrize("check", checks_for(Mine()), ids=lambda check: check.name)
def test_mine_keeps_the_contract(check):
    with Launcher(WARM) as launcher, bench(Mine(), workers=2, launcher=launcher) as place:
        check.run(place)
"""

from offbeat.testing._checks import CHECKS, Bench, Check, bench, checks_for, nothing_left, plain_loop, traces

__all__ = ["CHECKS", "Bench", "Check", "bench", "checks_for", "nothing_left", "plain_loop", "traces"]
