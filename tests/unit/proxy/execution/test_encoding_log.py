"""Tests how often the log says that no encode engine has encoded the media of a request."""

import pytest

from kvparams_proxy.execution.encoding_log import EncodingLog


def test_a_line_is_written_from_time_to_time_and_counts_the_requests_without_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 100.0
    log = EncodingLog(lambda: now_s)
    for number in range(8):
        log.write(f"r-{number}", "x" * 10_000)
    now_s += 9.9
    log.write("r-8", "too early")
    now_s += 0.2
    log.write("r-9", "late")
    now_s += 10.1
    log.write("r-10", "again")
    said = "no encode engine has encoded its media, so the engine of its prompt does"
    assert [record.getMessage() for record in caplog.records] == [
        f"request r-0: {said}: {'x' * 500}",
        f"request r-9: {said} (and of 8 requests before it): late",
        f"request r-10: {said}: again",
    ]
