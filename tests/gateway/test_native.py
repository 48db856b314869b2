"""The native loader, with modules that the test compiles."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.gateway import ConfigurationError, Gateway, ModuleError, include_directory
from tests.gateway.conftest import Collector, eventually

# Answers each message with its content reversed and one more property; counts; refuses content "bad".
REVERSER = r"""
#include <stdlib.h>
#include <string.h>
#include "penstock_module.h"

typedef struct { const penstock_host *host; void *broker; int received; char configuration[64]; } reverser;

static void *create(const penstock_host *host, void *broker, const char *configuration) {
    if (strcmp(configuration, "\"refuse\"") == 0) return NULL;
    reverser *self = calloc(1, sizeof *self);
    self->host = host;
    self->broker = broker;
    strncpy(self->configuration, configuration, sizeof self->configuration - 1);
    return self;
}
static int start(void *module) {
    reverser *self = module;
    penstock_message hello = {NULL, 0, (const uint8_t *)self->configuration, strlen(self->configuration)};
    self->host->log(self->broker, 30, "started");
    return self->host->publish(self->broker, &hello);
}
static int receive(void *module, const penstock_message *message) {
    reverser *self = module;
    if (message->content_size == 3 && memcmp(message->content, "bad", 3) == 0) return 7;
    uint8_t *turned = malloc(message->content_size + 1);
    for (uint64_t i = 0; i < message->content_size; ++i) turned[i] = message->content[message->content_size - 1 - i];
    char *properties = malloc(message->properties_size + 16);
    if (message->properties_size) memcpy(properties, message->properties, message->properties_size);
    memcpy(properties + message->properties_size, "turned\0yes", 11);
    penstock_message answer = {properties, message->properties_size + 11, turned, message->content_size};
    int status = self->host->publish(self->broker, &answer);
    free(turned);
    free(properties);
    ++self->received;
    return status;
}
static void destroy(void *module) { free(module); }

