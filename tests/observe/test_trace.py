"""Trace context in properties: there when OpenTelemetry is loaded, nothing at all when it is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.observe import trace


def test_without_opentelemetry_nothing_is_loaded_or_added() -> None:
    code = (
        "import sys\nfrom penstock.observe import trace\n"
        "properties = {}\ntrace.inject(properties)\nassert properties == {}\nassert trace.extract({}) is None\n"
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_context_travels_through_a_journal(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry import trace as otel
    from opentelemetry.sdk.trace import TracerProvider

    import penstock

    tracer = TracerProvider().get_tracer("test")
    address = f"journal:{tmp_path}/j#t"
    with tracer.start_as_current_span("publish") as span, penstock.publisher(address) as publisher:
        properties: dict[str, str] = {}
        trace.inject(properties)
        publisher.publish(b"x", properties=properties)  # type: ignore[call-arg]
    with penstock.subscriber(address, start="first") as subscriber:
        message = subscriber.read(30)
        assert message is not None
        context = trace.extract(message.properties)
    with tracer.start_as_current_span("read", context=context) as reading:
        assert reading.get_span_context().trace_id == span.get_span_context().trace_id
    assert otel.get_current_span() is not None
    with trace.following(message, "handle"):
        within = otel.get_current_span().get_span_context()
        assert within.trace_id == span.get_span_context().trace_id, "the trace of whoever published"


STUB = """
def inject(carrier): carrier["traceparent"] = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
def extract(carrier): return {"of": carrier["traceparent"]}
"""


def test_pub_adds_the_context_of_a_program_that_has_opentelemetry(tmp_path: Path) -> None:
    """With a stand-in for the package: what counts is that its propagator is asked, and only where it is loaded."""
    package = tmp_path / "stub" / "opentelemetry"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "propagate.py").write_text(STUB)
    code = (
        "import sys\nsys.path.insert(0, sys.argv[1])\n"
        "if sys.argv[2] == 'loaded': import opentelemetry.propagate\n"
        "from penstock.cli import main\n"
        "main(['pub', f'journal:{sys.argv[3]}#t', 'x', '--quiet', '--property', 'unit=C'])"
    )
    for state in ("loaded", "installed"):
        arguments = [str(package.parent), state, str(tmp_path / "j")]
        subprocess.run([sys.executable, "-c", code, *arguments], check=True, timeout=60)
    import penstock

    with penstock.subscriber(f"journal:{tmp_path}/j#t", start="first") as subscriber:
        with_trace, without = (dict(message.properties) for message in subscriber.read_many(2, 30))
    assert with_trace == {"unit": "C", "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}
    assert without == {"unit": "C"}, "installed and not loaded: nothing is imported, nothing is added"
