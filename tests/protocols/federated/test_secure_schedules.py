"""Clients drop out at random, at every stage: the sum is right, or the round ends without one. Never a hang.

And one wrong line in masks, shares or recovery is noticed.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass

import pytest

from offbeat.protocols.federated.secure import client, primitives, records, recovery, shamir
from offbeat.protocols.federated.secure.server import SecureFailure, SecureSum
from offbeat.simulate.faults.secure_rounds import (
    STAGES,
    SecureContract,
    SecureWorld,
    fault_in,
    play_secure_round,
)
from offbeat.simulate.machine_contract import check_machine


def play(seeds: range) -> Counter[str]:
    """How rounds ended, after what must never be was looked for in each."""
    ends: Counter[str] = Counter()
    for seed in seeds:
        world = play_secure_round(seed)
        outcome = world.server.outcome
        assert outcome is not None, f"seed {seed} hangs in phase {world.server.phase}"
        assert world.over, f"clients of seed {seed} never end"
        wrong = fault_in(world.machines)
        assert wrong is None, f"seed {seed}: {wrong}"
        _check_end(world, outcome, seed)
        ends[type(outcome).__name__] += 1
        ends["despite a lie"] += isinstance(outcome, SecureSum) and bool(outcome.liars)
        ends["partial"] += isinstance(outcome, SecureSum) and len(outcome.clients) < world.plan.clients
        ends.update(STAGES[each.dropout.stage].__name__ for each in world.clients.values() if each.dropped)
    return ends


def _check_end(world: SecureWorld, outcome: SecureSum | SecureFailure, seed: int) -> None:
    if isinstance(outcome, SecureSum):
        assert len(outcome.clients) >= world.plan.fewest, f"seed {seed}"
    else:
        assert outcome.reason
        assert world.liars or not outcome.culprits, f"seed {seed} accuses honest clients"
    if len(world.liars) <= 1:  # More may lie together such that others seem to.
        liars = {f"client {liar}" for liar in world.liars}
        assert {each.sender for each in world.server.refused if "left" not in each.reason} <= liars, f"seed {seed}"


def test_random_dropouts_give_the_right_sum_or_none() -> None:
    ends = play(range(60))
    assert min(ends["SecureSum"], ends["SecureFailure"], ends["partial"]) >= 5


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rounds", [200, 1000])
def test_many_random_dropouts_give_the_right_sum_or_none(rounds: int) -> None:
    ends = play(range(1000, 1000 + rounds))
    assert min(ends["SecureSum"], ends["SecureFailure"], ends["partial"], ends["despite a lie"]) >= rounds // 20
    assert all(ends[stage.__name__] >= rounds // 50 for stage in STAGES), ends


def test_the_contract_of_machines_holds_under_every_fault() -> None:
    report = check_machine(SecureContract(), runs=40)
    assert report.faults["kill"] >= 5


@dataclass(frozen=True)
class Broken:
    """A wrong line of a function or method."""

    owner: object
    name: str
    right: str
    wrong: str

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Make the line wrong, wherever the function is used."""
        before = getattr(self.owner, self.name)
        text = textwrap.dedent(inspect.getsource(before))
        assert text.count(self.right) == 1, f"{self.right!r} is not one line of {self.name}"
        module = sys.modules[before.__module__]
        known = dict(vars(module))
        exec(text.replace(self.right, self.wrong), known)  # noqa: S102
        if inspect.isclass(self.owner):
            patch.setattr(self.owner, self.name, known[self.name])
            return
        for user in list(sys.modules.values()):
            if getattr(user, "__name__", "").startswith("offbeat") and getattr(user, self.name, None) is before:
                patch.setattr(user, self.name, known[self.name])


MUTANTS = {
    "both of a pair add their mask": Broken(client.SecureClient, "_mask", "own < partner", "own != partner"),
    "a partner is forgotten": Broken(client.SecureClient, "_mask", "in self._partners:", "in self._partners[1:]:"),
    "a mask is added twice": Broken(
        client.MaskWork, "__call__", "masks.add(row, key)", "(masks.add(row, key), masks.add(row, key))"
    ),
    "masks of the dropped have the wrong sign": Broken(
        recovery.Unmasking, "_without_masks", "if client < absent", "if client > absent"
    ),
    "masks of the dropped stay": Broken(
        recovery.Unmasking, "_without_masks", "in self.neighbours[absent]", "in self.neighbours[absent][1:]"
    ),
    "own masks stay": Broken(recovery.Unmasking, "_without_masks", "masks.subtract(total, own", "masks.add(total, own"),
    "both kinds of share are released": Broken(client, "_released", " if client not in alive", ""),
    "an update counts twice": Broken(
        records.SecureRecords, "accept", "encoding.unpacked(payload.handle)", "encoding.unpacked(payload.handle) * 2"
    ),
    "the key of a pair depends on who asks": Broken(
        primitives, "pair_mask_key", "min(one, other), max(one, other)", "one, other"
    ),
    "a recovered secret is not checked": Broken(recovery.SecretRecovery, "secret", "if is_right(secret)", "if True"),
    "shares are of another polynomial": Broken(shamir, "_polynomial", "value * place", "value * (place + 1)"),
}
"""What is broken, by what is then wrong."""


@pytest.mark.parametrize("what", MUTANTS)
def test_a_wrong_line_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[what].install(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        play(range(60))