const penstock_module_api *penstock_module(void) {
    static const penstock_module_api api = {VERSION, create, start, receive, destroy};
    return &api;
}
"""

# Publishes for each message one whose content (for "c") or properties are a null pointer of 200 bytes, then one of none.
POINTS_NOWHERE = r"""
#include "penstock_module.h"
static const penstock_host *host;
static void *broker;
static void *create(const penstock_host *given, void *handle, const char *configuration) {
    (void)configuration;
    host = given;
    broker = handle;
    return &host;
}
static int receive(void *module, const penstock_message *message) {
    (void)module;
    const int content = message->content[0] == 'c';
    penstock_message nowhere = {0, content ? 0 : 200, 0, content ? 200 : 0}, empty = {0, 0, 0, 0};
    if (host->publish(broker, &nowhere) != -1) return 1;
    return host->publish(broker, &empty);
}
static void destroy(void *module) { (void)module; }
const penstock_module_api *penstock_module(void) {
    static const penstock_module_api api = {VERSION, create, 0, receive, destroy};
    return &api;
}
"""

Compile = Callable[..., str]


@pytest.fixture
def compiled(tmp_path: Path) -> Compile:
    def build(source: str = REVERSER, version: str = "PENSTOCK_MODULE_VERSION") -> str:
        code, library = tmp_path / "module.c", tmp_path / f"module-{os.urandom(4).hex()}.so"
        code.write_text(source.replace("VERSION,", f"{version},"))
        command = [
            "cc",
            "-shared",
            "-fPIC",
            "-Wall",
            "-Werror",
            "-I",
            str(include_directory()),
            "-o",
            str(library),
            str(code),
        ]
        subprocess.run(command, check=True)
        return str(library)

    return build


def test_a_module_in_c_is_a_module_like_any_other(compiled: Compile, caplog: pytest.LogCaptureFixture) -> None:
    with Gateway() as gateway:
        gateway.add_module("source", Collector)
        gateway.add_module("sink", Collector)
        gateway.add_module("native", {"module.path": compiled()}, {"some": "args"}, loader="native")
        gateway.add_link("source", "native")
        gateway.add_link("native", "sink")
        gateway.start()
        source, sink = gateway.module("source"), gateway.module("sink")
        for content, properties in ((b"abc", {"k": "v"}), (b"", {}), (b"bad", {}), (bytes(range(256)) * 40, {"ä": ""})):
            source.publish(content, properties)
        eventually(lambda: len(sink.got) == 4)
        assert sink.got == [b'{"some": "args"}', b"cba", b"", (bytes(range(256)) * 40)[::-1]]
        assert [dict(m.properties) for m in sink.messages[1:]] == [
            {"k": "v", "turned": "yes"},
            {"turned": "yes"},
            {"ä": "", "turned": "yes"},
        ]
        assert gateway.broker.info(gateway.module("native")).failed == 1
    assert "receive of" in caplog.text
    assert "started" in caplog.text


def test_a_library_that_does_not_fit_is_refused(compiled: Compile) -> None:
    with Gateway() as gateway:
        with pytest.raises(ConfigurationError, match="version 99"):
            gateway.add_module("old", compiled(version="99"), loader="native")
        with pytest.raises(ConfigurationError, match="exports no penstock_module"):
            gateway.add_module("other", compiled("int nothing;"), loader="native")
        nothing = '#include "penstock_module.h"\nconst penstock_module_api *penstock_module(void) { return 0; }'
        with pytest.raises(ConfigurationError, match="returned null"):
            gateway.add_module("null", compiled(nothing), loader="native")
        with pytest.raises(ModuleError, match=r"create\(\) of .* returned null"):
            gateway.add_module("refusing", compiled(), "refuse", loader="native")
        assert gateway.module_list() == []


@pytest.mark.parametrize("path", ["mine.so", "./mine.so", "lib/mine.so"])
@pytest.mark.parametrize("where", ["beside the file", "beside an included file", "in the working directory"])
def test_a_library_is_found_beside_the_file_and_from_the_working_directory(
    compiled: Compile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, where: str
) -> None:
    there, elsewhere = tmp_path / "there", tmp_path / "elsewhere"
    for directory in (there / "lib", elsewhere / "lib"):
        directory.mkdir(parents=True)
    at_file, at_work = (elsewhere, there) if where == "in the working directory" else (there, elsewhere)
    shutil.copy(compiled(), there / path)
    monkeypatch.chdir(at_work)
    part = json.dumps({"modules": [{"name": "native", "loader": {"entrypoint": path}}], "links": []})
    file = at_file / "gateway.json"
    file.write_text(part)
    if where == "beside an included file":
        main = elsewhere / "main.json"
        main.write_text(json.dumps({"include": [str(file)], "modules": [], "links": []}))
        file = main
    with Gateway.from_file(file) as gateway:
        assert [line.name for line in gateway.module_list()] == ["native"]


def test_where_a_library_was_looked_for_is_told(tmp_path: Path) -> None:
    file = tmp_path / "gateway.json"
    file.write_text(json.dumps({"modules": [{"name": "native", "loader": {"entrypoint": "mine.so"}}], "links": []}))
    with pytest.raises(ConfigurationError, match=rf"cannot be loaded: .*mine\.so.*{tmp_path}"):
        Gateway.from_file(file)


@pytest.mark.parametrize(("part", "what"), [(b"c", "content"), (b"p", "properties")])
def test_a_size_without_bytes_is_refused(
    compiled: Compile, caplog: pytest.LogCaptureFixture, part: bytes, what: str
) -> None:
    with Gateway() as gateway:
        gateway.add_module("source", Collector)
        gateway.add_module("sink", Collector)
        gateway.add_module("native", compiled(POINTS_NOWHERE), loader="native")
        gateway.add_link("source", "native")
        gateway.add_link("native", "sink")
        gateway.start()
        gateway.module("source").publish(part)
        eventually(lambda: b"" in gateway.module("sink").got)
        assert gateway.module("sink").got == [b""], "only the one of no bytes came"
    assert f"{what} is a null pointer with a size of 200" in caplog.text
