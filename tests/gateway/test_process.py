"""Modules in processes of their own: the control protocol, shared memory, deaths and restarts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.gateway import (
    ConfigurationError,
    Event,
    Gateway,
    GatewayMessage,
    Module,
    ModuleError,
    Policy,
    QueueOptions,
    Restart,
)
from penstock.gateway.worker import Life
from tests.gateway.conftest import Collector, eventually

HERE = "tests.gateway.test_process"
ALWAYS = Restart(Policy.ON_FAILURE, backoff_s=0.01, max_backoff_s=0.05, limit=None)


class Echo(Module):
    """In its own process: says who it is, answers everything, does what it is told."""

    def create(self, broker: Any, configuration: Any) -> None:
        super().create(broker, configuration)
        if configuration == "refuse":
            raise OSError("cannot be made")
        if configuration == "die":
            os._exit(3)

    def start(self) -> None:
        self.publish(b"%d" % os.getpid(), {"kind": "started"})

    def receive(self, message: GatewayMessage) -> None:
        content = bytes(message)
        if content == b"kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if content == b"raise":
            raise RuntimeError("told to")
        if content == b"hang":
            threading.Event().wait()
        self.publish(message, {**message.properties, "pid": str(os.getpid()), "source": str(message.id)})

    def stop(self) -> None:
        self.publish(b"last words")


class Ticks(Module):
    """Publishes from a task of its own, whether messages come or not."""

    async def start(self) -> None:
        self.task = asyncio.create_task(self.tick())

    async def tick(self) -> None:
        while True:
            self.publish(b"tick")
            await asyncio.sleep(0.01)

    async def receive(self, message: GatewayMessage) -> None:
        self.publish(b"received")

    async def stop(self) -> None:
        self.task.cancel()


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway() as made:
        for name in ("source", "sink"):
            made.add_module(name, Collector)
        made.start()
        yield made


def add_echo(gateway: Gateway, entrypoint: Any = f"{HERE}:Echo", args: Any = None, **options: Any) -> Collector:
    gateway.add_link("*", "sink")
    gateway.add_module("echo", entrypoint, args, loader="process", **options)
    gateway.add_link("source", "echo")
    gateway.remove_link("*", "sink")
    gateway.add_link("echo", "sink")
    sink: Collector = gateway.module("sink")
    eventually(lambda: sink.messages, "the process has started")
    return sink


def say(gateway: Gateway, *contents: bytes) -> None:
    for content in contents:
        gateway.module("source").publish(content, {"k": "v"})


def test_the_tasks_of_an_async_module_run_while_it_waits_for_messages(gateway: Gateway) -> None:
    sink = add_echo(gateway, f"{HERE}:Ticks")
    eventually(lambda: sink.got.count(b"tick") > 3)
    say(gateway, b"x")
    eventually(lambda: b"received" in sink.got)
    ticks = sink.got.count(b"tick")
    eventually(lambda: sink.got.count(b"tick") > ticks + 3)


def test_a_failure_in_a_process_is_told_by_the_gateway_alone(
    gateway: Gateway, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    add_echo(gateway)
    say(gateway, *[b"raise"] * 20)
    eventually(lambda: next(one for one in gateway.modules() if one.name == "echo").lost == 20)
    assert gateway.destroy()
    assert "Traceback" not in capfd.readouterr().err
    assert "module 'echo' failed in receive: RuntimeError: told to" in caplog.messages


def test_it_receives_and_answers_in_its_own_process(gateway: Gateway) -> None:
    sink = add_echo(gateway)
    process = gateway.module("echo").process
    assert sink.got == [b"%d" % process.pid]
    assert process.pid != os.getpid()
    contents = [b"%d" % n for n in range(2000)]
    say(gateway, *contents)
    eventually(lambda: len(sink.got) == 2001)
    assert sink.got[1:] == contents
    source_id = gateway.broker.info(gateway.module("source")).source_id
    assert dict(sink.messages[1].properties) == {"k": "v", "pid": str(process.pid), "source": str(source_id)}
    assert all(m.channel == "echo" for m in sink.messages)
    gateway.remove_module("echo")
    assert sink.got[-1] == b"last words"
    assert process.returncode == 0


def test_messages_of_all_sizes_pass(gateway: Gateway) -> None:
    sink = add_echo(gateway)
    contents = [bytes([size % 251]) * size for size in (0, 1, 4000, 5000, 70_000, 1_000_000, 10)]
    say(gateway, *contents)
    eventually(lambda: len(sink.got) == 8)
    assert sink.got[1:] == contents


def test_a_large_message_costs_its_size(gateway: Gateway) -> None:
    sink = add_echo(gateway)
    module = gateway.module("echo")
    before = shared_bytes(module)
    say(gateway, bytes(8_000_000))
    eventually(lambda: len(sink.got) == 2)
    assert len(sink.got[1]) == 8_000_000
    assert shared_bytes(module) <= before + 16_000_000, "not once for each slot"


def shared_bytes(module: Any) -> int:
    return sum(len(line) and int(line.split()[1]) * 1024 for line in maps(module) if line.startswith("Size:"))


def maps(module: Any) -> list[str]:
    text = Path(f"/proc/{module.process.pid}/smaps").read_text()
    blocks = text.split("\n")
    chosen, inside = [], False
    for line in blocks:
        if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]:
            inside = "shm" in line or "penstock" in line
        elif inside:
            chosen.append(line)
    return chosen


def test_a_frame_that_does_not_decode_is_skipped(gateway: Gateway) -> None:
    sink = add_echo(gateway)
    for wrong in (b"", b"garbage", bytes(8) + b"garbage", b"\xff" * 8 + GatewayMessage().to_bytes()):
        gateway.module("echo")._publisher.publish(wrong)
    say(gateway, b"goes on")
    eventually(lambda: sink.got[1:] == [b"goes on"])
    eventually(gateway.module("echo").mark_sent())


def test_a_mark_of_a_process_that_is_gone_writes_nowhere(gateway: Gateway) -> None:
    """The numbers of its descriptors may belong to anything by then."""
    add_echo(gateway)
    gone = gateway.module("echo")
    number = gone._wake_write
    mark = gone.mark_sent()
    gateway.remove_module("echo")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    reading, writing = os.pipe2(os.O_NONBLOCK)
    if number not in (reading, writing):
        os.dup2(writing, number)
    try:
        assert not mark()
        with pytest.raises(BlockingIOError):
            os.read(number if number == reading else reading, 1)
    finally:
        for each in {reading, writing, number}:
            os.close(each)


def test_removal_handles_everything_first(gateway: Gateway) -> None:
    sink = add_echo(gateway)
    say(gateway, *[b"%d" % n for n in range(500)])
    gateway.remove_module("echo")
    eventually(lambda: len(sink.got) == 502)
    assert sink.got[1:501] == [b"%d" % n for n in range(500)]


class Notes(Module):
    """In its own process: notes in a file what is called, and takes its time."""

    def create(self, broker: Any, configuration: Any) -> None:
        super().create(broker, configuration)
        self.file = Path(configuration)

    def _note(self, step: str) -> None:
        with self.file.open("a") as file:
            file.write(f"{step}\n")

    def receive(self, message: GatewayMessage) -> None:
        threading.Event().wait(0.05)
        self._note("receive")

    def stop(self) -> None:
        self._note("stop")

    def destroy(self) -> None:
        self._note("destroy")


def test_removal_without_draining_drops_what_the_process_has_received_too(gateway: Gateway, tmp_path: Path) -> None:
    file = tmp_path / "steps"
    gateway.add_module("notes", f"{HERE}:Notes", str(file), loader="process")
    gateway.add_link("source", "notes")
    module = gateway.module("notes")
    say(gateway, *[b"x"] * 500)
    eventually(lambda: file.exists() and module.sent == 500, "all of them have been sent to it")
    lost = gateway.remove_module("notes", drain=False, timeout=60)
    steps = file.read_text().split()
    handled = steps.count("receive")
    assert steps == [*["receive"] * handled, "stop", "destroy"]
    assert handled + lost == 500
    assert handled < 250, "it has dropped the rest at once"
    assert module.process.returncode == 0


def test_shutdown_drains_through_the_process(gateway: Gateway) -> None:
    sink = add_echo(gateway)
    say(gateway, *[b"%d" % n for n in range(500)])
    assert gateway.destroy(60)
    assert sink.got[1:501] == [b"%d" % n for n in range(500)]


def test_ctrl_c_while_a_process_still_imports_is_the_gateways(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    monkeypatch.syspath_prepend(tmp_path)
    sink = add_echo(gateway)
    say(gateway, b"x")
    eventually(lambda: b"x" in sink.got)
    pid = int(sink.got[0])
    status = Path(f"/proc/{pid}/status").read_text()
    blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
    assert not blocked & 1 << signal.SIGINT - 1, "what the module starts has Ctrl-C as usual"


@pytest.mark.parametrize(("args", "why"), [("refuse", "could not make"), ("die", r"ended while .* \(status 3\)")])
def test_a_module_that_cannot_be_made_leaves_nothing(gateway: Gateway, args: str, why: str) -> None:
    with penstock.publisher(f"shm:/gateway-test-{os.getpid()}"):
        pass  # what a process opens once, at its first channel, is open
    before = gateway.module_list(), threading.active_count(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(ModuleError, match=why):
        gateway.add_module("echo", f"{HERE}:Echo", args, loader="process")
    with pytest.raises(ConfigurationError, match=r"echo\.loader\.entrypoint: importing 'no\.such' failed"):
        gateway.add_module("echo", "no.such:Class", loader="process")
    assert (gateway.module_list(), threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_a_process_that_dies_is_started_again_and_loses_only_the_message_in_hand(gateway: Gateway) -> None:
    restarted: list[Any] = []
    gateway.add_event_callback(Event.MODULE_RESTARTED, lambda _, __, name, ___: restarted.append(name))
    sink = add_echo(gateway, restart=ALWAYS)
    first = gateway.module("echo").process.pid
    worker = gateway.broker.worker_of(gateway.module("echo"))
    before = [b"a%d" % n for n in range(100)]
    after = [b"b%d" % n for n in range(100)]
    say(gateway, *before, b"kill", *after)
    eventually(lambda: len(sink.got) == 202, "everything but the message in hand has come back")
    started = [content for content, m in zip(sink.got, sink.messages, strict=True) if m.properties.get("kind")]
    assert len(started) == 2
    assert started[0] == b"%d" % first
    assert [c for c, m in zip(sink.got, sink.messages, strict=True) if "kind" not in m.properties] == before + after
    eventually(lambda: restarted == ["echo"])
    assert worker.counters.snapshot()["dropped"] == {"error": 1}, "the message in hand is counted"
    assert worker.counters.get("redelivered") >= 1


def test_a_process_that_dies_while_idle_is_started_again(gateway: Gateway) -> None:
    sink = add_echo(gateway, restart=ALWAYS)
    os.kill(gateway.module("echo").process.pid, signal.SIGKILL)
    eventually(lambda: len(sink.got) == 2, "the next one has started")
    say(gateway, b"hello")
    eventually(lambda: sink.got[2:] == [b"hello"])


def test_raising_in_the_process_is_counted_and_told(gateway: Gateway) -> None:
    failed: list[Any] = []
    gateway.add_event_callback(Event.MODULE_FAILED, lambda _, __, context, ___: failed.append(context))
    sink = add_echo(gateway)
    say(gateway, b"raise", b"goes on")
    eventually(lambda: sink.got[1:] == [b"goes on"])
    eventually(lambda: failed)
    assert failed[0][0] == "echo"
    assert gateway.supervisor("echo").failures == 1


def test_with_a_restart_policy_raising_begins_anew(gateway: Gateway) -> None:
    sink = add_echo(gateway, restart=ALWAYS)
    say(gateway, b"raise", b"goes on")
    eventually(lambda: sink.got[-1:] == [b"goes on"])
    assert len({content for content in sink.got if content.isdigit()}) == 2


def test_never_made_anew_a_dead_process_loses_its_messages_and_each_is_counted(gateway: Gateway) -> None:
    sink = add_echo(gateway, restart=Restart(Policy.NEVER))
    module = gateway.module("echo")
    worker = gateway.broker.worker_of(module)
    say(gateway, *[b"x"] * 100)
    os.kill(module.process.pid, signal.SIGKILL)
    say(gateway, *[b"x"] * 2000)
    eventually(lambda: worker.life is Life.FAILED and worker.idle)
    eventually(lambda: len(sink.got) - 1 + worker.lost == 2100)
    assert gateway.supervisor("echo").restarts == 0


def test_a_process_that_dies_is_started_again_where_nobody_chose(gateway: Gateway) -> None:
    sink = add_echo(gateway)
    os.kill(gateway.module("echo").process.pid, signal.SIGKILL)
    eventually(lambda: gateway.supervisor("echo").restarts == 1)
    say(gateway, b"goes on")
    eventually(lambda: sink.got[-1] == b"goes on")


def test_a_process_that_hangs_is_told_killed_and_started_again(gateway: Gateway) -> None:
    told: list[Any] = []
    gateway.add_event_callback(Event.MODULE_STUCK, lambda _, __, context, ___: told.append(context))
    sink = add_echo(gateway, stuck_after_s=0.2)
    worker = gateway.broker.worker_of(gateway.module("echo"))
    say(gateway, b"hang", b"goes on")
    eventually(lambda: sink.got[-1] == b"goes on")
    eventually(lambda: told)
    assert told[0][0] == "echo"
    assert worker.lost == 1, "the message in its hand"


class Dies(Module):
    """At the first message."""

    def receive(self, message: GatewayMessage) -> None:
        os._exit(1)


def test_what_is_left_past_the_limit_is_counted_once_and_nobody_is_stuck(gateway: Gateway) -> None:
    gateway.add_module(
        "dies", {"class": f"{HERE}:Dies", "slots": 4}, loader="process",
        restart=Restart(Policy.ON_FAILURE, backoff_s=0.01, max_backoff_s=1000, limit=2),  # failures in a row, however slow
    )  # fmt: skip
    gateway.add_link("source", "dies")
    gateway.pause("dies")
    say(gateway, *[b"x"] * 50)
    gateway.resume("dies")
    eventually(lambda: gateway.supervisor("dies").gave_up)
    module = gateway.module("dies")
    eventually(lambda: gateway.broker.worker_of(module).idle)
    now = 1e9
    assert [module.seconds_in_hand(now), module.seconds_in_hand(now + 100)] == [0, 0], "there is no process"
    gateway.destroy()
    assert {one.name: one.lost for one in gateway.modules()}["dies"] == 50


def test_a_stopped_process_does_not_keep_the_gateway_from_its_end(gateway: Gateway) -> None:
    add_echo(gateway)
    process = gateway.module("echo").process
    os.kill(process.pid, signal.SIGSTOP)
    worker = gateway.broker.worker_of(gateway.module("echo"))
    say(gateway, *[b"never handled"] * 50)
    assert not gateway.destroy(2.0)
    assert process.wait(60) == -signal.SIGKILL
    assert worker.lost + worker.queue.ledger.lost == 50, "each of them is counted"


def test_a_process_that_does_not_end_is_killed_after_its_grace_period(gateway: Gateway) -> None:
    add_echo(gateway, {"class": f"{HERE}:Echo", "grace_period_ms": 100})
    module = gateway.module("echo")
    say(gateway, b"hang")
    eventually(lambda: len(module.in_hand()) == 1)
    gateway.remove_module("echo", timeout=0.2)
    assert module.process.returncode == -signal.SIGKILL


def test_a_process_that_somebody_else_starts(gateway: Gateway, tmp_path: Path) -> None:
    path = tmp_path / "control"
    command = [sys.executable, "-m", "penstock.gateway.child", "--control", str(path), "--class", f"{HERE}:Echo"]
    started: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        eventually(path.is_socket)
        assert path.stat().st_mode & 0o777 == 0o600
        started.append(subprocess.Popen(command))

    thread = threading.Thread(target=start)
    thread.start()
    sink = add_echo(gateway, {"activation": "none", "control_id": str(path), "grace_period_ms": 60_000})
    thread.join()
    say(gateway, b"hello")
    eventually(lambda: sink.got[1:] == [b"hello"])
    gateway.remove_module("echo")
    assert started[0].wait(60) == 0
    eventually(lambda: sink.got[1:] == [b"hello", b"last words"])


def test_a_program_of_any_kind_is_launched(gateway: Gateway, tmp_path: Path) -> None:
    path = str(tmp_path / "control")
    args = ["-m", "penstock.gateway.child", "--control", path, "--class", f"{HERE}:Echo"]
    entrypoint = {"activation": "launch", "path": sys.executable, "args": args, "control_id": path}
    sink = add_echo(gateway, entrypoint)
    say(gateway, b"hello")
    eventually(lambda: sink.got[1:] == [b"hello"])


def test_nobody_comes(gateway: Gateway, tmp_path: Path) -> None:
    entrypoint = {"activation": "none", "control_id": str(tmp_path / "control"), "timeout_ms": 50}
    with pytest.raises(ModuleError, match="nobody connected"):
        gateway.add_module("echo", entrypoint, loader="process")
    assert list(tmp_path.iterdir()) == []


class Talker(Module):
    """In its own process: says something for ever."""

    def start(self) -> None:
        threading.Thread(target=self.talk, daemon=True).start()

    def talk(self) -> None:
        while True:
            self.publish(b"again")

    def receive(self, message: GatewayMessage) -> None:
        pass


def test_a_full_sink_does_not_keep_the_gateway_from_its_end() -> None:
    gate = threading.Event()

    class Stuck(Module):
        def receive(self, message: GatewayMessage) -> None:
            gate.wait(60)

    gateway = Gateway()
    try:
        place = {"class": f"{HERE}:Talker", "grace_period_ms": 100}
        gateway.add_module("talker", place, loader="process")
        gateway.add_module("sink", Stuck, queue=QueueOptions(depth=4))
        gateway.add_link("talker", "sink")
        gateway.start()
        sink = gateway.broker.worker_of(gateway._kept["sink"].module)
        eventually(lambda: sink.waiting > 4, "the sink is full")
        ending = threading.Thread(target=gateway.destroy, args=(0,), daemon=True)
        ending.start()
        eventually(lambda: sink.queue.closed, "the process does not hold it up")
        gate.set()
        ending.join(60)
        assert not ending.is_alive()
    finally:
        gate.set()
        gateway.destroy(0)


class Raises(Module):
    """Raises in the step that it is told to, the first time in each process when it is said so."""

    def create(self, broker: Any, configuration: Any) -> None:
        super().create(broker, configuration)
        self.step, self.flag = configuration["step"], Path(configuration["flag"])

    def _at(self, step: str) -> None:
        if step == self.step and not self.flag.exists():
            self.flag.write_text("done")
            if step == "hang":
                threading.Event().wait()
            raise RuntimeError(f"told to in {step}")

    def start(self) -> None:
        self._at("start")
        self._at("hang")
        self.publish(b"started")

    def stop(self) -> None:
        self._at("stop")

    def destroy(self) -> None:
        self._at("destroy")


def add_raising(gateway: Gateway, step: str, flag: Path, **options: Any) -> list[Any]:
    failed: list[Any] = []
    gateway.add_event_callback(Event.MODULE_FAILED, lambda _, __, context, ___: failed.append(context))
    args = {"step": step, "flag": str(flag)}
    gateway.add_module("raises", f"{HERE}:Raises", args, loader="process", **options)
    return failed


@pytest.mark.parametrize("step", ["stop", "destroy"])
def test_raising_in_a_last_step_of_the_process_is_told_by_its_name(gateway: Gateway, step: str, tmp_path: Path) -> None:
    failed = add_raising(gateway, step, tmp_path / "flag")
    worker = gateway.broker.worker_of(gateway.module("raises"))
    gateway.remove_module("raises")
    eventually(lambda: failed)
    assert failed[0][:2] == ("raises", step)
    assert "RuntimeError: told to" in str(failed[0][2])
    assert worker.failed == 1


@pytest.mark.parametrize("chosen", [None, ALWAYS])
def test_raising_in_start_of_the_process_is_told_and_it_is_made_anew(tmp_path: Path, chosen: Restart | None) -> None:
    with Gateway() as gateway:
        gateway.add_module("sink", Collector)
        failed = add_raising(gateway, "start", tmp_path / "flag", restart=chosen)
        gateway.add_link("raises", "sink")
        gateway.start()
        eventually(lambda: gateway.module("sink").got == [b"started"])
        assert [context[:2] for context in failed] == [("raises", "start")]
        assert "RuntimeError: told to" in str(failed[0][2])
        info = next(info for info in gateway.modules() if info.name == "raises")
        assert (info.failed, gateway.supervisor("raises").restarts) == (1, 1)


def test_starting_again_a_process_whose_start_raised_counts_only_the_starts(tmp_path: Path) -> None:
    with Gateway() as gateway:
        failed = add_raising(gateway, "start", tmp_path / "flag", restart=Restart(Policy.NEVER))
        for _ in range(3):
            (tmp_path / "flag").unlink(missing_ok=True)
            with pytest.raises(ModuleError, match="RuntimeError: told to"):
                gateway.start()
        eventually(lambda: len(failed) == 3)
        info = next(info for info in gateway.modules() if info.name == "raises")
        assert (info.failed, info.lost) == (3, 0)
    assert [context[:2] for context in failed] == [("raises", "start")] * 3


def test_adding_a_process_whose_start_raises_is_undone(gateway: Gateway, tmp_path: Path) -> None:
    with pytest.raises(ModuleError, match=r"failed in start: .*RuntimeError: told to"):
        add_raising(gateway, "start", tmp_path / "flag")
    assert "raises" not in [info.name for info in gateway.modules()]


def test_a_process_that_hangs_in_start_is_told_killed_and_started_again(tmp_path: Path) -> None:
    with Gateway() as gateway:
        told: list[Any] = []
        gateway.add_event_callback(Event.MODULE_STUCK, lambda _, __, context, ___: told.append(context))
        gateway.add_module("sink", Collector)
        add_raising(gateway, "hang", tmp_path / "flag", stuck_after_s=0.2)
        gateway.add_link("raises", "sink")
        gateway.start()
        eventually(lambda: gateway.module("sink").got == [b"started"])
        eventually(lambda: told)
        assert told[0][0] == "raises"
        assert gateway.supervisor("raises").restarts == 1


def test_a_kill_is_one_failure(gateway: Gateway) -> None:
    sink = add_echo(gateway, restart=ALWAYS)
    failed: list[Any] = []
    gateway.add_event_callback(Event.MODULE_FAILED, lambda _, __, context, ___: failed.append(context))
    for kills in range(1, 4):
        say(gateway, *[b"x"] * 2000, b"kill", *[b"y"] * 2000, b"%d done" % kills)
        eventually(lambda n=kills: sink.got[-1] == b"%d done" % n)  # type: ignore[misc]
        info = next(info for info in gateway.modules() if info.name == "echo")
        assert (info.failed, gateway.supervisor("echo").restarts) == (kills, kills)
        eventually(lambda n=kills: len(failed) == n)  # type: ignore[misc]


def test_a_process_that_has_to_be_killed_at_its_end_is_told_of(gateway: Gateway) -> None:
    """As failed in stop, or as abandoned where even killing it took longer than there was."""
    told: list[Any] = []
    for event in (Event.MODULE_FAILED, Event.MODULE_ABANDONED):
        gateway.add_event_callback(event, lambda _, kind, context, ___: told.append((kind, context)))
    add_echo(gateway, {"class": f"{HERE}:Echo", "grace_period_ms": 100})
    say(gateway, b"hang")
    eventually(lambda: len(gateway.module("echo").in_hand()) == 1)  # before that it may still end in order
    gateway.remove_module("echo", timeout=0.2)
    eventually(lambda: told)
    kind, context = told[0]
    assert context[:2] == ("echo", "stop") if kind is Event.MODULE_FAILED else context[0] == "echo"


def test_a_process_that_is_killed_in_start_at_the_end_is_told_once(tmp_path: Path) -> None:
    gateway = Gateway()
    failed = add_raising(gateway, "hang", tmp_path / "flag")
    worker = gateway.broker.worker_of(gateway.module("raises"))
    starting = threading.Thread(target=gateway.start, daemon=True)
    starting.start()
    eventually((tmp_path / "flag").exists)
    gateway.destroy(2.0)
    starting.join(60)
    assert len(failed) <= 1
    assert worker.failed == 1


def test_the_end_waits_for_a_process_that_is_to_be_started_again(gateway: Gateway) -> None:
    """What it left is handled by the next one, and a healthy process beside it ends in order."""
    slow = Restart(Policy.ON_FAILURE, backoff_s=1.0, max_backoff_s=1.0, limit=None)
    sink = add_echo(gateway, restart=slow)
    gateway.add_module("healthy", f"{HERE}:Echo", loader="process")
    healthy = gateway.module("healthy").process
    first = gateway.module("echo")
    contents = [b"left %d" % n for n in range(100)]
    say(gateway, b"kill", *contents)
    eventually(lambda: first.dead is not None)
    eventually(lambda: gateway.broker.worker_of(first).lost == 1, "the one that was in hand")
    assert gateway.destroy(60)
    assert [content for content in sink.got if content.startswith(b"left")] == contents
    assert healthy.returncode == 0, "it ended in order"


def test_a_process_that_does_not_answer_create_is_told_while_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.gateway.process.CREATE_TOLD_S", 0.001)  # no interpreter starts as fast as that
    with Gateway() as gateway:
        gateway.add_module("slow", "tests.gateway.conftest:Collector", loader="process")
    told = [record.message for record in caplog.records if "has not answered create" in record.message]
    assert told == ["module 'slow': its process has not answered create yet; waiting up to 30 s"]
