"""What processes on hosts do in the tests; reachable in them because sys.path is passed on."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import offbeat
from offbeat.protocols.collectives.across_hosts import parts_across_hosts
from offbeat.runtime.backend import _across_hosts
from offbeat.runtime.collectives.one_sided.tickets import host_identity
from offbeat.runtime.groups.group import DirectGroup
from offbeat.runtime.launch import Control
from offbeat.runtime.run.rank_environment import where

_SIOCGIFADDR = 0x8915


def look_around(config: dict[str, Any], control: Control) -> None:
    """Say where this process is, after a sum with the others."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    place = where()
    group = DirectGroup(place, timedelta(seconds=30), torch.device("cpu"))
    total = float(group.sum(torch.tensor([float(group.rank + 1)])))
    backend: Any = group.process_group
    control.send(
        {
            "address": address_of(interface),
            "identity": host_identity(),
            "local": [
                place.local_rank,
                place.local_size,
                int(os.environ["GROUP_RANK"]),
                os.environ["GROUP_WORLD_SIZE"],
            ],
            "one_host": group.one_host,
            "hosts": list(backend.hosts.of),
            "shares": group.shares_memory,
            "sum": total,
        }
    )
    group.close()


def sum_much(config: dict[str, Any], control: Control) -> None:
    """Sum so many numbers once."""
    group = DirectGroup(where(), timedelta(seconds=60), torch.device("cpu"))
    row = torch.ones(config["count"])
    group.sum(row)
    control.send({"right": bool((row == group.size).all())})
    group.close()


def sum_without_handing_back(config: dict[str, Any], control: Control) -> None:
    """Sum by a schedule over hosts that leaves out its last part, the hand-back of the last piece."""
    _across_hosts.parts_across_hosts = lambda view, layout: parts_across_hosts(view, layout)[:-1]  # pyright: ignore[reportPrivateImportUsage]
    sum_much(config, control)


def count_bytes(config: dict[str, Any], control: Control) -> None:
    """Say what single exchanges count as."""
    group = DirectGroup(where(), timedelta(seconds=60), torch.device("cpu"))
    row = torch.ones(config["count"])
    counted: dict[str, int] = {}

    def count(name: str, act: Callable[[], object]) -> None:
        before = group.bytes_sent
        act()
        counted[name] = group.bytes_sent - before

    count("sum", lambda: group.sum(row))
    count("share", lambda: group.share(row, root=1))
    count("gather", lambda: group.payloads(row.view(torch.uint8), True, "a test"))
    for name in config["names"]:
        lane = group.lane()
        lane.sum_by(name)
        count(name, lambda lane=lane: lane.sum(row))
    with group.sent.measuring():
        count("measuring", lambda: group.sum(row))
    control.send(
        {"rank": group.rank, "counted": counted, "measuring": group.sent.totals.measured, "sent": group.bytes_sent}
    )
    group.close()


class Wide(offbeat.Task):
    """One layer of 2.4 MB: large enough that headers and reports are next to nothing beside its gradients."""

    global_batch = 6

    def model(self) -> nn.Module:
        """A layer."""
        return nn.Linear(1000, 600)

    def data(self) -> offbeat.Data:
        """Noise."""
        random = torch.Generator().manual_seed(0)
        inputs, labels = torch.randn(120, 1000, generator=random), torch.randint(0, 600, (120,), generator=random)
        noise = TensorDataset(inputs, labels)
        return offbeat.Data(noise, noise, noise)

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross entropy."""
        return nn.functional.cross_entropy(output, target)

    def optimizer(self, params: Any) -> SGD:
        """Plain SGD."""
        return SGD(params, lr=0.01)

    def score(self, model: nn.Module, data: Any) -> float:
        """Not of interest."""
        del model, data
        return 0.0


def address_of(interface: str) -> str:
    """The IPv4 address that an interface has in this process's network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        packed = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()))
    return socket.inet_ntoa(packed[20:24])
