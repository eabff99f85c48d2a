"""The same protocols in virtual time: when each rank is done, which algorithm is best where, and what a link costs."""

from offbeat.simulate.algorithm_ranking import Comparison, Crossover, compare_collectives
from offbeat.simulate.fit import CostTerms, Regimes, cost_of, fit_link, fit_regimes
from offbeat.simulate.network import Link, Network, Ports
from offbeat.simulate.predicted_step import compressed_sum_time, gossip_step_time, local_step_time
from offbeat.simulate.schedules import Trace, finish_times, trace

__all__ = [
    "Comparison",
    "CostTerms",
    "Crossover",
    "Link",
    "Network",
    "Ports",
    "Regimes",
    "Trace",
    "compare_collectives",
    "compressed_sum_time",
    "cost_of",
    "finish_times",
    "fit_link",
    "fit_regimes",
    "gossip_step_time",
    "local_step_time",
    "trace",
]
