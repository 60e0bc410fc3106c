"""What a language model and its optimizer are made of. Each field's line here is its help on the command line."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

Config = TypeVar("Config")


@dataclass(frozen=True)
class NetworkConfig:
    """The decoder.

    Args:
        vocab_size: number of tokens; 257 is 256 bytes and a document end.
        d_model: width of the residual stream.
        n_layers: number of blocks.
        n_heads: number of query heads.
        n_kv_heads: number of key and value heads, a divisor of n_heads; n_heads by default.
        d_ff: width of the feed-forward layer; by default 4 · d_model for gelu and 8/3 · d_model for swiglu.
        dropout: probability of dropping a residual branch's entry in training.
        attention: the mechanism.
        feature_map: φ of linear attention.
        position: how tokens know their places.
        rope: with linear attention and position rope, rotate after φ (RoFormer's eq. 19) or before it.
        normalize: with linear attention, divide by the unrotated sum of weights.
        output_norm: RMSNorm on each head's output.
        norm: normalisation of the residual stream's branches.
        ffn: activation of the feed-forward layer.
        tie_embeddings: one matrix for the embedding and the head.
        max_length: number of positions; for learned positions only, which need it.
    """

    vocab_size: int = 257
    d_model: int = 128
    n_layers: int = 4
    n_heads: int = 4
    n_kv_heads: int | None = None
    d_ff: int | None = None
    dropout: float = 0.0
    attention: Literal["linear", "softmax"] = "linear"
    feature_map: Literal["elu1", "relu", "squared_relu", "exp", "identity"] = "elu1"
    position: Literal["rope", "none", "sinusoidal", "learned"] = "rope"
    rope: Literal["after", "before"] = "after"
    normalize: bool = True
    output_norm: bool = False
    norm: Literal["layer", "rms"] = "layer"
    ffn: Literal["gelu", "swiglu"] = "gelu"
    tie_embeddings: bool = True
    max_length: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "n_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"network.{name} is {getattr(self, name)}; wanted at least 1")
        for name in ("n_kv_heads", "d_ff", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"network.{name} is {value}; wanted at least 1, or null for the default")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"network.dropout is {self.dropout}; wanted a number in [0, 1)")
        for name, kind in get_type_hints(type(self)).items():
            if get_origin(kind) is Literal and getattr(self, name) not in get_args(kind):
                known = ", ".join(get_args(kind))
                raise ValueError(f"network.{name} is {getattr(self, name)!r}; wanted one of {known}")
        self._refuse_idle_options()

    @property
    def rotates_features(self) -> bool:
        """Whether `rope`, before or after, has something to say."""
        return self.attention == "linear" and self.position == "rope"

    def _refuse_idle_options(self) -> None:
        """An option that the rest of the configuration gives nothing to do is a mistake, not a preference."""
        if self.attention == "softmax":
            for name, default in (("feature_map", "elu1"), ("rope", "after"), ("normalize", True)):
                if getattr(self, name) != default:
                    raise ValueError(
                        f"network.{name} is {getattr(self, name)!r} with network.attention softmax, which has no "
                        f"feature map and always normalises; leave it out"
                    )
        if self.rope == "before" and self.position != "rope":
            raise ValueError(f"network.rope is 'before' with network.position {self.position}; leave it out")
        if (self.max_length is None) == (self.position == "learned"):
            raise ValueError(
                f"network.max_length is {self.max_length} with network.position {self.position}; "
                "wanted a number for learned positions and null for all others, which have no end"
            )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with linear warm-up and cosine decay, per step.

    Args:
        lr: learning rate after warm-up.
        betas: decay rates of the first and second moments.
        weight_decay: on matrices only: not on biases, norms' scales or embeddings of positions.
        warmup_steps: steps over which the rate rises to lr, in equal parts.
        min_lr_ratio: the schedule ends at this share of lr.
        max_steps: steps of the schedule; the trainer's max_steps by default.
        clip: largest norm of all gradients together; null does not clip.
    """

    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    warmup_steps: int = 100
    min_lr_ratio: float = 0.1
    max_steps: int | None = None
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        if not self.lr > 0:
            raise ValueError(f"optimizer.lr is {self.lr}; wanted a positive number")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas is {self.betas}; wanted two numbers in [0, 1)")
        if not self.weight_decay >= 0:
            raise ValueError(f"optimizer.weight_decay is {self.weight_decay}; wanted a number ≥ 0")
        if self.warmup_steps < 0:
            raise ValueError(f"optimizer.warmup_steps is {self.warmup_steps}; wanted a number ≥ 0")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"optimizer.min_lr_ratio is {self.min_lr_ratio}; wanted a number in [0, 1]")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"optimizer.max_steps is {self.max_steps}; wanted at least 1, or null for the trainer's")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"optimizer.clip is {self.clip}; wanted a positive number, or null not to clip")


def as_config(kind: type[Config], value: Config | Mapping[str, Any] | None, argument: str) -> Config:
    """A config given as itself, as a mapping with its fields, or as None for all defaults.

    Raises:
        ValueError: if the mapping has fields that the config lacks.
    """
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping | None):
        raise ValueError(f"{argument} is a {type(value).__name__}; wanted a {kind.__name__} or a dict of its fields")
    values = dict(value) if isinstance(value, Mapping) else {}
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"{argument} has unknown fields {', '.join(unknown)}; wanted some of {', '.join(known)}")
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{argument} has a value of the wrong type: {error}") from error


def as_plain(config: NetworkConfig | OptimizerConfig) -> dict[str, Any]:
    """The config as a dict of numbers, strings and lists, for checkpoints that are read without unpickling classes."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(config).items()}
