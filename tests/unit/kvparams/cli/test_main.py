"""Tests that `kvparams` answers every mistake on its command line with one line that says what was probably meant."""

import subprocess
import sys

import pytest

from kvparams.cli import main, make_parser
from kvparams.version import __version__

ENGINES = ("--prefill", "http://p:1", "--decode", "http://d:1")


def refused(*argv: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Returns the only line of a refusal."""
    try:
        status = main(argv)
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr()
    assert (status, said.out) == (2, "")
    (line,) = said.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "kvparams: give a command; kvparams --help lists them"),
        (("prxy",), "kvparams: no command prxy; did you mean proxy? see kvparams --help"),
        (("run",), "kvparams: no command run; the commands are conformance, doctor, explain, "),
        (("--verson",), "kvparams: no option --verson; did you mean --version? see kvparams --help"),
        (("keys", "creat", "f"), "kvparams keys: no command creat; did you mean create? see kvparams keys --help"),
        (("keys",), "kvparams keys: missing: ACTION; see kvparams keys --help"),
        (
            ("store", "bench", "memory:", "--size", "1MiB"),
            "kvparams store bench: no option --size; did you mean --sizes? see kvparams store bench --help",
        ),
        (("proxy", "--prefil", "http://a:1"), "kvparams proxy: no option --prefil; did you mean --prefill? see "),
        (("proxy", "-port", "80"), "kvparams proxy: no option -port; did you mean --port? see kvparams proxy --help"),
        (("proxy", "--plain-asgi"), "kvparams proxy: no option --plain-asgi; "),
        (("proxy", "--queue-wai=3"), "kvparams proxy: no option --queue-wai; did you mean --queue-wait? "),
        (("proxy", "--port"), "kvparams proxy: --port: needs a value; see kvparams proxy --help"),
        (("proxy", "fleet.yaml"), "kvparams proxy: unexpected argument: fleet.yaml; see kvparams proxy --help"),
        (("proxy", "\x1b[31m"), 'kvparams proxy: unexpected argument: "\\u001b[31m"; see kvparams proxy --help'),
        (("sidecar",), "kvparams sidecar: missing: --engine, --role; see kvparams sidecar --help"),
        (("sidecar", "--engin", "http://a:1"), "kvparams sidecar: no option --engin; did you mean --engine? see "),
        (
            ("sidecar", "--engine", "http://a:1", "--role", "prefil"),
            "kvparams sidecar: --role: must be one of prefill, decode; did you mean prefill? see kvparams sidecar --",
        ),
        (("proxy", *ENGINES, "--connector", "NixlConnector"), "store-meet; did you mean nixl?"),
        (("proxy", *ENGINES, "--connector", "MooncakeConnector"), "store-meet; did you mean mooncake?"),
        (("proxy", *ENGINES, "--connector", "KVParamsConnectorV1"), "store-meet; did you mean store?"),
        (("proxy", *ENGINES, "--connector", "MooncakeStoreConnector"), "store-meet; did you mean content?"),
        (("proxy", *ENGINES, "--connector", "LMCacheConnectorV1"), "store-meet; did you mean content?"),
        (("proxy", *ENGINES, "--connector", "NixlConector"), "store-meet; did you mean nixl?"),
        (("proxy", "--verison"), "kvparams proxy: no option --verison; did you mean --version? see "),
        (("proxy", "--prefill", "htp://a:1"), "https://host:port; did you mean http://a:1?"),
        (("proxy", "--prefill", "https//a:1"), "https://host:port; did you mean https://a:1?"),
        (("proxy", *ENGINES, "--connector", "nixxl"), "store-meet; did you mean nixl?"),
        (("proxy", *ENGINES, "--policy", "round-robin"), "did you mean round_robin?"),
        (("proxy", "--prefill", "10.0.0.1:8000"), "did you mean http://10.0.0.1:8000?"),
        (("proxy", "--prefill", "http://h:1/v1"), "must be http://host:port or https://host:port, without a path"),
        (("proxy", *ENGINES, "--mode", "conditional,remote_token=5"), "did you mean remote_tokens? known: "),
        (("proxy", *ENGINES, "--discover", "k8s://?selector=a"), "dns+srv://; did you mean kubernetes://?"),
        (("proxy", *ENGINES, "--discover", "kubernets://?selector=a"), "dns+srv://; did you mean kubernetes://?"),
        (("proxy", *ENGINES, "--tokenizer", "byte"), "No such file or directory; did you mean bytes?"),
        (("proxy", *ENGINES, "--log-requests", "of"), "did you mean off? A file is written ./of"),
        (
            ("proxy", *ENGINES, "--connector", "mooncake", "--bootstrap", "prefil-0=http://h:1"),
            "there is no --prefill engine with the name 'prefil-0'; did you mean prefill-0?",
        ),
        (("proxy", *ENGINES, "--share", "valky://h"), "did you mean valkey://?"),
        (("proxy", *ENGINES, "--share", "rediss://h"), "rediss:// is written valkeys:// here"),
        (("explain-route", "http://h:1", "--prompt", "a", "--admin-token-file", "/no"), "/no cannot be read: No such"),
        (("proxy", *ENGINES, "--share", "redis://h"), "redis:// is written valkey:// here"),
        (("store", "bench", "redis://h"), "kvparams: redis:// is written valkey:// here"),
        (("store", "bench", "rediss://h"), "kvparams: rediss:// is written valkeys:// here"),
        (("store", "bench", "fil:///x"), "did you mean file? known: file, "),
    ],
)
def test_a_mistake_is_one_line_with_what_was_meant(
    argv: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(*argv, capsys=capsys)


@pytest.mark.parametrize(
    "argv",
    [
        ("proxy", *ENGINES, "--connector", "OtherConnector"),
        ("proxy", "--prefill", "tcp://a:1"),
        ("proxy", "--prefill", "htp://user:password@a:1"),
    ],
)
def test_what_resembles_nothing_gets_no_hint(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean" not in refused(*argv, capsys=capsys)


def test_a_value_that_looks_like_an_option_is_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert "must be a whole number, at least 0" in refused("proxy", *ENGINES, "--queue", "-1", capsys=capsys)
    assert "explain-route: " in refused(
        *("explain-route", "http://127.0.0.1:1", "--admin-token-file", "/no/such", "--prompt", "-a b"), capsys=capsys
    )


@pytest.mark.parametrize("argv", [["--help"], ["proxy", "--help"], ["store", "bench", "--help"]])
def test_help_is_whole(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) > 5


@pytest.mark.parametrize("argv", [["--version"], ["-V"], ["proxy", "--version"], ["validate", "--version"]])
def test_the_version_is_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert (ended.value.code, capsys.readouterr().out) == (0, f"kvparams {__version__}\n")


def test_a_command_loads_no_other_command() -> None:
    code = "import sys; from kvparams.cli import make_parser; make_parser('validate'); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert "kvparams.cli.validate_command" in loaded.split()
    assert "kvparams_proxy.cli.proxy_command" not in loaded.split()


def test_the_parser_of_all_commands_has_all_of_their_options() -> None:
    parser, broken = make_parser(None)
    assert not broken
    assert parser.parse_args(["keys", "create", "file", "--tenant", "a"]).tenant == "a"
