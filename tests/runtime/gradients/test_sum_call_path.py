"""How far gradients walk through the code under allreduce, from backward's hooks to where the C library sums them.

The measure is that of `call_path`: a *hop* is a function of offbeat, with a name, that is on the call stack at one of
the moments at which gradients change hands. These are when backward has finished the first of them, when the workers'
example counts and small gradients go to the backend, and when large ones go to the C library, which reads all workers'
memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from call_path import Walk

import offbeat
from offbeat.protocols.exchanges import SMALL_GRADIENT
from offbeat.runtime.launch import Launcher, Role, serve_store, worker_environment
from offbeat.runtime.run.settings import ASSIGNED, Assignment, Goal

MOMENTS = {"GradientSums.begin", "ReducingGroup.allreduce", "Runner.run"}
FOLLOWED = 12
"""The step that is followed: what is worked out once is known by then."""


def step(config: Mapping[str, Any], control: Any) -> None:
    """A few steps of one worker; worker 0 tells which functions the last one has passed."""
    del config
    ASSIGNED.set(Assignment(goal=Goal(strategy="allreduce")))
    walk = Walk(MOMENTS)
    model = torch.nn.Sequential(torch.nn.Linear(SMALL_GRADIENT // 64, 128), torch.nn.Linear(128, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.init() as team:
        model, optimizer = team.prepare(model, optimizer)
        for number in range(FOLLOWED + 1):
            optimizer.zero_grad()
            loss = model(torch.ones(3, SMALL_GRADIENT // 64)).sum()
            walk.begun = number == FOLLOWED
            sys.setprofile(walk if walk.begun else None)
            loss.backward()
            optimizer.step()
            sys.setprofile(None)
        if team.rank == 0:
            hops = [hop for hop in walk.names() if not hop.startswith("/runtime/launch/")]
            control.send({"passed": sorted(walk.passed), "hops": hops})


def test_gradients_pass_few_functions_on_their_way_from_backward_to_shared_memory(
    launcher: Launcher, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    store, told = serve_store(), dict[str, Any]()
    roles = [
        Role("worker", rank, f"{__name__}:step", {}, worker_environment(rank, 2, store.port), tmp_path / f"{rank}", 1)
        for rank in range(2)
    ]
    launcher.run(roles, on_message=lambda _role, message: told.update(message))
    assert set(told["passed"]) == MOMENTS, "the gradients were followed to where they are summed"
    hops = told["hops"]
    record_property("hops", len(hops))
    record_property("files", len({hop.split(":")[0] for hop in hops}))
    assert len(hops) <= 15, "\n".join(hops)
