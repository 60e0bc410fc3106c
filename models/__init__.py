"""The zoo: models around the attention of lin_attn, as Lightning modules.

Imported late, name by name: the command line answers before torch and lightning are loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.causal_lm import CausalLM
    from models.classifier import SequenceClassifier
    from models.config import NetworkConfig, OptimizerConfig
    from models.encoder import EncoderConfig
    from models.encoder_decoder import Seq2SeqConfig
    from models.masked_lm import MaskedLM
    from models.pretrained import available, from_pretrained
    from models.ranker import PairRanker
    from models.seq2seq import Seq2Seq

__all__ = [
    "CausalLM",
    "EncoderConfig",
    "MaskedLM",
    "NetworkConfig",
    "OptimizerConfig",
    "PairRanker",
    "Seq2Seq",
    "Seq2SeqConfig",
    "SequenceClassifier",
    "available",
    "from_pretrained",
]

_HOMES = {
    "CausalLM": "causal_lm",
    "EncoderConfig": "encoder",
    "MaskedLM": "masked_lm",
    "NetworkConfig": "config",
    "OptimizerConfig": "config",
    "PairRanker": "ranker",
    "Seq2Seq": "seq2seq",
    "Seq2SeqConfig": "encoder_decoder",
    "SequenceClassifier": "classifier",
    "available": "pretrained",
    "from_pretrained": "pretrained",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'models' has no attribute {name!r}")
    return getattr(import_module(f"models.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
