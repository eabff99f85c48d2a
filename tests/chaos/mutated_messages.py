"""A million mutated messages at a real socket; `make test` sends a thousand of them."""

from __future__ import annotations

import pytest
from message_support import Endpoints
from message_support import endpoints as endpoints
from message_support import nothing_is_left as nothing_is_left
from mutated_frames import mutated_at_the_door


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [1_000, 1_000_000])
def test_mutated_messages_have_no_effect(endpoints: Endpoints, count: int) -> None:
    mutated_at_the_door(endpoints, count)
