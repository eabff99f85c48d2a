"""Shamir's threshold sharing, held against pycryptodome's arithmetic and its scheme for short secrets."""

from __future__ import annotations

import random

import pytest
from Crypto.Math.Numbers import Integer
from Crypto.Protocol.SecretSharing import Shamir
from Crypto.Util.number import isPrime
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import SecureAggregationError, UsageError
from offbeat.protocols.federated.secure.sharing import PRIME, SHARE_BYTES, ShamirSharing, is_share
from offbeat.simulate.secure_rounds import seeded


def test_the_modulus_is_the_smallest_prime_that_holds_a_secret() -> None:
    assert isPrime(PRIME)
    assert not any(isPrime(2**256 + offset) for offset in range(297))


@given(st.binary(min_size=32, max_size=32), st.integers(1, 12), st.integers(0, 8), st.integers(0, 2**32))
def test_any_threshold_of_shares_gives_the_secret(secret: bytes, threshold: int, more: int, seed: int) -> None:
    chance = random.Random(seed)
    holders = chance.sample(range(1000), threshold + more)
    sharing = ShamirSharing(threshold)
    shares = sharing.split(secret, holders, seeded(seed))
    chosen = dict(chance.sample(sorted(shares.items()), threshold))
    assert sharing.combine(chosen) == secret
    assert all(is_share(share) and sharing.share_of(holder, chosen) == share for holder, share in shares.items())


def test_pycryptodome_computes_the_same_secret_from_our_shares() -> None:
    secret = bytes(range(32))
    shares = ShamirSharing(4).split(secret, [3, 9, 20, 31, 77], seeded(1))
    points = {holder + 1: Integer.from_bytes(share, "little") for holder, share in list(shares.items())[1:]}
    prime, value = Integer(PRIME), Integer(0)
    for x, y in points.items():
        factor = Integer(1)
        for other in points:
            if other != x:
                factor = factor * other * Integer((other - x) % PRIME).inverse(prime) % prime
        value = (value + y * factor) % prime
    assert int(value).to_bytes(32, "little") == secret


def test_pycryptodome_recovers_the_same_secret_from_the_same_holders() -> None:
    secret, chance = random.Random(5).randbytes(32), random.Random(6)
    ours = ShamirSharing(5).split(secret, range(9), seeded(2))
    halves = [dict(Shamir.split(5, 9, half)) for half in (secret[:16], secret[16:])]
    for count in (5, 7, 9):
        holders = chance.sample(range(9), count)
        theirs = b"".join(Shamir.combine([(h + 1, half[h + 1]) for h in holders]) for half in halves)
        assert ShamirSharing(5).combine({h: ours[h] for h in holders}) == theirs == secret


def test_one_share_less_gives_nothing() -> None:
    sharing, secret = ShamirSharing(3), bytes(31) + b"\1"
    shares = sharing.split(secret, [0, 1, 2, 3], seeded(3))
    with pytest.raises(SecureAggregationError, match="2 shares cannot recover a secret whose threshold is 3"):
        sharing.combine({0: shares[0], 1: shares[1]})
    # Any secret at all goes with two shares: for each there is a third share.
    for other in (secret, bytes(32), b"\xff" * 32):
        third = _share_for(other, {0: shares[0], 1: shares[1]}, 2)
        assert sharing.combine({0: shares[0], 1: shares[1], 2: third}) == other


def _share_for(secret: bytes, shares: dict[int, bytes], holder: int) -> bytes:
    known = {-1: secret + b"\0", **shares}  # The place of holder -1 is 0, where the secret is.
    return ShamirSharing(3).share_of(holder, known)


def test_a_wrong_share_gives_another_secret() -> None:
    sharing, secret = ShamirSharing(3), b"\7" * 32
    shares = sharing.split(secret, [0, 1, 2], seeded(4))
    shares[1] = (int.from_bytes(shares[1], "little") ^ 1).to_bytes(SHARE_BYTES, "little")
    assert sharing.combine(shares) != secret


def test_shares_that_give_no_secret_at_all_are_refused() -> None:
    largest = (PRIME - 1).to_bytes(SHARE_BYTES, "little")
    with pytest.raises(SecureAggregationError, match="do not fit together"):
        ShamirSharing(1).combine({0: largest})


def test_equal_secrets_have_different_shares() -> None:
    sharing, random_bytes = ShamirSharing(2), seeded(5)
    first, second = (sharing.split(bytes(32), [1, 2], random_bytes) for _ in range(2))
    assert set(first.values()).isdisjoint(second.values())


@pytest.mark.parametrize(
    ("threshold", "secret", "holders", "match"),
    [
        (3, bytes(32), [1, 2], "2 different holders are too few for a threshold of 3"),
        (2, bytes(32), [1, 1, 2], "2 different holders"),
        (2, bytes(31), [1, 2], "a secret of 31 bytes"),
        (0, bytes(32), [1], "threshold 0 makes no sense"),
    ],
)
def test_what_cannot_be_shared_is_refused(threshold: int, secret: bytes, holders: list[int], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        ShamirSharing(threshold).split(secret, holders, seeded(0))
