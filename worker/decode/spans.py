from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from decant.worker.decode.run import DecodeRun


@contextmanager
def run_span(run: DecodeRun) -> Iterator[None]:
    with run.span as span:
        try:
            yield
        finally:
            span.set(output_tokens=sum(len(output.tokens) for output in run.outputs))
            if (timeline := run.root.timeline) is not None:
                now = time.monotonic()
                if timeline.scheduled is not None:
                    span.event("scheduled", now - timeline.scheduled)
                if timeline.first_token is not None:
                    span.event("first token", now - timeline.first_token)
                if timeline.preemptions:
                    span.event("preempted", count=timeline.preemptions)
