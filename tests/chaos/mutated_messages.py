"""A million mutated messages at a real socket; `make test` sends fewer."""

from __future__ import annotations

from message_support import Endpoints
from message_support import endpoints as endpoints
from test_message_strangers import mutated_at_the_door


def test_a_million_mutated_messages_have_no_effect(endpoints: Endpoints) -> None:
    mutated_at_the_door(endpoints, 1_000_000)
