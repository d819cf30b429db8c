"""Reads the specification: the profiles, and the text of each requirement."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

__all__ = ["Profile", "Specification", "UnknownProfile", "load_specification", "vectors_folder"]

_PAGE: Final = "spec/draft/spec.md"
_ITEM: Final = re.compile(r"^- \*\*[a-z0-9.]+#(\d+\.\d+)\*\* (.*(?:\n  .*)*)", re.MULTILINE)
_HEADING: Final = re.compile(r"^## (\d+)\. (.+)$", re.MULTILINE)


class UnknownProfile(Exception):
    """There is no profile of this name."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A named set of requirements."""

    name: str
    title: str
    subject: str
    """What is tested: `proxy`, `engine`, `store`, `translator` or `events-reader`."""
    summary: str
    requirements: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Specification:
    """The profiles and the requirements of one version."""

    version: str
    profiles: Mapping[str, Profile]
    texts: Mapping[str, str]
    """The text of each requirement, by its number."""
    anchors: Mapping[str, str]
    """The heading under which each requirement stands, as the anchor of a link."""

    def profile(self, name: str, subject: str) -> Profile:
        """Returns a profile.

        Raises:
            UnknownProfile: there is none of this name for this subject.
        """
        found = self.profiles.get(name)
        if found is None or found.subject != subject:
            names = ", ".join(one.name for one in self.profiles.values() if one.subject == subject)
            raise UnknownProfile(f"there is no profile {name!r} for {subject}; there are: {names}")
        return found

    def link(self, requirement: str) -> str:
        """Returns the address of a requirement's section."""
        return f"{_PAGE}#{self.anchors.get(requirement, '')}"


def load_specification(folder: Path | None = None) -> Specification:
    """Reads the folder of the specification: that of the package, or of the repository that it is installed from."""
    folder = folder or _default_folder()
    content = cast("dict[str, Any]", json.loads((folder / "profiles.json").read_text("utf-8")))
    profiles = {
        name: Profile(name, one["title"], one["subject"], one["summary"], tuple(one["requirements"]))
        for name, one in content["profiles"].items()
    }
    text = (folder / "spec.md").read_text("utf-8")
    texts: dict[str, str] = dict(_ITEM.findall(text))
    headings = {number: _anchor(f"{number}. {title}") for number, title in _HEADING.findall(text)}
    anchors = {number: headings[number.partition(".")[0]] for number in texts}
    return Specification(content["version"], profiles, texts, anchors)


def _default_folder() -> Path:
    inside = Path(__file__).parent / "spec"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "spec" / "draft"


def vectors_folder() -> Path:
    """Returns the folder of the vectors of 1.0."""
    inside = Path(__file__).parent / "spec" / "vectors"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "spec" / "1.0" / "vectors"


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
