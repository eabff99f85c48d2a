"""The server of a federated deployment as a machine: who takes part, whose update counts, when a round is over.

Its whole state is one plain value, which the driver saves before the effects of an event are performed. So a server
that was killed goes on with the same round, and an update that was acknowledged is never lost or counted twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from offbeat.limits import EXAMPLES
from offbeat.protocols.federated.buffer_keeper import BufferKeeper
from offbeat.protocols.federated.federation_state import FederationState, RoundTerms
from offbeat.protocols.federated.keeper import FederationKeeper
from offbeat.protocols.federated.messages import (
    Again,
    Beat,
    ClientFailure,
    ClientLeave,
    Examine,
    Examined,
    Farewell,
    Goodbye,
    MembershipRequest,
    Noted,
    Refused,
    RoundClosed,
    Settled,
    UnknownClient,
    UpdateSent,
    Welcome,
    patience_for,
)
from offbeat.protocols.federated.peers import PeerList
from offbeat.protocols.federated.plan import RoundPlan
from offbeat.protocols.federated.roster import JoinedClient, Roster
from offbeat.protocols.federated.round_keeper import RoundKeeper
from offbeat.protocols.federated.secure.integers import MOST_WEIGHT
from offbeat.protocols.federated.secure.messages import SecureAnswer
from offbeat.protocols.federated.secure_sums import SecureTerms, SumKeeper
from offbeat.protocols.federated.summing_keeper import SummingKeeper
from offbeat.protocols.machine import Done, Effect, Effects, Event, Name, Payload, Received, Timer


class RoundServer:
    """Runs rounds with the clients that are there.

    Args:
        name: Of this participant.
        plan: How rounds go. Clients are numbered from 0, below `plan.clients`.
        seed: Of clients' random numbers.
        rounds: After how many it ends.
        model: What clients get first.
        update_bytes: Size of an update; 0: the first client whose description says it fixes it.
        selection: Seed of the selection of clients, if clients must not know it; None: the same.
        strategy: What clients are told to do.
        federation: Names this federation among all that a client takes part in.
        enrolled: The names of the clients that may join, by number; None: anybody may, up to `plan.clients`.
        first: Clients that must be there before the first round; None: all.
        score_every: Rounds between two scores by clients; None: they do not score.
        state: That of an earlier process, which this one replaces.
        secure: What secure sums of updates need; None: the server sees each update.
        peers: The long-term keys of all clients, who sign their secure sums then; None: they do not.

    """

    def __init__(
        self,
        name: Name,
        plan: RoundPlan,
        seed: int,
        rounds: int,
        model: Payload,
        update_bytes: int,
        *,
        selection: int | None = None,
        strategy: str = "",
        federation: str = "",
        enrolled: Sequence[Name] | None = None,
        first: int | None = None,
        score_every: int | None = None,
        state: FederationState | None = None,
        secure: SecureTerms | None = None,
        peers: PeerList | None = None,
    ) -> None:
        self.name, self.plan, self.state = name, plan, state or FederationState()
        self._model_bytes = model.nbytes
        patience = patience_for(plan.silence, max(model.nbytes, update_bytes))
        self.roster = Roster(
            self.state.members, plan.clients, enrolled, patience, signing=secure is not None, peers=peers
        )
        self._terms = RoundTerms(
            plan,
            rounds,
            selection=seed if selection is None else selection,
            update_bytes=update_bytes,
            first=plan.clients if first is None else first,
            score_every=score_every,
        )
        parts = self._terms, self.state, self.roster, model
        if secure is not None:
            sums = SumKeeper(secure, self.roster, name, plan.beat)
            self._rounds: FederationKeeper = SummingKeeper(*parts, sums=sums)
        else:
            self._rounds = RoundKeeper(*parts) if plan.buffer is None else BufferKeeper(*parts)
        self._seed, self._strategy, self._federation = seed, strategy, federation
        self._shown: tuple[Name, str] = ("", "")  # The last trouble of those that clients repeat.
        weighs = secure is not None and not secure.two_thirds  # With privacy all weigh the same.
        self._most_examples = MOST_WEIGHT // (plan.clients if plan.poisson else plan.selected) if weighs else EXAMPLES

    @property
    def troubles(self) -> list[tuple[Name, ClientFailure]]:
        """Errors of clients that have not been shown yet; the driver empties it."""
        return self._rounds.troubles

    @property
    def missing(self) -> str:
        """What the next round waits for, in words; empty if a round is under way."""
        return self._rounds.missing

    def begin(self, now: float) -> Sequence[Effect]:
        """Go on where the state says."""
        effects = Effects()
        self.roster.hear_all(now)
        self._rounds.resume(effects, now)
        return effects.done

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Handle an event."""
        effects = Effects()
        match event:
            case Received(sender, message, payload):
                self._received(effects, now, sender, message, payload)
            case Timer("overdue"):
                self._rounds.lose_patience(effects, now)
            case Timer(("silent", client)):
                self._silent(effects, now, client)
            case Timer("look"):
                self._rounds.next(effects, now)
            case Done("closed", RoundClosed() as result) if self.state.phase == "closing":
                self._rounds.closed(effects, now, result)
            case Done(("join", sender, join), Examined(why, update_bytes)):
                if update_bytes:
                    self._expect(update_bytes)
                self._examined(effects, now, sender, join, why)
            case Timer(("secure deadline" | "secure repeat", *_)) | Done(("secure unmasked", *_), _):
                self._rounds.on_sum(effects, now, event)
            case Done(("update", client, number), why):
                self._rounds.added(effects, now, client, number, why)
            case _:
                pass
        return effects.done

    def reject(self, name: Name, why: str, now: float) -> Sequence[Effect]:
        """A client has sent what is no message at all: its update, if there is one, is waited for no longer."""
        effects, member = Effects(), self.state.members.get(name)
        if member is not None and member.client in self.state.outstanding:
            self._rounds.refuse(effects, now, member.client, why)
        return effects.done

    def _expect(self, update_bytes: int) -> None:
        """The size of updates is known: large ones take longer."""
        self.roster.patience = patience_for(self.plan.silence, max(self._model_bytes, update_bytes))
        self._terms.update_bytes = update_bytes

    def _silent(self, effects: Effects, now: float, client: int) -> None:
        """A client has given no sign of life for too long."""
        self.roster.lose(client, now)
        if self.state.phase == "finishing":
            self._rounds.finish(effects, now)
        elif client in self.state.outstanding:
            self._rounds.drop(effects, now, client)
        elif self.state.awaits_sum(client):
            self._rounds.lose(effects, now, client)
            if client in self.state.outstanding:
                self._rounds.drop(effects, now, client)

    def _received(self, effects: Effects, now: float, sender: Name, message: Struct, payload: Payload) -> None:
        if isinstance(message, MembershipRequest):
            why = "the last round is over" if self.state.phase == "finished" else self.roster.why_not(sender, message)
            if why:
                self._examined(effects, now, sender, message, why)
            else:
                effects.start(Examine(sender, message, payload), ("join", sender, message))
            return
        member = self.state.members.get(sender)
        if member is None or (member.gone and isinstance(message, Beat | UpdateSent)):
            effects.send(sender, UnknownClient())
            return
        if isinstance(message, ClientLeave | Goodbye | ClientFailure):
            self._ends(effects, now, sender, member, message)
            return
        self.roster.hear(member.client, now)
        waits = member.client in self.state.outstanding or self.state.awaits_sum(member.client)
        if waits or self.state.phase == "finishing":
            effects.timer(self.roster.patience, ("silent", member.client))
        if isinstance(message, Beat):
            self._answer(effects, now, sender, member.client, message)
        elif isinstance(message, UpdateSent):
            self._rounds.update(effects, now, member.client, message, payload)
        elif isinstance(message, SecureAnswer):
            self._rounds.on_sum(effects, now, Received(sender, message, payload))
        self._rounds.next(effects, now)

    def _examined(self, effects: Effects, now: float, sender: Name, join: MembershipRequest, why: str) -> None:
        """Let a client join, or say why not."""
        state = self.state
        if why:
            state.counts["rejected_joins"] += 1
            self._show_once(sender, f"{join.label} may not join: {why}")
            effects.send(sender, Refused(why))
            return
        client = self.roster.admit(sender, join, now)
        if client in state.finished:
            state.finished.remove(client)
        effects.send(sender, Welcome(client, self.plan.beat, self._seed, self._strategy, self._federation))
        self._rounds.next(effects, now)

    def _show_once(self, sender: Name, words: str) -> None:
        """Show a client's trouble, unless it was shown last: clients say the same until something changes."""
        if (sender, words) != self._shown:
            self.troubles.append((sender, ClientFailure(0, words, "")))
        self._shown = (sender, words)

    def _answer(self, effects: Effects, now: float, sender: Name, client: int, beat: Beat) -> None:
        """From what a client is doing follows what got lost."""
        state, member = self.state, self.state.members[sender]
        effects.send(sender, Noted())
        if beat.activity == "preparing":
            return
        if beat.activity == "stopping":
            self.roster.stuck.add(client)
        else:
            self.roster.stuck.discard(client)
        if beat.examples > self._most_examples:
            words = f"it has {beat.examples:,} examples; secure sums weigh a client by {self._most_examples:,} at most"
            self._show_once(sender, f"{words}, so it takes no part")
        elif not state.takes_part(client):
            member.examples = beat.examples
        if client in state.outstanding:
            due = state.due(client)
            if beat.number == due and beat.activity == "sent":
                effects.send(sender, Again(due))
            elif beat.number != due or beat.activity == "idle":
                self._rounds.ask(effects, now, client)
        elif state.awaits_sum(client):
            self._waits(effects, now, client, beat)
        elif beat.activity not in ("idle", "stopping"):
            accepted = state.accepted.get(client) == beat.number
            effects.send(sender, Settled(beat.number, "accepted" if accepted else "late"))
        elif state.phase == "finishing" and client not in state.finished:
            self._rounds.ask(effects, now, client)

    def _waits(self, effects: Effects, now: float, client: int, beat: Beat) -> None:
        """A client whose update is to be summed has given a sign of life: another process has forgotten the update."""
        if beat.number != self.state.number or beat.activity == "idle":
            self._rounds.lose(effects, now, client)
            if client in self.state.outstanding:
                self._rounds.ask(effects, now, client)

    def _ends(
        self,
        effects: Effects,
        now: float,
        sender: Name,
        member: JoinedClient,
        message: ClientLeave | Goodbye | ClientFailure,
    ) -> None:
        """A client ends, for whatever reason."""
        client, state = member.client, self.state
        if isinstance(message, ClientFailure):
            if not member.gone:
                self.troubles.append((sender, message))
            effects.send(sender, Settled(message.number, "failed"))
        else:
            effects.send(sender, Farewell())
        if isinstance(message, Goodbye) and client not in state.finished and state.phase == "finishing":
            state.finished.append(client)
            state.round.score(message)
        member.gone = True
        if client in state.outstanding:
            self._rounds.drop(effects, now, client)
        elif state.awaits_sum(client):
            self._rounds.lose(effects, now, client)
            if client in state.outstanding:
                self._rounds.drop(effects, now, client)
        elif state.phase == "finishing":
            self._rounds.finish(effects, now)
