"""The page's server: who is let in, what is refused, what it tells of runs that are being written."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cli_support import Offbeat, in_process
from page_support import SUM, run_folder, sums
from prometheus_client.parser import text_string_to_metric_families

from offbeat.cli.commands.watch import LivePage
from offbeat.errors import UsageError
from offbeat.monitor.page import access
from offbeat.monitor.page.export import ASSETS
from offbeat.monitor.page.http_server import PageServer
from offbeat.monitor.page.run_folders import Folder, MetricsReader, opened
from offbeat.monitor.page.run_view import RunView
from offbeat.runtime.events.recorder import Mark, Recorder, events_file
from offbeat.runtime.launch import Launcher

PRIVATE = "not for everybody"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Asks a page's server as a browser or a program would."""

    def __init__(self, served: PageServer) -> None:
        self.served = served

    def get(self, path: str, *tokens: str | None, **headers: str) -> Answer:
        """With the right token, if none is given."""
        connection = http.client.HTTPConnection("127.0.0.1", self.served.port, timeout=30)
        for token in tokens or (self.served.token,):
            if token is not None:
                headers["Authorization"] = f"Bearer {token}"
        connection.request("GET", path, headers={name.replace("_", "-"): text for name, text in headers.items()})
        answer = connection.getresponse()
        found = Answer(answer.status, {name.lower(): text for name, text in answer.getheaders()}, answer.read())
        connection.close()
        return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, and something beside it that is nobody's business."""
    root = tmp_path_factory.mktemp("page")
    (root / "secret.json").write_text(PRIVATE)
    run_folder(root / "runs" / "20260101-first", sums(8), result={"score": 0.8, "seconds": 2.0, "staleness": {"0": 3}})
    run_folder(root / "runs" / "20260102-second", sums(12, last=0, late=0.01), workers=3)
    run_folder(root / "runs" / "league" / "20260103-third")
    (root / "runs" / "latest").symlink_to("20260102-second")
    (root / "runs" / "out").symlink_to(root)
    (root / "run.json").write_text(json.dumps({"state": PRIVATE}))
    return root / "runs"


@pytest.fixture(scope="module")
def client(runs: Path) -> Iterator[Client]:
    with PageServer(*opened(runs)) as served:
        yield Client(served)


# --- who is let in


def test_nobody_gets_anything_without_the_token(client: Client) -> None:
    for path in ("/", "/api/runs", "/metrics", "/static/page.js", "/nothing"):
        for token in (None, "", "wrong", client.served.token[:-1], client.served.token + "x"):
            assert client.get(path, token).status == 401, (path, token)
    assert client.get("/?token=wrong", None).status == 401
    assert client.get("/?token=%C3%A9", None).status == 401
    assert "set-cookie" not in client.get("/?token=wrong", None).headers


def test_the_token_in_the_address_becomes_a_cookie_that_lets_in(client: Client) -> None:
    first = client.get(f"/?token={client.served.token}", None)
    assert first.status == 200
    cookie, _, settings = first.headers["set-cookie"].partition("; ")
    assert settings == "Path=/; HttpOnly; SameSite=Strict"
    assert client.get("/api/runs", None, Cookie=cookie).status == 200
    assert client.get("/api/runs", None, Cookie=f"{cookie}x").status == 401
    assert client.get("/api/runs", None, Cookie='=;;a={"b": 1}').status == 401
    assert client.get("/api/runs", None, Cookie=f'other={{"b": 1}}; {cookie}').status == 200


def test_a_wrong_token_in_the_address_never_becomes_a_cookie(client: Client) -> None:
    for wrong in ("wrong", "x%0d%0aSet-Cookie:%20a=b", f"{client.served.token}%20"):
        assert "set-cookie" not in client.get(f"/?token={wrong}").headers


def test_only_the_names_of_this_machine_are_answered_to(client: Client) -> None:
    port = client.served.port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
        assert client.get("/api/runs", Host=host).status == 200, host
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", ""):
        assert client.get("/api/runs", Host=host).status == 403, host


def test_every_answer_forbids_what_the_page_does_not_need(client: Client) -> None:
    for path, tokens in (("/", ()), ("/api/runs", (None,)), ("/api/run?run=no", ())):
        headers = client.get(path, *tokens).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert "server" not in headers


def test_the_server_listens_on_loopback_only_and_a_port_that_is_taken_is_refused(client: Client) -> None:
    table = Path("/proc/net/tcp").read_text().split("\n")
    wanted = f":{client.served.port:04X}"
    assert [line.split()[1] for line in table if wanted in line and " 0A " in line] == [f"0100007F{wanted}"]
    with pytest.raises(UsageError, match=rf"port {client.served.port} on loopback cannot be used"):
        PageServer(Folder(Path()), port=client.served.port)
    with pytest.raises(UsageError, match="port 70000"):
        PageServer(Folder(Path()), port=70000)


