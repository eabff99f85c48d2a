"""Updates that look at the whole vector, on shards: what a worker tells each of them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from offbeat.protocols.servers.consistency import Rule
from offbeat.runtime.servers.updater import Recipe
from offbeat.strategies.servers.driver import PushQueue
from offbeat.strategies.servers.parameter_row import ParameterRow
from offbeat.strategies.servers.update import ServerUpdate


def sum_over_shards(
    update: ServerUpdate, recipes: Sequence[Recipe], row: ParameterRow, rule: Rule, queue: PushQueue
) -> list[Recipe]:
    """Recipes that say how long the whole vector is; pushes that are applied alone carry the sums of their gradient."""
    ranges = [[place for group in recipe.ranges for place in group] for recipe in recipes]
    length = sum(high - low for places in ranges for low, high in places)
    if update.reductions and not rule.aggregated:
        queue.totals_of = lambda slot: update.totals(
            [row.shard(slot, shard)[low:high] for shard, places in enumerate(ranges) for low, high in places], length
        )
    return [structs.replace(recipe, length=length) for recipe in recipes]
