"""The layout of Llama (Touvron et al. 2023, arXiv 2302.13971), Mistral and Qwen2: CausalLM.

    x ← x + attention(RMSNorm(x)),  x ← x + W_down (silu(W_gate x) ⊙ W_up x) of RMSNorm(x)      a layer
    logits = W RMSNorm(x)

Their rotary pairs are (x_i, x_{i+D/2}), ours (x_2i, x_2i+1) as in RoFormer's paper: rows of W_q and W_k change places
within each head, and no product of q and k does. rope_scaling "linear" is ours of that name; one that depends on the
length of the text at hand ("dynamic"), or treats frequencies apart ("llama3", "yarn", "longrope"), is refused. Ours of
the name "ntk" is written as the base that it stands for.

Heads are as wide as d_model / n_heads here, and see all tokens before them: another head_dim, and a sliding_window, are
refused.
"""

from typing import TYPE_CHECKING, Any

from lin_attn import Rotary
from models.converters.fields import Fields
from models.converters.layout import Export, Plan, Source, renamed, require
from models.positions import rotation

if TYPE_CHECKING:
    from models.training import TrainedModel

NAME, PREFIX = "Llama", "model."
ARCHITECTURES = {"LlamaForCausalLM": "CausalLM", "MistralForCausalLM": "CausalLM", "Qwen2ForCausalLM": "CausalLM"}
PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
LENGTH = 4096  # max_position_embeddings that is written; ours has no end
# Their classes' defaults, which their files may leave out.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 32000, "num_key_value_heads": None, "intermediate_size": 11008},
    "mistral": {"vocab_size": 32000, "num_key_value_heads": 8, "intermediate_size": 14336},
    "qwen2": {"vocab_size": 151936, "num_key_value_heads": 32, "intermediate_size": 22016},
}


def read(fields: Fields, architecture: str) -> Plan:
    """How the Llama, Mistral or Qwen2 of a config.json is read."""
    model_type = fields.take("model_type", "")
    defaults = DEFAULTS[model_type]
    fields.require("hidden_act", "silu", ("silu",), "an activation that a gated layer has not here")
    width, heads = fields.take("hidden_size", 4096), fields.take("num_attention_heads", 32)
    given = fields.has("num_key_value_heads")  # where it is null it means all heads
    kv_heads = fields.take("num_key_value_heads", heads if given else defaults["num_key_value_heads"] or heads)
    head_dim = fields.take("head_dim", width // heads)
    if head_dim * heads != width:
        fields.refuse(
            "head_dim", f"with hidden_size {width} and {heads} heads", f"{width // heads}, as heads share the width"
        )
    _refuse_windows(fields, model_type)
    if model_type == "llama":
        attention, mlp = fields.take("attention_bias", False), fields.take("mlp_bias", False)
    else:
        attention, mlp = model_type == "qwen2", False
    network = {
        "vocab_size": fields.take("vocab_size", defaults["vocab_size"]),
        "d_model": width,
        "n_layers": fields.take("num_hidden_layers", 32),
        "n_heads": heads,
        "n_kv_heads": None if kv_heads == heads else kv_heads,
        "d_ff": fields.take("intermediate_size", defaults["intermediate_size"]),
        "attention": "softmax",
        "position": "rope",
        "norm": "rms",
        "norm_eps": float(fields.take("rms_norm_eps", 1e-6, float)),
        "bias": attention or mlp,
        "ffn": "swiglu",
        "tie_embeddings": fields.take("tie_word_embeddings", False),
    }
    network |= _rope(fields)
    dropout = fields.take("attention_dropout", 0.0, float)
    plan = Plan("CausalLM", network)
    plan.notes += [f"attention_dropout is {dropout}: such a dropout, of training, is not here"] * bool(dropout)
    plan.weights = _weights(network, kv_heads)
    if network["tie_embeddings"]:
        plan.copies["lm_head.weight"] = "embed_tokens.weight"
    rotary = Rotary(head_dim, network["rope_base"])
    for i in range(network["n_layers"]):
        plan.tables[f"layers.{i}.self_attn.rotary_emb.inv_freq"] = lambda shape: rotary.frequencies()
    return plan


def write(model: "TrainedModel") -> Export:
    """How a model is written as a Llama."""
    config = model.network_config
    head_dim = config.d_model // config.n_heads
    require(model, NAME, position=("rope",), rotary_dim=(None, head_dim), norm=("rms",), norm_position=("pre",),
            ffn=("swiglu",), output_norm=(False,), embedding_norm=(False,), embedding_size=(None,), head=("linear",),
            dropout=(0.0,))  # fmt: skip
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_base}
    if config.rope_scaling == "linear":
        rope |= {"rope_type": "linear", "factor": config.rope_factor}
    elif config.rope_scaling == "ntk":
        rotary = rotation(config)
        assert isinstance(rotary, Rotary)
        assert rotary.scaling is not None
        rope["rope_theta"] = rotary.scaling.base(config.rope_base, head_dim)
    kv_heads = config.n_kv_heads or config.n_heads
    written = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": model.get_parameter("network.blocks.0.feed_forward.inner.weight").shape[0],
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps or 1e-6,
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": LENGTH,
        "rope_parameters": rope,
    }
    fields = {"n_layers": config.n_layers, "n_heads": config.n_heads, "bias": config.bias}
    notes = [f"max_position_embeddings is {LENGTH}: positions have no end here"]
    return Export(written, _weights(fields | {"tie_embeddings": config.tie_embeddings}, kv_heads), notes=notes)


