"""Runs whose batches are prepared by data servers: the same bits as without them, whatever dies."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
import torch
from data_tasks import Decoded, seen
from pyarrow import parquet

from offbeat.errors import DataError, OffbeatError, StrategyError, UsageError
from offbeat.run.data_supervisor import DataServing
from offbeat.run.drive import Result, fit
from offbeat.run.job import Job, Script
from offbeat.runtime.data_servers.plan import DataServerPlan
from offbeat.runtime.hosts import Host, Hosts
from offbeat.runtime.launch import Launcher, RoleOutcome
from offbeat.runtime.run.folder import MODEL_FILE, RunFolder
from offbeat.runtime.run.settings import Goal


def trained(launcher: Launcher, out: Path, task: dict[str, Any], **settings: Any) -> tuple[Result, bytes, list[Any]]:
    """A run's result, its model's bytes, and the examples that each worker has seen."""
    folder = out / "seen"
    folder.mkdir(parents=True)
    options: dict[str, Any] = {"workers": 2, "strategy": "allreduce", "seed": 5, "threads": 1, "timeout": 60.0}
    result = fit(Decoded(folder=str(folder), **task), launcher=launcher, out=out / "runs", **options | settings)
    return result, (result.run / MODEL_FILE).read_bytes(), seen(folder)


@pytest.mark.parametrize("stream", [False, True])
def test_a_run_with_data_servers_has_the_same_batches_and_bits(
    launcher: Launcher, tmp_path: Path, stream: bool
) -> None:
    _, model, examples = trained(launcher, tmp_path / "without", {"stream": stream})
    result, same, batches = trained(launcher, tmp_path / "with", {"stream": stream}, data_servers=2)
    assert batches == examples
    assert same == model
    assert [each["name"] for each in result.data_servers] == ["data server 0", "data server 1"]
    assert sum(each["examples"] for each in result.data_servers) >= result.samples == 3 * 45
    assert all(each["bytes_lent"] == each["bytes_sent"] > 0 for each in result.data_servers)


def test_a_killed_data_server_is_replaced_and_the_run_ends_with_the_same_bits(
    launcher: Launcher, tmp_path: Path
) -> None:
    _, model, examples = trained(launcher, tmp_path / "without", {})
    fault = "data server 0: kill at step 5"
    result, same, batches = trained(launcher, tmp_path / "with", {"milliseconds": 2.0}, data_servers=2, disturb=fault)
    assert (result.died, result.joined) == (["data server 0"], ["data server 0"])
    assert result.disturbances == {"asked": 1, "fired": 1}
    assert batches == examples
    assert same == model


@pytest.mark.parametrize("stream", [False, True])
def test_a_table_in_a_file_is_read_alike_with_and_without_data_servers(
    launcher: Launcher, tmp_path: Path, stream: bool
) -> None:
    """Three epochs in orders of their own, drawn when a stream is opened."""
    file = tmp_path / "table.parquet"
    numbers = torch.arange(45.0)
    columns = {"x": pa.FixedSizeListArray.from_arrays(numbers.numpy(), 1), "y": numbers.sin().numpy(), "id": range(45)}
    columns["y"] = pa.FixedSizeListArray.from_arrays(columns["y"], 1)
    parquet.write_table(pa.table(columns), file, row_group_size=10)
    _, model, examples = trained(launcher, tmp_path / "without", {"table": str(file), "stream": stream})
    _, same, batches = trained(launcher, tmp_path / "with", {"table": str(file), "stream": stream}, data_servers=2)
    assert batches == examples
    assert same == model
    assert examples[0][:6] != examples[0][6:12]


def test_a_run_with_data_servers_resumes_to_the_same_bits(launcher: Launcher, tmp_path: Path) -> None:
    whole, model, _ = trained(launcher, tmp_path / "whole", {})
    more: dict[str, Any] = {"data_servers": 1, "checkpoint_every": 2, "disturb": "worker 1: kill at step 9"}
    with pytest.raises(OffbeatError, match="SIGKILL"):
        trained(launcher, tmp_path / "killed", {}, **more)
    left = tmp_path / "killed" / "runs" / "latest"
    folder = str(tmp_path / "killed" / "seen")
    result = fit(Decoded(folder=folder), launcher=launcher, workers=2, resume=left.resolve())
    assert (result.run / MODEL_FILE).read_bytes() == model
    assert result.steps == whole.steps


@pytest.mark.parametrize("seed", range(20))
def test_random_deaths_and_pauses_change_no_bit(launcher: Launcher, tmp_path: Path, seed: int) -> None:
    chance = Random(seed)
    workers, servers = chance.randint(1, 3), chance.randint(1, 3)
    task = {"milliseconds": chance.choice([0.0, 1.0, 3.0]), "stream": chance.random() < 0.3}
    faults: list[str] = []
    for number in range(servers):
        step = chance.randrange(1, 12)
        verb = chance.choice(["kill", "stop 1500ms", "none", "kill"])
        if verb != "none":
            faults.append(f"data server {number}: {verb} at step {step}")
    _, model, examples = trained(launcher, tmp_path / "without", task, workers=workers)
    result, same, batches = trained(
        launcher, tmp_path / "with", task, workers=workers, data_servers=servers, disturb=faults
    )
    assert batches == examples
    assert same == model
    killed = sorted(fault.partition(":")[0] for fault in faults if "kill" in fault)
    assert sorted(result.died) == killed
    assert result.disturbances == {"asked": len(faults), "fired": len(faults)}


def test_a_data_server_on_another_host_is_replaced_there(launcher: Launcher, tmp_path: Path, networks: None) -> None:
    hosts = Hosts((Host("a", workers=2), Host("b", workers=0, servers=1)))
    _, model, examples = trained(launcher, tmp_path / "without", {})
    result, same, batches = trained(
        launcher, tmp_path / "with", {}, hosts=hosts, data_servers=1, disturb="data server 0: kill at step 5"
    )
    assert batches == examples
    assert same == model
    assert result.died == ["data server 0"]
    (account,) = result.data_servers
    assert account["bytes_sent"] > account["bytes_lent"] == 0


def test_workers_that_die_leave_no_example_to_nobody(launcher: Launcher, tmp_path: Path) -> None:
    """Workers that do not wait for each other, of which one dies: after the next evaluation the others have it all."""
    result, _, batches = trained(
        launcher,
        tmp_path,
        {"milliseconds": 1.0},
        workers=3,
        strategy="server",
        data_servers=2,
        epochs=4,
        disturb=["worker 2: kill at step 3", "data server 1: kill at step 8"],
    )
    assert set(result.died) == {"worker 2", "data server 1"}
    last_epochs = Counter(number for worker in batches[:2] for batch in worker[-12:] for number in batch)
    assert last_epochs == Counter(dict.fromkeys(range(45), 2))


def test_what_cannot_be_decoded_ends_the_run_with_the_example_and_the_traceback(
    launcher: Launcher, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as raised:
        trained(launcher, tmp_path, {"broken": 33}, data_servers=2)
    words = str(raised.value)
    assert "data server" in words
    assert "image-33.png is truncated" in words
    assert "It was example 33 of Images." in words
    assert "data_tasks.py" in words


def test_batches_that_cannot_be_sent_are_refused_with_what_to_do(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the batch is a builtins.set.*never as pickles"):
        trained(launcher, tmp_path, {"strange": True}, data_servers=1)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"data_servers": 65}, UsageError, "--data-servers 65 is more than 64"),
        ({"data_servers": -1}, UsageError, "--data-servers -1 makes no sense"),
        ({"data_servers": 1, "strategy": "federated"}, StrategyError, "cannot be used with federated"),
        ({"disturb": "data server 0: kill at step 1"}, UsageError, "this run has no data servers"),
        ({"data_servers": 1, "disturb": "data server 1: kill at step 1"}, UsageError, "only data server 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_anything_starts(
    tmp_path: Path, settings: dict[str, Any], error: type[OffbeatError], words: str
) -> None:
    with pytest.raises(error, match=words):
        fit(Decoded(), out=tmp_path, **{"workers": 2, **settings})


def test_nothing_is_started_on_a_lost_machine_and_without_data_servers_a_run_ends(tmp_path: Path) -> None:
    job = Job(Script("none.py"), Goal(data_servers=2), workers=2)
    plan = DataServerPlan(count=2, folder=str(tmp_path))
    data = DataServing(job, plan)
    first, second = (replace(role, machine=f"m{role.rank}") for role in data.roles(job, RunFolder(tmp_path)))
    assert data.ended(RoleOutcome(first, signal=9), (), {"m0"}) is None
    again = data.ended(RoleOutcome(second, signal=9), (0,), {"m0"})
    assert again is not None
    assert again.config["disturbed"] == [0]
    with pytest.raises(OffbeatError, match="no data server is left"):
        data.ended(RoleOutcome(again, signal=9), (), {"m0", "m1"})
    assert (data.died, data.joined) == (["data server 0", "data server 1", "data server 1"], ["data server 1"])
