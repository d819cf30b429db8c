"""Tests that `kvparams doctor` finds faults, and that every line that is not `ok` names a remedy."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvparams.cli import main
from kvparams_connectors import advice
from kvparams_connectors.advice import Advice, advice_from_store
from kvparams_connectors.cli import store_diagnosis
from kvparams_connectors.cli.store_diagnosis import examine_huge_pages, examine_machine, examine_store
from kvparams_connectors.conformance import Fault, FaultyStore, Operation
from kvparams_connectors.store import KVStore, ResultCode, open_store
from kvparams_connectors.stores.file import placement_advice
from kvparams_connectors.stores.memory.store import MemoryStore


@pytest.fixture
def opened_as(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[KVStore], None]]:
    """What the doctor opens, whatever the URL says."""
    stores: list[KVStore] = []

    def use(store: KVStore) -> None:
        def open_it(_: str) -> KVStore:
            return store

        stores.append(store)
        monkeypatch.setattr(store_diagnosis, "open_store", open_it)

    yield use
    for store in stores:
        store.close()


def memory() -> MemoryStore:
    return MemoryStore(8 << 20, unit_bytes=4096)


def grades(found: list[Advice]) -> list[str]:
    return [one.level for one in found]


def test_a_good_store_has_nothing_but_ok(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", f"file://{tmp_path}/store?size=32MiB"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("this machine\n")
    assert "came back unchanged, and was deleted" in said
    assert "GB/s with pages of" in said
    assert "a lookup of 1000 keys takes" in said
    assert "ERROR" not in said


@pytest.mark.parametrize(
    "url", ["file://{}/store?size=32MiB", "tiered:?l1=memory:%3Fsize=8MiB&l2=file://{}/store%3Fsize=32MiB"]
)
def test_the_doctor_leaves_no_file_behind(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", url.format(tmp_path)]) == 0
    assert "came back unchanged" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_keeps_a_store_that_exists(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store?size=32MiB"
    open_store(url).close()
    inode = (tmp_path / "store").stat().st_ino
    assert main(["doctor", url]) == 0
    assert (tmp_path / "store").stat().st_ino == inode


def test_an_empty_file_is_empty_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kv").write_bytes(b"")
    main(["doctor", f"file://{tmp_path}/kv?size=64MiB"])
    assert "ok" in capsys.readouterr().out
    assert (tmp_path / "kv").stat().st_size == 0


def test_a_store_that_cannot_be_created_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", f"file://{tmp_path}/store?size=1KiB"]) == 1
    assert "ERROR" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_engines_of_a_fleet_are_held_against_what_is_declared(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody is there; `tests/interop/vllm/test_vllm_handoff.py` has right engines, and a wrong connector."""
    path = tmp_path / "fleet.yaml"
    path.write_text('{"instances": [{"id": "p", "url": "http://127.0.0.1:1", "role": "prefill"}]}')
    assert main(["doctor", "memory:?size=8MiB", str(path)]) == 1
    said = capfd.readouterr()
    assert f"\n{path}\n" in said.out
    assert "p" in said.out.split(str(path))[1]
    assert "1 error found" in said.err


def test_a_file_that_is_no_fleet_is_wrong(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "none.yaml")]) == 1
    assert "none.yaml" in capfd.readouterr().err


def test_the_doctor_deletes_what_it_put(opened_as: Callable[[KVStore], None]) -> None:
    inner = memory()
    seen: set[str] = set()

    def watch(operation: Operation, key: str) -> None:
        if operation == "put":
            seen.add(key)

    opened_as(FaultyStore(inner, watch))
    assert "error" not in grades(list(examine_store("memory:")))
    assert len(seen) > 5
    assert {result.code for result in inner.exists(sorted(seen)).result()} == {ResultCode.MISS}
    inner.close()


@pytest.mark.parametrize(
    ("operation", "fault", "words"),
    [
        ("put", Fault("fail", code=ResultCode.FULL), "no room"),
        ("put", Fault("fail", code=ResultCode.DENIED), "password_file"),
        ("put", Fault("drop"), "loses values at once"),
        ("exists", Fault("fail", code=ResultCode.TIMEOUT), "too slow or stopped"),
        ("get", Fault("flip", at=8 * 5000), "changes bytes"),
        ("get", Fault("truncate", at=100), "ended with ok, 100 bytes"),
        ("delete", Fault("fail", code=ResultCode.UNAVAILABLE), "server runs"),
    ],
)
def test_a_store_that_goes_wrong_is_an_error_that_says_what_to_do(
    opened_as: Callable[[KVStore], None], operation: Operation, fault: Fault, words: str
) -> None:
    opened_as(FaultyStore(memory(), lambda found, _: fault if found == operation else None))
    found = list(examine_store("memory:"))
    assert grades(found).count("error") == 1
    assert found[-1].level == "error"  # it ends there
    assert words in f"{found[-1].finding} {found[-1].action}"


