"""A model's own tokenizer in this process: HF `tokenizers`, its chat template, and what was encoded before.

The ids are always those of the whole text, however much of it was cached.
"""

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from tokenizers import Tokenizer

from kvparams_proxy.tokenization.chat_template import ChatTemplate
from kvparams_proxy.tokenization.errors import TokenizerError, UnsupportedChatError
from kvparams_proxy.tokenization.safe_split_points import SafeSplitPoints, may_split_between_words
from kvparams_proxy.tokenization.segment_cache import SegmentCache
from kvparams_proxy.tokenization.text_prefix_cache import EncodedText, TextPrefixCache

__all__ = ["CACHE_BYTES", "LocalEncodingJob", "LocalTokenizer"]

CACHE_BYTES: Final = 64 << 20
_LONGEST_CHARS: Final = 1024
"""A part that is longer is encoded where other threads may run beside it: `encode_batch_fast` gives the interpreter's
lock away, `encode` does not (tokenizers 0.23), but is there at once."""


class LocalEncodingJob:
    """Encodes one text: keeps the known token ids, and the parts that are still to be encoded."""

    __slots__ = ("_begun", "_finer", "_ids", "_parts", "_special", "_text", "_tokenizer", "missing_chars")

    def __init__(self, tokenizer: "LocalTokenizer", text: str, *, special: bool) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._special = special
        begun = self._begun = tokenizer.prefix_cache.find(text, special=special)
        parts = self._parts = tokenizer.split_points.split(
            text, 0 if begun is None else begun[0].split_points[begun[1] - 1]
        )
        finer = tokenizer.split_points.split_finely(parts[-1])
        self._finer = len(finer)
        parts[-1:] = finer
        self._ids = tokenizer.segment_cache.look_up(parts)
        missing = (len(part) for part, ids in zip(parts, self._ids, strict=True) if ids is None)
        self.missing_chars: Final = sum(missing)

    def encode(self) -> "array[int]":
        """Returns all token ids, after encoding the missing ones. Any thread may call it.

        Raises:
            UnicodeError: the text has half a surrogate pair in it.
        """
        tokenizer = self._tokenizer
        before, behind = tokenizer.surrounding_special_tokens if self._special else ((), ())
        cut, cuts, ends = 0, list[int](), list[int]()
        whole = array("I", before)
        if self._begun is not None:
            other, alike = self._begun
            cuts, ends = list(other.split_points[:alike]), list(other.id_counts[:alike])
            cut, whole = cuts.pop(), other.ids[: ends.pop()]
        coarse = len(self._parts) - self._finer
        for number, (part, known) in enumerate(zip(self._parts, self._ids, strict=True)):
            if cut and number <= coarse:
                cuts.append(cut)
                ends.append(len(whole))
            ids = known
            if ids is None:
                ids = tokenizer.encode(part)
                tokenizer.segment_cache.add(part, ids)
            whole.extend(ids)
            cut += len(part)
        whole.extend(behind)
        tokenizer.prefix_cache.add(EncodedText(self._text, cuts, ends, whole), special=self._special)
        return whole


class LocalTokenizer:
    """The tokenizer of one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: Mapping[str, ChatTemplate] | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """Prepares the tokenizer and its caches.

        Args:
            tokenizer: is changed: no truncation, no padding.
            templates: by name, `default` and perhaps `tool_use`.
            cache_bytes: for what was encoded before.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer: Final = tokenizer
        self._templates = templates or {}
        self.split_points: Final = SafeSplitPoints(
            tokenizer.get_added_tokens_decoder().values(),
            normalizes=tokenizer.normalizer is not None,
            words=may_split_between_words(_said(tokenizer.normalizer), _said(tokenizer.pre_tokenizer)),
        )
        self.prefix_cache: Final = TextPrefixCache(cache_bytes // 4, self.split_points.lookahead_chars)
        self.segment_cache: Final = SegmentCache(cache_bytes - cache_bytes // 4)
        self.surrounding_special_tokens: Final = _surrounding_special_tokens(tokenizer)
        """The special tokens before and behind a text that is no chat."""

    def encode(self, part: str) -> "array[int]":
        """Returns the ids of one part, without special tokens around it."""
        if len(part) > _LONGEST_CHARS:
            return array("I", self._tokenizer.encode_batch_fast([part], add_special_tokens=False)[0].ids)
        return array("I", self._tokenizer.encode(part, add_special_tokens=False).ids)

    def encode_chat(self, document: Mapping[str, object], max_chars: int) -> LocalEncodingJob:
        """Returns a job that encodes the prompt of a chat request.

        Raises:
            UnsupportedChatError: it cannot be rendered here.
            RenderLimitError: it is longer than `max_chars`.
            jinja2.TemplateError: the template refuses it.
        """
        name = "tool_use" if document.get("tools") is not None and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise UnsupportedChatError("the tokenizer has no chat template")
        special = document.get("add_special_tokens") is True
        return LocalEncodingJob(self, template.render(document, max_chars), special=special)

    def encode_completion(self, document: Mapping[str, object], max_chars: int) -> LocalEncodingJob:
        """Returns a job that encodes a completion request with one prompt of text.

        Raises:
            UnsupportedChatError: it has none, or a longer one than `max_chars`.
        """
        prompt = document.get("prompt")
        if isinstance(prompt, list) and len(cast("list[object]", prompt)) == 1:
            prompt = cast("list[object]", prompt)[0]
        if not isinstance(prompt, str) or len(prompt) > max_chars:
            raise UnsupportedChatError("there is not one prompt of text")
        return LocalEncodingJob(self, prompt, special=document.get("add_special_tokens") is not False)


def _said(part: Any) -> object:
    """A part of a tokenizer, as its file has it."""
    return None if part is None else json.loads(part.__getstate__())


def _surrounding_special_tokens(tokenizer: Tokenizer) -> tuple[Sequence[int], Sequence[int]]:
    """Finds the tokens that the tokenizer adds before and behind a text, by encoding one."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare) :])
    raise TokenizerError("the tokenizer changes a text that it puts special tokens around")
