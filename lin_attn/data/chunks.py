"""Cutting a document into chunks that a subword tokenizer can take one by one.

Where the cuts fall is a function of the document's bytes alone, so that a document has the same tokens however it
arrives. A cut stands before a space that follows a visible character, where the usual pre-tokenizers (those of GPT-2
and its successors) end a word whatever comes next: the chunks then have the tokens that the whole document has. Only
a text without such a place in 32 KiB is cut before a line's end or, at last, between two characters.
"""

from collections.abc import Iterable, Iterator

CHUNK = 1 << 16


def cut(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Cuts a document.

    Args:
        pieces: Its bytes, in pieces of any size.

    Returns:
        An iterator over chunks of 1 to 65536 bytes, which joined are the document.
    """
    held = bytearray()
    for piece in pieces:
        held += piece
        start = 0
        while len(held) - start > CHUNK:
            stop = _last_place(held, start + CHUNK // 2, start + CHUNK)
            yield bytes(held[start:stop])
            start = stop
        del held[:start]
    if held:
        yield bytes(held)


def _last_place(text: bytearray, first: int, last: int) -> int:
    """The last good index to cut before, in (first, last]."""
    for blank in (b" ", b"\n"):
        place = last
        while (place := text.rfind(blank, first + 1, place)) != -1:
            if _is_visible(text, place):
                return place
    while text[last] & 0xC0 == 0x80 and last > first + 1:  # inside a character
        last -= 1
    return last


def _is_visible(text: bytearray, place: int) -> bool:
    """Whether the character before `place` is no white space."""
    before = text[place - 1]
    if before < 0x80:
        return 0x20 < before < 0x7F
    character = bytes(text[max(place - 4, 0) : place]).decode("utf-8", "ignore")[-1:]
    return bool(character) and not character.isspace()
