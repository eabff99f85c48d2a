"""What a client and the server compare before the client may join: every difference has a name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from offbeat.federated.description import LARGEST, TaskDescription, decoded, difference, encoded
from offbeat.protocols.machine import Payload

OWN = TaskDescription("Digits", "ab12", "{}", {"0.weight": "float32 (32, 64)", "0.bias": "float32 (32,)"})


def compared(other: TaskDescription) -> str:
    arrived = decoded(encoded(other))
    assert isinstance(arrived, TaskDescription)
    return difference(OWN, arrived)


def test_the_same_task_and_model_differ_in_nothing() -> None:
    assert compared(OWN) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensors": {"0.weight": "float32 (32, 64)"}}, "parameter 0.bias is missing at the client, float32 (32,)"),
        ({"tensors": OWN.tensors | {"0.bias": "float64 (32,)"}}, "0.bias is float64 (32,) at the client, float32"),
        ({"tensors": OWN.tensors | {"1.bias": "float32 (2,)"}}, "1.bias is float32 (2,) at the client, missing"),
        ({"tensors": dict(reversed(OWN.tensors.items()))}, "its parameters have another order"),
        ({"task": "Mnist"}, "its task is Mnist, the server's Digits"),
        ({"source": "cd34"}, "the file of task Digits differs: checksum cd34 at the client, ab12 at the server"),
        ({"arguments": '{"rate": 1}'}, 'its task has arguments {"rate": 1}, the server\'s {}'),
    ],
)
def test_a_difference_is_named(changes: dict[str, Any], words: str) -> None:
    other = msgspec.structs.replace(OWN, **changes)
    assert words in compared(other)


def test_of_many_differences_some_are_named() -> None:
    other = msgspec.structs.replace(OWN, tensors={f"{i}.weight": "float32 (1,)" for i in range(1000)})
    assert compared(other).count(";") == 2


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (Payload(0), "in 0 bytes"),
        (Payload(LARGEST + 1, b""), "in 16,777,217 bytes"),
        (Payload(3, b"\xc1no"), "cannot be read"),
        (Payload(4, msgspec.msgpack.encode([1, 2])), "cannot be read"),
    ],
)
def test_a_description_that_is_none_is_refused(payload: Payload, words: str) -> None:
    why = decoded(payload)
    assert isinstance(why, str)
    assert words in why
