"""Names the ways in which this project's proxy is held to a profile."""

from typing import Final, NamedTuple

__all__ = ["ENGINES", "RUNS", "Run"]

ENGINES: Final = "--prefill {prefill0} --prefill {prefill1} --decode {decode0} --decode {decode1}"
_BOOTSTRAP: Final = "--bootstrap prefill-0={prefill0} --bootstrap prefill-1={prefill1}"


class Run(NamedTuple):
    """A profile, and the options with which our proxy keeps it."""

    profile: str
    options: str


RUNS: Final = {
    "store": Run("store-proxy", f"--connector store {ENGINES}"),
    "store_drop": Run("store-proxy", f"--connector store-drop {ENGINES}"),
    "two_workers": Run("store-proxy", f"--connector store --workers 2 {ENGINES}"),
    "nixl": Run("nixl-proxy", f"--connector nixl {ENGINES}"),
    "bootstrap": Run("bootstrap-proxy", f"--connector sglang --mode concurrent_legs {_BOOTSTRAP} {ENGINES}"),
    "content": Run("content-proxy", f"--connector content {ENGINES}"),
    "aggregated": Run("aggregated-proxy", "--mode aggregated --aggregated {decode0} --aggregated {decode1}"),
    "signed": Run("signed", f"--connector store --sign-with {{keys}} --audience {{audience}} {ENGINES}"),
}
