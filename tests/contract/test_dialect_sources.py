"""Compares our dialect tables with the engines' own code, to notice a field that an engine renames, drops or adds.

The code is parsed, never imported. It is looked for in this environment, in those beside it (`.venv-vllm`,
`.venv-sglang`, `.venv-lmcache`) and among sources that are only read (`.cache/sources`). Where a package is in none of
them, its tests are skipped and say so. TensorRT-LLM's code is not available: its package only installs one of several
GB with CUDA in it. Its fields are checked as far as Dynamo's code names them.
"""

import ast
import json
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from kvparams.dialects.registry import load_tables
from kvparams.dialects.table import PHASES, DialectTable, LegCode

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TABLES = load_tables()
V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
KNOWN = {"vllm": "0.32.0", "sglang": "0.5.23", "lmcache": "0.5.6", "dynamo": "1.6.1"}
"""The releases that the tables were read from."""
INTERNAL = {"_remote_blocks_processed", "_p_side_truncated"}
"""What engines write into the dictionary for themselves."""


def site(package: str) -> Path:
    places = [Path(entry) for entry in sys.path if entry.endswith("site-packages")]
    places += [*sorted(ROOT.glob(".venv*/lib/python3*/site-packages")), ROOT / ".cache" / "sources"]
    own = "sources" if package == "dynamo" else f".venv-{package}"
    places.sort(key=lambda place: own not in place.parts)  # the release that it was made for comes first
    for place in places:
        if (place / package / "__init__.py").exists() or (place / package / "vllm" / "__init__.py").exists():
            return place
    pytest.skip(f"{package} is not installed here")


def source(path: str) -> ast.Module:
    package = path.partition("/")[0]
    return ast.parse((site(package) / path).read_text())


def function(tree: ast.AST, name: str, of: str | None = None) -> ast.AST:
    """The function, or the method of that class."""
    for node in ast.walk(tree):
        if of is not None and isinstance(node, ast.ClassDef) and node.name == of:
            return function(node, name)
        if of is None and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node
    raise AssertionError(f"{of or ''} {name} is not there any more")


def _text(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def read_keys(tree: ast.AST, *names: str) -> set[str]:
    """What is read of these dictionaries: `params["x"]`, `params.get("x")`, `.pop("x")`, `"x" in params`."""

    def ours(node: ast.AST) -> bool:
        return ast.unparse(node).split(".")[-1] in names

    def keys() -> Iterator[str | None]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Subscript) and ours(node.value):
                yield _text(node.slice)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ours(node.func.value):
                if node.func.attr in ("get", "pop", "setdefault") and node.args:
                    yield _text(node.args[0])
            elif isinstance(node, ast.Compare) and any(map(ours, node.comparators)):
                yield _text(node.left)

    return {key for key in keys() if key is not None}


def written_keys(tree: ast.AST, marker: str) -> set[str]:
    """The keywords of the `dict(...)`, or keys of the literal, that has `marker` among them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict":
            found = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
        elif isinstance(node, ast.Dict):
            found = {text for key in node.keys if key is not None and (text := _text(key)) is not None}
        else:
            continue
        if marker in found:
            return found
    raise AssertionError(f"nothing is written with {marker!r} any more")


def fields(tree: ast.AST, name: str) -> set[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {
                one.target.id
                for one in node.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            }
    raise AssertionError(f"class {name} is not there any more")


def texts(tree: ast.AST) -> set[str]:
    return {text for node in ast.walk(tree) if (text := _text(node)) is not None}


def ours(table: DialectTable, leg: LegCode, release: str) -> set[str]:
    return {row.name for row in table.known(release) if leg in row.legs and row.location == "home" and not row.parents}


@pytest.mark.parametrize("package", sorted(KNOWN))
def test_the_release_is_the_one_that_was_read(package: str) -> None:
    """Another release is no fault as long as the tests below hold; then the tables' words say it too."""
    for info in site(package).glob(f"*{package}*.dist-info"):
        if info.name.partition("-")[0] not in (package, f"{package}_cpu", f"ai_{package}"):
            continue
        version = Distribution.at(info).version
        assert version.split(".")[:2] == KNOWN[package].split(".")[:2], "read the sources again"
        return
    pytest.skip(f"{package} says no version")


