"""Where a worker stands, read from what launchers leave in the environment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import UsageError
from offbeat.runtime.run.rank_environment import Place, first_host, where

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host7",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "11",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_TASKS_PER_NODE": "4(x2),3",
    "SLURM_JOB_NODELIST": "gpu[07-09,12],cpu1",
    "SLURM_JOB_ID": "1234567",
}


def _without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


@pytest.mark.parametrize(
    "env", [{}, {"RANK": "", "WORLD_SIZE": ""}, {"LOCAL_RANK": "0"}, {"SLURM_PROCID": "0"}, {"SLURM_NTASKS": "4"}]
)
def test_without_a_launcher_a_worker_is_alone(env: dict[str, str]) -> None:
    assert where(env) == Place()


def test_torchruns_variables_are_read() -> None:
    assert where(TORCHRUN) == Place("torchrun", 3, 8, 1, 2, "host7", 29500)


def test_the_environment_is_the_processs_own_if_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert where() == where(TORCHRUN)


def test_torchruns_variables_go_before_slurms() -> None:
    assert where(SLURM | TORCHRUN).launcher == "torchrun"


def test_one_worker_under_torchrun_needs_nobody_to_meet() -> None:
    assert where({"RANK": "0", "WORLD_SIZE": "1"}) == Place("torchrun")


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
@pytest.mark.parametrize("how", ["missing", "empty"])
def test_half_of_rank_and_size_is_refused(name: str, how: str) -> None:
    env = _without(TORCHRUN, name) | ({name: ""} if how == "empty" else {})
    other = {"RANK": "WORLD_SIZE='8'", "WORLD_SIZE": "RANK='3'"}[name]
    with pytest.raises(UsageError, match=f"{other}.*needs both"):
        where(env)


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_workers_that_cannot_meet_are_refused(name: str) -> None:
    for env in (_without(TORCHRUN, name), TORCHRUN | {name: ""}):
        with pytest.raises(UsageError, match="the workers cannot meet"):
            where(env)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"])
@pytest.mark.parametrize("text", ["three", "1.5", "0x1", " - "])
def test_garbage_numbers_are_named(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"{name}='{text}', which is not a number"):
        where(TORCHRUN | {name: text})


@pytest.mark.parametrize(
    "wrong",
    [{"RANK": "8"}, {"RANK": "-1"}, {"WORLD_SIZE": "0"}, {"LOCAL_RANK": "2"}, {"MASTER_PORT": "70000"}],
)
def test_impossible_places_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="no possible place"):
        where(TORCHRUN | wrong)


def test_slurms_variables_are_read() -> None:
    assert where(SLURM) == Place("slurm", 9, 11, 1, 3, "gpu07", 20000 + 4567)


def test_slurms_step_goes_before_its_job() -> None:
    step = {"SLURM_STEP_NODELIST": "n[1,3]", "SLURM_STEP_TASKS_PER_NODE": "5(x2),1", "SLURM_NODEID": "0"}
    place = where(SLURM | step)
    assert (place.address, place.local_size) == ("n1", 5)


def test_master_address_and_port_go_before_what_slurm_says() -> None:
    place = where(SLURM | {"MASTER_ADDR": "other", "MASTER_PORT": "1234"})
    assert (place.address, place.port) == ("other", 1234)


@pytest.mark.parametrize("name", ["bash", "interactive"])
def test_a_shell_inside_a_slurm_job_is_alone(name: str) -> None:
    assert where(SLURM | {"SLURM_JOB_NAME": name}) == Place()


@pytest.mark.parametrize("text", ["x", "4(x", "4(x2)3", ",", "4,,3"])
def test_a_garbled_layout_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="SLURM_TASKS_PER_NODE="):
        where(SLURM | {"SLURM_TASKS_PER_NODE": text})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[07-09,12],cpu1", "gpu07"),
        ("a01", "a01"),
        ("n[1,3]", "n1"),
        ("n[12]", "n12"),
        ("a01,b[1-2]", "a01"),
        ("rack[1-2]node[03-04]", "rack1node03"),
        ("gpu[1-2]-ib,x", "gpu1-ib"),
        ("node-7.cluster.example", "node-7.cluster.example"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize("nodes", ["", ",a", "gpu[07", "gpu]", "gpu[]"])
def test_a_garbled_node_list_is_refused(nodes: str) -> None:
    with pytest.raises(UsageError, match=r"cannot be read\. Set MASTER_ADDR"):
        first_host(nodes)


@given(st.dictionaries(st.sampled_from([*TORCHRUN, *SLURM]), st.text(max_size=6)))
def test_any_environment_gives_a_place_or_a_usage_error(env: dict[str, str]) -> None:
    try:
        place = where(env)
    except UsageError:
        return
    assert 0 <= place.rank < place.size
    assert 0 <= place.local_rank < place.local_size
