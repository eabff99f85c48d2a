"""Hosts: what a file may say, namespaces that come and go, and processes that really live in them."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paths
import pytest
from host_entries import address_of
from host_runs import started
from safetensors.torch import load_file

import offbeat
from conftest import mine, wait_until
from offbeat.errors import StrategyError, UsageError, WorkerError
from offbeat.protocols.servers.messages import COORDINATOR, ClusterView, Timeouts, server_name
from offbeat.run.drive import Result
from offbeat.runtime.hosts import Host, Hosts, Placed, abandoned, existing, placed
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import MODEL_FILE
from offbeat.testing._tasks import CurveTask

# What a file may say.

FILE = """
[network]
rate = "100Mbit"
mtu = 9000

[[host]]
name = "a"
workers = 2

[[host]]
name = "b"
rate = "1Gbit"
servers = 1
"""


def read(tmp_path: Path, text: str) -> Hosts:
    (tmp_path / "hosts.toml").write_text(text)
    return Hosts.read(tmp_path / "hosts.toml")


def test_a_file_says_who_is_where_and_what_links_carry(tmp_path: Path) -> None:
    hosts = read(tmp_path, FILE)
    assert hosts.hosts == (Host("a", 2, 0, "100Mbit"), Host("b", 1, 1, "1Gbit"))
    assert (hosts.workers, hosts.mtu, hosts.slowest) == (3, 9000, 12.5e6)
    assert hosts.of_workers() == (0, 0, 1)
    assert read(tmp_path, hosts.text()) == hosts == Hosts.from_plain(json.loads(json.dumps(hosts.plain())))


def test_the_file_in_the_docs_is_one(tmp_path: Path) -> None:
    page = (paths.ROOT / "docs" / "hosts.md").read_text()
    hosts = read(tmp_path, page.partition("```toml\n")[2].partition("```")[0])
    assert [(host.name, host.workers, host.servers, host.rate) for host in hosts.hosts] == [
        ("a", 1, 0, "100Mbit"), ("b", 1, 0, "100Mbit"), ("c", 2, 1, "1Gbit"),
    ]  # fmt: skip


def test_servers_take_turns_so_that_copies_are_on_different_hosts() -> None:
    assert Hosts.alike(3).of_servers(5) == (0, 1, 2, 0, 1)
    shares = Hosts((Host("a", servers=2), Host("b"), Host("c", workers=0, servers=1)))
    assert shares.of_servers(5) == (0, 2, 0, 0, 2)
    assert shares.of_workers() == (0, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no host has a worker"),
        ("[[host]]\nworkers = 1", "no name"),
        ('[[host]]\nname = "a"\nworker = 1', "Did you mean 'workers'?"),
        ('[netwerk]\nmtu = 1\n[[host]]\nname = "a"', "Did you mean 'network'?"),
        ('[network]\nspeed = "1Gbit"\n[[host]]\nname = "a"', "Valid: address, cluster, mtu, rate, subnet"),
        ('[[host]]\nname = "a"\n[[host]]\nname = "a"', "more than one host"),
        ('[[host]]\nname = "A/b"', "lower-case letters"),
        ('[[host]]\nname = "a"\nkind = "shh"', "unknown kind 'shh'. Did you mean 'ssh'?"),
        (
            '[[host]]\nname = "a"\nkind = "ssh"',
            'host a of kind ssh has no address. Say where it is: address = "10.0.0.7"',
        ),
        ('[[host]]\nname = "a"\naddress = "10.0.0.7"', 'which is for machines: say kind = "ssh", too'),
        ('[[host]]\nname = "a"\nkind = "ssh"\naddress = "-oProxyCommand=x"', "does not begin with a dash"),
        ('[[host]]\nname = "a"\nkind = "ssh"\naddress = "b"\nport = 70000', "ports go up to 65535"),
        ('[[host]]\nname = "a"\nworkers = 0', "nothing would run there"),
        ('[[host]]\nname = "a"\nworkers = 0\nservers = 1', "no host has a worker"),
        ('[[host]]\nname = "a"\nworkers = -1', "whole number"),
        ('[[host]]\nname = "a"\nworkers = true', "whole number"),
        ('[[host]]\nname = "a"\nrate = "fast"', "host a: 'fast' is not a rate"),
        ('[[host]]\nname = "a"\nrate = 100', "in quotes"),
        ('[[host]]\nname = "a"\nrate = "1bit"', "heartbeats"),
        ('[network]\nrate = "0Mbit"\n[[host]]\nname = "a"', "would move nothing"),
        ('[network]\nmtu = 20\n[[host]]\nname = "a"', "mtu = 20"),
        ('[network]\nsubnet = "10.0.0.1/24"\n[[host]]\nname = "a"', "host bits"),
        ('[network]\nsubnet = "8.8.8.0/24"\n[[host]]\nname = "a"', "private one"),
        ('[network]\nsubnet = "10.0.0.0/30"\n[[host]]\nname = "a"\n[[host]]\nname = "b"', "too few addresses"),
        ('host = "a"', "[[host]] tables"),
        ("[[host", "not TOML"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_with_the_reason(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    assert said in str(caught.value)
    assert "hosts.toml" in str(caught.value)


def test_a_file_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml: No such file"):
        offbeat.fit(CurveTask(str(tmp_path)), "allreduce", hosts=tmp_path / "none.toml", out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_workers_must_agree_with_the_hosts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="have 2 workers together, but --workers says 3"):
        offbeat.fit(CurveTask(str(tmp_path)), "allreduce", hosts=Hosts.alike(2), workers=3, out=tmp_path)


@pytest.mark.parametrize("strategy", ["hogwild", "allreduce(one_shot)"])
def test_what_needs_shared_memory_refuses_several_hosts(tmp_path: Path, strategy: str, launcher: Launcher) -> None:
    with pytest.raises(StrategyError, match="2 hosts share none"):
        offbeat.fit(CurveTask(str(tmp_path)), strategy, hosts=Hosts.alike(2), out=tmp_path, launcher=launcher)


def test_patience_grows_with_payloads_where_links_are_slow() -> None:
    timing = Timeouts(per_byte=1e-6)
    assert timing.patience(0) == timing.resend
    assert timing.patience(4_000_000) == timing.resend + 4.0
    assert timing.longest_patience(4_000_000) >= timing.patience(4_000_000)


# Namespaces.

MAKER = """
from offbeat.runtime.hosts import Hosts, placed

