"""What a language model and its optimizer are made of. Each field's line here is its help on the command line."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

Config = TypeVar("Config")

# Positions that need no scores are for every attention; the others add a term to the scores.
ANY_ATTENTION = ("rope", "xpos", "sinusoidal", "learned", "none")
# Fields that only some positions read.
READ_BY = {
    "rope_base": ("rope", "xpos"),
    "rotary_dim": ("rope",),
    "rope_scaling": ("rope",),
    "rope_factor": ("rope",),
    "decay_base": ("xpos",),
    "max_distance": ("shaw", "t5", "deberta"),
    "n_buckets": ("t5",),
    "memory_length": ("transformer_xl",),
    "segment_length": ("transformer_xl",),
}


@dataclass(frozen=True)
class NetworkConfig:
    """A stack of blocks, as a decoder or an encoder.

    Args:
        vocab_size: number of tokens; 257 is 256 bytes and a document end.
        d_model: width of the residual stream.
        n_layers: number of blocks.
        n_heads: number of query heads.
        n_kv_heads: number of key and value heads, a divisor of n_heads; n_heads by default.
        d_ff: width of the feed-forward layer; by default 4 · d_model for gelu and relu and 8/3 · d_model for swiglu.
        dropout: probability of dropping a residual branch's entry in training.
        attention: the mechanism.
        feature_map: φ of linear attention.
        position: how tokens know their places (docs/positions.md). shaw, transformer_xl, t5, deberta and alibi add a
            term to the scores, which only softmax attention forms.
        rope: with linear attention and position rope, rotate after φ (RoFormer's eq. 19) or before it.
        normalize: with linear attention, divide by the unrotated sum of weights.
        output_norm: RMSNorm on each head's output.
        norm: normalisation of the residual stream's branches.
        norm_position: pre, on the way into each branch and at the end; post, after each sum, as in the first
            Transformer and in BERT.
        norm_eps: added to the norm's variance; 1e-5 for layer and 1e-6 for rms by default (BERT has 1e-12).
        bias: of the projections of attention and of the feed-forward layer.
        ffn: activation of the feed-forward layer.
        tie_embeddings: one matrix for the embedding and the head.
        embedding_norm: a norm on the embeddings.
        embedding_size: width of the embeddings, projected to d_model; d_model without a projection by default.
        head: of a CausalLM: linear, or bert for a layer and a norm before it, as BERT and RoFormer have them.
        max_length: number of positions; for learned positions only, which need it.
        rope_base: base of the rotary wavelengths, with position rope or xpos.
        rotary_dim: with position rope, how many entries of a head are rotated; all by default.
        rope_scaling: with position rope, how wavelengths are stretched for lengths beyond those trained on.
        rope_factor: with rope_scaling, the new length over the original one.
        decay_base: with position xpos, the number of positions over which its decay is measured.
        max_distance: from where on distances are alike; by default 16 for shaw, 128 for t5, 512 for deberta.
        n_buckets: with position t5, the number of distances that are told apart; 32 by default.
        memory_length: with position transformer_xl, how many tokens before a segment each layer remembers; by default
            there are no segments, and all tokens before are seen.
        segment_length: with memory_length, tokens a segment: a longer input is read one segment after the other.
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
    position: Literal[
        "rope", "none", "sinusoidal", "learned", "xpos", "shaw", "transformer_xl", "t5", "deberta", "alibi"
    ] = "rope"
    rope: Literal["after", "before"] = "after"
    normalize: bool = True
    output_norm: bool = False
    norm: Literal["layer", "rms"] = "layer"
    norm_position: Literal["pre", "post"] = "pre"
    norm_eps: float | None = None
    bias: bool = False
    ffn: Literal["gelu", "relu", "swiglu"] = "gelu"
    tie_embeddings: bool = True
    embedding_norm: bool = False
    embedding_size: int | None = None
    head: Literal["linear", "bert"] = "linear"
    max_length: int | None = None
    rope_base: float = 10000.0
    rotary_dim: int | None = None
    rope_scaling: Literal["none", "linear", "ntk"] = "none"
    rope_factor: float = 1.0
    decay_base: float = 512.0
    max_distance: int | None = None
    n_buckets: int | None = None
    memory_length: int | None = None
    segment_length: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "n_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"network.{name} is {getattr(self, name)}; wanted at least 1")
        optional = ("n_kv_heads", "d_ff", "embedding_size", "max_length", "rotary_dim", "max_distance", "n_buckets")
        for name in (*optional, "memory_length", "segment_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"network.{name} is {value}; wanted at least 1, or null for the default")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"network.dropout is {self.dropout}; wanted a number in [0, 1)")
        if self.norm_eps is not None and not self.norm_eps > 0:
            raise ValueError(f"network.norm_eps is {self.norm_eps}; wanted a positive number, or null for the default")
        for name, kind in get_type_hints(type(self)).items():
            if get_origin(kind) is Literal and getattr(self, name) not in get_args(kind):
                known = ", ".join(get_args(kind))
                raise ValueError(f"network.{name} is {getattr(self, name)!r}; wanted one of {known}")
        self._refuse_idle_options()
        self._check_positions()

    @property
    def rotates_features(self) -> bool:
        """Whether `rope`, before or after, has something to say."""
        return self.attention == "linear" and self.position == "rope"

    def _check_positions(self) -> None:
        """What a position encoding cannot do, and fields of others that it does not read."""
        if self.attention == "linear" and self.position not in ANY_ATTENTION:
            raise ValueError(
                f"network.position is {self.position!r} with network.attention linear: it adds a term to the scores, "
                f"which linear attention never forms; wanted one of {', '.join(ANY_ATTENTION)}, or attention softmax"
            )
        defaults = {field.name: field.default for field in fields(self)}
        for name, readers in READ_BY.items():
            if getattr(self, name) != defaults[name] and self.position not in readers:
                raise ValueError(
                    f"network.{name} is {getattr(self, name)!r} with network.position {self.position}, which does not "
                    f"read it ({', '.join(readers)} does); leave it out"
                )
        for name in ("rope_base", "decay_base"):
            if not getattr(self, name) > 0:
                raise ValueError(f"network.{name} is {getattr(self, name)}; wanted a positive number")
        if (self.rope_scaling == "none") != (self.rope_factor == 1) or not self.rope_factor >= 1:
            raise ValueError(
                f"network.rope_factor is {self.rope_factor} with network.rope_scaling {self.rope_scaling}; "
                "wanted a number above 1 with linear or ntk, and 1 with none"
            )
        if (self.memory_length is None) != (self.segment_length is None):
            raise ValueError(
                f"network.memory_length is {self.memory_length} and network.segment_length {self.segment_length}; "
                "wanted both or none: a memory is of the segments before"
            )

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
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with linear warm-up and a schedule after it, per step.

    Args:
        lr: learning rate after warm-up.
        betas: decay rates of the first and second moments.
        weight_decay: on matrices only: not on biases, norms' scales or embeddings of positions.
        warmup_steps: steps over which the rate rises to lr, in equal parts.
        schedule: what follows: half a cosine (Loshchilov and Hutter 2017, arXiv 1608.03983), a line, the inverse square
            root of the step (Vaswani et al. 2017, arXiv 1706.03762, §5.3, with lr at the end of the warm-up), or lr
            as it is.
        min_lr_ratio: cosine and linear end at this share of lr; 0.1 by default.
        max_steps: where cosine and linear end; the trainer's max_steps by default.
        clip: largest norm of all gradients together; null does not clip.
    """

    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    warmup_steps: int = 100
    schedule: Literal["cosine", "linear", "inverse_sqrt", "constant"] = "cosine"
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
        schedules = get_args(get_type_hints(type(self))["schedule"])
        if self.schedule not in schedules:
            raise ValueError(f"optimizer.schedule is {self.schedule!r}; wanted one of {', '.join(schedules)}")
        if self.schedule == "inverse_sqrt" and self.warmup_steps < 1:
            raise ValueError("optimizer.warmup_steps is 0 with optimizer.schedule inverse_sqrt; wanted at least 1")
        for name, default in (("min_lr_ratio", 0.1), ("max_steps", None)):
            if getattr(self, name) != default and not self.has_end:
                raise ValueError(
                    f"optimizer.{name} is {getattr(self, name)} with optimizer.schedule {self.schedule}, which has no "
                    "end; leave it out"
                )
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"optimizer.min_lr_ratio is {self.min_lr_ratio}; wanted a number in [0, 1]")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"optimizer.max_steps is {self.max_steps}; wanted at least 1, or null for the trainer's")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"optimizer.clip is {self.clip}; wanted a positive number, or null not to clip")

    @property
    def has_end(self) -> bool:
        """Whether the schedule goes to an end, and not on without one."""
        return self.schedule in ("cosine", "linear")


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
