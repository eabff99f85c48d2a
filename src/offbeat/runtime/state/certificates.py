"""Certificates of snapshots: what was cut where, which files hold it, and whether all of that is true.

A certificate says what each part says of itself, with the checksum of every file. To check it needs nothing else: files
must be as they were written, the parts must say what the certificate says, and together they must be a consistent cut
in which every push, or every move of a pair, is once.
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
from offbeat.runtime.state.checkpoint import (
    CERTIFICATE,
    digest,
    file_of,
    fingerprint,
    metadata_of,
    newest,
    read_manifest,
    write_text,
)

FORMAT = 1
REFUSED = 20
"""What `offbeat explain --verify-checkpoint` ends with if a checkpoint is refused."""
Kind = Literal["servers", "gossip"]
"""What the run's workers exchange by."""


class FileSum(msgspec.Struct, frozen=True):
    """By what a file is known again."""

    bytes: int
    sha256: str


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of a snapshot."""

    format: int = FORMAT
    kind: Kind
    run: str
    """The folder of the run."""
    colour: int
    """Which snapshot of the run: all parts were cut by it."""
    epoch: int
    """The view of who took part; it did not change meanwhile."""
    workers: tuple[WorkerCut, ...] = ()
    shards: tuple[ShardCut, ...] = ()
    pairs: tuple[GossipCut, ...] = ()
    """Of workers that mix in pairs."""
    sums: dict[str, int]
    """What was sent, what of it was in the states, and what was under way."""
    files: dict[str, FileSum]
    """Every file with its bytes and its sha256."""
    checksum: str = ""


class _LatePush(msgspec.Struct):
    worker: int
    number: int
    colour: int


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a look at a checkpoint."""

    path: str
    snapshot: bool
    """Whether it was taken while the run went on; else all workers had met for it."""
    words: str
    faults: tuple[str, ...] = ()
    """Why it is refused; none: it is good."""


def shard_file(shard: int) -> str:
    """Where the state of a shard is."""
    return f"shard-{shard}.safetensors"


def channel_file(shard: int) -> str:
    """Where the pushes are that were under way to a shard."""
    return f"channel-{shard}.safetensors"


def issue(draft: Path, *, kind: Kind, colour: int, epoch: int, run: str) -> None:
    """Write the certificate of all files in a draft; refused if they are not a consistent cut."""
    names = sorted(path.name for path in draft.iterdir())
    cuts = _said_by_files(draft, kind, names)
    wrong = _faults(kind, cuts)
    if wrong:
        raise CheckpointError(f"the parts of snapshot {colour} do not fit together: {'; '.join(wrong)}.")
    made = Certificate(
        kind=kind,
        run=run,
        colour=colour,
        epoch=epoch,
        **cuts,
        sums=_sums(cuts),
        files={name: FileSum(**fingerprint(draft / name, "sha256")) for name in names},
    )
    data = _plain(made)
    write_text(draft / CERTIFICATE, json.dumps(data | {"checksum": digest(data)}, indent=1) + "\n")


def read(path: Path) -> Certificate:
    """The certificate of a snapshot; refused if it is not what was written."""
    try:
        found = msgspec.convert(read_object(path / CERTIFICATE), Certificate)
        for name in found.files:
            plain_name(name)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / CERTIFICATE} cannot be read: {error}") from error
    if found.format != FORMAT:
        raise CheckpointError(f"{path / CERTIFICATE} has format {found.format}, this version reads {FORMAT}.")
    if found.checksum != digest(_plain(found)):
        raise CheckpointError(f"{path / CERTIFICATE} is not what was written (another checksum).")
    return found


def check(path: Path) -> Checked:
    """Say whether a checkpoint's files are as they were written, whether it is a consistent cut, and balances.

    `path` is the folder of a checkpoint, or that of a run, whose newest is then looked at.
    """
    place = _checkpoint_in(path)
    if not (place / CERTIFICATE).exists() and not _lists_certificate(place):
        return _check_ordinary(place)
    try:
        found = read(place)
    except CheckpointError as error:
        return Checked(path=str(place), snapshot=True, words="", faults=(str(error),))
    wrong = _changed_files(place, found) or _false_parts(place, found) or _faults(found.kind, _cuts_of(found))
    if not wrong and found.sums != _sums(_cuts_of(found)):
        wrong = [f"its sums are {found.sums}, and its parts have {_sums(_cuts_of(found))}"]
    if not wrong:
        try:
            read_manifest(place)
        except CheckpointError as error:
            wrong = [str(error)]
    return Checked(path=str(place), snapshot=True, words=_words(found), faults=tuple(wrong))


def _checkpoint_in(path: Path) -> Path:
    for place in (path / "checkpoint", path):
        found = newest(place)
        if found is not None:
            return found
    if not is_folder(path):
        raise CheckpointError(f"{path} is not a checkpoint: there is no such folder. Give RUN/checkpoint/step-*.")
    return path


