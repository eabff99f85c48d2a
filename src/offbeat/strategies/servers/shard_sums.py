"""Updates that look at the whole vector, on shards: what a worker tells each of them, and where it cannot."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from offbeat.errors import StrategyError
from offbeat.protocols.servers.consistency import Rule
from offbeat.runtime.servers.updater import Recipe
from offbeat.strategies.servers.driver import PushQueue
from offbeat.strategies.servers.link import ServerLink
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


def refuse_partial_sums(strategy: object, link: ServerLink, compressions: Sequence[object]) -> None:
    """Refuse what keeps a worker from knowing the whole gradient that shards apply."""
    if link.client.view.parts:
        raise StrategyError(
            f"{strategy} looks at the whole vector (norm, sum, …), and each worker has a part of the model only: leave "
            f"out pipeline or tensor, or sum nothing."
        )
    if compressions and not link.rule.aggregated:
        raise StrategyError(
            f"{strategy} looks at the whole gradient (norm, sum, …), which workers sum up for the shards under "
            f"{link.rule}, and with a compressor shards do not get that gradient: use shards=1 or bsp, or leave out "
            f"{', '.join(map(str, compressions))}."
        )
