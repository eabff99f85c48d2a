"""The server's last step: it recovers secrets from shares, checks each, and takes the masks off the sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations, islice
from typing import Final

from offbeat.errors import SecureAggregationError
from offbeat.protocols.federated.secure.integers import Row
from offbeat.protocols.federated.secure.masks import Masks
from offbeat.protocols.federated.secure.primitives import agreement_public, commitment, own_mask_key, pair_mask_key
from offbeat.protocols.federated.secure.shamir import ShamirSharing

MOST_CHOICES: Final = 200
"""Choices of shares that are tried when several holders lie: with ten holders, these are all."""

Shares = Mapping[int, bytes]
"""Shares of one secret, by holder."""


@dataclass(frozen=True)
class UnmaskedSum:
    """How an unmasking has ended."""

    total: Row | None
    """The sum of the survivors' updates; None if a secret could not be recovered."""
    unrecovered: tuple[int, ...] = ()
    """Clients a secret of which could not be recovered."""
    liars: tuple[int, ...] = ()
    """Clients that released a wrong share, as far as it is certain."""


@dataclass(frozen=True)
class Unmasking:
    """Work of the server: call it, and give it the result as `Done`."""

    digest: bytes
    threshold: int
    total: Row
    """The sum of masked updates; stays as it is."""
    commitments: Mapping[int, bytes]
    """Of each survivor's seed."""
    masking: Mapping[int, bytes]
    """The public masking key of every client that dealt shares."""
    seeds: Mapping[int, Shares]
    """Shares of each survivor's seed."""
    keys: Mapping[int, Shares]
    """Shares of the masking key of each that dealt shares and did not survive."""
    neighbours: Mapping[int, tuple[int, ...]]
    """The surviving neighbours of each that did not survive."""

    def __call__(self) -> UnmaskedSum:
        """The sum without masks, or whose secrets are missing."""
        recovery = SecretRecovery(ShamirSharing(self.threshold))
        seeds = {
            client: recovery.secret(
                shares, lambda seed, client=client: commitment(seed, self.digest, client) == self.commitments[client]
            )
            for client, shares in self.seeds.items()
        }
        keys = {
            client: recovery.secret(shares, lambda key, client=client: agreement_public(key) == self.masking[client])
            for client, shares in self.keys.items()
        }
        liars = tuple(sorted(recovery.liars))
        missing = tuple(sorted(client for client, secret in (seeds | keys).items() if secret is None))
        if missing:
            return UnmaskedSum(None, missing, liars)
        return UnmaskedSum(self._without_masks(_known(seeds), _known(keys)), (), liars)

    def _without_masks(self, seeds: Mapping[int, bytes], keys: Mapping[int, bytes]) -> Row:
        total, masks = self.total.copy(), Masks()
        for client, seed in seeds.items():
            masks.subtract(total, own_mask_key(seed, self.digest, client))
        for absent, private in keys.items():
            for client in self.neighbours[absent]:
                key = pair_mask_key(private, self.masking[client], self.digest, absent, client)
                # What the survivor did with this mask is undone: the smaller of two numbers adds it.
                (masks.subtract if client < absent else masks.add)(total, key)
        return total


@dataclass
class SecretRecovery:
    """Recovers secrets although some holders lie, and finds out who does."""

    sharing: ShamirSharing
    liars: set[int] = field(default_factory=set[int])
    """Holders that released a wrong share, as far as it is certain."""

    def secret(self, shares: Shares, is_right: Callable[[bytes], bool]) -> bytes | None:
        """The secret of some shares; None if no choice of them that is tried gives the right one."""
        for number, chosen in enumerate(self._choices(shares)):
            try:
                secret = self.sharing.combine({holder: shares[holder] for holder in chosen})
            except SecureAggregationError:
                continue
            if is_right(secret):
                if number:
                    self._accuse(shares, {holder: shares[holder] for holder in chosen})
                return secret
        return None

    def _choices(self, shares: Shares) -> Iterator[tuple[int, ...]]:
        """Which shares are tried: neighbours in a circle, without known liars at first, and then any."""
        holders, needed = sorted(shares, key=lambda holder: holder in self.liars), self.sharing.threshold
        if len(holders) <= needed:
            yield from [tuple(holders)] * (len(holders) == needed)
            return
        for first in range(len(holders)):
            yield tuple((holders[first:] + holders[:first])[:needed])
        yield from islice(combinations(holders, needed), MOST_CHOICES)

    def _accuse(self, shares: Shares, right: Shares) -> None:
        """Those whose shares do not fit, if they are so few that no other polynomial fits more shares.

        Only if still more lie together can they make the secret come out right and others seem wrong.
        """
        wrong = [holder for holder in shares if self.sharing.share_of(holder, right) != shares[holder]]
        # The secret itself is one more point that is known.
        if 2 * len(wrong) <= len(shares) + 1 - self.sharing.threshold:
            self.liars.update(wrong)


def _known(secrets: Mapping[int, bytes | None]) -> dict[int, bytes]:
    return {client: secret for client, secret in secrets.items() if secret is not None}