def test_nixl_answers_with_our_keys() -> None:
    tree = source(f"{V1}/nixl/pull_scheduler.py")
    written = written_keys(function(tree, "request_finished"), "remote_block_ids")
    counted = {"remote_prefill_cached_tokens"}
    assert written | counted == ours(TABLES["nixl"], "R", KNOWN["vllm"])
    scheduler = source("vllm/v1/core/sched/scheduler.py")
    assert counted <= texts(scheduler)


def test_nixl_reads_our_keys() -> None:
    nixl = TABLES["nixl"]
    known = ours(nixl, "D", KNOWN["vllm"]) | INTERNAL
    read: set[str] = set()
    for name in ("pull_scheduler", "base_scheduler", "metadata"):
        read |= read_keys(source(f"{V1}/nixl/{name}.py"), "params", "kv_transfer_params")
    assert read <= known, "nixl reads what our table has not"
    needed = {row.name for row in nixl.known(KNOWN["vllm"]) if "D" in row.required_legs}
    assert needed <= read | texts(source(f"{V1}/nixl/pull_scheduler.py"))
    metadata = read_keys(source(f"{V1}/nixl/metadata.py"), "kv_transfer_params")
    assert needed <= metadata, "what decode cannot do without"


def test_pushing_nixl_says_our_keys() -> None:
    tree, push = source(f"{V1}/nixl/push_scheduler.py"), TABLES["nixl-push"]
    written = written_keys(function(tree, "request_finished"), "remote_num_tokens")
    assert written | {"remote_prefill_cached_tokens"} == ours(push, "R", KNOWN["vllm"])
    hard = {
        text
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "params" and isinstance(node.ctx, ast.Load)
        if (text := _text(node.slice)) is not None
    }
    assert hard == {row.name for row in push.native_keys if "D" in row.required_legs}, "a KeyError where one is missing"
    modes = {text for name in ("push", "base") for text in texts(source(f"{V1}/nixl/{name}_scheduler.py"))}
    assert {"push", "pull"} <= modes


def test_mooncake_reads_our_keys() -> None:
    tree, mooncake = source(f"{V1}/mooncake/mooncake_connector.py"), TABLES["mooncake"]
    read = read_keys(tree, "params", "kv_transfer_params")
    known = ours(mooncake, "P", KNOWN["vllm"]) | ours(mooncake, "D", KNOWN["vllm"])
    assert read <= known | INTERNAL
    assert {row.name for row in mooncake.native_keys if "D" in row.required_legs} | {
        "do_remote_decode",
        "do_remote_prefill",
    } <= read


def test_mooncakes_bootstrap_server_is_asked_as_ours() -> None:
    assert {"/query", "/register"} <= texts(source(f"{V1}/mooncake/mooncake_utils.py"))


def test_moriio_says_our_keys() -> None:
    connector, common = source(f"{V1}/moriio/moriio_connector.py"), source(f"{V1}/moriio/moriio_common.py")
    table = TABLES["moriio-read"]
    written = written_keys(function(connector, "request_finished", "MoRIIOConnectorScheduler"), "remote_block_ids")
    assert written <= ours(table, "R", KNOWN["vllm"])
    assert {row.name for row in table.native_keys if "R" in row.required_legs} <= written
    read = read_keys(common, "kv_transfer_params") | read_keys(connector, "params", "kv_transfer_params", "_kvp")
    known = ours(table, "P", KNOWN["vllm"]) | ours(table, "D", KNOWN["vllm"]) | INTERNAL
    assert read <= known, "moriio reads what our table has not"


