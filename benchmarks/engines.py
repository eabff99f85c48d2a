"""Engines against namespaces: the step of a 25 MiB model on two hosts at 1 Gbit/s, and the start on a warm Ray cluster.

Bars: ssh and Ray within 3 % of the namespaces engine; the first step at most 10 s after the command. Every run has the
same seed and so the same loss, which is compared first. Runs take turns; needs root, sshd, iproute2 and Ray.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "support")]

from ssh_machines import SshMachines, ssh_machines  # noqa: E402  # pyright: ignore[reportMissingImports]

import offbeat  # noqa: E402
from offbeat.runtime.hosts import Hosts  # noqa: E402

RATE = "1Gbit"
TASK = str(ROOT / "benchmarks" / "_engine_task.py") + ":Mlp"


def seconds_of(hosts: Hosts | str, steps: int, out: Path) -> tuple[float, float, float]:
    """Seconds of a step, seconds until the first one, and the final loss."""
    result = offbeat.fit(TASK, "allreduce", hosts=hosts, workers=2, steps=steps, threads=1, out=out)
    last = json.loads((Path(result.run) / "metrics.jsonl").read_text().splitlines()[-1])
    return result.seconds / result.steps, result.startup_seconds, float(last.get("loss", 0.0))


class RayNodes:
    """A Ray cluster whose two nodes are the machines of a test, started by `ray start` in their namespaces."""

    def __init__(self, machines: SshMachines, held: ExitStack) -> None:
        self.address = f"{machines.placed.address}:6399"
        head = ["ip", "netns", "exec", machines.network, sys.executable, "-m", "ray.scripts.scripts", "start"]
        self._run([*head, "--head", f"--node-ip-address={machines.placed.address}", "--port=6399", "--num-cpus=0"])
        held.callback(self._run, [sys.executable, "-m", "ray.scripts.scripts", "stop", "--force"])
        for each in machines.placed.hosts:
            command = ["ip", "netns", "exec", Path(str(each.network)).name, sys.executable, "-m", "ray.scripts.scripts"]
            words = ["start", f"--address={self.address}", f"--node-ip-address={each.address}", "--num-cpus=1"]
            self._run([*command, *words])

    def _run(self, command: list[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, timeout=120, env=environment, stdout=subprocess.DEVNULL)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--engines", default="ssh,ray")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        machines = held.enter_context(ssh_machines(folder, 2, RATE))
        held.enter_context(machines.placed.inside())
        wanted: dict[str, Hosts | str] = {
            "namespaces": Hosts.alike(2, RATE),
            "namespaces again": Hosts.alike(2, RATE),
            "ssh": machines.with_workers(1, 1),
        }
        if "ray" in given.engines:
            os.environ["RAY_ADDRESS"] = RayNodes(machines, held).address
            wanted["ray"] = "ray"
        figures: dict[str, list[tuple[float, float, float]]] = {name: [] for name in wanted}
        for _ in range(given.blocks):
            for name, hosts in wanted.items():
                figures[name].append(seconds_of(hosts, given.steps, folder / "runs"))
        losses = {round(loss, 4) for each in figures.values() for _, _, loss in each}
        assert len(losses) == 1, f"the engines compute different things: {losses}"
    base = [step for step, _, _ in figures["namespaces"]]
    results: dict[str, Any] = {"blocks": given.blocks, "steps": given.steps}
    for name, each in figures.items():
        ratios = [step / other for (step, _, _), other in zip(each, base, strict=True)]
        results[name] = {
            "step": statistics.median(step for step, _, _ in each),
            "first_step": statistics.median(start for _, start, _ in each),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
        }
        print(f"{name:17} {results[name]['step']:.3f} s a step, {results[name]['ratio']:.3f} of namespaces, "
              f"first step after {results[name]['first_step']:.1f} s")  # fmt: skip
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
