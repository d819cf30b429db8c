"""Tests the URL of an external picker."""

import pytest

from kvparams_proxy.config.picker_url import PickerURL, parse_picker_url


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("grpc://picker:9002", PickerURL("picker:9002", False, 0.5)),
        ("grpcs://[::1]:9002?timeout=2", PickerURL("[::1]:9002", True, 2.0)),
    ],
)
def test_good_urls(text: str, parsed: PickerURL) -> None:
    assert parse_picker_url(text) == parsed


@pytest.mark.parametrize(
    "text",
    [
        *("", "picker:9002", "http://picker:9002", "grpc://picker", "grpc://:9002", "grpc://picker:99999"),
        *("grpc://user@picker:9002", "grpc://picker:9002/path", "grpc://picker:9002?timeout=0", "grpc://[:1"),
        *("grpc://picker:9002?timeout=nan", "grpc://picker:9002?timeout=61", "grpc://picker:9002?more=1"),
    ],
)
def test_others_say_what_to_write(text: str) -> None:
    with pytest.raises(ValueError, match="grpc://host:port"):
        parse_picker_url(text)
