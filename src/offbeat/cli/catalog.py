"""The commands: name, function, examples and settings of each.

Nothing heavy is imported here: `offbeat --help` answers at once, and each command imports what it needs.
"""

from __future__ import annotations

from typing import Final

from offbeat.cli import options
from offbeat.cli.from_settings import Command
from offbeat.runtime.run.settings import Goal

COMMANDS: Final = (
    Command(
        "run",
        "run:run_job",
        (
            "run train.py --workers 2 -- --lr 0.1",
            "run offbeat.tasks.digits --workers 2 --strategy 'allreduce + accumulate(2)' --target 0.97",
            "run --resume runs/latest --epochs 40",
        ),
        options.RunOptions,
        Goal,
        leading=("strategy", "workers", "target", "epochs", "steps", "seed", "watch", "tensorboard", "disturb"),
        first_page=True,
    ),
    Command(
        "compare",
        "compare:compare_strategies",
        (
            "compare offbeat.tasks.digits --workers 2",
            "compare train.py --target accuracy=0.97 --workers 2 --strategy allreduce --strategy 'local({4,16})' "
            "--budget 10m -- --its own --arguments",
            "compare --resume runs/latest-league",
        ),
        options.CompareOptions,
        Goal,
        only=("target", "epochs", "steps", "disturb", "parts", "data_servers", "device", "timeout"),
        leading=("strategies", "workers", "on", "hosts", "target", "seeds", "seed"),
        first_page=True,
    ),
    Command(
        "explain",
        "explain:explain",
        (
            "run train.py --workers 2 --monitor, then offbeat explain runs/latest",
            "explain runs/latest --picture run.svg --window 3s..4s --cut latest",
            "explain runs/latest --export run.perfetto",
            "explain other.log --cut 'a:3, b:4'",
            "explain runs/latest --delivery vector --possibly 'steps-apart>3'",
            "explain --verify-checkpoint runs/latest",
        ),
        options.ExplainTarget,
        options.ExplainOptions,
        leading=("path",),
        first_page=True,
    ),
    Command(
        "doctor", "doctor:examine", ("doctor --format json > report.json",), options.DoctorOptions, first_page=True
    ),
    Command(
        "watch",
        "watch:watch",
        ("watch", "watch runs/latest --open", "watch runs/latest --export page.html"),
        options.WatchOptions,
    ),
    Command("strategies", "strategies:show", ("strategies", "strategies accumulate"), options.StrategiesOptions),
    Command(
        "config",
        "config:show",
        ("config run", "config --format json", "config run --config experiment.toml"),
        options.ConfigOptions,
    ),
    Command(
        "draw",
        "draw:draw",
        (
            'draw "allreduce(ring)" --workers 8 -o ring.svg',
            'draw "server(consistency=ssp(3))" --size 10MB --steps 8 --stragglers "permanent(2)" -o ssp.png',
            'draw "all_gather(doubling)" --workers 6 --size 1MB',
            'draw "allreduce(hierarchical)" --workers 8 --per-host 4 -o hosts.svg',
            "draw mine.py:my_ring -w 5",
        ),
        options.DrawOptions,
        leading=("workers", "per_host", "network", "size"),
    ),
    Command(
        "reduce",
        "reduce:reduce_term",
        (
            'reduce "S(KS)K"',
            r"reduce '(\x y. x) 1 ((\x. x x) (\x. x x))' --strategy name",
            "reduce 'S(BBS)(KK)' --equal C --draw tree.svg",
        ),
        options.ReduceOptions,
        own_section=True,
    ),
    Command(
        "check",
        "check:check_any",
        (
            "check allreduce --workers 3",
            "check 'mine.py:Push(0.5)'",
            "check mine.py:my_ring",
            "check mine.py:my_gather --collective all_gather",
            "check mine.py:MyContract --runs 2000",
            "check mine.py:MyContract --seed 17",
        ),
        options.CheckOptions,
        own_section=True,
    ),
    Command("ps", "runs:ps", ("ps", "ps --all --format json"), options.PsOptions),
    Command("stop", "runs:stop", ("stop runs/latest", "stop runs/latest --kill"), options.StopOptions),
    Command(
        "logs",
        "runs:logs",
        ("logs runs/latest --rank 3", "logs runs/latest --server 0.1 --follow"),
        options.LogsOptions,
    ),
    Command(
        "scale",
        "scale:scale_target",
        (
            "scale offbeat.tasks.digits --workers 1,2",
            "scale train.py --strategy 'local(8)' --workers 1,2,4 --weak -- --lr 0.1",
        ),
        options.ScaleOptions,
        leading=("strategy", "workers", "weak", "repeats"),
    ),
    Command(
        "batch-size",
        "scale:measure_batch_size",
        ("batch-size offbeat.tasks.digits --per-example", "batch-size train.py --seconds 30 -- --lr 0.1"),
        options.BatchSizeOptions,
        leading=("workers",),
    ),
    Command(
        "bench collectives",
        "bench:collectives",
        (
            "bench collectives --ranks 2",
            "bench collectives --simulate --ranks 4096 --size 100MB --network 10Gbit,50us",
            "bench collectives --simulate --ranks 64 --per-host 8 --network 25Gbit,20us --inside 200Gbit,1us",
        ),
        options.CollectivesOptions,
        own_section=True,
    ),
    Command(
        "bench server",
        "bench:server",
        (
            'bench server --simulate --workers 100 --stragglers "transient(0.2, 0.15)"',
            'bench server --simulate --workers 64 --stragglers "permanent(4)" --consistency bsp '
            '--consistency "drop_slowest(1)"',
            "bench server --simulate --workers 64 --size 100MB --servers 8 --network 10Gbit,50us",
            'bench server --simulate --workers 8 --strategy "downpour(push=4, fetch=4)" --strategy elastic',
        ),
        options.ServerOptions,
    ),
    Command(
        "federated serve",
        "federation:serve",
        (
            "federated serve offbeat.tasks.digits --strategy 'federated(clients=3, fraction=1)' --rounds 10",
            "federated serve task.py:Scans --strategy 'federated(clients=3, fraction=1)' --keys server.keys "
            "--address tcp://0.0.0.0:7777",
            "federated serve --resume runs/latest",
        ),
        options.FederatedServerOptions,
        leading=("strategy", "rounds", "address", "keys"),
    ),
    Command(
        "federated join",
        "federation:join",
        (
            "federated join tcp://127.0.0.1:7777 offbeat.tasks.digits --part 0",
            "federated join tcp://server:7777 task.py:Scans --data ./scans --keys own.keys --server-key PUBLIC",
        ),
        options.FederatedClientOptions,
        leading=("data", "part", "keys", "server_key"),
    ),
    Command(
        "federated identity",
        "federation:identity",
        ("federated identity --data ./scans >> peers.keys",),
        options.FederatedIdentityOptions,
    ),
    Command("keys new", "keys:new", ("keys new run.keys",), options.NewKeys),
    Command("keys show", "keys:show", ("keys show run.keys",), options.ShownKeys),
    Command("keys allow", "keys:allow", ("keys allow server.keys PUBLIC",), options.AllowedKey),
)
GROUPS: Final = {
    "bench": (
        "Benchmark collectives on this machine, or simulate networks and clusters.",
        "Example: offbeat bench collectives --simulate --ranks 64 --network 10Gbit,50us",
    ),
    "federated": (
        "Federated learning on real clients, which keep their data: run the server, or join as a client.",
        "Example: offbeat federated serve offbeat.tasks.digits --strategy 'federated(clients=3, fraction=1)', then "
        "offbeat federated join ADDRESS offbeat.tasks.digits --part 0 for clients 0, 1 and 2",
    ),
    "keys": (
        "Create and show the keys that connections from other machines need.",
        "Example: offbeat keys new run.keys, then copy run.keys to all machines of the run",
    ),
}
"""Help and example of the commands that have commands below them."""