def _weights(network: dict[str, Any], kv_heads: int) -> dict[str, Source]:
    names = {"network.embedding": "embed_tokens", "network.norm": "norm"}
    if not network["tie_embeddings"]:
        names["network.head"] = "lm_head"
    found: dict[str, Source] = {}
    for i in range(network["n_layers"]):
        block, layer = f"network.blocks.{i}", f"layers.{i}"
        names[f"{block}.attention_norm"] = f"{layer}.input_layernorm"
        names[f"{block}.feed_forward_norm"] = f"{layer}.post_attention_layernorm"
        linear = {f"{block}.attention.{ours}": f"{layer}.self_attn.{theirs}" for ours, theirs in PROJECTIONS.items()}
        for ours, theirs in (("inner", "up_proj"), ("gate", "gate_proj"), ("output", "down_proj")):
            linear[f"{block}.feed_forward.{ours}"] = f"{layer}.mlp.{theirs}"
        for ours, theirs in linear.items():
            for part in ("weight", "bias") if network["bias"] else ("weight",):
                found[f"{ours}.{part}"] = Source((f"{theirs}.{part}",), zeros=part == "bias")
        for name, heads in (("query", network["n_heads"]), ("key", kv_heads)):
            for part in ("weight", "bias") if network["bias"] else ("weight",):
                source = found[f"{block}.attention.{name}.{part}"]
                found[f"{block}.attention.{name}.{part}"] = Source(
                    source.names, turn=_interleaved(heads), back=_halves(heads), zeros=source.zeros
                )
    return renamed(names, "weight") | found


def _interleaved(heads: int) -> Any:
    """Rows (h, 2, D/2) of pairs (i, i + D/2) → (h, D/2, 2) of pairs (2i, 2i + 1)."""
    return lambda tensor: tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _halves(heads: int) -> Any:
    """What `_interleaved` undoes."""
    return lambda tensor: tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _rope(fields: Fields) -> dict[str, Any]:
    """Base and scaling; older files have them in rope_theta and rope_scaling."""
    new, old = (fields.take(name, {}, dict) for name in ("rope_parameters", "rope_scaling"))
    name = "rope_parameters" if new else "rope_scaling"
    if new and old and new != old:
        fields.refuse("rope_scaling", f"and rope_parameters {new}", "one of the two")
    rope = dict(new or old)
    base = float(fields.take("rope_theta", 10000.0, float))
    base = float(rope.pop("rope_theta", base))
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    if kind not in ("default", "linear"):
        fields.refuse(name, f"whose frequencies ({kind!r}) no rotation here has", "'default' or 'linear'")
    factor = float(rope.pop("factor", 1.0)) if kind == "linear" else 1.0
    if rope.pop("partial_rotary_factor", 1.0) != 1.0 or rope:
        fields.refuse(name, "of which not all is understood", "rope_type, rope_theta and for linear a factor")
    if fields.take("partial_rotary_factor", 1.0, float) != 1.0:
        fields.refuse("partial_rotary_factor", "and Llama rotates heads as a whole", "1.0")
    if factor == 1.0:
        return {"rope_base": base}
    return {"rope_base": base, "rope_scaling": "linear", "rope_factor": factor}


def _refuse_windows(fields: Fields, model_type: str) -> None:
    why = "where a token sees the last ones only"
    if model_type == "mistral":
        fields.without_effect("layer_types")
        if not fields.has("sliding_window") or fields.take("sliding_window", 0, int):
            fields.refuse("sliding_window", f"4096 where it is left out, {why}", "null")
    elif model_type == "qwen2":
        fields.require("use_sliding_window", False, (False,), why)
        fields.without_effect("sliding_window", "max_window_layers")
        kinds = set(fields.take("layer_types", ["full_attention"], list))
        if kinds != {"full_attention"}:
            fields.refuse("layer_types", why, "'full_attention' for all")
