"""Which tokenizer a corpus is read with: bytes, a BPE to be trained on it, or one that is there already.

bytes                         each byte is a token
bpe                           trained on the training text
words, jieba                  the commonest words of the training text, see `lin_attn.data.words`
words:FILE, jieba:FILE        a vocabulary of words, a token a line
path/to/tokenizer.json        of the `tokenizers` library
path/to/folder                of a model that save_pretrained wrote, its special tokens and all; or with a
                              tokenizer.json, or what a tokenizer of transformers was saved as
path/to/model.ckpt            the tokenizer that a checkpoint carries
hub:OWNER/NAME                a folder as above, on the Hugging Face hub
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lin_attn.data.documents import Document
from lin_attn.data.tokenizer import ByteTokenizer, Tokenizer, tokenizer_from_dict
from lin_attn.data.tokenizer_files import files_of, read_tokenizer

PREFIX = "hub:"
TRAINED = ("bpe", "words", "jieba")
WORDS = ("words", "jieba")
VOCAB_SIZE = 8192
# Tried in this order where neither the user nor the tokenizer's own configuration names one.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]", "<|im_end|>")
DEFINITION, CONFIGURATION, MODEL = "tokenizer.json", "tokenizer_config.json", "config.json"


@dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer by name, with the options of one that is trained. The fields are those of `TextCorpus`.

    Raises:
        ValueError: An option is given that has no effect, or is out of range.
    """

    tokenizer: str = "bytes"
    vocab_size: int | None = None
    special_tokens: tuple[str, ...] = ()
    end_token: str | None = None

    def __post_init__(self) -> None:
        if not self.is_trained:
            for name in ("vocab_size", "special_tokens"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} is {getattr(self, name)!r} with tokenizer {self.tokenizer!r}, whose vocabulary is "
                        f"given; leave it out, or train one with tokenizer {', '.join(TRAINED)}"
                    )
        if self.tokenizer == "bytes" and self.end_token is not None:
            raise ValueError(
                f"end_token is {self.end_token!r} with tokenizer bytes, whose end has no text; leave it out"
            )
        for token in (*self.special_tokens, *([self.end_token] if self.is_trained and self.end_token else [])):
            if not token or any(letter.isspace() for letter in token):
                raise ValueError(f"a special token is {token!r}; wanted one without white space")
        named = [*self.special_tokens, self.trained_end]
        if len(set(named)) < len(named):
            raise ValueError(f"special_tokens are {list(self.special_tokens)}; wanted each once, without end_token")
        least = 256 + len(named)
        if self.vocab_size is not None and self.vocab_size < least:
            raise ValueError(f"vocab_size is {self.vocab_size}; wanted at least {least}: 256 bytes and special tokens")

    @property
    def is_trained(self) -> bool:
        """Whether it comes of the corpus."""
        return self.tokenizer in TRAINED

    @property
    def trained_end(self) -> str:
        """The end token of a tokenizer that is trained."""
        return self.end_token or END_TOKENS[0]

    @property
    def trained_size(self) -> int:
        """The vocabulary size that training is asked for."""
        return self.vocab_size or VOCAB_SIZE

    @property
    def recipe(self) -> str:
        """What a trained tokenizer depends on, besides the text."""
        kind = [f"{self.tokenizer}-1"]
        if self.tokenizer == "jieba":
            from lin_attn.data.words import jieba_version

            kind.append(jieba_version())
        return json.dumps([*kind, self.trained_size, self.special_tokens, self.trained_end])

    def train(self, documents: Iterable[Document]) -> Tokenizer:
        """Trains it on these documents."""
        if self.tokenizer == "bpe":
            from lin_attn.data.bpe import train_bpe

            return train_bpe(documents, self.trained_size, self.special_tokens, self.trained_end)
        from lin_attn.data.words import train_words

        return train_words(documents, self.trained_size, self.special_tokens, self.trained_end, self.tokenizer)

    def open(self) -> Tokenizer:
        """Opens a tokenizer that need not be trained.

        Raises:
            ValueError: It cannot be read, or the bytes of its tokens cannot be counted.
        """
        if self.tokenizer == "bytes":
            return ByteTokenizer()
        if self.tokenizer.startswith(PREFIX):
            return _from_hub(self.tokenizer.removeprefix(PREFIX), self.end_token)
        segmenter, colon, vocabulary = self.tokenizer.partition(":")
        if colon and segmenter in WORDS:
            from lin_attn.data.words import open_words

            return open_words(vocabulary, segmenter, self.end_token, END_TOKENS)
        path = os.path.expanduser(self.tokenizer)
        if path.endswith(".ckpt"):
            return _from_checkpoint(path, self.end_token)
        if os.path.isdir(path):
            if is_of_a_model(path):
                return _of_a_model(path, self.tokenizer, self.end_token)
            if not os.path.isfile(os.path.join(path, DEFINITION)):
                return _from_transformers(path, path, self.end_token)
            return _from_file(os.path.join(path, DEFINITION), os.path.join(path, CONFIGURATION), self.end_token)
        return _from_file(path, None, self.end_token)


@dataclass(frozen=True)
class MadeTokenizer(TokenizerSpec):
    """A tokenizer that is there as an object, such as that of a model; the other fields say nothing of it."""

    made: Tokenizer = field(default_factory=ByteTokenizer, kw_only=True)

    def open(self) -> Tokenizer:
        """The tokenizer itself."""
        return self.made


