"""Trains small tokenizers on the spot, and provides chat templates in the forms of three families of models."""

import json
from functools import cache
from pathlib import Path
from typing import Final, cast

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

__all__ = ["CHATML", "LLAMA3", "MISTRAL", "SPECIALS", "byte_level", "metaspace", "save"]

SPECIALS: Final = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "<|im_start|>extra"),  # the last one is longer than one that it begins with
)
_ROOT: Final = Path(__file__).parents[3]

CHATML: Final = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {% generation %}{{- message.content }}{% endgeneration %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set function = tool_call.function %}
            {{- '\\n<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
"""As Qwen 3 has it: text content, tools as JSON, a switch of its own."""

LLAMA3: Final = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'][0]['text'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if documents %}
    {%- for document in documents %}
        {{- document.title + ": " + document.text + "\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role not in ('user', 'assistant', 'tool') %}
        {{- raise_exception('Unknown role ' + message.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for content in message['content'] %}
            {%- if content['type'] == 'text' %}
                {{- content['text'] | trim }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
"""As Llama 3.2 with images has it: content in parts, the date."""

MISTRAL: Final = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and loop.last %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {{- tool.function | tojson }}
                {%- if not loop.last %}{{- ", " }}{%- endif %}
            {%- endfor %}
            {{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {{- tool_call.function | tojson }}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- "[/TOOL_RESULTS]" }}
    {%- else %}
        {{- raise_exception("Only user, assistant and tool roles are supported!") }}
    {%- endif %}
    {%- if loop.index > 5000 %}{% break %}{% endif %}
{%- endfor %}
"""
"""As Mistral has it: no generation prompt, tools before the last question."""


def byte_level(*, nfc: bool = False) -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it. A new one each time, the same one within a process."""
    return Tokenizer.from_str(_byte_level(nfc))


def metaspace() -> Tokenizer:
    """As Llama 2 and Mistral have it: a blank becomes a mark, and one is put before the text where it begins."""
    return Tokenizer.from_str(_metaspace())


@cache
def _byte_level(nfc: bool) -> str:
    tokenizer = Tokenizer(models.BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _trained(tokenizer, pre_tokenizers.ByteLevel.alphabet())


@cache
def _metaspace() -> str:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<s>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    return _trained(tokenizer, [])


def _trained(tokenizer: Tokenizer, alphabet: list[str]) -> str:
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    text = (_ROOT / "LICENSE").read_text()
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    begin = cast("int", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", begin)])
    return tokenizer.to_str()


def save(tokenizer: Tokenizer, folder: Path, template: str | None = CHATML, **config: object) -> Path:
    """Write it as a model's folder has it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
