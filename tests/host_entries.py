"""What processes on hosts do in the tests; reachable in them because sys.path is passed on."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from datetime import timedelta
from typing import Any

import torch

from offbeat.runtime.group import Group
from offbeat.runtime.launch import Control
from offbeat.runtime.place import where
from offbeat.runtime.shared.segment import host_identity

_SIOCGIFADDR = 0x8915


def look_around(config: dict[str, Any], control: Control) -> None:
    """Say where this process is, after a sum with the others."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    place = where()
    group = Group(place, timedelta(seconds=30), torch.device("cpu"))
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
    group = Group(where(), timedelta(seconds=60), torch.device("cpu"))
    row = torch.ones(config["count"])
    group.sum(row)
    control.send({"right": bool((row == group.size).all())})
    group.close()


def address_of(interface: str) -> str:
    """The IPv4 address that an interface has in this process's network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        packed = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()))
    return socket.inet_ntoa(packed[20:24])
