"""Networks as people write them, and `offbeat bench collectives`: what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import paths
import pytest

from offbeat.cli import main
from offbeat.errors import UsageError
from offbeat.simulate.network import Link, Network
from offbeat.simulate.units import parse_duration, parse_rate, parse_size, seconds_in_words, size_in_words

# --- as people write it


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("1kB", 1000), ("1 KiB", 1024), ("25MiB", 25 * 2**20), ("1.5GB", 1.5e9)]
)
def test_sizes_are_read(text: str, size: float) -> None:
    assert parse_size(text) == size


def test_rates_durations_and_networks_are_read() -> None:
    assert parse_rate("10Gbit") == parse_rate("1.25GB/s") == parse_rate("10 gbit/s") == 1.25e9
    assert parse_duration("50us") == parse_duration("0.05ms") == parse_duration("50µs") == 50e-6
    assert Network.parse("10Gbit,50us,1GB/s", "1GB,1us").between == Link(50e-6, 8e-10, 1e-9)
    assert Network.parse("10Gbit,50us", "1GB,1us").inside == Link(1e-6, 1e-9)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("10Gbit", "is not a network: it is written like 10Gbit,50us"),
        ("10,50us", "'10' has no unit; a rate is written like 10Gbit"),
        ("10Gbat,50us", "no unit 'Gbat' that is known"),
        ("0Gbit,50us", "would move nothing"),
        ("10Gbit,-5us", "'-5us' is not a duration"),
        ("10Gbit,fast", "'fast' is not a duration"),
        ("1,2,3,4,5", "is not a network"),
    ],
)
def test_a_network_that_makes_no_sense_is_refused_with_an_example(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(complaint)):
        Network.parse(text)


def test_links_and_sizes_out_of_range_are_refused() -> None:
    with pytest.raises(UsageError, match="a link's beta is -1"):
        Link(0, -1)
    with pytest.raises(UsageError, match="at least 1 byte"):
        parse_size("0MB")
    with pytest.raises(UsageError, match="no unit 'm'"):
        parse_size("1m")


def test_sizes_and_times_are_said_briefly() -> None:
    assert [size_in_words(n) for n in (4, 1000, 4096, 26214400, 74997, 10**8)] == [
        "4 B", "1 kB", "4 KiB", "25 MiB", "75 kB", "100 MB",
    ]  # fmt: skip
    assert [seconds_in_words(t) for t in (0, 4.1e-6, 0.08, 1.5, 2345)] == ["0 s", "4.1 us", "80 ms", "1.5 s", "2,345 s"]


# --- the command

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    monkeypatch.setenv("COLUMNS", "100")

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["offbeat", "bench", "collectives", *words])
        with pytest.raises(SystemExit) as end:
            main()
        assert isinstance(end.value.code, int)
        return end.value.code, *capsys.readouterr()

    return run


def test_the_command_prints_a_table_with_the_best_marked_and_where_it_changes(said: Say) -> None:
    code, out, err = said("--simulate", "--ranks", "12", "--size", "10MB", "--network", "10Gbit,50us")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "all_reduce, 12 ranks on 12 hosts, 10Gbit,50us: simulated time"
    assert lines[1].split() == ["algorithm", "1", "kB", "10", "kB", "100", "kB", "1", "MB", "10", "MB"]
    table = {line.split()[0]: line for line in lines[2:]}
    assert table["naive"].split()[1:3] == ["58.8", "us*"]
    assert table["ring"].rstrip().endswith("15.8 ms*")
    assert sum(line.count("*") for line in table.values()) == 5 + 1
    assert "naive below 41.7 kB, recursive_doubling below 150 kB, halving_doubling below 457 kB, ring from" in out
    assert "Omitted: one_shot, two_shot, zero_copy. Why: the 12 ranks live on 12 hosts" in out


def test_the_json_of_a_simulation_is_one_object(said: Say) -> None:
    words = ("--simulate", "--ranks", "8", "--sizes", "4KiB,1MB", "--network", "10Gbit,50us", "--inside", "1GB,1us")
    code, out, err = said(
        *words, "--per-host", "4", "--ports", "host", "--collective", "all-gather", "--format", "json"
    )
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["simulated"] is True
    assert (found["ranks"], found["hosts"], found["collective"]) == (8, 2, "all_gather")
    assert found["sizes"] == [4096, 10**6]
    assert found["network"]["ports"] == "host"
    assert found["network"]["inside"]["beta"] == 1e-9
    assert set(found["seconds"]) >= {"naive", "ring"}
    assert len(found["best"]) == 2


def test_hosts_share_the_ranks_evenly(said: Say) -> None:
    found = json.loads(
        said("--simulate", "--ranks", "7", "--host-count", "3", "--network", "1Gbit,1us", "--format", "json")[1]
    )
    assert found["hosts"] == 3


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--simulate --ranks 4", "--simulate needs --network, written like 10Gbit,50us"),
        ("--simulate --ranks 0 --network 10Gbit,50us", "--ranks 0 makes no sense"),
        ("--simulate --network 10Gbit", "is not a network"),
        ("--simulate --network 10Gbit,50us --size 1parsec", "no unit 'parsec'"),
        ("--simulate --network 10Gbit,50us --size 1MB --sizes 1kB", "give one of them"),
        ("--simulate --network 10Gbit,50us --host-count 1 --per-host 1", "give one of them"),
        ("--simulate --network 10Gbit,50us --host-count 3", "--host-count 3 makes no sense for 2 ranks"),
        ("--simulate --network 10Gbit,50us --per-host 0", "--per-host 0 makes no sense"),
        ("--simulate --network 10Gbit,50us --collective allreduce", "Did you mean 'all_reduce'?"),
        ("--simulate --network 10Gbit,50us --ports card", "Valid: host, rank"),
        ("--simulate --network 10Gbit,50us --peers gloo", "--peers applies to measurements"),
        ("--network 10Gbit,50us", "--network applies to simulations: add --simulate"),
        ("--per-host 2", "--per-host applies to simulations"),
        ("--peers glo", "Did you mean 'gloo'?"),
        ("--ranks 1", "2 or more"),
    ],
)
def test_wrong_options_are_refused_with_what_to_do(said: Say, words: str, complaint: str) -> None:
    code, out, err = said(*words.split())
    assert (code, out) == (2, "")
    assert complaint in err


def test_a_simulation_needs_no_torch() -> None:
    words = ["offbeat", "bench", "collectives", "--simulate", "--ranks", "4", "--network", "10Gbit,50us"]
    program = (
        "import sys, atexit; atexit.register(lambda: print('torch' in sys.modules)); "
        f"sys.argv = {words}; from offbeat.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")


def test_the_commands_on_the_page_do_what_it_says(said: Say) -> None:
    page = (paths.ROOT / "docs/simulate.md").read_text()
    commands = re.findall(r"^offbeat bench collectives (--simulate .*)$", page, re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        words = command.replace("4096", "16").split()  # Thousands of ranks take seconds.
        assert said(*words)[0] == 0, command


def test_without_simulating_the_options_go_to_the_measurement(said: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def collectives(*words: object) -> list[dict[str, object]]:
        asked.extend([*words[:6], *words[7:]])
        return [{"rows": []}] * len(cast("list[str]", words[7]))

    monkeypatch.setattr("offbeat.bench.collectives", collectives)
    words = ("--ranks", "3", "--size", "1MB", "--peers", "gloo, offbeat", "--blocks", "7", "--report", "found.json")
    assert said(*words, "--format", "json") == (0, '{"rows": []}\n', "")
    assert asked == [
        3,
        [4000, 32_000, 256_000, 10**6],
        ["gloo", "offbeat"],
        7,
        Path("found.json"),
        None,
        ["all_reduce"],
    ]
    asked.clear()
    found = said("--call", "send", "--call", "all-gather", "--format", "json")
    assert found == (0, '{"results": [{"rows": []}, {"rows": []}]}\n', "")
    assert asked[-1] == ["send", "all_gather"]
