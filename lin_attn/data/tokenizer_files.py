"""A model's tokenizer in its folder.

config.json says which it is: null, a name, or {"name": …, "special_tokens": [pad, class, …]} for one with special
tokens on top (lin_attn.data.SpecialTokens). "bytes" has no files. "tokenizers" and "jieba" have their definition in
tokenizer.json and the text of their end token in tokenizer_config.json, where other programs look for both.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from lin_attn.data.tokenizer import Tokenizer, tokenizer_from_dict

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
WITH_FILES = ("tokenizers", "jieba")
NAMES = ("bytes", *WITH_FILES)


class _Entry(NamedTuple):
    name: str | None
    special_tokens: list[str] | None


def entry_of(tokenizer: Tokenizer | None) -> Any:
    """What config.json says of a tokenizer: plain values."""
    if tokenizer is None:
        return None
    plain = tokenizer.to_dict()
    if plain["name"] == "special":
        return {"name": plain["tokenizer"]["name"], "special_tokens": plain["special"]}
    return plain["name"]


def plain_name(tokenizer: Tokenizer | None) -> str | None:
    """The name of a tokenizer, or of the one under its special tokens."""
    return _parsed(entry_of(tokenizer)).name


def files_of(entry: Any) -> set[str]:
    """The files that a tokenizer has beside config.json.

    Raises:
        ValueError: if config.json can say no such thing.
    """
    return {TOKENIZER, TOKENIZER_CONFIG} if _parsed(entry).name in WITH_FILES else set()


def write_tokenizer(tokenizer: Tokenizer | None, folder: Path) -> list[str]:
    """Writes a tokenizer's files; their names."""
    plain = {} if tokenizer is None else tokenizer.to_dict()
    plain = plain["tokenizer"] if plain.get("name") == "special" else plain
    if plain.get("name") not in WITH_FILES:
        return []
    (folder / TOKENIZER).write_bytes(plain["json"].encode("utf-8"))
    told = json.dumps({"eos_token": plain["end_token"]}, indent=2, ensure_ascii=False)
    (folder / TOKENIZER_CONFIG).write_text(told + "\n", encoding="utf-8")
    return [TOKENIZER, TOKENIZER_CONFIG]


def read_tokenizer(entry: Any, folder: Path) -> Tokenizer | None:
    """The tokenizer of a folder whose config.json has this entry.

    Raises:
        ValueError: if it cannot be read.
    """
    name, special_tokens = _parsed(entry)
    if name is None:
        return None
    plain: dict[str, Any] = {"name": name}
    try:
        if name in WITH_FILES:
            plain["json"] = (folder / TOKENIZER).read_bytes().decode("utf-8")
            plain["end_token"] = json.loads((folder / TOKENIZER_CONFIG).read_bytes().decode("utf-8"))["eos_token"]
        if special_tokens is not None:
            plain = {"name": "special", "tokenizer": plain, "special": special_tokens}
        return tokenizer_from_dict(plain)
    except Exception as error:  # whatever the library makes of a file
        raise ValueError(f"the tokenizer of {folder} cannot be read: {error}") from None


def _parsed(entry: Any) -> _Entry:
    if isinstance(entry, dict) and set(entry) == {"name", "special_tokens"}:
        names = entry["special_tokens"]
        if entry["name"] in NAMES and isinstance(names, list) and all(isinstance(name, str) for name in names):
            return _Entry(entry["name"], names)
    elif entry is None or entry in NAMES:
        return _Entry(entry, None)
    raise ValueError(
        f"tokenizer is {entry!r}; wanted null, one of {', '.join(NAMES)}, or an object of a name and special_tokens"
    )
