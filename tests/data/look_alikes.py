"""Small data sets on disk with the layout, the columns and the splits of those on the hub that configurations name."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SPLITS = ("train", "validation", "test")


def story(number: int) -> str:
    """Text of some hundred bytes, another one for each number."""
    return " ".join(f"Word {number} and number {number * i % 97}, é." for i in range(6))


def write_split(folder: Path, split: str, columns: Mapping[str, Sequence[Any]], n_files: int = 1) -> None:
    """Writes a split as Parquet files, named as the hub does."""
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table(dict(columns))
    size = -(-len(table) // n_files)
    for i in range(n_files):
        path = folder / f"{split}-{i:05}-of-{n_files:05}.parquet"
        pq.write_table(table.slice(i * size, size), path)


def wikitext(root: Path) -> Path:
    """Salesforce/wikitext: configurations in the card, a row a line, blank ones between."""
    card = ["---", "configs:"]
    for config in ("wikitext-2-raw-v1", "wikitext-103-raw-v1"):
        card.append(f"- config_name: {config}\n  data_files:")
        for number, split in enumerate(SPLITS):
            rows = ["", f" = {config} {split} = \n", "", *(f" {story(i + number)} \n" for i in range(20))]
            write_split(root / config, split, {"text": rows})
            card.append(f"  - split: {split}\n    path: {config}/{split}-*")
    (root / "README.md").write_text("\n".join([*card, "---", ""]))
    return root


def enwik8(root: Path) -> Path:
    """LTCB/enwik8 at refs/convert/parquet: a folder a configuration, no card."""
    text = "\n".join(f"  <page>{story(i)}</page>  " for i in range(40))
    for config, rows in (("enwik8", [line.strip() for line in text.split("\n")]), ("enwik8-raw", [text])):
        (root / config / "train").mkdir(parents=True)
        pq.write_table(pa.table({"text": rows}), root / config / "train" / "0000.parquet")
    return root


def text8(root: Path) -> Path:
    """afmck/text8: one row a split."""
    for number, split in enumerate(SPLITS):
        write_split(root / "data", split, {"text": [" anarchism originated as a term of abuse" * (20 + number)]})
    return root


def tinystories(root: Path) -> Path:
    """roneneldan/TinyStories: train and validation, a row a story."""
    write_split(root / "data", "train", {"text": [story(i) for i in range(60)]}, n_files=4)
    write_split(root / "data", "validation", {"text": [story(i) for i in range(60, 70)]})
    return root


def pg19(root: Path) -> Path:
    """emozilla/pg19: a row a book, among other columns."""
    for split, n, n_files in (("train", 12, 4), ("validation", 3, 1), ("test", 3, 1)):
        books = {
            "short_book_title": [f"Book {i}" for i in range(n)],
            "publication_date": [1850 + i for i in range(n)],
            "url": [f"book/{i}" for i in range(n)],
            "text": [" ".join(story(i + j) for j in range(5)) for i in range(n)],
        }
        write_split(root / "data", split, books, n_files)
    return root


def bookcorpus(root: Path) -> Path:
    """lucadiliello/bookcorpusopen: train alone, a row a book."""
    books = {"title": [f"Book {i}" for i in range(12)], "text": [story(i) * 3 for i in range(12)]}
    write_split(root / "data", "train", books, n_files=2)
    return root


def wikipedia(root: Path, language: str, text: Callable[[int], str] = story) -> Path:
    """wikimedia/wikipedia: a configuration a date and language, named in the card, train alone, a row an article."""
    card = ["---", "configs:"]
    for config in (f"20231101.{language}", "20231101.xx"):
        articles = {
            "id": [str(i) for i in range(24)],
            "url": [f"wiki/{i}" for i in range(24)],
            "title": [f"Article {i}" for i in range(24)],
            "text": [text(100 + i) if language in config else "" for i in range(24)],
        }
        write_split(root / config, "train", articles, n_files=2)
        card.append(f"- config_name: {config}\n  data_files:\n  - split: train\n    path: {config}/train-*")
    (root / "README.md").write_text("\n".join([*card, "---", ""]))
    return root


LOOK_ALIKES = {
    "hub:Salesforce/wikitext": wikitext,
    "hub:LTCB/enwik8": enwik8,
    "hub:afmck/text8": text8,
    "hub:roneneldan/TinyStories": tinystories,
    "hub:emozilla/pg19": pg19,
}
