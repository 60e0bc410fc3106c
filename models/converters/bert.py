"""BERT's layout (Devlin et al. 2019, arXiv 1810.04805): MaskedLM and SequenceClassifier.

    x = LayerNorm(word + position + type)
    x ← LayerNorm(x + attention(x)),  x ← LayerNorm(x + feed_forward(x))      a layer
    logits = W LayerNorm(gelu(W_t x + b_t)) + b                               of a masked language model
    logits = W tanh(W_p x_first + b_p) + b                                    of a classifier

Positions count the real tokens; transformers counts padding on the left as well, unless it is given position_ids. There
is no next-sentence prediction here: its head, and in a masked language model the pooler that it stands on, are left
out, which is told.
"""

from typing import TYPE_CHECKING

import torch

from models.converters import bert_like
from models.converters.fields import Fields
from models.converters.layout import Export, Plan, Source, renamed, require

if TYPE_CHECKING:
    from models.training import TrainedModel

NAME, PREFIX = "BERT", "bert."
ARCHITECTURES = {
    "BertForMaskedLM": "MaskedLM",
    "BertForPreTraining": "MaskedLM",
    "BertForSequenceClassification": "SequenceClassifier",
}
HEAD = ("head.transform", "head.norm", "head.output")
CLASSES = {"network.dense": "pooler.dense", "network.output": "classifier"}
NEXT_SENTENCE = {f"cls.seq_relationship.{part}": "the head of next-sentence prediction" for part in ("weight", "bias")}


def read(fields: Fields, architecture: str) -> Plan:
    """How the BERT of a config.json is read."""
    fields.require("position_embedding_type", "absolute", ("absolute",), "a term of the scores in BERT's own form")
    fields.require("is_decoder", False, (False,), "a decoder of BERT's layout")
    length = fields.take("max_position_embeddings", 512)
    network = bert_like.network_of(fields, 30522) | {"position": "learned", "max_length": length}
    plan = Plan(ARCHITECTURES[architecture], network, notes=bert_like.training_notes(fields))
    plan.tables["embeddings.position_ids"] = lambda shape: torch.arange(length).expand(1, length)
    if plan.kind == "MaskedLM":
        plan.weights = bert_like.body("network", network) | bert_like.language_head(*HEAD)
        if not network["tie_embeddings"]:
            plan.weights["head.output.weight"] = Source((f"{bert_like.DECODER}.weight",))
        plan.left_out = bert_like.POOLER | NEXT_SENTENCE
        bert_like.allow_repeats(plan, network["tie_embeddings"])
    else:
        plan.options = bert_like.classifier_options(fields, plan.notes) | {"pooler": "tanh"}
        plan.weights = bert_like.body("network.encoder", network) | renamed(CLASSES, "weight", "bias")
    return plan


def write(model: "TrainedModel") -> Export:
    """How a model is written as a BERT."""
    require(model, NAME, position=("learned",), embedding_size=(None,))
    if type(model).__name__ == "MaskedLM":
        export = bert_like.export_of(model, NAME, "BertForMaskedLM", "network")
        export.weights |= bert_like.language_head(*HEAD)
        if not model.network_config.tie_embeddings:
            export.weights["head.output.weight"] = Source((f"{bert_like.DECODER}.weight",))
    else:
        export = bert_like.export_of(model, NAME, "BertForSequenceClassification", "network.encoder")
        export.weights |= renamed(CLASSES, "weight", "bias")
        bert_like.add_classes(export, model, NAME, pooler="tanh")
    export.config |= {"model_type": "bert", "max_position_embeddings": model.network_config.max_length}
    return export