def _from_file(path: str, configuration: str | None, end_token: str | None) -> Tokenizer:
    definition = _read(path)
    end = None
    if end_token is None and configuration is not None and os.path.isfile(configuration):
        try:
            end = json.loads(_read(configuration)).get("eos_token")
        except (ValueError, AttributeError) as error:
            raise ValueError(f"cannot read {configuration!r}: {error}; wanted a JSON object") from None
        end = end["content"] if isinstance(end, dict) else end  # older files have the whole added token
    return _subword(definition, end_token or end, path)


def is_of_a_model(folder: str) -> bool:
    """Whether a folder is of a model that save_pretrained wrote, whose config.json says what its tokenizer is.

    Its tokenizer.json alone does not: not of special tokens, nor that jieba cuts the words, and bytes have none.
    """
    return "format_version" in _config(folder)


def _config(folder: str) -> dict[str, Any]:
    try:
        with open(os.path.join(folder, MODEL), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):  # of another library, or of none: its tokenizer is looked for by itself
        return {}
    return found if isinstance(found, dict) else {}


def _of_a_model(folder: str, label: str, end_token: str | None) -> Tokenizer:
    if end_token is not None:
        raise ValueError(f"end_token is {end_token!r}, and the tokenizer of a model has its own; leave it out")
    found = read_tokenizer(_config(folder).get("tokenizer"), Path(folder))
    if found is None:
        raise ValueError(f"the model {label!r} has no tokenizer; wanted one that was trained on text")
    return found


def _from_checkpoint(path: str, end_token: str | None) -> Tokenizer:
    if end_token is not None:
        raise ValueError(f"end_token is {end_token!r}, and the tokenizer of a checkpoint has its own; leave it out")
    import torch

    try:
        saved = torch.load(path, map_location="meta", weights_only=True, mmap=True)["tokenizer"]
    except Exception as error:  # what the reader makes of arbitrary bytes has no common type
        reason = "there is no such file" if not os.path.isfile(path) else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"cannot read a tokenizer from {path!r} ({reason}); wanted a checkpoint of lin-attn fit"
        ) from None
    return tokenizer_from_dict(saved)


def _from_hub(name: str, end_token: str | None) -> Tokenizer:
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    def fetch(file: str) -> str | None:
        try:
            return hf_hub_download(name, file)
        except LocalEntryNotFoundError:  # an EntryNotFoundError too, but says that the hub was not reached
            raise
        except EntryNotFoundError:
            return None

    def fetch_if_cached(file: str) -> str | None:
        try:
            return fetch(file)
        except LocalEntryNotFoundError:  # out of reach, and perhaps never there
            return None

    try:
        model = fetch_if_cached(MODEL)
        if model is not None and is_of_a_model(os.path.dirname(model)):
            folder = os.path.dirname(model)
            for file in files_of(_config(folder).get("tokenizer")):
                fetch(file)
            return _of_a_model(folder, f"{PREFIX}{name}", end_token)
        definition = fetch(DEFINITION)
        if definition is not None:
            return _from_file(definition, fetch_if_cached(CONFIGURATION), end_token)
    except ValueError as error:
        if not isinstance(error, OSError) and type(error) is ValueError:
            raise
        reason = _first_line(error)
    except Exception as error:  # the library raises many types
        reason = _first_line(error)
    else:
        return _from_transformers(name, f"{PREFIX}{name}", end_token)
    raise ValueError(
        f"cannot load the tokenizer {PREFIX}{name} ({reason}). If the hub cannot be reached, load it once with network "
        f"access into the cache {constants.HF_HUB_CACHE}, or set HF_HOME to a folder that holds it and "
        "HF_HUB_OFFLINE=1, or give the path of its tokenizer.json"
    )


def _from_transformers(path: str, label: str, end_token: str | None) -> Tokenizer:
    try:
        import transformers
    except ImportError:
        raise ValueError(
            f"tokenizer {label!r} has no {DEFINITION}; to read it in another form, install transformers"
        ) from None
    try:
        found: Any = transformers.AutoTokenizer.from_pretrained(path)
    except Exception as error:  # the library raises many types
        raise ValueError(
            f"cannot read the tokenizer {label!r}: {_first_line(error)}; wanted a folder with a {DEFINITION}, or what "
            "save_pretrained of transformers wrote"
        ) from None
    if not getattr(found, "is_fast", False):
        raise ValueError(
            f"tokenizer {label!r} is a {type(found).__name__}, which does not say what bytes its tokens stand for, so "
            f"that bits per byte could not be had; wanted one with a {DEFINITION}"
        )
    return _subword(found.backend_tokenizer.to_str(), end_token or found.eos_token, label)


def _subword(definition: str, end_token: str | None, label: str) -> Tokenizer:
    from lin_attn.data.subword import SubwordTokenizer

    try:
        if end_token is None:
            known = {token["content"] for token in json.loads(definition).get("added_tokens") or ()}
            end_token = next((token for token in END_TOKENS if token in known), None)
        if end_token is None:
            raise ValueError(f"it names no token that ends a document; choose with end_token, of {sorted(known)}")
        return SubwordTokenizer(definition, end_token)
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise ValueError(f"tokenizer {label!r}: {error}") from None


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"cannot read the tokenizer {path!r}: {reason}. Wanted bytes, bpe, words, jieba, a "
            f"tokenizer.json, a folder with one, a checkpoint, or {PREFIX}OWNER/NAME"
        ) from None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
