"""A model's own tokenizer in this process: HF `tokenizers`, its chat template, and what was encoded before.

The one rule: the ids are those of the whole text, however much of it was known.
"""

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from tokenizers import Tokenizer

from kvparams_proxy.tokens.beginnings import Beginnings, Encoded
from kvparams_proxy.tokens.chat import ChatTemplate
from kvparams_proxy.tokens.choices import TokenizerError
from kvparams_proxy.tokens.conversation import NotText
from kvparams_proxy.tokens.cuts import Cuts, splits_words
from kvparams_proxy.tokens.segments import Segments

__all__ = ["CACHE_BYTES", "LocalTokenizer", "Work"]

CACHE_BYTES: Final = 64 << 20
_LONGEST_CHARS: Final = 1024
"""A part that is longer is encoded where other threads may run beside it: `encode_batch_fast` gives the interpreter's
lock away, `encode` does not (tokenizers 0.23), but is there at once."""


class Work:
    """One text on its way to its token ids: what is known of it, and what is still to be encoded."""

    __slots__ = ("_begun", "_finer", "_ids", "_parts", "_special", "_text", "_tokenizer", "missing_chars")

    def __init__(self, tokenizer: "LocalTokenizer", text: str, *, special: bool) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._special = special
        begun = self._begun = tokenizer.beginnings.find(text, special=special)
        parts = self._parts = tokenizer.cuts.parts(text, 0 if begun is None else begun[0].cuts[begun[1] - 1])
        finer = tokenizer.cuts.finer(parts[-1])
        self._finer = len(finer)
        parts[-1:] = finer
        self._ids = tokenizer.segments.look_up(parts)
        missing = (len(part) for part, ids in zip(parts, self._ids, strict=True) if ids is None)
        self.missing_chars: Final = sum(missing)

    def ids(self) -> "array[int]":
        """All token ids; encodes what is missing. For any thread.

        Raises:
            UnicodeError: the text has half a surrogate pair in it.
        """
        tokenizer = self._tokenizer
        before, behind = tokenizer.around if self._special else ((), ())
        cut, cuts, ends = 0, list[int](), list[int]()
        whole = array("I", before)
        if self._begun is not None:
            other, alike = self._begun
            cuts, ends = list(other.cuts[:alike]), list(other.ends[:alike])
            cut, whole = cuts.pop(), other.ids[: ends.pop()]
        coarse = len(self._parts) - self._finer
        for number, (part, known) in enumerate(zip(self._parts, self._ids, strict=True)):
            if cut and number <= coarse:
                cuts.append(cut)
                ends.append(len(whole))
            ids = known
            if ids is None:
                ids = tokenizer.encode(part)
                tokenizer.segments.keep(part, ids)
            whole.extend(ids)
            cut += len(part)
        whole.extend(behind)
        tokenizer.beginnings.keep(Encoded(self._text, cuts, ends, whole), special=self._special)
        return whole


class LocalTokenizer:
    """One model's."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: Mapping[str, ChatTemplate] | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """
        Args:
            tokenizer: is changed: no truncation, no padding.
            templates: by name, `default` and perhaps `tool_use`.
            cache_bytes: for what was encoded before.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer: Final = tokenizer
        self._templates = templates or {}
        self.cuts: Final = Cuts(
            tokenizer.get_added_tokens_decoder().values(),
            normalizes=tokenizer.normalizer is not None,
            words=splits_words(_said(tokenizer.normalizer), _said(tokenizer.pre_tokenizer)),
        )
        self.beginnings: Final = Beginnings(cache_bytes // 4, self.cuts.margin)
        self.segments: Final = Segments(cache_bytes - cache_bytes // 4)
        self.around: Final = _around(tokenizer)
        """The special tokens before and behind a text that is no chat."""

    def encode(self, part: str) -> "array[int]":
        """The ids of one part, without special tokens around it."""
        if len(part) > _LONGEST_CHARS:
            return array("I", self._tokenizer.encode_batch_fast([part], add_special_tokens=False)[0].ids)
        return array("I", self._tokenizer.encode(part, add_special_tokens=False).ids)

    def chat(self, document: Mapping[str, object], max_chars: int) -> Work:
        """That of a chat request's prompt.

        Raises:
            NotText: it cannot be rendered here.
            TooMuch: it is longer than `max_chars`.
            jinja2.TemplateError: the template refuses it.
        """
        name = "tool_use" if document.get("tools") is not None and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise NotText("the tokenizer has no chat template")
        special = document.get("add_special_tokens") is True
        return Work(self, template.render(document, max_chars), special=special)

    def text(self, document: Mapping[str, object], max_chars: int) -> Work:
        """That of a completion request with one prompt of text.

        Raises:
            NotText: it has none, or a longer one than `max_chars`.
        """
        prompt = document.get("prompt")
        if isinstance(prompt, list) and len(cast("list[object]", prompt)) == 1:
            prompt = cast("list[object]", prompt)[0]
        if not isinstance(prompt, str) or len(prompt) > max_chars:
            raise NotText("there is not one prompt of text")
        return Work(self, prompt, special=document.get("add_special_tokens") is not False)


def _said(part: Any) -> object:
    """A part of a tokenizer, as its file has it."""
    return None if part is None else json.loads(part.__getstate__())


def _around(tokenizer: Tokenizer) -> tuple[Sequence[int], Sequence[int]]:
    """What the tokenizer puts before and behind a text: seen from what it does with one."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare) :])
    raise TokenizerError("the tokenizer changes a text that it puts special tokens around")
