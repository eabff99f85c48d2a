"""Servers and clients of federated deployments as real processes, which tests can kill and stop one by one."""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file

from conftest import wait_until
from offbeat.cli.commands.federation import ServerProgress
from offbeat.federated import client, client_work, join, serve
from offbeat.federated.server import resume
from offbeat.federated.store import FOLDER, ServerStore
from offbeat.protocols.federated.federation_state import FederationState
from offbeat.protocols.federated.roster import Roster
from offbeat.protocols.federated.secure.messages import KeyRoster, PeerKeys, SurvivorList, keys_text
from offbeat.protocols.federated.secure.primitives import agreement_public, identity_public, sign
from offbeat.protocols.federated.secure.records import SecureRecords
from offbeat.protocols.machine import Payload
from offbeat.runtime.run.folder import MODEL_FILE
from offbeat.task import IterativeTask, TaskReference

SILENCE = 3.0


def _child(log: str, result: str, act: str, words: dict[str, Any]) -> None:
    """The body of a process: its output goes to a file, and its result to another."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = os.fdopen(descriptor, "w", buffering=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        task, fault = words.pop("task", None), words.pop("fault", "")
        if task is not None:
            words["task"] = TaskReference(**task).build()
            break_client(words["task"], fault)
        if act == "join":
            done = join(**words, report=lambda line: print(line, flush=True)).plain()
        else:
            done = (serve if act == "serve" else resume)(**words, watcher=ServerProgress(quiet=False)).plain()
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None
    Path(result).write_text(json.dumps(done))


def break_client(task: Any, fault: str) -> None:
    """Make this process a faulty client: it raises, computes NaN, is slow, never ends, or lies about its size."""
    kind, batches = type(task), [0]
    if isinstance(task, IterativeTask):
        _break_sums(kind, fault)
        return
    honest = kind.loss

    def loss(self: Any, model: Any, batch: Any) -> Any:
        batches[0] += 1
        if fault == "raise" and batches[0] > 1:
            raise ValueError("the disk of this clinic is full")
        if fault == "dies training":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "slow":
            time.sleep(0.1)
        while fault == "hangs":  # Its signs of life go on.
            time.sleep(1.0)
        return honest(self, model, batch) * (float("nan") if fault == "nan" else 1.0)

    kind.loss = loss
    if fault.startswith("dies after "):
        _die_after(fault.removeprefix("dies after "))
    if fault.startswith("dies in "):
        _die_in(fault.removeprefix("dies in "))
    if fault == "takes any list":
        Roster._why_not_among_peers = lambda *_: ""  # pyright: ignore[reportPrivateUsage]
    if fault in LIES:
        _lie(LIES[fault])
    size = {"shape": 8, "huge": 17 * 2**20}.get(fault)
    if size is not None:
        client.LARGEST = 2**30
        client_work.packed = lambda _vectors: Payload(size, np.zeros(size, np.uint8))
    if fault == "garbage":
        packed = client_work.packed
        client_work.packed = lambda vectors: _noise(packed(vectors).nbytes)


def _break_sums(kind: Any, fault: str) -> None:
    """Make this process a faulty client of an iterative task: it is slow, computes NaN or other statistics."""
    honest = kind.statistics

    def statistics(self: Any, params: Any, batch: Any) -> Any:
        sums = dict(honest(self, params, batch))
        if fault == "slow":
            time.sleep(0.3)
        if fault == "nan":
            return {name: value * float("nan") if value.is_floating_point() else value for name, value in sums.items()}
        if fault == "other statistics":
            return {**sums, "square": sums["square"][:1], "more": sums["count"]}
        return sums

    kind.statistics = statistics


def _noise(nbytes: int) -> Payload:
    """As many random bytes."""
    return Payload(nbytes, np.random.default_rng(1).integers(0, 256, nbytes, np.uint8))


def _die_after(message: str) -> None:
    """Make this client kill itself when it has sent a message of this type."""
    honest = client.Endpoint.send

    def send(self: Any, to: str, what: Any, payload: Any = None) -> bool:
        sent = honest(self, to, what, payload)
        if type(what).__name__ == message:
            time.sleep(0.1)  # The message leaves first, more often than not.
            os.kill(os.getpid(), signal.SIGKILL)
        return sent

    client.Endpoint.send = send


def _die_in(phase: str) -> None:
    """Make this server kill itself when it has saved that a secure sum is in this phase."""
    honest = ServerStore.save

    def save(self: Any, state: FederationState) -> None:
        honest(self, state)
        if state.round.secure is not None and state.round.secure.server.phase == phase:
            os.kill(os.getpid(), signal.SIGKILL)

    ServerStore.save = save


def _lie(change: Callable[[Any, int], Any]) -> None:
    """Make this server change what it asks a client in a secure sum."""
    honest = SecureRecords.question

    def question(self: Any, client: int) -> Any:
        return change(honest(self, client), client)

    SecureRecords.question = question


def _invent(message: Any, _client: int) -> Any:
    """Its own keys in place of client 1's."""
    if not isinstance(message, KeyRoster):
        return message
    private, sealing, masking = secrets.token_bytes(32), *(agreement_public(secrets.token_bytes(32)) for _ in "sm")
    signature = sign(private, keys_text(message.round, 1, sealing, masking))
    invented = PeerKeys(1, identity_public(private), sealing, masking, signature)
    return msgspec.structs.replace(
        message, peers=tuple(invented if peer.client == 1 else peer for peer in message.peers)
    )