def test_connections_without_a_request_make_room_and_end(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "PATIENCE", 0.5)
    held = [socket.create_connection(("127.0.0.1", client.served.port), timeout=30) for _ in range(200)]
    for connection in held[::2]:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: ")
    assert client.get("/api/runs").status == 200
    for connection in held:
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
        connection.close()
    assert client.get("/api/runs").status == 200


def test_whoever_is_refused_is_disconnected(client: Client) -> None:
    with socket.create_connection(("127.0.0.1", client.served.port), timeout=30) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        said = b""
        while more := connection.recv(4096):
            said += more
    assert said.startswith(b"HTTP/1.1 403")


# --- what is refused


@pytest.mark.parametrize(
    "name",
    [
        *("", "no", "..", "../", ".", "latest", "out", "/etc", "20260101-first/../20260101-first"),
        *("20260101-first%00", "x" * 9999),
    ],
)  # fmt: skip
def test_only_runs_that_are_listed_can_be_had(client: Client, name: str) -> None:
    for path in ("run", "lanes", "follow", "export", "log"):
        answer = client.get(f"/api/{path}?run={name}&of=worker-0")
        assert answer.status == 404, path
        assert PRIVATE.encode() not in answer.body


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py", "/static/%2e%2e%2fapp.py", "/static/..%2f..%2fapp.py", "/static/page.html", "/static/",
        "/../../etc/passwd", "/api/log?run=20260101-first&of=../run", "/api/log?run=20260101-first&of=..%2f..%2fsecret",
        "/api/log?run=20260101-first",
    ],
)  # fmt: skip
def test_no_path_leads_out_of_what_is_served(client: Client, path: str) -> None:
    assert client.get(path).status == 404


@pytest.mark.parametrize(
    "window",
    ["start=2&stop=1", "start=nan", "stop=inf", "start=x", "pixels=0", "pixels=9999999", "pixels=-1", "start=1&stop=1"],
)
def test_a_window_that_makes_no_sense_is_refused(client: Client, window: str) -> None:
    answer = client.get(f"/api/lanes?run=20260101-first&{window}")
    assert (answer.status, b"Traceback" in answer.body) == (400, False)


def test_a_folder_that_is_not_there_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="offbeat run"):
        opened(tmp_path / "runs")


# --- what is told


def test_the_page_has_all_its_files_and_asks_for_nothing_from_elsewhere(client: Client) -> None:
    page = client.get("/").body.decode()
    for name in ASSETS:
        answer = client.get(f"/static/{name}")
        assert answer.status == 200
        assert name in page
        assert b"http" not in answer.body.replace(b"http://www.w3.org/", b""), name
    assert "http" not in page.replace("http-equiv", "")


def test_runs_are_listed_the_newest_first_also_those_of_a_comparison(client: Client) -> None:
    told = client.get("/api/runs").json()
    assert [run["name"] for run in told["runs"]] == ["league/20260103-third", "20260102-second", "20260101-first"]
    assert told["chosen"] == "league/20260103-third"
    first = told["runs"][-1]
    assert (first["strategy"], first["workers"], first["score"]) == ("allreduce", 2, 0.8)


def test_a_run_is_told_in_words(client: Client) -> None:
    told = client.get("/api/run?run=20260101-first").json()
    assert [(one["kind"], one["message"]) for one in told["verdicts"]] == [("healthy", "No worker got stuck.")]
    assert [(one["name"], one["state"], one["step"]) for one in told["processes"]] == [
        ("worker 0", "ended", 8),
        ("worker 1", "ended", 8),
    ]
    assert [line["score"] for line in told["metrics"]] == [0.4, 0.8]
    assert (told["events"], told["dropped"], told["logs"]) == (2 * (8 * 3 + 1), 0, ["worker-0", "worker-1"])
    assert client.get("/api/log?run=20260101-first&of=worker-1").body == b"hello from 1\n"


def test_a_straggler_is_named_and_so_is_a_run_that_was_not_watched(client: Client) -> None:
    slow = client.get("/api/run?run=20260102-second").json()["verdicts"]
    assert [one["kind"] for one in slow] == ["straggler"]
    assert slow[0]["message"].startswith("worker 0 was last in")
    assert "worker-seconds" in slow[0]["message"]
    third = client.get("/api/run?run=league/20260103-third").json()
    assert [one["kind"] for one in third["verdicts"]] == ["unwatched"]
    assert "offbeat run --monitor" in third["verdicts"][0]["message"]
    assert client.get("/api/lanes?run=league/20260103-third").status == 200


