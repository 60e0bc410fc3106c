"""What `lin-attn scale --level model` measures: a language model, its attention replaced by the mechanism asked for.

The network is a configuration's or a checkpoint's, in all its sizes; its weights are random, since time and memory do
not depend on them. A phase is one call: *forward* to the logits of every token; *train* forward, loss, and the
gradients of all weights; *decode* one token on a state at position N, to its logits.

Letters: B batch, N length, E model dim, F feed-forward dim, V vocabulary, L layers.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lin_attn.attention import LinearAttention
from lin_attn.scaling.cost import Cost, cost
from lin_attn.scaling.plan import Point
from lin_attn.scaling.subjects import Operation, check_kernel, kernel, random_state
from models.blocks import FeedForward
from models.checkpoint import load_checkpoint
from models.cli.configs import find_config
from models.config import NetworkConfig, as_config
from models.decoder import Decoder, DecoderState
from models.loss import cross_entropy_sum

SUBJECT = "models.scaling:language_model"


def language_model(point: Point) -> Operation:
    """A decoder at a point.

    Raises:
        ValueError: if the network cannot be read, or has no such length.
    """
    assert point.model is not None
    config = with_mechanism(network_config(point.model), point.mechanism)
    if config.max_length is not None and point.length + (point.phase == "decode") > config.max_length:
        raise ValueError(f"the length is {point.length}; the network's learned positions end at {config.max_length}")
    if point.mechanism != "linear":
        check_kernel(point)
    network = Decoder(config).to(point.device, getattr(torch, point.dtype)).train(point.phase == "train")
    for module in network.modules():
        if isinstance(module, LinearAttention):
            module.backend = point.backend
    generator = torch.Generator(point.device).manual_seed(point.seed)
    length = 1 if point.phase == "decode" else point.length
    tokens, targets = (
        torch.randint(config.vocab_size, (point.batch, length), generator=generator, device=point.device)
        for _ in range(2)
    )

    def loss() -> Tensor:
        with kernel(point.mechanism):
            hidden, _ = network(tokens)
            return cross_entropy_sum(hidden.flatten(0, 1), network.head.weight, targets.flatten(), network.head.bias)

    def step() -> None:
        loss().backward()
        network.zero_grad(set_to_none=True)

    if point.phase == "train":
        return Operation(step, loss)
    state = _state(point, config, generator) if point.phase == "decode" else None

    def logits() -> tuple[Tensor, Any]:
        with kernel(point.mechanism):
            hidden, after = network(tokens, None, state)
            return network.logits(hidden), after

    return Operation(torch.no_grad()(logits), state_bytes=None if state is None else state.nbytes)


def network_config(name: str) -> NetworkConfig:
    """The network of a configuration of `lin-attn fit`, by its path or name, or of a checkpoint.

    Raises:
        ValueError: if there is none, or it is of another kind of model.
    """
    if name.endswith(".ckpt"):
        return load_checkpoint(name).network_config
    import yaml  # type: ignore[import-untyped]

    path = find_config(name)
    try:
        model = (yaml.safe_load(path.read_text()) or {}).get("model", {})
        network = model.get("init_args", {}).get("network", {})
    except (yaml.YAMLError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a configuration of lin-attn fit: {error}") from error
    if model.get("class_path", "models.CausalLM").rpartition(".")[2] != "CausalLM":
        raise ValueError(f"{path} is of a {model['class_path']}; wanted a configuration of models.CausalLM")
    config: NetworkConfig = as_config(NetworkConfig, network, f"network of {path}")
    return config


def with_mechanism(config: NetworkConfig, mechanism: str) -> NetworkConfig:
    """The same network with another attention; what that has no use for goes back to its default."""
    if mechanism == "linear":
        return replace(config, attention="linear")
    return replace(config, attention="softmax", feature_map="elu1", rope="after", normalize=True)


def network_cost(point: Point, config: NetworkConfig) -> Cost:
    """The cost of a whole model at a point.

    To attention's own (`lin_attn.scaling.cost`), a layer adds the projections 2E(2E + 2·H_k·D) and the feed-forward
    4EF, by SwiGLU 6EF, a token; the head adds 2EV, and projections before it or after the embeddings add theirs. Train
    takes each three times: forward, and both gradients. Bytes saved and the peak are not derived; the state is L times
    attention's.
    """
    config = with_mechanism(config, point.mechanism)
    kv_heads = config.n_kv_heads or config.n_heads
    heads = cost(point, kv_heads=kv_heads)
    with torch.device("meta"):
        feed_forward = sum(weight.numel() for weight in FeedForward(config).parameters())
        network = Decoder(replace(config, n_layers=1))
    E, tokens = config.d_model, point.batch * (1 if point.phase == "decode" else point.length)
    layer = 2 * E * E + 2 * E * kv_heads * point.head_dim + feed_forward
    ends = [network.head, *network.transform.modules(), *network.projection.modules()]
    outside = sum(part.weight.numel() for part in ends if isinstance(part, nn.Linear))
    linear = 2 * tokens * (config.n_layers * layer + outside)
    state = None if heads.state_bytes is None else config.n_layers * heads.state_bytes
    return Cost(config.n_layers * heads.flops + linear * (3 if point.phase == "train" else 1), state_bytes=state)


def _state(point: Point, config: NetworkConfig, generator: torch.Generator) -> DecoderState:
    """A state at position N, without the cost of reading N tokens."""

    def random(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=point.device)

    layers = tuple(random_state(point, config.n_kv_heads or config.n_heads, random) for _ in range(config.n_layers))
    lengths = torch.full((point.batch,), point.length, device=point.device)
    return DecoderState(layers, lengths, point.length)
