"""Linear attention forward, backward and of a step, and a few tokens' projections, on tensors, by the compiled kernel.

What attention computes, and the layout of arguments and results, is that of `lin_attn.ops.linear_chunked`; inputs here
are float32 or bfloat16 on the CPU, sums and denominators float32.

Letters: B batch, H heads of q, K heads of k and v, N length, D head dim, M value head dim.
"""

from collections.abc import Sequence
from ctypes import Array, c_int64

import torch
from torch import Tensor

from lin_attn.kernels.cpu import results
from lin_attn.kernels.cpu.library import Problem, TensorView, call, load

FEATURE_MAPS = ("identity", "relu", "squared_relu", "elu1")  # in the order of csrc/problem.h's Phi
CHUNK = 32  # tokens; these two are csrc/problem.h's
MAX_DIM = 256  # of D and M
_ROPES = ("none", "after", "before")

# Under this many operations, or weights of a projection, a second thread takes longer to wake than the first to finish.
_SMALL = 2e6
_SMALL_PROJECTION = 2**15

poison = False  # tests set it: outputs and scratch memory start as NaN


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    kv: Tensor,
    k_sum: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    feature_map: str,
    rope: str,
    normalize: bool,
    causal: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output (B, H, N, M), denominators (B, H, N) with their floor (empty if not normalize), and the new S and z."""
    problem, kept = _problem(q, k, v, key_mask, kv, k_sum, cos, sin, feature_map, rope, causal, eps)
    out = _fresh(empty_rows(q, v.shape[3]))
    # Sizes one by one: torch reads a shape more slowly than it allocates, and a step of decoding does little else.
    denominators = _fresh(kv.new_empty(*q.shape[:3]) if normalize else kv.new_empty(0))
    new_kv, new_k_sum = _fresh(kv.new_empty(*kv.shape)), _fresh(k_sum.new_empty(*k_sum.shape))
    problem.out = _view(out)
    problem.denominators = denominators.data_ptr() if normalize else None
    problem.new_kv, problem.new_k_sum = new_kv.data_ptr(), new_k_sum.data_ptr()
    call("step" if causal and q.shape[2] == 1 else "forward", problem)
    del kept
    return out, denominators, new_kv, new_k_sum


def backward(
    grad_out: Tensor,
    grad_new_kv: Tensor | None,
    grad_new_k_sum: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    kv: Tensor,
    k_sum: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    denominators: Tensor,
    feature_map: str,
    rope: str,
    normalize: bool,
    causal: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of the incoming S and z; None is a gradient of zero."""
    problem, kept = _problem(q, k, v, key_mask, kv, k_sum, cos, sin, feature_map, rope, causal, eps)
    grad_q, grad_k, grad_v = (_fresh(empty_rows(x, x.shape[3])) for x in (q, k, v))
    grad_kv, grad_k_sum = (_fresh(x.new_empty(x.shape)) for x in (kv, k_sum))
    slopes = _fresh(torch.empty_like(denominators))
    problem.grad_out = _view(grad_out)
    problem.grad_q, problem.grad_k, problem.grad_v = _view(grad_q), _view(grad_k), _view(grad_v)
    problem.grad_kv, problem.grad_k_sum = grad_kv.data_ptr(), grad_k_sum.data_ptr()
    if grad_new_kv is not None:
        grad_new_kv = grad_new_kv.contiguous()
        problem.grad_new_kv = grad_new_kv.data_ptr()
    if grad_new_k_sum is not None:
        grad_new_k_sum = grad_new_k_sum.contiguous()
        problem.grad_new_k_sum = grad_new_k_sum.data_ptr()
    problem.denominators = denominators.data_ptr() if normalize else None
    problem.slopes = slopes.data_ptr() if normalize else None
    call("backward", problem)
    del kept
    return grad_q, grad_k, grad_v, grad_kv, grad_k_sum


Layer = tuple[Tensor, Tensor | None]  # of a projection: W (F, E) and b (F)


def project(x: Tensor, layers: Sequence[Layer], *, gelu: bool = False) -> list[Tensor]:
    """x Wᵀ + b by each of the layers, or gelu of it, (…, E) → (…, F); all float32 or all bfloat16, and contiguous.

    Every weight is read once, and nothing is set up: for a few tokens, less than a library's product of matrices takes.
    """
    library = load()
    assert not isinstance(library, str), library
    *leading, inputs = x.shape
    ys = [_fresh(x.new_empty(*leading, weight.shape[0])) for weight, _ in layers]
    library.lin_attn_project(
        x.data_ptr(),
        _described(layers, [y.data_ptr() for y in ys], gelu),
        len(layers),
        x.numel() // inputs,
        inputs,
        x.dtype == torch.bfloat16,
        _projecting_threads(layers),
    )
    return ys


