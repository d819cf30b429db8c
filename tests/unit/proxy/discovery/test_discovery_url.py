"""Tests the URLs of `--discover`."""

import pytest

from kvparams.instances import Role
from kvparams_proxy.config.discovery_url import DNSSource, KubernetesSource, parse_discovery_url


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("kubernetes://?selector=app%3Dvllm", KubernetesSource("app=vllm")),
        (
            "kubernetes://prod?selector=a%3D1,b%3D2&port=80&resource=endpointslices",
            KubernetesSource("a=1,b=2", "prod", (80,), "endpointslices"),
        ),
        ("kubernetes://prod?pool=llama-3", KubernetesSource(namespace="prod", pool="llama-3")),
        ("dns://prefill.example:8000?role=prefill", DNSSource("prefill.example", Role.PREFILL, 8000)),
        (
            "dns+srv://_vllm._tcp.example?role=decode&connector=nixl",
            DNSSource("_vllm._tcp.example", Role.DECODE, None, "nixl"),
        ),
    ],
)
def test_a_url_names_a_source(text: str, source: object) -> None:
    assert parse_discovery_url(text) == source


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("consul://x", "must begin with kubernetes://, dns://, dns\\+srv://"),
        ("kubernetes://x", "needs selector=LABELS"),
        ("kubernetes://x?pool=a&port=1", "write nothing beside it"),
        ("kubernetes://x?pool=", "must be the name of an InferencePool"),
        ("kubernetes://x?pool=A%2CB", "must be the name of an InferencePool"),
        ("kubernetes://x?selector=a&port=0", "port must be from 1 to 65535"),
        ("kubernetes://x?selector=a&resource=pod", "resource .*did you mean pods"),
        ("kubernetes://x?selectr=a", "did you mean selector"),
        ("kubernetes://user:secret@x?selector=a", "nothing else"),
        ("dns://x?role=prefill", "dns:// needs a port"),
        ("dns+srv://x:1?role=prefill", "the records say it"),
        ("dns://x:1", "role must be"),
        ("dns://:1?role=prefill", "must name a host"),
        ("dns://x:99999?role=prefill", "must be a URL"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        parse_discovery_url(text)
    assert "secret" not in str(caught.value)
