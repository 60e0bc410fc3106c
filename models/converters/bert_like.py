"""What the layouts of BERT and RoFormer share: post-norm layers with biases, a norm on the embeddings, and heads."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from models.converters.fields import Fields
from models.converters.layout import Export, Plan, Source, renamed, require

if TYPE_CHECKING:
    from models.training import TrainedModel

WORD, TYPE = "embeddings.word_embeddings.weight", "embeddings.token_type_embeddings.weight"
DECODER, BIAS = "cls.predictions.decoder", "cls.predictions.bias"
POOLER = {f"pooler.dense.{part}": "a pooler, which only a classifier reads" for part in ("weight", "bias")}


def network_of(fields: Fields, vocab_size: int) -> dict[str, Any]:
    """The fields of a network, but those of its positions; vocab_size is the default."""
    fields.require("add_cross_attention", False, (False,), "a second attention in each layer")
    fields.require("pruned_heads", {}, ({},), "layers of different widths")
    return {
        "vocab_size": fields.take("vocab_size", vocab_size),
        "d_model": fields.take("hidden_size", 768),
        "n_layers": fields.take("num_hidden_layers", 12),
        "n_heads": fields.take("num_attention_heads", 12),
        "d_ff": fields.take("intermediate_size", 3072),
        "dropout": float(fields.take("hidden_dropout_prob", 0.1, float)),
        "attention": "softmax",
        "norm_position": "post",
        "norm_eps": float(fields.take("layer_norm_eps", 1e-12, float)),
        "bias": True,
        "ffn": fields.require("hidden_act", "gelu", ("gelu", "relu"), "an activation that is not here"),
        "tie_embeddings": fields.take("tie_word_embeddings", True),
        "embedding_norm": True,
        "n_token_types": fields.take("type_vocab_size", 2),
    }


def training_notes(fields: Fields) -> list[str]:
    """What acts in training alone and has no counterpart."""
    values = {name: fields.take(name, 0.0, float) for name in ("attention_probs_dropout_prob", "classifier_dropout")}
    return [f"{name} is {value}: such a dropout, of training, is not here" for name, value in values.items() if value]


def classifier_options(fields: Fields, notes: list[str]) -> dict[str, Any]:
    """Arguments of a SequenceClassifier; a note of its classes' names, which it does not keep."""
    labels = fields.take("id2label", {}, dict)
    count = fields.take("num_labels", len(labels) or 2)
    known = (None, "single_label_classification", "regression")
    problem = fields.require("problem_type", None, known, "several classes at once, whose loss is not here")
    if problem == "regression" and count != 1:
        fields.refuse("problem_type", f"with {count} numbers", "one number")
    if any(str(name) != f"LABEL_{index}" for index, name in labels.items()):
        notes.append(f"left out: the classes' names, {', '.join(f'{index} {name}' for index, name in labels.items())}")
    return {"n_classes": count, "pooling": "first"}


def body(ours: str, network: dict[str, Any]) -> dict[str, Source]:
    """Where embeddings and layers are; ours is the name of our encoder or decoder."""
    tables = {f"{ours}.embedding": "embeddings.word_embeddings"}
    if network.get("n_token_types"):
        tables[f"{ours}.token_types"] = "embeddings.token_type_embeddings"
    if network["position"] == "learned":
        tables[f"{ours}.learned_positions.table"] = "embeddings.position_embeddings"
    layers = {f"{ours}.embedding_norm": "embeddings.LayerNorm"}
    if network.get("embedding_size") is not None:
        layers[f"{ours}.projection"] = "embeddings_project"
    for i in range(network["n_layers"]):
        block, layer = f"{ours}.blocks.{i}", f"encoder.layer.{i}"
        layers |= {f"{block}.attention.{name}": f"{layer}.attention.self.{name}" for name in ("query", "key", "value")}
        layers |= {
            f"{block}.attention.output": f"{layer}.attention.output.dense",
            f"{block}.attention_norm": f"{layer}.attention.output.LayerNorm",
            f"{block}.feed_forward.inner": f"{layer}.intermediate.dense",
            f"{block}.feed_forward.output": f"{layer}.output.dense",
            f"{block}.feed_forward_norm": f"{layer}.output.LayerNorm",
        }
    return renamed(tables, "weight") | renamed(layers, "weight", "bias")


def language_head(dense: str, norm: str, output: str) -> dict[str, Source]:
    """Where the head of a language model is, but for the matrix of its output; given our names of its parts."""
    transform = "cls.predictions.transform"
    head = renamed({dense: f"{transform}.dense", norm: f"{transform}.LayerNorm"}, "weight", "bias")
    head[f"{output}.bias"] = Source((f"{DECODER}.bias", BIAS))
    return head


def allow_repeats(plan: Plan, tied: bool) -> None:
    """What else a language model's file may have of its head: tied tensors under their other names."""
    if tied:
        plan.copies |= {f"{DECODER}.weight": WORD, BIAS: f"{DECODER}.bias"}
    else:
        plan.left_out[BIAS] = "a bias that is not read where the head is not tied"


def export_of(model: "TrainedModel", layout: str, architecture: str, ours: str) -> Export:
    """config.json and the weights of embeddings and layers, which are `ours`.

    Raises:
        ValueError: for an option that the layout has no place for.
    """
    config = model.network_config
    require(
        model,
        layout,
        norm=("layer",),
        norm_position=("post",),
        embedding_norm=(True,),
        bias=(True,),
        ffn=("gelu", "relu"),
        output_norm=(False,),
        n_kv_heads=(None, config.n_heads),
    )
    network = asdict(config)
    types = network.get("n_token_types", 0)
    written = {
        "architectures": [architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "intermediate_size": config.d_ff or 4 * config.d_model,
        "hidden_act": config.ffn,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": config.norm_eps or 1e-5,
        "type_vocab_size": types or 1,
        "tie_word_embeddings": config.tie_embeddings,
        "is_decoder": type(model).__name__ == "CausalLM",
    }
    width = config.embedding_size or config.d_model
    return Export(written, body(ours, network), {} if types else {TYPE: torch.zeros(1, width)})


def add_classes(export: Export, model: "TrainedModel", layout: str, pooler: str) -> None:
    """The names and the kind of a classifier's outputs.

    Raises:
        ValueError: if it pools in another way than the layout.
    """
    options = dict(model.hparams)
    for name, wanted in (("pooling", "first"), ("pooler", pooler)):
        if options[name] != wanted:
            raise ValueError(
                f"{name} is {options[name]!r}, for which {layout} of transformers has no place; wanted {wanted!r}"
            )
    labels = [f"LABEL_{i}" for i in range(options["n_classes"])]
    export.config |= {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}
    export.config["problem_type"] = "regression" if len(labels) == 1 else "single_label_classification"
