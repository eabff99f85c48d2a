"""Every exchange there is keeps the contract of its traits, on real processes."""

from __future__ import annotations

import pytest

from offbeat.runtime.launch import Launcher
from offbeat.strategies import Axis, available, combined, parse
from offbeat.testing import Check, bench, checks_for
from offbeat.testing._checks import a_watched_run_goes_on_from_its_checkpoints

pytestmark = pytest.mark.slow

EXCHANGES = [name for name, cls in available().items() if cls.axis is Axis.EXCHANGE]
INSTEAD = {
    "single": ("single", 1),
    "allreduce": ("allreduce", 3),
    "server": ("server(shards=2, replicas=1)", 2),
    "coded": ("coded", 4),
    "downpour": ("downpour(push=2, fetch=3, shards=2, warm=4)", 3),
    "elastic": ("elastic(period=2, asynchronous=False)", 3),
    "hogwild": ("hogwild", 3),
    "federated": ("federated(clients=7, fraction=1, batch=4)", 3),
}
"""What is harder to keep the contract with than the defaults on two workers, which then follow."""
WORLDS = [
    *(INSTEAD.get(name, (name, 2)) for name in EXCHANGES),
    ("allreduce(shard=optimizer)", 2),
    ("allreduce(shard=gradients)", 3),
    ("federated(clients=6, fraction=1, algorithm=fedsgd, batch=full)", 2),
    ("federated(clients=5, fraction=0.6, algorithm=fedbuff(2))", 2),
    ("local(4)", 2),
    ("pipeline(2)", 2),
    ("tensor(2)", 2),
    ("local(4) + tensor(2)", 4),
    ("server(shards=2) + pipeline(2)", 4),
    ("server(consistency=ssp(2)) + tensor(2)", 4),
    ("allreduce + accumulate(3) + topk(0.1) + quantize(4, stochastic=True)", 2),
]
INTERRUPTED = [INSTEAD["allreduce"], INSTEAD["server"]]
"""Others end as one of these does: strategies on servers as `server`, all else as `allreduce`."""


@pytest.mark.parametrize(
    ("strategy", "workers", "check"),
    [
        pytest.param(text, workers, check, id=f"{text.replace(' ', '')}-{workers}-{check.name.replace(' ', '_')}")
        for text, workers in WORLDS
        for check in checks_for(parse(text))
        # A real command costs seconds, and how it ends is the exchange's business: once for each kind is enough.
        if not check.name.startswith("Ctrl-C") or (text, workers) in INTERRUPTED
    ],
)
def test_the_contract_is_kept(strategy: str, workers: int, check: Check, launcher: Launcher) -> None:
    with bench(parse(strategy), workers, launcher) as place:
        check.run(place)


@pytest.mark.parametrize(
    "strategy",
    [
        "gossip(asynchronous=True)",
        "gossip(exponential) + local(2)",
        "gossip + quantize(4)",
        "server(consistency=ssp(2), replicas=1)",
        "server(shards=2, consistency=asp) + topk(0.1)",
        "elastic",
        "coded(code=cyclic)",
        "allreduce(auto)",
        "ddp + accumulate(2)",
    ],
)
def test_other_kinds_go_on_from_their_checkpoints_while_watched(strategy: str, launcher: Launcher) -> None:
    with bench(parse(strategy), 2, launcher) as place:
        a_watched_run_goes_on_from_its_checkpoints(place)


def test_all_built_in_exchanges_promise_all_that_can_be_checked() -> None:
    for text, _ in WORLDS:
        assert len(checks_for(parse(text))) == _demands(text)


def _demands(text: str) -> int:
    """How many of the checks a strategy must pass."""
    name = text.partition("(")[0]
    if "+ pipeline" in text or "+ tensor" in text:
        return {"local(4) + tensor(2)": 11, "server(shards=2) + pipeline(2)": 12}.get(text, 9)  # A death ends them.
    if name in ("downpour", "elastic") or "ssp" in text or "asp" in text:
        return 8  # Who comes first is chance; and a worker that is killed does not end the run.
    if name == "sandblaster":
        return 8  # It takes other steps than a plain loop, and a resumed run has no history; no worker has a replica.
    if name == "coded":
        return 11  # As exact as bsp; but the slow leave out steps.
    if name == "server":
        return 12  # As exact as the others; but sums are made in the order of arrival, so bits may differ.
    if name == "gossip":
        return (
            8 if "asynchronous" in text else 11
        )  # Replicas differ; without a beat there is chance, and a death ends nothing.
    if name == "federated":
        return 11  # No worker has a replica of its own to compare, and clients train alone.
    if name == "pipeline":
        return 12  # No worker has a replica of its own, and where the model is cut is measured.
    if name == "tensor":
        return 14  # No worker has a replica of its own.
    if name == "local":
        return 12  # Several steps alone are not one step on the joined batch.
    if combined(parse(text)).compressions:
        return 9 if name.startswith("server") else 12  # Never exact.
    if "hogwild" in text:
        return 9  # Who comes first is chance.
    return 13 if "auto" in text else 15  # What is fastest may be another algorithm in the next run, with other bits.
