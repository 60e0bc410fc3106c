"""RoFormer's layout (Su et al. 2021, arXiv 2104.09864): MaskedLM, CausalLM and SequenceClassifier.

    x = P LayerNorm(word + type)                             P where the embeddings are narrower than the model
    x ← LayerNorm(x + attention(x)),  x ← LayerNorm(x + feed_forward(x))      a layer; it rotates q and k by pairs
    logits = W LayerNorm(gelu(W_t x + b_t)) + b                               of a language model
    logits = W gelu(W_p x_first + b_p) + b                                    of a classifier

The pairs are interleaved on both sides. Their table of positions is not read: it is computed here, for any length, and
has to be what the file has. Refused are rotary_value, which rotates values too (the paper does not, nor does eq. 19),
and RoFormer v2, whose norm is an RMS without a scale and whose layers have no biases.

A causal model of ours reads one text: its embeddings are word + type 0, and other types are left out.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lin_attn import Rotary
from models.converters import bert_like
from models.converters.bert_like import DECODER, TYPE, WORD
from models.converters.fields import Fields
from models.converters.layout import Export, Plan, Source, renamed, require

if TYPE_CHECKING:
    from models.training import TrainedModel

NAME, PREFIX = "RoFormer", "roformer."
ARCHITECTURES = {
    "RoFormerForMaskedLM": "MaskedLM",
    "RoFormerForCausalLM": "CausalLM",
    "RoFormerForSequenceClassification": "SequenceClassifier",
}
HEADS = {
    "MaskedLM": ("head.transform", "head.norm", "head.output"),
    "CausalLM": ("network.transform.dense", "network.transform.norm", "network.head"),
}
CLASSES = {"network.dense": "classifier.dense", "network.output": "classifier.out_proj"}
POSITIONS = "encoder.embed_positions.weight"
LENGTH = 4096  # of the table that is written; ours has no end
V2 = "RoFormer v2, whose norm has no scale and whose layers no biases"


def read(fields: Fields, architecture: str) -> Plan:
    """How the RoFormer of a config.json is read."""
    kind = ARCHITECTURES[architecture]
    fields.require("rotary_value", False, (False,), "which rotates values too, as no attention here does")
    fields.require("norm_type", "layer_norm", ("layer_norm",), V2)
    fields.require("use_bias", True, (True,), V2)
    decoder = fields.require("is_decoder", False, (False, True), "which is no value of that field")
    if decoder != (kind == "CausalLM"):
        fields.refuse(
            "is_decoder", f"with {architecture}, where tokens would see other ones than here", str(not decoder)
        )
    network = bert_like.network_of(fields, 50000) | {"position": "rope"}
    width = fields.take("embedding_size", network["d_model"])
    network["embedding_size"] = None if width == network["d_model"] else width
    plan = Plan(kind, network, notes=bert_like.training_notes(fields))
    plan.tables[POSITIONS] = position_table
    if kind == "SequenceClassifier":
        if network["ffn"] != "gelu":
            fields.refuse("hidden_act", "and the classifier's layer has gelu here", "'gelu'")
        plan.options = bert_like.classifier_options(fields, plan.notes) | {"pooler": "gelu"}
        plan.weights = bert_like.body("network.encoder", network) | renamed(CLASSES, "weight", "bias")
        return plan
    tied = network["tie_embeddings"]
    plan.left_out = dict(bert_like.POOLER)
    bert_like.allow_repeats(plan, tied)
    output = f"{HEADS[kind][2]}.weight"
    if kind == "CausalLM":
        types = network.pop("n_token_types")
        plan.notes += ["left out: token types but the first, as it reads one text"] * (types > 1)
        network |= {"tie_embeddings": False, "head": "bert"}
    plan.weights = bert_like.body("network", network) | bert_like.language_head(*HEADS[kind])
    if kind == "CausalLM":
        plan.weights["network.embedding.weight"] = Source((WORD,), plus=(TYPE, lambda word, types: word + types[0]))
        plan.weights[output] = Source((WORD if tied else f"{DECODER}.weight",))
    elif not tied:
        plan.weights[output] = Source((f"{DECODER}.weight",))
    return plan


def write(model: "TrainedModel") -> Export:
    """How a model is written as a RoFormer."""
    kind, config = type(model).__name__, model.network_config
    require(model, NAME, position=("rope",), rotary_dim=(None, config.d_model // config.n_heads), rope_base=(10000.0,),
            rope_scaling=("none",))  # fmt: skip
    if kind == "CausalLM":
        require(model, NAME, head=("bert",))
    architecture = next(name for name, ours in ARCHITECTURES.items() if ours == kind)
    export = bert_like.export_of(
        model, NAME, architecture, "network.encoder" if kind == "SequenceClassifier" else "network"
    )
    export.config |= {
        "model_type": "roformer",
        "embedding_size": config.embedding_size or config.d_model,
        "max_position_embeddings": LENGTH,
        "rotary_value": False,
    }
    export.extra[POSITIONS] = position_table((LENGTH, config.d_model // config.n_heads))
    export.notes.append(f"max_position_embeddings is {LENGTH}: positions have no end here, and a table there")
    if kind == "SequenceClassifier":
        require(model, NAME, ffn=("gelu",))
        export.weights |= renamed(CLASSES, "weight", "bias")
        bert_like.add_classes(export, model, NAME, pooler="gelu")
        return export
    export.weights |= bert_like.language_head(*HEADS[kind])
    if not config.tie_embeddings:
        export.weights[f"{HEADS[kind][2]}.weight"] = Source((f"{DECODER}.weight",))
    return export


def position_table(shape: tuple[int, ...]) -> Tensor:
    """Their table of so many positions, (N, D): sin mθ_i in the first half, cos mθ_i in the second."""
    if len(shape) != 2 or shape[1] % 2:
        return torch.empty(0)
    cos, sin = Rotary(shape[1]).tables_at(torch.arange(shape[0]), dtype=torch.float32)
    return torch.cat((sin, cos), dim=-1)