def test_a_verdict_of_the_launcher_stands_on_top_with_its_stacks(tmp_path: Path) -> None:
    verdict = {"kind": "deadlock", "message": "worker 0 waits for worker 1", "stacks": {"worker 0": "line 7"}}
    run = RunView("a", run_folder(tmp_path / "a", sums(3), state="failed", verdict=verdict))
    worst = run.summary()["verdicts"][0]
    assert (worst["kind"], worst["level"], worst["exit_code"]) == ("deadlock", "bad", 10)
    assert worst["stacks"] == {"worker 0": "line 7"}


def test_a_run_whose_launcher_was_killed_is_judged_by_its_events(tmp_path: Path) -> None:
    def write(recorders: list[Recorder]) -> None:
        recorders[0].stamp(Mark.ENTER, recorders[0].name("sum", lambda: SUM), 1)
        recorders[1].stamp(Mark.END)

    folder = run_folder(tmp_path / "a", write, state="interrupted")
    known = json.loads((folder / "run.json").read_text())
    del known["verdict"]
    (folder / "run.json").write_text(json.dumps(known))
    told = RunView("a", folder).summary()
    assert told["verdicts"][0]["kind"] == "ended"
    assert "worker 0 waits for worker 1 in all_reduce #1" in told["verdicts"][0]["message"]
    assert told["processes"][0] | {"events": 1} == {
        "name": "worker 0", "state": "gone", "step": 0, "at_least": False, "events": 1,
        "waits_in": "all_reduce #1 (sum of float32 x 4) of group world, called at train.py:88",
        "waits_for": ["worker 1"],
    }  # fmt: skip


def test_figures_for_prometheus_are_told_of_the_newest_run(runs: Path) -> None:
    with PageServer(*opened(runs / "20260101-first")) as served:
        answer = Client(served).get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    families = list(text_string_to_metric_families(answer.body.decode()))
    assert {family.type for family in families} == {"gauge"}
    told = {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}
    for name, labels, value in (
        ("offbeat_run", {"strategy": "allreduce", "workers": "2", "state": "finished"}, 1),
        ("offbeat_step", {}, 20),
        ("offbeat_samples_per_second", {}, 100),
        ("offbeat_metric", {"name": "score"}, 0.8),
        ("offbeat_seconds", {"kind": "compute"}, 1.2),
        ("offbeat_staleness_reads", {"steps": "1"}, 4),
        ("offbeat_worker_steps", {"worker": "worker 1"}, 8),
        ("offbeat_verdict", {"kind": "healthy"}, 1),
    ):
        assert told[name, frozenset({"run": "20260101-first", **labels}.items())] == value


# --- while it is written


