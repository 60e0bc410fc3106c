"""lin-attn data info: prepares a corpus, or examples, and tells how much there is, and a sample."""

import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from models.cli.arguments import ArgumentParser
from models.cli.tables import aligned

if TYPE_CHECKING:
    from lin_attn.data.example_module import ExampleData

USAGE = """usage: lin-attn data info [-c CONFIG] [--data.OPTION VALUE ...]

Prepare a corpus as fit would, and print how many documents, bytes, tokens and blocks each split has, or how
many examples and tokens, and a sample.
Options are those of fit; the rest of a configuration is left alone.
"""
SAMPLE_TOKENS = 200


def main(command: str, arguments: list[str]) -> None:
    """Runs `lin-attn data info ARGUMENTS…`."""
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return
    if arguments[0] != "info":
        raise ValueError(f"data has no command {arguments[0]!r}; wanted info")
    from lightning.pytorch import LightningDataModule

    from models.cli.training import Parser

    # The configuration first: which class of data it names says which options there are.
    of_config = ArgumentParser(prog="lin-attn data info", add_help=False, allow_abbrev=False)
    of_config.add_argument("-c", "--config")
    config, _ = of_config.parse_known_args(arguments[1:])
    parser = Parser(prog="lin-attn data info", description=USAGE)
    parser.add_argument("-c", "--config", help="a configuration of fit")
    parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)
    data = {"class_path": "lin_attn.data.TextCorpus"} if config.config is None else data_of(config.config)
    parser.set_defaults({"data": data})
    print_info(parser.instantiate_classes(parser.parse_args(arguments[1:])).data)


def print_info(data: Any) -> None:
    """Prints what is in a data module's corpus, or of which examples it is."""
    from lin_attn.data.example_module import ExampleData
    from lin_attn.data.streaming import StreamingCorpus

    data.setup()
    if isinstance(data, ExampleData):
        print_examples(data)
        return
    streams = isinstance(data, StreamingCorpus)
    rows = [("split", "documents", "bytes", "tokens", "bytes/token", f"blocks of {data.block_length}")]
    for split, store in data.stores.items():
        n_bytes, n_tokens = int(store.column("n_bytes").sum()), len(store)
        numbers = (store.n_documents, n_bytes, n_tokens)
        ratio = f"{n_bytes / max(n_tokens - store.n_documents - 1, 1):.2f}"
        rows.append((split, *(f"{number:,}" for number in numbers), ratio, f"{len(data.blocks(split)):,}"))
    tokenizer = data.tokenizer
    lines = [*aligned(rows), _of_tokenizer(data)]
    meta = data.corpus.meta
    lines.append(
        "the training text is streamed; above is what is kept to evaluate on, and the beginning of train"
        if streams
        else f"split: {meta['rule']}; {meta['empty']} empty documents left out"
    )
    if not streams and len(data.source_blocks()) > 2:
        bounds = data.source_blocks()
        sizes = [f"{stop - start:,}" for start, stop in pairwise(bounds)]
        lines.append(f"training blocks of each source: {', '.join(sizes)}")
    store = data.stores["train"]
    lines.append(f"folder: {store.folder.rpartition('/')[0]}")
    lines.append(f"sample, the first {SAMPLE_TOKENS} tokens of {', '.join(store.names(0, 1))}:\n")
    lines.append(tokenizer.decode(store.tokens(1, 1 + SAMPLE_TOKENS)).decode("utf-8", "replace"))
    sys.stdout.write("\n".join(lines) + "\n")


def print_examples(data: "ExampleData") -> None:
    """Prints how many examples and tokens there are, and the first one."""
    from lin_attn.data.examples import token_counts

    names = list(data.text_columns)
    rows: list[tuple[str, ...]] = [("split", "examples", "tokens", "longest")]
    for split, parts in data.parts.items():
        for part in parts:
            counts = token_counts(part.rows, names)
            label = split if part.name == split else f"{split} {part.name}"
            rows.append((label, *(f"{n:,}" for n in (len(counts), counts.sum(), counts.max(initial=0)))))
    lines = [*aligned(rows), _of_tokenizer(data), "sample, the first training example:\n"]
    first = data.parts["train"][0].rows[0]
    for name in names:
        lines.append(f"{name}: {data.tokenizer.decode(first[name][:SAMPLE_TOKENS]).decode('utf-8', 'replace')}")
    lines += [f"label: {first['label']}"] if "label" in first else []
    sys.stdout.write("\n".join(lines) + "\n")


def _of_tokenizer(data: Any) -> str:
    tokenizer = data.tokenizer
    return f"tokenizer: {data.hparams['tokenizer']}, {tokenizer.vocab_size:,} tokens, {tokenizer.fingerprint}"


def data_of(name: str) -> dict[str, Any]:
    """The data section of a configuration."""
    import yaml  # type: ignore[import-untyped]

    from models.cli.configs import find_config

    path = find_config(name)
    try:
        data = (yaml.safe_load(path.read_text()) or {}).get("data")
    except (yaml.YAMLError, AttributeError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read as a configuration of lin-attn fit: {reason}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} has no data; wanted a configuration of lin-attn fit")
    return data
