"""The server's last step: it recovers secrets from shares, checks each, and takes the masks off the sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from offbeat.errors import SecureAggregationError
from offbeat.protocols.federated.secure.masks import Masks, Row
from offbeat.protocols.federated.secure.primitives import agreement_public, commitment, own_mask_key, pair_mask_key
from offbeat.protocols.federated.secure.sharing import ShamirSharing

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
    """Clients that released a wrong share."""


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
    """Holders that released a wrong share."""

    def secret(self, shares: Shares, is_right: Callable[[bytes], bool]) -> bytes | None:
        """The secret of some shares; None if no choice of them gives the right one."""
        holders = [*(h for h in shares if h not in self.liars), *(h for h in shares if h in self.liars)]
        needed = self.sharing.threshold
        for first in range(len(holders) if len(holders) >= needed else 0):
            chosen = {holder: shares[holder] for holder in (holders[first:] + holders[:first])[:needed]}
            try:
                secret = self.sharing.combine(chosen)
            except SecureAggregationError:
                continue
            if is_right(secret):
                if first:
                    self._accuse(shares, chosen)
                return secret
            if len(holders) == needed:
                break
        return None

    def _accuse(self, shares: Shares, right: Shares) -> None:
        """All whose shares are not on the polynomial through those that are right."""
        wrong = (holder for holder in shares if self.sharing.share_of(holder, right) != shares[holder])
        self.liars.update(wrong)


def _known(secrets: Mapping[int, bytes | None]) -> dict[int, bytes]:
    return {client: secret for client, secret in secrets.items() if secret is not None}
