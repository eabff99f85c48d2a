"""Certificates of snapshots: where each part was cut, which files hold it, and whether all of that is true.

Files must be as written, parts must say what the certificate says, and together they must be a consistent cut in which
every push, or every move of a pair, counts once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
from safetensors import SafetensorError

from offbeat.errors import CheckpointError
from offbeat.protocols.gossip.snapshots import GossipCut, gossip_faults
from offbeat.protocols.servers.messages import ShardCut, WorkerCut
from offbeat.protocols.servers.snapshots import faults
from offbeat.runtime.run.untrusted_files import is_folder, parse_json, plain_name, read_object
from offbeat.runtime.state import checkpoint
from offbeat.runtime.state.checkpoint import CERTIFICATE, fingerprint, metadata_of, read_manifest

FORMAT = 1
REFUSED = 20  # Exit code of `offbeat explain --verify-checkpoint` for a refused checkpoint.
Kind = Literal["servers", "gossip"]  # How the run's workers exchange.


class FileSum(msgspec.Struct, frozen=True):
    """Size and checksum of a file."""

    bytes: int
    sha256: str


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """The certificate of a snapshot."""

    format: int = FORMAT
    kind: Kind
    run: str  # The run folder.
    colour: int  # The number of the snapshot, in which all parts were cut.
    epoch: int  # The membership epoch, which did not change meanwhile.
    workers: tuple[WorkerCut, ...] = ()
    shards: tuple[ShardCut, ...] = ()
    pairs: tuple[GossipCut, ...] = ()  # Workers of pairwise gossip.
    sums: dict[str, int]  # Messages sent, contained in the states, and in flight.
    files: dict[str, FileSum]
    checksum: str = ""


class _LatePush(msgspec.Struct):
    worker: int
    number: int
    colour: int


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """Result of checking a checkpoint."""

    path: str
    snapshot: bool  # Whether it was taken while the run went on; otherwise all workers had met for it.
    words: str = ""
    faults: tuple[str, ...] = ()  # Why it is refused; empty if it is good.


def shard_file(shard: int) -> str:
    """The file with the state of a shard."""
    return f"shard-{shard}.safetensors"


def channel_file(shard: int) -> str:
    """The file with the messages in flight to a shard."""
    return f"channel-{shard}.safetensors"


def issue(draft: Path, *, kind: Kind, colour: int, epoch: int, run: str) -> None:
    """Write the certificate for all files in a draft; refused if they are not a consistent cut."""
    names = sorted(path.name for path in draft.iterdir())
    cuts = _read_cuts(draft, kind, names)
    if problems := _faults(cuts):
        raise CheckpointError(f"the parts of snapshot {colour} do not fit together: {'; '.join(problems)}.")
    files = {name: FileSum(**fingerprint(draft / name, "sha256")) for name in names}
    data = _plain(Certificate(kind=kind, run=run, colour=colour, epoch=epoch, **cuts, sums=_sums(cuts), files=files))
    text = json.dumps(data | {"checksum": checkpoint.digest(data)}, indent=1) + "\n"
    checkpoint.write_text(draft / CERTIFICATE, text)


def read(path: Path) -> Certificate:
    """The certificate of a snapshot; refused if it was changed."""
    file = path / CERTIFICATE
    try:
        certificate = msgspec.convert(read_object(file), Certificate)
        for name in certificate.files:
            plain_name(name)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if certificate.format != FORMAT:
        raise CheckpointError(f"{file} has format {certificate.format}, this version reads {FORMAT}.")
    if certificate.checksum != checkpoint.digest(_plain(certificate)):
        raise CheckpointError(f"{file} is not what was written (another checksum).")
    return certificate


def check(path: Path) -> Checked:
    """Check a checkpoint, or the newest of a run folder: whether it is as written, and a cut that balances."""
    place = checkpoint.newest(path / "checkpoint") or checkpoint.newest(path)
    if place is None:
        place = path
        if not is_folder(path):
            raise CheckpointError(f"{path} is not a checkpoint: there is no such folder. Give RUN/checkpoint/step-*.")
    snapshot = (place / CERTIFICATE).exists() or _lists_certificate(place)
    words, problems = "", []
    try:
        if snapshot:
            certificate = read(place)
            words = _words(certificate)
            problems = _problems(place, certificate)
        if not problems:
            manifest = read_manifest(place)
            words = words or (
                f"an ordinary checkpoint of step {manifest['step']}: all workers had met for it, so nothing was in "
                f"flight and there is no cut to judge. Its {len(manifest['files'])} files are as they were written."
            )
    except CheckpointError as error:
        problems = [str(error)]
    return Checked(path=str(place), snapshot=snapshot, words=words, faults=tuple(problems))


def _lists_certificate(place: Path) -> bool:
    """Whether there should be a certificate."""
    try:
        return CERTIFICATE in read_object(place / "manifest.json")["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _problems(place: Path, certificate: Certificate) -> list[str]:
    if problems := _changed_files(place, certificate):
        return problems
    cuts = _read_cuts(place, certificate.kind, sorted(certificate.files))
    if any(getattr(certificate, name) != parts for name, parts in cuts.items()):
        return ["its files say that they were cut elsewhere than the certificate says"]
    problems = _wrong_pushes(place, certificate) or _faults(cuts)
    if not problems and certificate.sums != _sums(cuts):
        problems = [f"its sums are {certificate.sums}, and its parts have {_sums(cuts)}"]
    return problems


def _changed_files(place: Path, certificate: Certificate) -> list[str]:
    shards, pairs = [cut.shard for cut in certificate.shards], [cut.worker for cut in certificate.pairs]
    workers = [cut.worker for cut in certificate.workers]
    expected = [*map(checkpoint.file_of, workers + pairs), *map(shard_file, shards), *map(channel_file, shards + pairs)]
    problems = [f"{name} is not in the certificate" for name in expected if name not in certificate.files]
    for name, written in certificate.files.items():
        try:
            actual = FileSum(**fingerprint(place / name, "sha256", written.bytes))
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except (OSError, ValueError) as error:
            problems.append(f"{name} cannot be read ({error})")
        else:
            if actual.bytes != written.bytes:
                problems.append(f"{name} has {actual.bytes:,} bytes, and {written.bytes:,} were written")
            elif actual != written:
                problems.append(f"{name} is not what was written (another sha256)")
    return problems


def _wrong_pushes(place: Path, certificate: Certificate) -> list[str]:
    """Kept pushes must be those that the cut names, and of an earlier colour."""
    problems: list[str] = []
    for cut in certificate.shards:
        try:
            data = parse_json(metadata_of(place / channel_file(cut.shard))["pushes"])
            pushes = msgspec.convert(data, list[_LatePush])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise CheckpointError(f"{channel_file(cut.shard)} does not say which pushes it holds: {error}") from error
        if [(push.worker, push.number) for push in pushes] != list(cut.in_flight):
            problems.append(f"the pushes kept for shard {cut.shard} are not those that were in flight")
        if any(push.colour >= certificate.colour for push in pushes):
            problems.append(f"a push kept for shard {cut.shard} is from after its sender's cut")
    return problems


def _read_cuts(folder: Path, kind: Kind, names: list[str]) -> dict[str, Any]:
    """Where each part says that it was cut."""

    def cuts(prefix: str, cut: type[Any], number: str) -> tuple[Any, ...]:
        data = [parse_json(metadata_of(folder / name)["cut"]) for name in names if name.startswith(prefix)]
        return tuple(sorted((msgspec.convert(entry, cut) for entry in data), key=lambda c: getattr(c, number)))

    try:
        if kind == "gossip":
            return {"pairs": cuts("channel-", GossipCut, "worker")}
        return {"workers": cuts("worker-", WorkerCut, "worker"), "shards": cuts("channel-", ShardCut, "shard")}
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"a part of {folder} does not say where it was cut: {error}") from error


def _faults(cuts: dict[str, Any]) -> list[str]:
    return gossip_faults(cuts["pairs"]) if "pairs" in cuts else faults(cuts["workers"], cuts["shards"])


def _sums(cuts: dict[str, Any]) -> dict[str, int]:
    if "pairs" in cuts:
        pairs = cast("tuple[GossipCut, ...]", cuts["pairs"])
        return {
            "sent": sum(count for cut in pairs for _, count in cut.granted),
            "in_states": sum(count for cut in pairs for _, count in cut.moved),
            "under_way": sum(len(cut.under_way) for cut in pairs),
        }
    workers, shards = cast("tuple[WorkerCut, ...]", cuts["workers"]), cast("tuple[ShardCut, ...]", cuts["shards"])
    present = {cut.worker for cut in workers}
    return {
        "sent": sum(sum(cut.pushes) for cut in workers),
        "in_states": sum(pushes for cut in shards for worker, _, pushes, _ in cut.taken if worker in present),
        "under_way": sum(len(cut.in_flight) for cut in shards),
    }


def _words(certificate: Certificate) -> str:
    clocks = ", ".join(str(cut.clock) for cut in certificate.workers or certificate.pairs)
    if certificate.kind == "gossip":
        who, what = f"{len(certificate.pairs)} workers (steps {clocks})", "moves that were granted"
    else:
        who = f"{len(certificate.workers)} workers (clocks {clocks}) and {len(certificate.shards)} shards"
        what = "pushes that were sent"
    sent, held, late = (certificate.sums[name] for name in ("sent", "in_states", "under_way"))
    return (
        f"certified: snapshot {certificate.colour} of {certificate.run} is a consistent cut of {who}. Of {sent:,} "
        f"{what}, {held:,} are in the states and {late:,} were in flight, each once. Its "
        f"{len(certificate.files)} files are as they were written."
    )


def _plain(certificate: Certificate) -> dict[str, Any]:
    data = cast("dict[str, Any]", msgspec.to_builtins(certificate))
    data.pop("checksum")
    return data