def _lists_certificate(place: Path) -> bool:
    """Whether a certificate ought to be there."""
    try:
        return CERTIFICATE in read_object(place / "manifest.json")["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _check_ordinary(place: Path) -> Checked:
    try:
        manifest = read_manifest(place)
    except CheckpointError as error:
        return Checked(path=str(place), snapshot=False, words="", faults=(str(error),))
    files, step = len(manifest["files"]), manifest["step"]
    words = (
        f"an ordinary checkpoint of step {step}: all workers had met for it, so nothing was under way and there is no "
        f"cut to judge. Its {files} files are as they were written."
    )
    return Checked(path=str(place), snapshot=False, words=words)


def _changed_files(place: Path, certificate: Certificate) -> list[str]:
    unlisted = [name for name in _expected_files(certificate) if name not in certificate.files]
    wrong = [f"{name} is not in the certificate" for name in unlisted]
    for name, expected in certificate.files.items():
        try:
            actual = FileSum(**fingerprint(place / name, "sha256", expected.bytes))
        except FileNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        except (OSError, ValueError) as error:
            wrong.append(f"{name} cannot be read ({error})")
            continue
        if actual.bytes != expected.bytes:
            wrong.append(f"{name} has {actual.bytes:,} bytes, and {expected.bytes:,} were written")
        elif actual != expected:
            wrong.append(f"{name} is not what was written (another sha256)")
    return wrong


def _expected_files(certificate: Certificate) -> list[str]:
    ranks = [cut.worker for cut in (*certificate.workers, *certificate.pairs)]
    shards = [cut.shard for cut in certificate.shards]
    channels = shards + [cut.worker for cut in certificate.pairs]
    return [*map(file_of, ranks), *map(shard_file, shards), *map(channel_file, channels)]


def _false_parts(place: Path, certificate: Certificate) -> list[str]:
    try:
        said = _said_by_files(place, certificate.kind, sorted(certificate.files))
        late = _late_pushes(place, certificate)
    except CheckpointError as error:
        return [str(error)]
    if said != _cuts_of(certificate):
        return ["its files say that they were cut elsewhere than the certificate says"]
    return late


def _late_pushes(place: Path, certificate: Certificate) -> list[str]:
    """Pushes that were kept must be those that the cut names, and of an earlier colour."""
    wrong: list[str] = []
    for cut in certificate.shards:
        try:
            told = parse_json(metadata_of(place / channel_file(cut.shard))["pushes"])
            pushes = msgspec.convert(told, list[_LatePush])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise CheckpointError(f"{channel_file(cut.shard)} does not say which pushes it holds: {error}") from error
        if [(push.worker, push.number) for push in pushes] != list(cut.in_flight):
            wrong.append(f"the pushes kept for shard {cut.shard} are not those that were under way")
        if any(push.colour >= certificate.colour for push in pushes):
            wrong.append(f"a push kept for shard {cut.shard} is from after its sender's cut")
    return wrong


def _said_by_files(folder: Path, kind: Kind, names: list[str]) -> dict[str, Any]:
    """Where each part says that it was cut."""
    try:
        if kind == "gossip":
            channels = [parse_json(metadata_of(folder / n)["cut"]) for n in names if n.startswith("channel-")]
            return {"pairs": tuple(sorted(msgspec.convert(channels, list[GossipCut]), key=lambda cut: cut.worker))}
        workers = [parse_json(metadata_of(folder / n)["cut"]) for n in names if n.startswith("worker-")]
        shards = [parse_json(metadata_of(folder / n)["cut"]) for n in names if n.startswith("channel-")]
        return {
            "workers": tuple(sorted(msgspec.convert(workers, list[WorkerCut]), key=lambda cut: cut.worker)),
            "shards": tuple(sorted(msgspec.convert(shards, list[ShardCut]), key=lambda cut: cut.shard)),
        }
    except (OSError, SafetensorError, KeyError, ValueError, msgspec.ValidationError) as error:
        raise CheckpointError(f"a part of {folder} does not say where it was cut: {error}") from error


def _cuts_of(certificate: Certificate) -> dict[str, Any]:
    if certificate.kind == "gossip":
        return {"pairs": certificate.pairs}
    return {"workers": certificate.workers, "shards": certificate.shards}


def _faults(kind: Kind, cuts: dict[str, Any]) -> list[str]:
    if kind == "gossip":
        return gossip_faults(cuts["pairs"])
    return faults(cuts["workers"], cuts["shards"])


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
    sums = certificate.sums
    if certificate.kind == "gossip":
        where = ", ".join(str(cut.clock) for cut in certificate.pairs)
        who, what = f"{len(certificate.pairs)} workers (steps {where})", "moves that were granted"
    else:
        where = ", ".join(str(cut.clock) for cut in certificate.workers)
        who = f"{len(certificate.workers)} workers (clocks {where}) and {len(certificate.shards)} shards"
        what = "pushes that were sent"
    sent, held, late = sums["sent"], sums["in_states"], sums["under_way"]
    return (
        f"certified: snapshot {certificate.colour} of {certificate.run} is a consistent cut of {who}. Of {sent:,} "
        f"{what}, {held:,} are in the states and {late:,} were under way, each once. Its "
        f"{len(certificate.files)} files are as they were written."
    )


def _plain(certificate: Certificate) -> dict[str, Any]:
    data = cast("dict[str, Any]", msgspec.to_builtins(certificate))
    data.pop("checksum")
    return data
