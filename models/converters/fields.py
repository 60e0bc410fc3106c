"""The fields of a config.json of transformers, each of which is used, checked, known to be without effect, or told."""

from collections.abc import Iterable
from typing import Any

# Of every model type: names, files, generation, tasks and training. None changes what the network computes.
WITHOUT_EFFECT = (
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "bos_token_id",
    "chunk_size_feed_forward",
    "cls_token_id",
    "decoder_start_token_id",
    "directionality",
    "dtype",
    "eos_token_id",
    "finetuning_task",
    "gradient_checkpointing",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "language",
    "mask_token_id",
    "max_length",
    "max_position_embeddings",
    "min_length",
    "model_max_length",
    "model_type",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "pad_token_id",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
    "prefix",
    "pretraining_tp",
    "return_dict",
    "sep_token_id",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "unk_token_id",
    "use_cache",
    "use_return_dict",
)


class Fields:
    """Takes fields out of a config.json and keeps account of them.

    Args:
        config: the object in the file.
        source: the file, for messages.
    """

    def __init__(self, config: dict[str, Any], source: Any) -> None:
        self.source = source
        self._config = config
        self._seen: set[str] = set(WITHOUT_EFFECT)

    def take(self, name: str, default: Any, kind: type | tuple[type, ...] | None = None) -> Any:
        """A field's value, or the class's default, which older files leave out.

        Raises:
            ValueError: if it is of another kind than `kind`, the default's by default.
        """
        self._seen.add(name)
        value = self._config.get(name)
        if value is None:
            return default
        kind = type(default) if kind is None else kind
        kind = (int, float) if kind is float else kind
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self.refuse(name, "which is no value of that field", f"a {getattr(kind, '__name__', 'number')}")
        return value

    def require(self, name: str, default: Any, allowed: Iterable[Any], why: str) -> Any:
        """A field of which only some values can be honoured.

        Raises:
            ValueError: if it has another; why says what that would take.
        """
        self._seen.add(name)
        value = self._config.get(name, default)
        value = default if value is None else value
        if value not in (known := tuple(allowed)):
            self.refuse(name, why, " or ".join(map(repr, known)))
        return value

    def refuse(self, name: str, why: str, wanted: str) -> None:
        """Raises ValueError about a field."""
        raise ValueError(f"{self.source}: {name} is {self._config.get(name)!r}, {why}; wanted {wanted}")

    def has(self, name: str) -> bool:
        """Whether a field is there, be it null."""
        return name in self._config

    def without_effect(self, *names: str) -> None:
        """Counts fields that this layout does not read either as known."""
        self._seen.update(names)

    def unknown(self) -> list[str]:
        """Fields that nobody asked for and that say something."""
        return sorted(name for name, value in self._config.items() if name not in self._seen and value is not None)
