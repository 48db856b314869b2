"""Decoders of files that somebody else may have written: MCAP, tokens, virtual channels, staged rows, counters, deaths."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.fuzz.target import Patched, Target, memory_folder


class InMemory(Patched):
    """Files in a folder of our own."""

    def __init__(self) -> None:
        self.place = memory_folder()

    def close(self) -> None:
        shutil.rmtree(self.place)


class McapFiles(InMemory):
    """``penstock import`` of a file that was changed."""

    def __init__(self) -> None:
        from mcap.writer import CompressionType, Writer

        super().__init__()
        made = io.BytesIO()
        writer = Writer(made, compression=CompressionType.NONE, chunk_size=256)
        writer.start()
        schema = writer.register_schema("Reading", "jsonschema", b'{"type": "object", "properties": {"c": {"type": "number"}}}')
        channels = [writer.register_channel(topic, "json", schema) for topic in ("/a", "/b/c")]
        for number in range(12):
            writer.add_message(channels[number % 2], 1_000_000 + number, b'{"c": %d}' % number, 1_000_000 + number)
        writer.finish()
        self.names, self.template = ["made.mcap"], {"made.mcap": made.getvalue()}

    def decode(self, data: bytes) -> None:
        from penstock.cli.imports import import_

        file, output = self.place / "changed.mcap", self.place / "recording"
        file.write_bytes(self.patched(data)["made.mcap"])
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                import_(file, output)
        finally:
            shutil.rmtree(output, ignore_errors=True)


class TokenFiles(Target):
    """A broker's file of tokens, and the file of virtual channels."""

    words = [b"[[token]]\n", b"token = ", b'"secret"', b"sha256 = ", b"publish = ", b'["a.>"]', b"subscribe = ", b"queues = ", b"manage = true\n",
             b"name = ", b"[" * 2000, b"{" * 2000, b"=", b"\n", b"#", b"9" * 5000, b"7 /a\n", b"/b", b" ", "\N{ARABIC-INDIC DIGIT FIVE}".encode()]  # fmt: skip

    def __init__(self) -> None:
        self.place = memory_folder()
        self.file = self.place / "file"
        self.file.touch(mode=0o600)

    def decode(self, data: bytes) -> None:
        from penstock.broker.rights import Tokens
        from penstock.errors import PenstockError
        from penstock.shm.vchans import read_vchans

        self.file.write_bytes(data)
        with contextlib.suppress(PenstockError):
            Tokens(self.file).rights("secret")
        read_vchans(self.file)

    def close(self) -> None:
        shutil.rmtree(self.place)


class StagedRows(InMemory):
    """The rows that Spark's executors staged for a journal."""

    def __init__(self) -> None:
        import pyarrow

        from penstock.spark.blocks import SHAPE
        from penstock.spark.staging import DirectoryStaging

        super().__init__()
        staging = DirectoryStaging(self.place / "made", "batch")
        staging.begin()
        columns = [["a", "b.c", "a"], [b"1", b"", b"3" * 40], [1, 2, None], [[("k", "v")], [], None], ["m1", None, ""], ["key", "", None]]
        batch = pyarrow.record_batch([pyarrow.array(one, kind) for one, kind in zip(columns, SHAPE.types, strict=True)], schema=SHAPE)
        self.name, _ = staging.write(0, 0, iter([batch, batch]))
        self.names, self.template = [self.name], {self.name: (staging.directory / self.name).read_bytes()}

    def decode(self, data: bytes) -> None:
        from penstock._core.broker import batch_names, range_batch
        from penstock.spark import blocks
        from penstock.spark.staging import DirectoryStaging

        staging = DirectoryStaging(self.place / "made", "batch")
        (staging.directory / self.name).write_bytes(self.patched(data)[self.name])
        for batch in staging._batches(self.name):
            for block in blocks.encode(batch):
                batch_names(range_batch(block.index, block.data, dict(enumerate(block.topics)), foreign=False))


HOLDER = "import sys, penstock\np = penstock.publisher('shm:/fuzz')\np.publish(b'x')\nprint(flush=True)\nsys.stdin.read()"


class CounterPages(InMemory):
    """What the monitor reads of another process: its page of counters."""

    def __init__(self) -> None:
        super().__init__()
        os.environ["PENSTOCK_SHM_DIR"] = str(self.place)
        self.holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.holder.stdout is not None
        self.holder.stdout.readline()
        (self.page,) = self.place.glob(f"counters.{self.holder.pid}.*")
        self.names, self.template = ["page"], {"page": self.page.read_bytes()}

    def decode(self, data: bytes) -> None:
        from penstock.observe.snapshot import live

        # In place, as its own process writes: that one has the file mapped, and a shorter one would end it.
        with self.page.open("r+b") as file:
            file.write(self.patched(data)["page"].ljust(len(self.template["page"]), b"\0"))
        live()

    def close(self) -> None:
        assert self.holder.stdin is not None
        self.page.write_bytes(self.template["page"])
        self.holder.stdin.close()
        self.holder.wait()
        super().close()


class DeathFiles(InMemory):
    """The ring of the last deaths, which ``penstock autopsy`` reads."""

    def __init__(self) -> None:
        super().__init__()
        os.environ["PENSTOCK_SHM_DIR"] = str(self.place / "shm")
        os.environ["XDG_STATE_HOME"] = str(self.place / "state")
        (self.place / "shm").mkdir(mode=0o700)
        killed = HOLDER.replace("sys.stdin.read()", "import os; os.kill(os.getpid(), 9)")
        subprocess.run([sys.executable, "-c", killed], stdout=subprocess.DEVNULL, check=False)
        from penstock.shm.deaths import death_file

        self.file = Path(death_file().path)
        assert self.file.stat().st_size
        self.names, self.template = ["deaths"], {"deaths": self.file.read_bytes()}

    def decode(self, data: bytes) -> None:
        from penstock.shm.deaths import death_file

        self.file.write_bytes(self.patched(data)["deaths"])
        death_file()


TARGETS: dict[str, type[Target]] = {
    "mcap-files": McapFiles,
    "token-files": TokenFiles,
    "staged-rows": StagedRows,
    "counter-pages": CounterPages,
    "death-files": DeathFiles,
}
