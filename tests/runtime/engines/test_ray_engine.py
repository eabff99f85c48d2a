"""Runs on a real Ray cluster: several nodes on this machine, started by Ray's own tool for that."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_support import At, agents

import offbeat
from conftest import wait_until
from offbeat.errors import MachineLostError, UsageError

pytestmark = pytest.mark.slow
if importlib.util.find_spec("ray") is None and not os.environ.get("CI"):
    pytest.skip("Ray is not installed: pip install 'offbeat[ray]'", allow_module_level=True)
ray: Any = importlib.import_module("ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.nodes = [made.add_node(num_cpus=1) for _ in range(2)]
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    wait_until(lambda: not agents(), "every agent to end", 15)


def test_a_run_on_ray_trains_on_every_node(cluster: Any, tmp_path: Path) -> None:
    result = offbeat.fit("offbeat.tasks.digits", "allreduce", hosts="ray", workers=2, steps=20, out=tmp_path / "runs")
    assert result.steps == 20
    assert [host["workers"] for host in result.hosts] == [[0], [1]]
    assert (Path(result.run) / "logs" / "worker-1.log").is_file()
    wait_until(lambda: ray.available_resources().get("CPU") == 3.0, "the cluster to have its cores back")


def test_more_machines_than_the_cluster_has_are_refused(cluster: Any, tmp_path: Path) -> None:
    from offbeat.runtime.hosts import Host, Hosts

    many = Hosts(tuple(Host(f"ray-{n}", kind="ray", address="?") for n in range(4)), cluster="ray")
    with pytest.raises(UsageError, match="needs 4 machines, the cluster has 3"):
        offbeat.fit("offbeat.tasks.digits", hosts=many, out=tmp_path / "runs")


def test_a_node_that_is_killed_ends_or_not_as_the_strategy_promises(cluster: Any, tmp_path: Path) -> None:
    def kill_node() -> None:
        # The last node: the run's last machine, since they are taken in order of their cores.
        cluster.remove_node(cluster.nodes.pop(), allow_graceful=False)

    result = offbeat.fit(
        "offbeat.tasks.digits", "server(replicas=1, consistency=ssp(3))", hosts="ray", workers=3, epochs=60,
        out=tmp_path / "runs", timeout=60, watcher=At(kill_node), target=0.9,
    )  # fmt: skip
    assert result.reached_target
    assert any(name.startswith("worker") for name in result.died)
    cluster.nodes.append(cluster.add_node(num_cpus=1))
    with pytest.raises(MachineLostError, match="was lost, and with it worker"):
        offbeat.fit(
            "offbeat.tasks.digits", "allreduce", hosts="ray", workers=3, epochs=500,
            out=tmp_path / "runs", timeout=60, watcher=At(kill_node),
        )  # fmt: skip