def _split(message: Any, client: int) -> Any:
    """Another list of survivors for two clients."""
    if not isinstance(message, SurvivorList) or client > 1:
        return message
    return msgspec.structs.replace(message, clients=message.clients[:-1])


LIES = {"invents a client": _invent, "splits the survivors": _split}
"""How a server may lie in secure sums."""


def _forking() -> Any:
    """Starts processes by forking one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["federation", "federated_tasks", "torch._dynamo"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # Preloading looks there only.
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def same_model(left: Path, right: Path) -> bool:
    one, other = load_file(left / MODEL_FILE), load_file(right / MODEL_FILE)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class RunningProcess:
    """A process, its output and its result."""

    def __init__(self, folder: Path, name: str, act: str, words: dict[str, Any]) -> None:
        self.log = folder / f"{name}.log"
        self._result = folder / f"{name}.json"
        context = _forking()
        arguments = (str(self.log), str(self._result), act, words)
        self.process: BaseProcess = context.Process(target=_child, args=arguments, daemon=True)
        self.process.start()

    @property
    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def send(self, number: int) -> None:
        if self.process.pid is not None:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.process.join(30)

    def result(self, seconds: float = 90.0) -> dict[str, Any]:
        """Its result, once it has ended."""
        self.process.join(seconds)
        assert self.process.exitcode == 0, self.output
        return json.loads(self._result.read_text())

    def fails(self, seconds: float = 90.0) -> str:
        """Its output, once it has ended with an error."""
        self.process.join(seconds)
        assert self.process.exitcode not in (0, None), self.output
        return self.output


class Deployment:
    """A server and its clients in one folder."""

    def __init__(
        self, folder: Path, task: str = "Owners", *, source: str = "federated_tasks", **arguments: Any
    ) -> None:
        self.folder = folder
        self.task = {"source": source, "name": task, "arguments": arguments}
        self.processes: list[RunningProcess] = []
        self.address = ""

    def _start(self, name: str, act: str, words: dict[str, Any]) -> RunningProcess:
        running = RunningProcess(self.folder, f"{len(self.processes)}-{name}", act, words)
        self.processes.append(running)
        return running

    def serve(self, strategy: str, **words: Any) -> RunningProcess:
        """Start a server, and wait until it listens."""
        words = {"silence": SILENCE, "timeout": 60.0, "out": str(self.folder / "runs"), **words}
        server = self._start("server", "serve", {"task": self.task, "strategy": strategy, **words})
        return self._listening(server)

    def resume(self) -> RunningProcess:
        """Start a server that goes on where the last one was."""
        return self._listening(self._start("server", "resume", {"run": str(self.run)}))

    def _listening(self, server: RunningProcess) -> RunningProcess:
        wait_until(lambda: "listening at" in server.output or not server.process.is_alive(), "the server")
        assert "listening at" in server.output, server.output
        self.address = server.output.split("listening at ")[1].split()[0]
        return server

    def join(self, part: int, **words: Any) -> RunningProcess:
        """Start a client."""
        task = {**self.task, "arguments": {**self.task["arguments"], **words.pop("arguments", {})}}
        words = {"address": self.address, "task": task, "part": part, "timeout": 60.0, **words}
        return self._start(f"client-{part}", "join", {"out": str(self.folder / "kept"), **words})

    @property
    def run(self) -> Path:
        return (self.folder / "runs" / "latest").resolve()

    def state(self) -> FederationState:
        """What the server has on disk."""
        path = self.run / FOLDER / "state.json"
        return msgspec.json.decode(path.read_bytes(), type=FederationState) if path.exists() else FederationState()

    def wait_for(self, condition: Callable[[FederationState], bool], what: str) -> None:
        wait_until(lambda: condition(self.state()), what)

    def close(self) -> None:
        """End whatever is left."""
        for running in self.processes:
            if running.process.is_alive():
                running.send(signal.SIGCONT)
                running.kill()
            running.process.join(30)