def test_the_offload_tier_reads_our_keys() -> None:
    manager = source("vllm/v1/kv_offload/tiering/p2p/manager.py")
    table = TABLES["offload-p2p"]
    rows = [row for row in table.known(KNOWN["vllm"]) if row.parents]
    assert {str(row.parents[0]) for row in rows} == read_keys(manager, "kv_params")
    assert {row.name for row in rows} == read_keys(manager, "role", "role_params")
    scheduler = texts(source(f"{V1}/offloading/scheduler.py"))
    assert {"max_load_tokens", "kv_load_tiers"} <= scheduler & ours(table, "D", KNOWN["vllm"])


def test_encode_engines_answer_with_our_keys_and_prefill_reads_them() -> None:
    folder, table = "vllm/distributed/ec_transfer/ec_connector", TABLES["ec"]
    inside = {row.name for row in table.native_keys if row.parents}
    answered = function(source(f"{folder}/utils.py"), "collect_ec_item_metadata")
    assert {"item_indices", "metadata"} == inside & texts(answered)
    scheduler = source(f"{folder}/cpu/scheduler/__init__.py")
    addressed = {"peer_host", "peer_port", "size_bytes", "shape"}
    finished = function(scheduler, "request_finished")
    said = {one.arg for node in ast.walk(finished) if isinstance(node, ast.Call) for one in node.keywords}
    assert addressed == said == inside - {"item_indices", "metadata"}
    assert read_keys(scheduler, "remote", "info") == addressed
    pushed = read_keys(source(f"{folder}/mooncake/scheduler.py"), "params")
    assert pushed == {row.name for row in table.native_keys if not row.parents} - {"*"}


def test_lmcache_reads_and_answers_with_our_keys() -> None:
    tree, table = source("lmcache/integration/vllm/vllm_v1_adapter.py"), TABLES["lmcache-pd"]
    spec = {row.name for row in table.native_keys if row.parents == ("disagg_spec",)}
    assert read_keys(tree, "req_disagg_spec") == spec
    assert spec <= fields(tree, "DisaggSpec")
    assert written_keys(function(tree, "request_finished"), "first_tok") <= ours(table, "R", KNOWN["lmcache"])
    assert {"ret_first_tok", "disagg_spec", "num_lmcache_cached_tokens", "lmcache.skip_save"} <= texts(tree)
    mp = texts(source("lmcache/integration/vllm/lmcache_mp_connector.py"))
    assert "cached_token_stats" in mp
    assert "cached_token_stats" in read_keys(
        source("lmcache/integration/vllm/lmcache_mp_connector.py"), "params", "return_params"
    )


def test_vllms_own_lmcache_adapters_speak_the_same() -> None:
    tree = source(f"{V1}/lmcache_integration/vllm_v1_adapter.py")
    asked = {row.name for row in TABLES["lmcache-pd"].native_keys if "P" in row.required_legs}
    assert read_keys(tree, "req_disagg_spec") == asked
    assert "num_lmcache_extra_cached_tokens" in texts(source(f"{V1}/lmcache_mp_connector.py"))


def test_sglang_has_our_fields() -> None:
    sglang = TABLES["sglang"]
    members = {row.name for row in sglang.native_keys if row.location == "home" and not row.parents}
    routing = fields(source("sglang/srt/entrypoints/openai/protocol.py"), "PDRoutingFields")
    generate = fields(source("sglang/srt/managers/io_struct.py"), "GenerateReqInput")
    assert routing <= members, "a field of its routing that our table has not"
    assert members - {"rid"} <= generate | routing
    overrides = texts(source("sglang/srt/entrypoints/request_headers.py"))
    headers = {row.name for row in sglang.native_keys if row.location == "headers"}
    assert headers == {text for text in overrides if text.startswith("x-override-")}


def test_the_envelope_of_hints_is_ours() -> None:
    inside = {
        name: {row.name for row in TABLES[name].native_keys if row.parents in (("kv_hints",), ("kv_hint",))}
        for name in TABLES
    }
    for path in ("vllm/v1/kv_hints/protocol.py", "sglang/srt/managers/kv_hints.py"):
        own = fields(source(path), "KvHintsEnvelope")
        assert own == inside["nixl"] == inside["sglang"] == inside["dynamo-vllm"]


