"""Blocks of streams of rows that never end, with a state to go on from.

Each reader (a worker of a rank) has its own share of a stream's rows and passes over it again and again. It packs the
documents as `lin_attn.data.store` does, end d0 d0 end d1 end ..., and cuts that into blocks whose every token but the
first is a target once a pass. Blocks are shuffled in windows: of W blocks that follow each other, by (seed, reader,
window). A mixture takes its next block from the source that is furthest behind its share.

The state of a reader is where its current window began: for each source the state of the rows before the document in
which the next block begins, and how much of that document has been given; then the number of the window, and how many
of its blocks have been given. Going on reads that one window again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from lin_attn.data.blocks import IGNORED, Batch
from lin_attn.data.splits import bytes_hash
from lin_attn.data.tokenizer import Tokenizer, Tokens

State = dict[str, Any]


@dataclass(frozen=True)
class Share:
    """Documents whose hash, of their bytes, lies in [start, stop)."""

    start: float = 0.0
    stop: float = 1.0

    def has(self, text: bytes) -> bool:
        """Whether a document is of this share."""
        return (self.start, self.stop) == (0.0, 1.0) or self.start <= bytes_hash(text) < self.stop


@dataclass(frozen=True)
class Stream:
    """One source: a rank's share of the rows, where they have text, which documents count, and its weight."""

    rows: Any
    text_column: str
    share: Share = Share()
    weight: float = 1.0


def row_bytes(row: dict[str, Any], column: str) -> bytes:
    """The text of a row; null is an empty row.

    Raises:
        ValueError: The column holds something else than text.
    """
    value = row[column]
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if value is None or isinstance(value, bytes):
        return value or b""
    raise ValueError(f"column {column!r} holds a {type(value).__name__}, wanted text")


class _Packer:
    """Cuts one stream into blocks of N targets, endlessly; `state` is where the next block begins."""

    def __init__(self, stream: Stream, tokenizer: Tokenizer, block_length: int, state: State | None) -> None:
        self._stream, self._tokenizer, self._block_length = stream, tokenizer, block_length
        self._documents = self._read(state["pass"], state["rows"]) if state else self._read(0, None)
        # The first document is read from its beginning; what was given of it is dropped.
        self.state: State = dict(state) if state else {"pass": 0, "rows": None, "given": 0, "last": tokenizer.end_id}
        self._targets: Tokens = np.empty(0, dtype=np.int64)
        self._n_bytes: Tokens = np.empty(0, dtype=np.int64)
        self._starts: list[tuple[State, int]] = []  # of each document that is held: the state before it, its length
        self._drop = self.state["given"]

    def block(self) -> dict[str, Any]:
        """The next block: a row of a batch."""
        n = self._block_length
        while len(self._targets) < n:
            before, targets, n_bytes = next(self._documents)
            self._starts.append((before, len(targets)))
            self._targets = np.concatenate([self._targets, targets[self._drop :]])
            self._n_bytes = np.concatenate([self._n_bytes, n_bytes[self._drop :]])
            self._drop = 0
        targets, self._targets = self._targets[:n], self._targets[n:]
        row = {
            "tokens": np.concatenate([[self.state["last"]], targets[:-1]]),
            "targets": targets,
            "n_bytes": self._n_bytes[:n].sum(),
            "start": IGNORED,  # a place in an endless stream has no use
        }
        self._n_bytes = self._n_bytes[n:]
        given = self.state["given"] + n
        while self._starts and given >= self._starts[0][1]:
            given -= self._starts.pop(0)[1]
        # With nothing left over, the next document begins where the rows now stand.
        before = self._starts[0][0] if self._starts else self._now
        self.state = {**before, "given": given, "last": int(targets[-1])}
        return row

    def _read(self, which: int, rows_state: State | None) -> Iterator[tuple[State, Tokens, Tokens]]:
        """Each document: the state before it, and its targets with their bytes, the end included."""
        rows, column = self._stream.rows, self._stream.text_column
        table = self._tokenizer.token_bytes
        rows.load_state_dict(rows_state)
        while True:
            self._now: State = {"pass": which, "rows": rows_state}
            found = 0
            for row in rows:
                before, self._now = self._now, {"pass": which, "rows": rows.state_dict()}
                text = row_bytes(row, column)
                if not self._stream.share.has(text):
                    continue
                pieces = list(self._tokenizer.encode_pieces([text]))
                tokens = np.concatenate([piece.tokens for piece in pieces]) if pieces else np.empty(0, np.int64)
                if not len(tokens):
                    continue
                found += 1
                targets = np.append(tokens, self._tokenizer.end_id).astype(np.int64)
                if table is not None:
                    n_bytes = table[targets]
                else:
                    n_bytes = np.append(np.concatenate([piece.n_bytes for piece in pieces]), 0)
                yield before, targets, n_bytes
            if not found and rows_state is None:
                raise ValueError(
                    "a reader of the stream found no text; wanted more rows, or fewer workers and processes"
                )
            which, rows_state = which + 1, None
            rows.load_state_dict(None)  # from the beginning


class StreamBlocks(IterableDataset[Batch]):
    """Batches of a mixture of streams, without end; beside its tensors a batch has its worker and the state after it.

    Args:
        streams: The sources; their rows are those of this rank.
        tokenizer: Makes the tokens.
        block_length: N.
        batch_size: B.
        shuffle_blocks: W, how many blocks that follow each other are shuffled.
        seed: Of their order.
        rank: This process.
    """

    def __init__(
        self,
        streams: list[Stream],
        tokenizer: Tokenizer,
        block_length: int,
        batch_size: int,
        *,
        shuffle_blocks: int,
        seed: int = 0,
        rank: int = 0,
    ) -> None:
        self._streams, self._tokenizer = streams, tokenizer
        self._block_length, self.batch_size = block_length, batch_size
        self._window, self._seed, self._rank = shuffle_blocks, seed, rank
        self.states: list[State | None] = []  # of each worker, to go on from
        self.next_worker = 0  # which gives the next batch

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        worker = info.id if info else 0
        if worker < self.next_worker:  # DataLoader asks the first worker first: those before the next one pass
            yield {}
        blocks = self._blocks(worker, self.states[worker] if self.states else None)
        while True:
            rows, states = zip(*(next(blocks) for _ in range(self.batch_size)), strict=True)
            batch = {name: torch.from_numpy(np.array([row[name] for row in rows], dtype=np.int64)) for name in rows[0]}
            yield {**batch, "worker": worker, "state": states[-1]}  # type: ignore[dict-item]

    def _blocks(self, worker: int, state: State | None) -> Iterator[tuple[dict[str, Any], State]]:
        n, weights = len(self._streams), np.array([stream.weight for stream in self._streams])
        state = state or {"sources": [None] * n, "counts": [0] * n, "window": 0, "index": 0}
        packers = [
            _Packer(stream, self._tokenizer, self._block_length, source)
            for stream, source in zip(self._streams, state["sources"], strict=True)
        ]
        counts, window, index = np.array(state["counts"]), state["window"], state["index"]
        while True:
            began = {"sources": [packer.state for packer in packers], "counts": counts.tolist(), "window": window}
            rows = []
            for _ in range(self._window):
                source = int(np.argmax(weights / weights.sum() * (counts.sum() + 1) - counts))
                rows.append(packers[source].block())
                counts[source] += 1
            seeds = np.random.SeedSequence([self._seed, self._rank, worker, window])
            order = np.random.Generator(np.random.Philox(seeds)).permutation(self._window)
            for place in range(index, self._window):
                yield rows[order[place]], {**began, "index": place + 1}
            window, index = window + 1, 0