with placed(Hosts.alike(2)) as made:
    print(*(host.network.name for host in made.hosts), made.network.name, flush=True)
    input()
"""


@pytest.fixture
def two(networks: None) -> Iterator[Placed]:
    with placed(Hosts((Host("a", workers=2, rate="100Mbit"), Host("b")))) as made:
        yield made


def counted(network: Path, interface: str = "eth0") -> dict[str, int]:
    """Bytes that the kernel has counted on an interface, sent and received."""
    said = subprocess.run(
        ["ip", "-n", network.name, "-s", "-j", "link", "show", "dev", interface],
        capture_output=True, check=True, timeout=20,
    )  # fmt: skip
    stats = json.loads(said.stdout)[0]["stats64"]
    return {"sent": stats["tx"]["bytes"], "received": stats["rx"]["bytes"]}


def buckets(network: Path, interface: str) -> list[dict[str, Any]]:
    said = subprocess.run(
        ["tc", "-n", network.name, "-s", "-j", "qdisc", "show", "dev", interface],
        capture_output=True, check=True, timeout=20,
    )  # fmt: skip
    return [entry for entry in json.loads(said.stdout) if entry["kind"] == "tbf"]


def test_namespaces_appear_with_their_rates_and_vanish(networks: None) -> None:
    before = mine()
    with placed(Hosts.alike(2, "100Mbit")) as made, placed(Hosts.alike(2)) as others:
        here = mine() - before
        assert {host.network.name for host in (*made.hosts, *others.hosts)} <= here
        assert [host.address for host in made.hosts] == ["10.77.0.2", "10.77.0.3"]
        for number, host in enumerate(made.hosts):
            for network, interface in ((host.network, "eth0"), (made.network, f"h{number}")):
                assert [entry["options"]["rate"] for entry in buckets(network, interface)] == [12_500_000]
        assert buckets(others.hosts[0].network, "eth0") == []
    assert mine() == before


def test_whoever_may_not_make_namespaces_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="needs root, and this is user 1000"), placed(Hosts.alike(2)):
        pass
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match=r"no command ip or tc\. Install iproute2"), placed(Hosts.alike(2)):
        pass


def test_namespaces_vanish_when_the_body_fails(networks: None) -> None:
    before = mine()
    with pytest.raises(KeyboardInterrupt), placed(Hosts.alike(2)):
        raise KeyboardInterrupt
    assert mine() == before


def test_what_a_killed_process_has_left_is_removed_by_the_next(networks: None) -> None:
    command = [sys.executable, "-c", MAKER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            left = process.stdout.readline().split()
            assert len(left) == 3
            with placed(Hosts.alike(1)):
                assert set(left) <= set(existing())  # Its maker lives.
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(20)
    assert all(abandoned(name) for name in left)
    with placed(Hosts.alike(1)):
        assert not set(left) & set(existing())


def test_what_is_opened_inside_is_out_of_reach_from_outside(two: Placed) -> None:
    before = Path("/proc/thread-self/ns/net").stat().st_ino
    with two.inside():
        listener = socket.create_server((two.address, 0))
        assert address_of("bridge") == two.address
        socket.create_connection(listener.getsockname(), timeout=5).close()
    assert Path("/proc/thread-self/ns/net").stat().st_ino == before
    with listener, pytest.raises(OSError, match=r"refused|unreachable|timed out"):
        socket.create_connection(listener.getsockname(), timeout=0.5)


def test_processes_live_on_their_hosts_and_those_of_one_host_share_memory(
    two: Placed, launcher: Launcher, tmp_path: Path
) -> None:
    said = started(launcher, two, tmp_path, "look_around")
    assert [one["address"] for one in said] == ["10.77.0.2", "10.77.0.2", "10.77.0.3"]
    assert said[0]["identity"] == said[1]["identity"] != said[2]["identity"]
    assert [one["local"] for one in said] == [[0, 2, 0, "2"], [1, 2, 0, "2"], [0, 1, 1, "2"]]
    assert all(one["hosts"] == [0, 0, 1] and one["sum"] == 6.0 for one in said)
    assert not any(one["one_host"] or one["shares"] for one in said)


def test_workers_of_a_single_host_share_memory(networks: None, launcher: Launcher, tmp_path: Path) -> None:
    with placed(Hosts((Host("a", workers=2),))) as made:
        said = started(launcher, made, tmp_path, "look_around")
    assert all(one["one_host"] and one["shares"] for one in said)


def test_sums_pass_through_the_limited_links(networks: None, launcher: Launcher, tmp_path: Path) -> None:
    count = 500_000
    with placed(Hosts.alike(4, "400Mbit")) as made:
        before = [counted(host.network) for host in made.hosts]
        said = started(launcher, made, tmp_path, "sum_much", count=count)
        after = [counted(host.network) for host in made.hosts]
        held = [entry["overlimits"] for host in made.hosts for entry in buckets(host.network, "eth0")]
    assert all(one["right"] for one in said)
    ring = 2 * 4 * count * 3 / 4  # bytes that a ring all-reduce sends through each port
    for then, now in zip(before, after, strict=True):
        for way in ("sent", "received"):
            assert ring <= now[way] - then[way] <= 1.25 * ring
    assert all(times > 0 for times in held)  # The bucket has made packets wait.


# Runs.


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "server(shards=2, replicas=1)", "elastic(period=2)"])
def test_hosts_give_what_one_host_gives(networks: None, launcher: Launcher, tmp_path: Path, strategy: str) -> None:
    def learned(name: str, **options: Any) -> Result:
        (tmp_path / name).mkdir()
        task = CurveTask(str(tmp_path / name))
        return offbeat.fit(task, strategy, epochs=2, seed=3, out=tmp_path / "runs", launcher=launcher, **options)

    apart = learned("apart", hosts=Hosts((Host("a", 2, rate="1Gbit"), Host("b", 1))))
    assert apart.workers == 3
    assert [(host["name"], host["address"], host["workers"]) for host in apart.hosts] == [
        ("a", "10.77.0.2", [0, 1]), ("b", "10.77.0.3", [2]),
    ]  # fmt: skip
    assert all(host["sent_bytes"] > 1000 for host in apart.hosts)  # As the kernel counted on the links.
    assert json.loads((apart.run / "run.json").read_text())["config"]["hosts"]["host"][0]["rate"] == "1Gbit"
    if strategy.startswith("server"):
        assert [host["servers"] for host in apart.hosts] == [["0.0", "1.0"], ["0.1", "1.1"]]
        links = {peer: link for shard in apart.servers for peer, link in shard["links"].items() if "worker" in peer}
        assert any(link["received"] > 0 for link in links.values())
    if not strategy.startswith("elastic"):
        together = learned("together", workers=3)
        one, other = load_file(apart.run / MODEL_FILE), load_file(together.run / MODEL_FILE)
        assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-6


@pytest.mark.slow
def test_a_server_killed_on_one_host_is_replaced_by_its_copy_on_another_and_that_by_a_new_one(
    networks: None, launcher: Launcher, tmp_path: Path
) -> None:
    (tmp_path / "seen").mkdir()
    disturb = ["worker *: pace 40ms", "server 0: kill at step 10", "server 0: kill at step 180"]
    result = offbeat.fit(
        CurveTask(str(tmp_path / "seen")), "server(replicas=1)", hosts=Hosts.alike(2), steps=190, out=tmp_path / "runs",
        disturb=disturb, launcher=launcher, target=1e9,
    )  # fmt: skip
    assert result.disturbances == {"asked": 4, "fired": 4}
    assert result.died == ["server 0.0", "server 0.1"]
    assert result.joined[0] == "server 0.2"
    # Each new one is where the dead one was, so that copies stay on different hosts.
    assert [host["servers"] for host in result.hosts] == [["0.0", "0.2"], ["0.1", "0.3"]]
    (account,) = result.servers
    assert (account["served_by"], account["version"]) == ("server 0.2", result.steps)
    pushes = account["pushes"]
    assert pushes["applied"] == 2 * result.steps
    assert account["links"]["worker 0"]["lent"] > 0
    assert account["links"]["worker 1"]["lent"] == 0, "it is on the other host, and is sent what it reads"


@pytest.mark.slow
def test_a_resumed_run_is_on_the_same_hosts(networks: None, launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "seen").mkdir()
    task = CurveTask(str(tmp_path / "seen"))
    first = offbeat.fit(task, "allreduce", hosts=Hosts.alike(2), steps=4, out=tmp_path / "runs", launcher=launcher)
    again = offbeat.fit(task, resume=first.run, steps=6, launcher=launcher)
    here = [
        [{key: value for key, value in one.items() if not key.startswith("sent_")} for one in run.hosts]
        for run in (first, again)
    ]
    assert here[0] == here[1]
    assert again.steps == 6


@pytest.mark.slow
def test_a_crash_on_a_host_leaves_no_namespace(networks: None, launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "seen").mkdir()
    before = mine()
    task = CurveTask(str(tmp_path / "seen"), fault="kill", fault_rank=1)
    with pytest.raises(WorkerError, match="SIGKILL"):
        offbeat.fit(task, "allreduce", hosts=Hosts.alike(2), epochs=3, out=tmp_path / "runs", launcher=launcher)
    assert mine() == before


@pytest.mark.slow
def test_the_command_line_takes_a_file_and_ctrl_c_leaves_nothing(networks: None, tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_text(Hosts.alike(2, "100Mbit").text())
    command = [sys.executable, "-m", "offbeat", "run", "offbeat.testing._tasks:CurveTask", "--hosts", "hosts.toml"]
    command += ["--epochs", "10000", "--", "--folder", str(tmp_path), "--pause", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path) as process:
        try:
            wait_until((tmp_path / "replica-1").exists, "the first step of worker 1")
            assert len(_of(process.pid)) == 3
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()
    assert _of(process.pid) == []


def _of(process: int) -> list[str]:
    return [name for name in existing() if name.startswith(f"offbeat-{process}-")]


def test_new_copies_are_where_the_dead_were_as_long_as_there_are_numbers() -> None:
    from offbeat.protocols.servers.consistency import Rule
    from offbeat.run.server_supervisor import SPARES, Serving, home_of
    from offbeat.runtime.servers.plan import ServerPlan

    plan = ServerPlan(workers=2, shards=2, replicas=1, rule=Rule(0), folder="/nowhere")
    serving = Serving(plan)
    made: list[int] = []
    while (new := serving._next_replica(1, dead=1, plan=plan)) is not None:
        made.append(new)
        serving._replicas[len(serving._replicas)] = (1, new)
    assert len(made) == len(set(made)) == SPARES
    beside = [home_of(1, number, plan) for number in made]
    assert beside == [3] * (SPARES // 2) + [2] * (SPARES // 2)
    assert serving._next_replica(0, dead=0, plan=plan) == 2


def test_addresses_of_servers_are_on_their_hosts_and_need_the_keys_of_the_run() -> None:
    from offbeat.protocols.servers.consistency import Rule
    from offbeat.run.server_supervisor import spread
    from offbeat.runtime.hosts import PlacedHost
    from offbeat.runtime.servers.plan import ServerPlan

    wanted = Hosts.alike(2, "100Mbit")
    there = tuple(PlacedHost(host, f"10.77.0.{n + 2}", "eth0", Path("/x")) for n, host in enumerate(wanted.hosts))
    plan = ServerPlan(workers=2, shards=2, replicas=0, rule=Rule(0), folder="/x")
    made = spread(plan, Placed(wanted, there, "10.77.0.1", Path("/x")))
    assert made.address(server_name(1, 0)).startswith("tcp://10.77.0.3:")
    assert made.address(COORDINATOR) == "tcp://10.77.0.1:*"
    assert made.keys is not None
    assert made.keys.secret not in repr(made)
    assert ServerPlan.from_plain(made.plain()).keys == made.keys
    assert made.timing.per_byte > 2 / wanted.slowest if wanted.slowest else False
    assert made.view == ClusterView.of(2, 2, 0)