ANSWERS_NOTHING = {
    "hf3fs/hf3fs_connector.py": "HF3FSKVConnector",
    "simple_cpu_offload_connector.py": "SimpleCPUOffloadConnector",
    "hisparse/connector.py": "HiSparseConnector",
    "decode_bench_connector.py": "DecodeBenchConnector",
    "mooncake/store/connector.py": "MooncakeStoreConnector",
}


@pytest.mark.parametrize("path", ANSWERS_NOTHING)
def test_a_connector_that_is_said_to_take_and_answer_nothing_does(path: str) -> None:
    tree = source(f"{V1}/{path}")
    assert read_keys(tree, "params", "kv_transfer_params") == set()
    finished = [
        one
        for one in ast.walk(tree)
        if isinstance(one, ast.FunctionDef) and one.name in ("request_finished", "request_finished_all_groups")
    ]
    returned = [one.value for node in finished for one in ast.walk(node) if isinstance(one, ast.Return)]
    assert returned
    for value in returned:
        if isinstance(value, ast.Tuple):
            assert isinstance(value.elts[1], ast.Constant)
            assert value.elts[1].value is None
    assert "ExampleConnector" in texts(source("vllm/distributed/kv_transfer/kv_connector/factory.py"))
    with pytest.raises(AssertionError):  # it has none: the base class answers None
        function(source(f"{V1}/example_connector.py"), "request_finished")


def test_every_connector_of_the_factory_is_in_the_catalogue() -> None:
    registered = {
        text
        for node in ast.walk(source("vllm/distributed/kv_transfer/kv_connector/factory.py"))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("register_connector")
        if (text := _text(node.args[0])) is not None
    }
    rows = json.loads((ROOT / "spec" / "dialects" / "messages.json").read_bytes())
    named = " ".join(row["who"] for row in rows)
    assert len(registered) > 15
    assert [one for one in sorted(registered) if one not in named] == []


def test_the_carriers_are_read_where_ours_are() -> None:
    serving = source("vllm/entrypoints/scale_out/token_in_token_out/serving.py")
    assert "kv_transfer_params" in {
        text
        for node in ast.walk(serving)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "extra" and (text := _text(node.slice))
    }
    assert "extra_args" in fields(source("vllm/sampling_params.py"), "SamplingParams")
    protocol = source("vllm/entrypoints/scale_out/token_in_token_out/protocol.py")
    assert "sampling_params" in fields(protocol, "GenerateRequest")


def members(path: str, cls: str) -> list[str]:
    """The attributes that are read of any object in a class."""
    for node in ast.walk(source(path)):
        if isinstance(node, ast.ClassDef) and node.name == cls:
            return [one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)]
    raise AssertionError(f"class {cls} is not there any more")


def test_dynamo_asks_vllm_with_our_keys() -> None:
    tree, ask = source("dynamo/vllm/kv_connector_protocols.py"), "prefill_request_kv_transfer_params"
    asked = written_keys(function(tree, ask, "NixlConnectorProtocol"), "remote_host")
    assert asked == ours(TABLES["nixl"], "P", KNOWN["vllm"]) - {"kv_hint"}
    asked = written_keys(function(tree, ask, "MooncakeConnectorProtocol"), "transfer_id")
    mooncake = TABLES["mooncake"]
    assert asked == ours(mooncake, "P", KNOWN["vllm"]) - {"kv_hint"}
    told = function(tree, "decode_request_kv_transfer_params", "MooncakeConnectorProtocol")
    marks = {row.name for row in mooncake.native_keys if row.marker_values or row.default_values}
    assert (
        written_keys(told, "transfer_id")
        == {row.name for row in mooncake.native_keys if "D" in row.required_legs} | marks
    )
    assert {"NixlConnector", "MooncakeConnector", "LMCacheMPConnector"} <= texts(tree)


