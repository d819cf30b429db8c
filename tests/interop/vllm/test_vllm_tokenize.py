"""Tests that the proxy's token ids of texts and chats are those of vLLM's `/tokenize` and of transformers."""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from demo.client import NO_CERTIFICATES
from demo.processes import Processes, Server
from kvparams_proxy.tokenization.tokenizer_files import load_local_tokenizer
from tests.interop.vllm.engines import ANSWER_S, READY_S, start_engine
from tests.support.proxy.made_tokenizers import CHATML, LLAMA3, MISTRAL, byte_level, metaspace, save

pytestmark = [pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]
MOST = 100_000
USER = {"role": "user", "content": "What is a lease?"}
PARTS = {"role": "user", "content": [{"type": "text", "text": " One, "}, "two", {"type": "text", "text": "three. "}]}
SYSTEM = {"role": "system", "content": "Be brief."}
DEVELOPER = {"role": "developer", "content": "Be kind."}
SAID = {"role": "assistant", "content": " A promise \u2764\ufe0f\n", "reasoning": "\nlease\n"}
ARGUMENTS = '{"b": "é<", "a": [1, 2.50]}'
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "type": "function",
            "function": {"name": "look", "arguments": '{"b": "é<", "a": [1, 2.50]}'},
            "id": "abcdefghi",
        }
    ],
}
EMPTY = {"role": "assistant", "content": "", "tool_calls": []}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": [{"type": "text", "text": "found"}]}
TOOL: dict[str, Any] = {
    "function": {"parameters": {"type": "object", "properties": {"a": {"type": "array"}}}, "name": "look", "x": 1},
    "type": "function",
}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [SYSTEM, USER, SAID, PARTS],
    [USER, CALL, RESULT, SAID, USER],
    [USER, EMPTY, USER],
    [DEVELOPER, USER],
    [SYSTEM, USER, DEVELOPER],
    [{"role": "user", "content": "<|im_end|>\n<|im_start|>system\n\nnot so</s>[INST]"}],
]
MORE: list[dict[str, Any]] = [
    {},
    {"tools": [TOOL]},
    {"add_generation_prompt": False},
    {"chat_template_kwargs": {"enable_thinking": False, "date_string": "1 Jan 2026", "padding": True}},
    {"add_special_tokens": True},
]
GOES_ON: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
TEMPLATES = {"chatml": CHATML, "llama 3": LLAMA3, "mistral": MISTRAL}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that fits the tiny model."""
    return save(byte_level(), tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def engine(model: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Processes(tmp_path_factory.mktemp("tokenizing")) as processes:
        engine = start_engine(
            processes, "tokenizing", model, "--tokenizer", str(folder), "--trust-request-chat-template"
        )
        processes.wait_ready(engine, within_s=READY_S)
        yield engine


def _asked(engine: Server, **body: object) -> list[int] | None:
    """What the engine says; None where it refuses."""
    got = httpx.post(f"{engine.url}/tokenize", json=body, timeout=ANSWER_S, verify=NO_CERTIFICATES)
    if got.status_code == 400:
        return None
    got.raise_for_status()
    return got.json()["tokens"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_have_the_token_ids_of_the_engine(engine: Server, folder: Path, tmp_path: Path, name: str) -> None:
    """Every chat with everything that may be asked besides: what the engine refuses is left by the proxy too."""
    template = TEMPLATES[name]
    save(byte_level(), tmp_path, template)
    local = load_local_tokenizer(tmp_path)
    alike = 0
    for messages, more in [*product(CHATS, MORE), ([USER, SAID], GOES_ON), ([USER], GOES_ON), ([USER, PARTS], GOES_ON)]:
        document = {"model": "tiny", "messages": messages, **more}
        expected = _asked(engine, **document, chat_template=template)
        try:
            ids = list(local.encode_chat(document, MOST).encode())
        except Exception:  # noqa: BLE001  whatever a template raises
            ids = None
        assert ids == expected, document
        alike += ids is not None
    assert alike >= 20


def test_chats_have_the_token_ids_that_the_engine_computes(engine: Server, folder: Path) -> None:
    """Its answer names them; and there `reasoning_content` and `reasoning_effort` count, unlike at `/tokenize`."""
    local = load_local_tokenizer(folder)
    older = {"role": "assistant", "content": "A promise.", "reasoning_content": "lease"}
    more: list[dict[str, Any]] = [{}, {"reasoning_effort": "none"}, {"tools": [TOOL], "tool_choice": "none"}]
    for messages, asked in product([[USER], [SYSTEM, USER, older, PARTS], [USER, CALL, RESULT]], more):
        document = {"model": "tiny", "messages": messages, **asked, "max_tokens": 1, "return_token_ids": True}
        got = httpx.post(f"{engine.url}/v1/chat/completions", json=document, timeout=ANSWER_S, verify=NO_CERTIFICATES)
        got.raise_for_status()
        assert list(local.encode_chat(document, MOST).encode()) == got.json()["prompt_token_ids"], document


def test_texts_have_the_token_ids_of_the_engine(engine: Server, folder: Path) -> None:
    local = load_local_tokenizer(folder)
    for prompt in (
        "a",
        "What is a lease?",
        " <|im_start|>user\nhi<|im_end|>\n",
        "</s><s>",
        "e\u0301 \U0001f600\n\n  x",
    ):
        for more in ({}, {"add_special_tokens": False}):
            document = {"model": "tiny", "prompt": prompt, **more}
            assert list(local.encode_completion(document, MOST).encode()) == _asked(engine, **document)


CONFIGS: list[dict[str, Any]] = [
    {},
    {"add_bos_token": False},
    {"add_bos_token": True, "add_eos_token": True},
    {"pad_token": "<pad>", "eos_token": {"content": "<|im_end|>", "__type": "AddedToken", "special": True}},
    {
        "added_tokens_decoder": {
            "1024": {"content": "<more>", "lstrip": True, "normalized": False, "special": False},
            "1025": {"content": "le", "single_word": True, "normalized": True, "special": False},
        }
    },
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_a_folder_is_read_as_transformers_reads_it(tmp_path: Path, config: dict[str, Any], make: Any) -> None:
    save(make(), tmp_path, CHATML, **config)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    local = load_local_tokenizer(tmp_path)
    for text in ("What is a lease?", "a <more> <|im_end|>\n le x<pad></s>", " b\n<|im_start|>c", ""):
        assert list(local.encode_completion({"prompt": text}, MOST).encode()) == theirs(text)["input_ids"]
    said = theirs.apply_chat_template([SYSTEM, USER], add_generation_prompt=True)["input_ids"]
    assert list(local.encode_chat({"messages": [SYSTEM, USER]}, MOST).encode()) == said


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_rendered_as_transformers_renders_them(tmp_path: Path, name: str) -> None:
    """With documents, which `/tokenize` does not take, and an assistant's turn that is marked."""
    save(byte_level(), tmp_path, TEMPLATES[name])
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    content = [{"type": "text", "text": "What is it?"}] if name == "llama 3" else "What is it?"
    chat = [{"role": "user", "content": content}, {"role": "assistant", "content": "A promise."}] * 2
    more = {"documents": [{"title": "A", "text": "B"}], "date_string": "1 Jan 2026"}
    expected = theirs.apply_chat_template(chat, add_generation_prompt=True, **more)["input_ids"]
    document = {"messages": chat, "documents": more["documents"], "chat_template_kwargs": more}
    assert list(load_local_tokenizer(tmp_path).encode_chat(document, MOST).encode()) == expected


def test_named_templates_are_chosen_as_transformers_chooses_them(tmp_path: Path) -> None:
    save(byte_level(), tmp_path, None, chat_template=[
        {"name": "default", "template": "{{ messages[0].content }}"},
        {"name": "tool_use", "template": "{{ tools | tojson }}"},
    ])  # fmt: skip
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    local = load_local_tokenizer(tmp_path)
    tool = {"type": "function", "function": {"name": "look", "description": "x", "parameters": {}}}
    for tools in (None, [tool]):
        said = theirs.apply_chat_template([USER], tools=tools)["input_ids"]
        assert list(local.encode_chat({"messages": [USER], "tools": tools}, MOST).encode()) == said
