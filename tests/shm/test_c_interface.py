# ruff: noqa: SIM117 -- nesting shows who outlives whom
"""The C header and library: a C program is compiled, linked and run against channels of this process."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from penstock import shm

EXAMPLES = Path(__file__).parents[2] / "examples"
SOURCE = Path(__file__).parents[2] / "native" / "tests" / "programs" / "shm_c_program.c"
LONG = 30.0


def built(source: Path, directory: Path) -> Path:
    """The program, compiled against the header and the library of the package."""
    compilers, standard = (("gcc", "cc"), "c11") if source.suffix == ".c" else (("g++", "c++"), "c++17")
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        pytest.skip("no compiler")
    program, library = directory / source.stem, shm.library_path()
    command = [compiler, f"-std={standard}", "-D_DEFAULT_SOURCE", "-Wall", "-Wextra", "-Werror", "-pedantic"]
    command += [f"-I{shm.include_directory()}", str(source), "-o", str(program), str(library)]
    subprocess.run([*command, f"-Wl,-rpath,{library.parent}"], check=True)
    return program


@pytest.mark.parametrize("example", ["channels.c", "channels.cpp"])
def test_the_examples(example: str, tmp_path: Path) -> None:
    done = subprocess.run([built(EXAMPLES / example, tmp_path)], capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr
    if example == "channels.c":
        assert done.stdout == "hello from C (front, message 1)\n"
    else:
        assert done.stdout.splitlines()[:2] == ["hello from C++ (message 1)", "newest: 41"]
        assert "must begin with '/'" in done.stdout.splitlines()[2]


def test_a_c_program_takes_part(name: str, tmp_path: Path) -> None:
    program = built(SOURCE, tmp_path)
    with shm.Publisher(f"{name}/in", reliable=True, timeout=LONG) as publisher:
        with shm.Subscriber(f"{name}/out", reliable=True) as subscriber:
            process = subprocess.Popen([program, name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            assert publisher.wait_ready(1, LONG)
            sent = [b"%d" % i * (1 + i % 9) for i in range(200)]
            for data in sent:
                publisher.publish(data)
                message = subscriber.read(LONG)
                assert message is not None and bytes(message) == data
                del message
            publisher.publish(b"")
            out, errors = process.communicate(timeout=LONG)
            assert (process.returncode, out) == (0, "ok\n"), errors


THROWS = """
#include <iostream>
#include "penstock_shm.hpp"
using namespace penstock_shm;
int main(int, char **arguments) {
    Options options;
    options.slots = 8;
    Publisher publisher(arguments[1], options);
    Subscriber subscriber(arguments[1]);
    subscriber.on_dropped([](std::uint64_t) { throw std::runtime_error("told"); });
    for (int round = 0; round < 10; ++round) {
        for (int i = 0; i < 30; ++i) publisher.publish("x");
        try {
            subscriber.read(0);
            return 1;
        } catch (const Error &) {
        }
        if (!subscriber.wait(0)) return 2;
        auto kept = subscriber.read(0);
        std::cout << (kept ? kept->ordinal() : 0) << " ";
    }
}
"""

NULLS = """
#include <math.h>
#include <stdio.h>
#include "penstock_shm.h"
#define REFUSED(call) if ((call) != PENSTOCK_SHM_INVALID) return printf("%s\\n", #call), 1
int main(int count, char **arguments) {
    penstock_shm_options options;
    penstock_shm_publisher *publisher;
    penstock_shm_subscriber *subscriber;
    penstock_shm_message message;
    void *data;
    uint32_t slot;
    (void)count;
    penstock_shm_options_init(&options);
    options.slots = 8;
    options.metadata_size = 8;
    REFUSED(penstock_shm_publisher_open(arguments[1], &options, NULL));
    REFUSED(penstock_shm_subscriber_open(arguments[1], NULL, NULL));
    if (penstock_shm_publisher_open(arguments[1], &options, &publisher) < 0) return 2;
    if (penstock_shm_subscriber_open(arguments[1], NULL, &subscriber) < 0) return 3;
    REFUSED(penstock_shm_publish_copy(publisher, NULL, 5, 0, NULL));
    REFUSED(penstock_shm_publish_copy(publisher, "x", 1, NAN, NULL));
    REFUSED(penstock_shm_reserve(publisher, 5, 0, NULL, &slot));
    REFUSED(penstock_shm_reserve(publisher, 5, 0, &data, NULL));
    REFUSED(penstock_shm_reserve(publisher, 5, NAN, &data, &slot));
    if (penstock_shm_reserve(publisher, 5, 0, &data, &slot) < 0) return 4;
    REFUSED(penstock_shm_set_metadata(publisher, slot, NULL, 3));
    if (penstock_shm_publish(publisher, slot, 5, NULL) < 0) return 5;
    REFUSED(penstock_shm_read(subscriber, 0, NULL));
    REFUSED(penstock_shm_read(subscriber, NAN, &message));
    REFUSED(penstock_shm_read_newest(subscriber, NULL));
    REFUSED(penstock_shm_find(subscriber, 0, NULL));
    REFUSED(penstock_shm_release(subscriber, NULL));
    if (penstock_shm_read(subscriber, 0, &message) != 1) return 6;
    REFUSED(penstock_shm_weak_of(subscriber, &message, NULL));
    penstock_shm_subscriber_close(subscriber);
    penstock_shm_publisher_close(publisher);
    return 0;
}
"""

RETIRED = """
#include <algorithm>
#include <iostream>
#include "penstock_shm.hpp"
using namespace penstock_shm;
int main(int, char **arguments) {
    Options options;
    options.slots = 8;
    options.retirement = true;
    Publisher publisher(arguments[1], options);
    for (int i = 0; i < 70000; ++i) publisher.publish("x");
    auto slots = publisher.retired();
    bool only_zeros = std::count(slots.begin() + 65536, slots.end(), 0u) == slots.end() - slots.begin() - 65536;
    std::cout << slots.size() << " " << only_zeros << " " << publisher.retired().size();
}
"""

RETIRED_IN_PARTS = """
#include <stdio.h>
#include "penstock_shm.h"
int main(int count, char **arguments) {
    penstock_shm_options options;
    penstock_shm_publisher *publisher;
    uint32_t slots[2];
    (void)count;
    penstock_shm_options_init(&options);
    options.slots = 8;
    options.retirement = 1;
    if (penstock_shm_publisher_open(arguments[1], &options, &publisher) < 0) return 1;
    for (int i = 0; i < 3; ++i)
        if (penstock_shm_publish_copy(publisher, "x", 1, 0, NULL) < 0) return 2;
    if (penstock_shm_retired(publisher, 0, NULL, 2) != PENSTOCK_SHM_INVALID) return 3;
    printf("%d", penstock_shm_retired(publisher, 0, NULL, 0));
    printf(" %d", penstock_shm_retired(publisher, 0, slots, 2));
    printf(" %d", penstock_shm_retired(publisher, 0, slots, 2));
    printf(" %d", penstock_shm_retired(publisher, 0, slots, 2));
    penstock_shm_publisher_close(publisher);
    return 0;
}
"""


@pytest.mark.parametrize(
    ("source", "program", "said"),
    [("retired.cpp", RETIRED, ["70000", "0", "0"]), ("parts.c", RETIRED_IN_PARTS, ["3", "3", "1", "0"])],
)
def test_every_retired_message_is_told_once(name: str, tmp_path: Path, source: str, program: str, said: list[str]) -> None:
    (tmp_path / source).write_text(program)
    done = subprocess.run([built(tmp_path / source, tmp_path), name], capture_output=True, text=True, timeout=LONG)
    assert (done.returncode, done.stdout.split()) == (0, said), done.stderr


def test_a_function_that_throws_costs_no_message(name: str, tmp_path: Path) -> None:
    (tmp_path / "throws.cpp").write_text(THROWS)
    done = subprocess.run([built(tmp_path / "throws.cpp", tmp_path), name], capture_output=True, text=True, timeout=LONG)
    # Each read finds 8 of 30 new ones, and what it had taken when the function threw is the first of them.
    assert (done.returncode, done.stdout.split()) == (0, [str(30 * n + 23) for n in range(10)]), done.stderr


def test_null_pointers_are_told_and_not_followed(name: str, tmp_path: Path) -> None:
    (tmp_path / "nulls.c").write_text(NULLS)
    done = subprocess.run([built(tmp_path / "nulls.c", tmp_path), name], capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stdout
