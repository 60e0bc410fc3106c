"""Small models of every kind, and what is done to their folders."""

import json

import torch

from lin_attn.data.bpe import train_bpe
from lin_attn.data.documents import Document
from models import CausalLM, MaskedLM, PairRanker, Seq2Seq, SequenceClassifier
from models.pretrained import checksums

TINY = {"vocab_size": 300, "d_model": 8, "n_layers": 1, "n_heads": 2}
MODELS = {
    "causal": (CausalLM, TINY, {}),
    "causal untied": (CausalLM, TINY | {"tie_embeddings": False, "n_kv_heads": 1, "rope_base": 500.0}, {}),
    "causal t5": (CausalLM, TINY | {"n_layers": 2, "attention": "softmax", "position": "t5"}, {}),
    "masked": (MaskedLM, TINY | {"embedding_size": 6, "n_token_types": 2, "embedding_norm": True, "bias": True}, {}),
    "masked learned": (MaskedLM, TINY | {"position": "learned", "max_length": 30}, {}),
    "masked deberta": (MaskedLM, TINY | {"n_layers": 2, "attention": "softmax", "position": "deberta"}, {}),
    "masked xl": (MaskedLM, TINY | {"attention": "softmax", "position": "transformer_xl"}, {}),
    "seq2seq": (Seq2Seq, TINY | {"source_vocab_size": 310}, {"label_smoothing": 0.1, "begin_token": 0, "end_token": 1}),
    "seq2seq narrow": (Seq2Seq, TINY | {"embedding_size": 6, "embedding_norm": True, "tie_embeddings": False}, {}),
    "causal roformer": (CausalLM, TINY | {"embedding_size": 6, "embedding_norm": True, "head": "bert"}, {}),
    "seq2seq shared": (Seq2Seq, TINY | {"n_decoder_layers": 2}, {}),
    "classifier": (SequenceClassifier, TINY, {"n_classes": 5, "pooling": "mean"}),
    "ranker": (PairRanker, TINY, {"pooler": "gelu"}),
}


def build(name="causal", tokenizer=None):
    torch.manual_seed(0)
    kind, network, options = MODELS[name]
    model = kind(network=network, optimizer={"lr": 0.5, "betas": (0.5, 0.75)}, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5)
    model.tokenizer = tokenizer
    return model.eval()


def outputs(model):
    tokens = torch.randint(300, (2, 7), generator=torch.Generator().manual_seed(1))
    return model(tokens, tokens) if isinstance(model, Seq2Seq) else model(tokens)


def subwords():
    return train_bpe([Document("a", [b"low lower lowest slow slower " * 20])], 280, end_token="<end>")


def replace(path, data):
    path.unlink()  # to write over a file is a hundred times slower where the system then waits for the disk
    path.write_bytes(data)


def resign(path):
    """Gives a folder whose files were changed the checksums of what they are now."""
    names = [line.split("  ")[1] for line in (path / "SHA256SUMS").read_text().splitlines()]
    replace(path / "SHA256SUMS", checksums.checksums(path, names).encode())


def change(path, **fields):
    """Other fields in a folder's config.json, or without those that are ..., checksums made anew."""
    config = json.loads((path / "config.json").read_text())
    config = {name: value for name, value in (config | fields).items() if value is not ...}
    (path / "config.json").write_text(json.dumps(config))
    resign(path)