def test_metrics_are_taken_in_line_by_line_as_they_become_whole(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    metrics = MetricsReader(tmp_path)
    metrics.read()
    file.write_text('{"step": 1}\n{"step"')
    metrics.read()
    assert metrics.lines == [{"step": 1}]
    with file.open("a") as more:
        more.write(': 2, "loss": NaN}\nnonsense\n[3]\n{"step": 4}\n')
    metrics.read()
    assert metrics.lines == [{"step": 1}, {"step": 2}, {"step": 4}]
    file.write_text('{"step": 9}\n')
    metrics.read()
    assert (metrics.lines, metrics.epoch) == ([{"step": 9}], 1)


def test_files_that_are_half_written_are_read_at_the_next_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.monitor.page.run_view.EVERY", 0.0)
    folder = run_folder(tmp_path / "a", state="running")
    run = RunView("a", folder)
    assert run.summary()["state"] == "running"
    whole = (folder / "run.json").read_text()
    (folder / "run.json").write_text(whole[:40])
    (folder / "events").mkdir()
    for size in (0, 10, 6_000_000):
        events_file(folder, 0).write_bytes(b"\0" * size)
        assert run.summary()["processes"][0]["state"] == "unwatched"
    events_file(folder, 0).unlink()
    (folder / "run.json").write_text(whole)
    recorder = Recorder(events_file(folder, 0), 0)
    recorder.stamp(Mark.ENTER, recorder.name("sum", lambda: SUM), 1)
    told = run.summary()
    assert (told["live"], told["processes"][0]["state"]) == (True, "waiting")
    assert told["processes"][0]["waits_for"] == ["worker 1"]
    recorder.stamp(Mark.EXIT, recorder.name("sum", lambda: SUM), 1)
    assert run.summary()["processes"][0]["state"] == "computing"


def test_a_resumed_run_puts_new_events_in_the_place_of_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.monitor.page.run_view.EVERY", 0.0)
    folder = run_folder(tmp_path / "a", sums(3), state="running")
    run = RunView("a", folder)
    assert run.summary()["processes"][0]["step"] == 3
    events_file(folder, 0).unlink()
    Recorder(events_file(folder, 0), 0).stamp(Mark.STEP)
    assert run.summary()["processes"][0]["step"] == 1


def test_a_run_that_says_it_runs_but_has_no_process_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    monkeypatch.setattr("offbeat.runtime.events.recorder.os.getpid", lambda: child)
    told = RunView("a", run_folder(tmp_path / "a", sums(3, end=False), state="running")).summary()
    assert (told["state"], told["live"], told["verdicts"][0]["kind"]) == ("gone", False, "gone")


def test_news_come_as_they_happen_and_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.monitor.page.app.TICK", 0.05)
    monkeypatch.setattr("offbeat.monitor.page.run_view.EVERY", 0.0)
    folder = run_folder(tmp_path / "runs" / "a", sums(3, end=False), state="running")
    with PageServer(*opened(folder)) as served, socket.create_connection(("127.0.0.1", served.port), 30) as line:
        request = f"GET /api/follow?run=a&lines=2 HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\n"
        line.sendall(f"{request}Authorization: Bearer {served.token}\r\n\r\n".encode())
        stream = line.makefile("rb")

        def news(kind: str) -> Any:
            while stream.readline().strip() != f"event: {kind}".encode():
                pass
            return json.loads(stream.readline().removeprefix(b"data: "))

        first = news("run")
        assert (first["metrics"], first["lines"], first["live"]) == ([], 2, True)
        assert [run["name"] for run in news("runs")["runs"]] == ["a"]
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 30}\n')
        while not (told := news("run"))["metrics"]:
            pass
        assert (told["metrics"], told["lines"]) == ([{"step": 30}], 3)
        run_folder(tmp_path / "runs" / "b")
        assert [run["name"] for run in news("runs")["runs"]] == ["b", "a"]


# --- the commands


@pytest.fixture
def offbeat_(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Offbeat:
    return in_process(launcher, tmp_path, monkeypatch, capsys)


def test_a_saved_page_holds_everything_and_cannot_be_broken_out_of(offbeat_: Offbeat, tmp_path: Path) -> None:
    verdict = {"kind": "deadlock", "message": "</script><script>alert(1)</script><!--", "stacks": {}}
    run_folder(tmp_path / "runs" / "a", sums(3), state="failed", verdict=verdict)
    said = offbeat_("watch", "runs", "--export", "page.html")
    assert said.code == 0, said.err
    page = (tmp_path / "page.html").read_text()
    assert page.count("<script") == page.count("</script>") == 2
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert "src=" not in page
    assert "unsafe" not in page
    assert offbeat_("watch", "runs/a", "--export", "no/such/page.html").code == 1
    assert offbeat_("watch", "nowhere").code == 2


def test_without_the_extra_the_command_says_how_to_get_it(
    offbeat_: Offbeat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat.monitor.page.http_server.find_spec", lambda _name: None)
    run_folder(tmp_path / "runs" / "a")
    said = offbeat_("watch")
    assert said.code == 2
    assert "pip install 'offbeat[watch]'" in said.err
    assert offbeat_("watch", "--export", "page.html").code == 0


def test_whatever_is_wrong_with_a_page_is_said_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folder(tmp_path / "a")
    page = LivePage(folder)
    address = page.words.removeprefix("Watch it at ")
    assert address.startswith("http://127.0.0.1:")
    page.close()
    page.close()
    gone = LivePage(tmp_path / "nowhere")
    assert "There is no page of it: " in gone.words
    gone.close()
    monkeypatch.setattr("offbeat.monitor.page.http_server.find_spec", lambda _name: None)
    assert "pip install 'offbeat[watch]'" in LivePage(folder).words


def test_ctrl_c_ends_the_page_and_is_no_error(
    offbeat_: Offbeat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: PageServer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PageServer, "wait", interrupted)
    monkeypatch.setattr("offbeat.cli.commands.watch.webbrowser.open", lambda address: print(f"opened {address}"))
    run_folder(tmp_path / "runs" / "a")
    said = offbeat_("watch", "runs/a", "--open")
    assert said.code == 0, said.err
    assert "opened http://127.0.0.1:" in said.out
    port = int(said.out.split("127.0.0.1:")[1].split("/")[0])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)