def attend(
    x: Tensor,
    layers: Sequence[Layer],
    kv: Tensor,
    k_sum: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    feature_map: str,
    rope: str,
    normalize: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """One token of each sequence through a layer of causal attention: its output (B, 1, F), and the new S and z.

    x is (B, 1, E), and the layers are those of queries, keys, values and outputs, as in `project`; S (B, K, D, D) and z
    (B, K, D) are contiguous, and so are cos and sin (1, D/2).
    """
    batch, kv_heads, dim, _ = kv.shape
    heads = layers[0][0].shape[0] // dim
    out = _fresh(x.new_empty(batch, 1, layers[3][0].shape[0]))
    new_kv, new_k_sum = _fresh(kv.new_empty(*kv.shape)), _fresh(k_sum.new_empty(*k_sum.shape))
    problem = Problem(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        queries=1,
        keys=1,
        dim=dim,
        value_dim=dim,
        cos=None if cos is None else cos.data_ptr(),
        sin=None if sin is None else sin.data_ptr(),
        kv=kv.data_ptr(),
        k_sum=k_sum.data_ptr(),
        new_kv=new_kv.data_ptr(),
        new_k_sum=new_k_sum.data_ptr(),
        eps=eps,
        feature_map=FEATURE_MAPS.index(feature_map),
        rope=0 if cos is None else _ROPES.index(rope),
        causal=1,
        bf16_tensors=x.dtype == torch.bfloat16,
        threads=_threads(batch * heads, dim, dim),
        poison=poison,
    )
    call(
        "attend",
        problem,
        x.data_ptr(),
        x.shape[2],
        _described(layers, (0, 0, 0, out.data_ptr()), False),
        bool(normalize),
        _projecting_threads(layers),
    )
    return out, new_kv, new_k_sum


def _described(layers: Sequence[Layer], ys: Sequence[int], gelu: bool) -> Array[c_int64]:
    """csrc/project.h's Layer, one after the other."""
    fields: list[int] = []
    for (weight, bias), y in zip(layers, ys, strict=True):
        fields += (weight.data_ptr(), 0 if bias is None else bias.data_ptr(), y, weight.shape[0], gelu)
    return (c_int64 * len(fields))(*fields)


def _projecting_threads(layers: Sequence[Layer]) -> int:
    return 1 if sum(weight.numel() for weight, _ in layers) < _SMALL_PROJECTION else torch.get_num_threads()


def empty_rows(x: Tensor, dim: int) -> Tensor:
    """Uninitialised (B, H, N, dim), heads within positions in memory if they are so in x (B, H, N, …).

    What comes out of a projection and goes into one lies like that; no copy is needed then.
    """
    batch, heads, length = x.shape[:3]
    inside = heads > 1 and x.stride(1) < x.stride(2)
    # A fake tensor's size is not to be asked: the answer would hold for one size only.
    if type(x) is Tensor and x.is_cpu and batch * heads * length * dim * x.element_size() >= results.LARGE:
        step, head = (heads * dim, dim) if inside else (dim, length * dim)
        return results.empty((batch, heads, length, dim), (heads * length * dim, head, step, 1), x.dtype)
    if inside:
        return x.new_empty(batch, length, heads, dim).transpose(1, 2)
    return x.new_empty(batch, heads, length, dim)


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    kv: Tensor,
    k_sum: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    feature_map: str,
    rope: str,
    causal: bool,
    eps: float,
) -> tuple[Problem, tuple[Tensor | None, ...]]:
    """What forward and backward have in common, and the tensors that have to live until the call is over."""
    kv, k_sum = kv.contiguous(), k_sum.contiguous()
    if cos is not None and sin is not None:
        cos, sin = cos.contiguous(), sin.contiguous()
    (batch, heads, queries, dim), (_, kv_heads, keys, value_dim) = q.shape, v.shape
    problem = Problem()
    problem.batch, problem.heads, problem.kv_heads = batch, heads, kv_heads
    problem.queries, problem.keys, problem.dim, problem.value_dim = queries, keys, dim, value_dim
    problem.q, problem.k, problem.v = _view(q), _view(k), _view(v)
    if key_mask is not None:
        problem.key_mask, problem.key_mask_stride = key_mask.data_ptr(), key_mask.stride()
    if cos is not None and sin is not None:
        problem.cos, problem.sin = cos.data_ptr(), sin.data_ptr()
    problem.kv, problem.k_sum = kv.data_ptr(), k_sum.data_ptr()
    problem.eps = eps
    problem.feature_map = FEATURE_MAPS.index(feature_map)
    problem.rope = 0 if cos is None else _ROPES.index(rope)
    problem.causal = causal
    problem.bf16_tensors = q.dtype == torch.bfloat16
    problem.bf16_products = has_bf16_products()
    problem.threads = _threads(batch * heads * max(queries, keys), dim, value_dim)
    problem.poison = poison
    return problem, (kv, k_sum, cos, sin)


def _threads(rows: int, dim: int, value_dim: int) -> int:
    operations = rows * (4 * dim * value_dim + 128 * (dim + value_dim))
    return 1 if operations < _SMALL else torch.get_num_threads()


def has_bf16_products() -> bool:
    """Whether the kernel multiplies bfloat16 inputs as such, where D and M are multiples of two vectors."""
    library = load()
    return not isinstance(library, str) and bool(library.lin_attn_built(2))


def _view(x: Tensor) -> TensorView:
    return TensorView(x.data_ptr(), x.stride())


def _fresh(x: Tensor) -> Tensor:
    """x as it came, or filled with NaN."""
    return x.fill_(float("nan")) if poison else x