def test_a_store_that_cannot_be_opened_is_an_error_and_the_others_are_examined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = ["file:///nowhere/x?size=1MiB", "mamory:", "valkey://127.0.0.1:1", f"file://{tmp_path}/store?size=32MiB"]
    assert main(["doctor", *urls]) == 1
    said = capsys.readouterr()
    assert "cannot open /nowhere/x" in said.out
    assert said.out.count("lmcache-mp, memory") == 1  # those that are known, once
    for todo in ("correct the word before the colon", "start the server, and check"):
        assert said.out.count(todo) == 1
    assert "came back unchanged" in said.out
    assert said.err == "kvparams doctor: 3 errors found\n"


def test_what_the_store_knows_of_its_settings_is_told(opened_as: Callable[[KVStore], None]) -> None:
    class Knowing(MemoryStore):
        def advice(self) -> list[Advice]:
            return [Advice("warning", "maxmemory-policy is noeviction", "set it to allkeys-lru")]

    class Broken(MemoryStore):
        def advice(self) -> list[Advice]:
            raise ConnectionError("with a secret in it")

    opened_as(Knowing(8 << 20, unit_bytes=4096))
    assert Advice("warning", "maxmemory-policy is noeviction", "set it to allkeys-lru") in examine_store("memory:")
    with_defect = Broken(1 << 20, unit_bytes=4096)
    (said,) = advice_from_store(with_defect)
    assert said.level == "warning"
    assert "secret" not in said.finding
    assert "ConnectionError" in said.finding
    with_defect.close()
    plain = memory()
    assert advice_from_store(plain) == [] or isinstance(plain, advice.StoreAdvisor)
    plain.close()


def test_an_error_in_the_settings_ends_the_examination(opened_as: Callable[[KVStore], None]) -> None:
    class Old(MemoryStore):
        def advice(self) -> list[Advice]:
            return [Advice("error", "the server is version 1", "use version 8")]

    opened_as(Old(8 << 20, unit_bytes=4096))
    assert list(examine_store("memory:"))[-1] == Advice("error", "the server is version 1", "use version 8")


def test_every_warning_and_error_says_what_to_do(opened_as: Callable[[KVStore], None]) -> None:
    opened_as(MemoryStore(1 << 20, unit_bytes=4096))
    found = [*examine_machine(), *examine_store("memory:")]
    assert [one for one in found if one.level != "ok" and not one.action] == []
    assert any("at most 1048576 bytes" in one.finding for one in found)


@pytest.mark.parametrize(
    ("text", "grade"), [("[always] madvise never\n", ["warning"]), ("always [madvise] never\n", ["ok"]), (None, [])]
)
def test_huge_pages_are_judged(tmp_path: Path, text: str | None, grade: list[str]) -> None:
    setting = tmp_path / "enabled"
    if text is not None:
        setting.write_text(text)
    assert grades(list(examine_huge_pages(setting))) == grade


MOUNTS = """\
overlay / overlay rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
server:/x /mnt/a\\040b nfs4 rw 0 0
/dev/sda /mnt ext4 rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/dev/shm/kv", "tmpfs"),
        ("/dev/shmkv", "overlay"),
        ("/mnt/a b/kv", "nfs4"),
        ("/mnt/ab", "ext4"),
        ("/home/kv", "overlay"),
    ],
)
def test_the_file_system_of_a_path_is_found(path: str, kind: str) -> None:
    assert placement_advice.file_system_of(Path(path), MOUNTS) == kind


def test_a_file_on_the_network_is_an_error_and_one_on_a_disk_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, grade in (("nfs4", "error"), ("ext4", "warning"), ("tmpfs", "ok")):
        mounts = tmp_path / "mounts"
        mounts.write_text(f"somewhere / {kind} rw 0 0\n")
        monkeypatch.setattr(placement_advice, "_MOUNTS", mounts)
        assert placement_advice.file_advice(tmp_path)[0].level == grade
    assert placement_advice.file_advice(tmp_path / "none")[0].level == "warning"