def test_dynamos_envelope_is_ours() -> None:
    tree = source("dynamo/vllm/handlers.py")
    handed = TABLES["dynamo-vllm"].home("D")
    assert handed == ("prefill_result", "disaggregated_params", "kv_transfer_params")
    assert handed[0] in read_keys(tree, "request")
    assert handed[1] in read_keys(tree, "prefill_result")
    assert handed[2] in read_keys(tree, "disaggregated_params")
    assert TABLES["dynamo-vllm"].home("R") == handed[1:]
    assert handed[1] in texts(tree)
    inside = {row.name for row in TABLES["dynamo-vllm"].native_keys if row.parents == ("routing",)}
    assert read_keys(tree, "routing") & inside == {"dp_rank"}, "what is read of our routing"
    assert {"token_ids", "kv_hint"} <= texts(tree) | texts(source("dynamo/vllm/kv_hints.py"))


def test_dynamos_sglang_workers_read_and_answer_with_our_keys() -> None:
    handlers = "dynamo/sglang/request_handlers/llm"
    table = TABLES["dynamo-sglang"]
    keys = {row.name for row in table.native_keys if "R" in row.legs and row.location == "home"}
    answered = written_keys(source(f"{handlers}/prefill_handler.py"), "bootstrap_room")
    assert answered == keys == {row.name for row in table.native_keys if "D" in row.required_legs}
    assert read_keys(source(f"{handlers}/decode_handler.py"), "bootstrap_info") == keys
    (home,) = table.home("D")
    assert home in read_keys(source(f"{handlers}/decode_handler.py"), "request")


def test_dynamo_names_the_fields_of_trtllm_as_we_do() -> None:
    utils, base = "dynamo/trtllm/utils/disagg_utils.py", "dynamo/trtllm/request_handlers/handler_base.py"
    table = TABLES["dynamo-trtllm"]
    names = {row.name for row in table.native_keys if row.location == "home"}
    assert {"opaque_state"} <= names & set(members(utils, "DisaggregatedParamsCodec"))
    assert {"first_gen_log_probs"} <= names & texts(source(utils))
    assert {"request_type", "disagg_request_id"} <= names & set(members(base, "HandlerBase"))
    assert "worker_id" in names & read_keys(source(base), "params_dict")
    assert {"generation_only", "context_only"} <= texts(source(base))
    assert table.home("D")[-1] in read_keys(source(base), "prefill_result")


def test_headers_and_salts_are_read_where_our_tables_have_them() -> None:
    serving = texts(source("vllm/entrypoints/generate/base/serving.py"))
    assert "x-data-parallel-rank" in {text.lower() for text in serving}
    for path in (
        "vllm/entrypoints/openai/completion/protocol.py",
        "vllm/entrypoints/openai/chat_completion/protocol.py",
    ):
        found = fields(source(path), "CompletionRequest" if "/completion/" in path else "ChatCompletionRequest")
        assert {"cache_salt", "kv_transfer_params"} <= found
    reused = function(source("vllm/renderers/online_renderer.py"), "_reused_prompt_token_ids")
    assert read_keys(reused, "kv") == {"prompt_token_ids"}


def test_a_field_that_is_renamed_is_noticed() -> None:
    """The control: the helpers above see what they look for, and miss what is not there."""
    tree = ast.parse(
        "def request_finished():\n"
        "    x = params['remote_engine'] or params.get('remote_host') or ('transfer_id' in req.params)\n"
        "    return dict(remote_block_ids=1, remote_machine=2)\n"
        "class PDRoutingFields:\n    bootstrap_door: int = 1\n"
    )
    assert read_keys(tree, "params") == {"remote_engine", "remote_host", "transfer_id"}
    assert written_keys(function(tree, "request_finished"), "remote_block_ids") == {
        "remote_block_ids",
        "remote_machine",
    }
    assert not fields(tree, "PDRoutingFields") <= {row.name for row in TABLES["sglang"].native_keys}
    with pytest.raises(AssertionError, match="not there any more"):
        function(tree, "request_begun")


def test_every_leg_has_a_phase() -> None:
    assert {leg for table in TABLES.values() for leg in table.container_paths} <= set(PHASES)
