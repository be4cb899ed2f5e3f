"""What a mixer declares about itself to the conformance kit, and the declarations of our own mixers.

A definition is written from the paper, token by token, without our ops. It computes only what it needs, so its matrix
products are at the same time the brute-force count of the mixer's FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor

from kernels import flops
from mixers import registry
from mixers.base import Mixer
from mixers.rope_scaling import Linear, LongRope


@dataclass(frozen=True)
class Conformance:
    """Class attribute `conformance` of a mixer; not inherited, and nothing of it is required.

    Attributes:
        d_model: the width to check at.
        options: constructor options to check with; small ones, so that short inputs cross windows and blocks.
        alternatives: option -> a value other than the one checked with. Each is one more setting to check, and must
            have an effect; where some are declared, every option needs one.
        together: names of alternatives that do not interact: one setting for all of them instead of one each, so that
            a mixer of many options is checked quickly. That each has an effect is still asked of each alone.
        reference: (mixer, x [B, T, D] float64) -> [B, T, D], the definition of one document a row; its matrix products
            are the truth for the counted FLOPs.
        growth: exponent of the counted FLOPs in the length, for long sequences.
        unordered: options under which permuted tokens give permuted outputs.
        exempt: parameters that need no gradient.
        smooth: options under which near inputs give near outputs, for the property of low precision: a mixer that
            chooses what to attend to may choose something else after rounding.
        reads: the least share of a state that the next three tokens read; lower where a mixer chooses what to read.
    """

    d_model: int = 16
    options: Mapping[str, Any] = field(default_factory=dict)
    alternatives: Mapping[str, Any] = field(default_factory=dict)
    together: tuple[tuple[str, ...], ...] = ()
    reference: Callable[[Any, Tensor], Tensor] | None = None
    growth: float | None = None
    unordered: Mapping[str, Any] | None = None
    exempt: tuple[str, ...] = ()
    smooth: Mapping[str, Any] = field(default_factory=dict)
    reads: float = 0.5


    def changes(self) -> list[dict[str, Any]]:
        """Alternatives setting by setting; those of a group in one, where its first stands.

        Raises:
            ValueError: a group names what is no alternative, or what another group has.
        """
        grouped = [name for names in self.together for name in names]
        for name in grouped:
            if name not in self.alternatives or grouped.count(name) > 1:
                raise ValueError(f"together names {name!r}; allowed, once: {', '.join(self.alternatives)}")
        group = {name: names for names in self.together for name in names}
        groups = dict.fromkeys(group.get(name, (name,)) for name in self.alternatives)
        return [{name: self.alternatives[name] for name in names} for names in groups]


def declared(cls: type[Mixer]) -> Conformance:
    """The class's own declaration, ours for a built-in mixer, or an empty one."""
    own = vars(cls).get("conformance")
    if own is not None:
        return own
    return next((said for name, said in _BUILT_IN.items() if registry.get(name) is cls), Conformance())


def attention(mixer: Any, x: Tensor) -> Tensor:
    """Softmax attention: Vaswani et al. 2017, section 3.2; ALiBi: Press et al. 2022, section 3."""
    q, k, v = (_heads(project(x), mixer.head_dim) for project in (mixer.q, mixer.k, mixer.v))
    q, k = _rms(mixer.q_norm, q), _rms(mixer.k_norm, k)
    if mixer.position == "rope":
        q, k = (_turned(t, mixer.rope) for t in (q, k))
    # Query head h reads key/value head h // (H / G).
    k, v = (repeat(t, "b g t k -> b (g n) t k", n=mixer.n_heads // mixer.n_kv_heads) for t in (k, v))
    scale = mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale
    rows = []
    for i in range(x.shape[1]):
        seen = [j for j in range(x.shape[1]) if _visible(i, j, mixer.causal, mixer.window)]
        scores = q[:, :, i, None] @ k[:, :, seen].transpose(2, 3) * scale
        if mixer.softcap is not None:
            scores = mixer.softcap * torch.tanh(scores / mixer.softcap)
        if mixer.position == "alibi":
            for h in range(mixer.n_heads):
                scores[:, h, 0] -= 2 ** (-8 * (h + 1) / mixer.n_heads) * torch.tensor([abs(i - j) for j in seen]).to(x)
        total = scores.exp().sum(-1, keepdim=True)
        if mixer.sinks is not None:
            total = total + mixer.sinks.exp()[:, None, None]
        weights = scores.exp() / total
        rows.append(rearrange(weights @ v[:, :, seen], "b h 1 v -> b (h v)"))
    return mixer.out(_stacked(rows, x, mixer.n_heads * mixer.head_dim))


def additive(mixer: Any, x: Tensor) -> Tensor:
    """Additive attention: Bahdanau et al. 2014, section 3.1 and appendix A.1.2."""
    q, k = (_heads(project(x), mixer.attention_dim) for project in (mixer.q, mixer.k))
    v = _heads(mixer.v(x), mixer.head_dim)
    bias = 0 if mixer.bias is None else mixer.bias[:, None]
    rows = []
    for i in range(x.shape[1]):
        seen = [j for j in range(x.shape[1]) if _visible(i, j, mixer.causal, mixer.window)]
        hidden = torch.tanh(q[:, :, i, None] + k[:, :, seen] + bias)
        if count := flops.counter():
            # Products do not show an add and a tanh a channel of each pair.
            count.record("add, tanh", 2 * hidden.numel())
        weights = (hidden @ mixer.score[:, :, None]).softmax(2)
        rows.append(rearrange(weights.transpose(2, 3) @ v[:, :, seen], "b h 1 v -> b (h v)"))
    return mixer.out(_stacked(rows, x, mixer.n_heads * mixer.head_dim))


def kernelised(features: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Linear attention over a feature map: Katharopoulos et al. 2020, equations 16 to 20."""

    def definition(mixer: Any, x: Tensor) -> Tensor:
        q, k = (features(mixer, _heads(project(x), mixer.key_dim)) for project in (mixer.q, mixer.k))
        v = _heads(mixer.v(x), mixer.value_dim)
        if mixer.normalise:
            # The normaliser is the sum of the weights: a value of 1.
            v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        y = _recurrence(q, k, v, x.new_zeros(1, mixer.n_heads, x.shape[1]), mixer.causal)
        y = y[..., :-1] / y[..., -1:] if mixer.normalise else y * mixer.key_dim**-0.5
        return mixer.out(rearrange(y, "b h t v -> b t (h v)"))

    return definition


def retention(mixer: Any, x: Tensor) -> Tensor:
    """Sun et al. 2023, equations 6 to 8; slopes, silu, RMSNorm and sigmoid: MiniMax 2025, section 2.2.1."""
    q, k, v = (
        _heads(project(x), width)
        for project, width in ((mixer.q, mixer.key_dim), (mixer.k, mixer.key_dim), (mixer.v, mixer.value_dim))
    )
    if mixer.activation == "silu":
        q, k, v = (t / (1 + torch.exp(-t)) for t in (q, k, v))
    if mixer.rope is not None:
        q, k = (_turned(t, mixer.rope) for t in (q, k))
    heads = range(mixer.n_heads)
    if mixer.decay == "slopes":
        decay = [math.exp(-mixer.slope_scale * 2 ** (-8 * (h + 1) / mixer.n_heads)) for h in heads]
    else:
        decay = [1 - 2.0 ** (-5 - h) for h in heads]
    y = _recurrence(q, k, v, torch.tensor(decay, dtype=x.dtype).log()[None, :, None].expand(1, -1, x.shape[1]))
    y = rearrange(y, "b h t v -> b t h v") * mixer.scale
    if mixer.norm is None:
        y = y - y.mean(-1, keepdim=True)
        y = (y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(2)
    else:
        y = y.flatten(2)
        y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * mixer.norm.weight
    gate = mixer.gate(x)
    return mixer.out(y * (gate if mixer.gate_function == "swish" else 1) / (1 + torch.exp(-gate)))


def gated_linear(mixer: Any, x: Tensor) -> Tensor:
    """Yang et al. 2024, section 4.1, equation 3 and 4.4, with one gate a head."""
    q, k, v = (_heads(project(x), mixer.key_dim) for project in (mixer.q, mixer.k, mixer.v))
    gates = -torch.log(1 + torch.exp(-mixer.forget(x))) / mixer.tau
    y = _recurrence(q, k, v, gates.transpose(1, 2)).transpose(1, 2) / mixer.key_dim**0.5
    y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.norm.weight
    gate = mixer.gate(x)
    return mixer.out(y.flatten(2) * gate / (1 + torch.exp(-gate)))


def _recurrence(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, causal: bool = True) -> Tensor:
    """q_t S_t with S_t = exp(log_decay_t) S_{t-1} + k_t v_t^T, over [B, H, T, ..]; not causal: q_t S_T."""
    state = k.new_zeros(*k.shape[:2], k.shape[3], v.shape[3])
    states = []
    for i in range(q.shape[2]):
        state = log_decay[:, :, i, None, None].exp() * state + k[:, :, i, :, None] @ v[:, :, i, None]
        states.append(state)
    rows = [q[:, :, i, None] @ (states[i] if causal else states[-1]) for i in range(q.shape[2])]
    return torch.cat(rows, 2) if rows else v


def linear_features(mixer: Any, x: Tensor) -> Tensor:
    """elu(x) + 1 (Katharopoulos et al. 2020, equation 7), relu, or Hedgehog's two softmaxes (Zhang et al. 2024)."""
    match mixer.feature_map:
        case "elu":
            return torch.where(x > 0, x + 1, x.exp())
        case "relu":
            return torch.where(x > 0, x, 0)
        case "softmax_pair":
            pair = (x.exp() / x.exp().sum(-1, keepdim=True), (-x).exp() / (-x).exp().sum(-1, keepdim=True))
            return torch.cat(pair, -1)
    return x


def taylor_features(mixer: Any, x: Tensor) -> Tensor:
    """phi with phi(q) . phi(k) = 1 + s + s^2 / 2, s = scale * q . k (Arora et al. 2024, section 4.1)."""
    x = x * mixer.scale**0.5
    pairs = [x[..., i, None] * x * 0.5**0.5 for i in range(x.shape[-1])]
    return torch.cat([torch.ones_like(x[..., :1]), x, *pairs], -1)


def selective(mixer: Any, x: Tensor) -> Tensor:
    """Mamba: Gu and Dao 2023, algorithm 2 and figure 3; the norms inside: Lieber et al. 2024, section 6.4."""
    x, gate = mixer.in_proj(x).chunk(2, -1)
    x = _convolved(mixer.conv1d, x)
    dt, b, c = mixer.x_proj(x).split([mixer.dt_rank, mixer.d_state, mixer.d_state], -1)
    if mixer.inner_norm:
        dt, b, c = _rms(mixer.dt_layernorm, dt), _rms(mixer.b_layernorm, b), _rms(mixer.c_layernorm, c)
    dt = (1 + mixer.dt_proj(dt).exp()).log()
    state = x.new_zeros(len(x), *mixer.A_log.shape)
    rows = []
    for i in range(x.shape[1]):
        state = (-dt[:, i, :, None] * mixer.A_log.exp()).exp() * state + (dt * x)[:, i, :, None] @ b[:, i, None]
        rows.append((state @ c[:, i, :, None])[..., 0] + mixer.D * x[:, i])
    return mixer.out_proj(_stacked(rows, x, x.shape[2]) * gate * gate.sigmoid())


def heads_of_states(mixer: Any, x: Tensor) -> Tensor:
    """Mamba-2: Dao and Gu 2024, listing 1 as a recurrence, and figure 6."""
    inner, shared = mixer.n_heads * mixer.head_dim, mixer.n_groups * mixer.d_state
    gate, x, dt = mixer.in_proj(x).split([inner, inner + 2 * shared, mixer.n_heads], -1)
    x, b, c = _convolved(mixer.conv1d, x).split([inner, shared, shared], -1)
    x = _heads(x, mixer.head_dim)
    # Head h reads group h // (H / G).
    share = mixer.n_heads // mixer.n_groups
    b, c = (repeat(_heads(t, mixer.d_state), "b g t n -> b (g k) t n", k=share) for t in (b, c))
    dt = (1 + (dt + mixer.dt_bias).exp()).log().clamp(min=mixer.dt_floor).transpose(1, 2)[..., None]
    state = x.new_zeros(*x.shape[:2], mixer.head_dim, mixer.d_state)
    rows = []
    for i in range(x.shape[2]):
        decay = (-dt[:, :, i, None] * mixer.A_log.exp()[:, None, None]).exp()
        state = decay * state + (dt * x)[:, :, i, :, None] @ b[:, :, i, None]
        y = (state @ c[:, :, i, :, None])[..., 0] + mixer.D[:, None] * x[:, :, i]
        rows.append(rearrange(y, "b h p -> b (h p)"))
    y, gate = _stacked(rows, x, inner), gate * gate.sigmoid()
    if mixer.norm is None:
        return mixer.out_proj(y * gate)
    y = y if mixer.norm.before_gate else y * gate
    parts = y.unflatten(-1, (mixer.n_groups, -1))
    y = (parts / (parts.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(-2) * mixer.norm.weight
    return mixer.out_proj(y * gate if mixer.norm.before_gate else y)


def _convolved(conv: Any, x: Tensor) -> Tensor:
    """silu of a causal depthwise convolution, over the taps that lie inside of the row."""
    rows = []
    for i in range(x.shape[1]):
        taps = min(i + 1, conv.kernel_size[0])
        y = x[:, i + 1 - taps : i + 1].transpose(1, 2)[..., None, :] @ conv.weight[:, 0, -taps:, None]
        y = y[..., 0, 0] if conv.bias is None else y[..., 0, 0] + conv.bias
        rows.append(y * y.sigmoid())
    return _stacked(rows, x, x.shape[2])


def native_sparse(mixer: Any, x: Tensor) -> Tensor:
    """NSA: Yuan et al. 2025, sections 3.2 and 3.3, one query at a time."""
    groups, width, names = mixer.n_kv_heads, mixer.head_dim, mixer.branches
    q = plain = _heads(mixer.q(x), width)
    split = [_heads(project(x), width).split(groups, 1) for project in (mixer.k, mixer.v)]
    k, v = (dict(zip(names, parts, strict=True)) for parts in split)
    if mixer.position == "rope":
        q = _turned(q, mixer.rope)
        k = {name: t if name == "compressed" else _turned(t, mixer.rope) for name, t in k.items()}
    if "compressed" in names:
        phi = mixer.compress_k, mixer.compress_v
        compressed = [_compress(mixer, f, t["compressed"]) for f, t in zip(phi, (k, v), strict=True)]
    elif "selected" in names:
        # Scores alone: values without channels.
        keys = _compress(mixer, mixer.compress_k, k["selected"])
        compressed = [keys, keys[..., :0]]
    rows = []
    for t in range(x.shape[1]):
        seen = [list(range(max(0, t - mixer.window + 1), t + 1))] * groups
        row = x.new_zeros(x.shape[0], mixer.n_heads, width)
        gates = torch.ones(x.shape[0], len(names), mixer.n_heads).to(x)
        if mixer.gate is not None:
            gates = rearrange(1 / (1 + torch.exp(-mixer.gate(x[:, t]))), "b (c h) -> b c h", h=mixer.n_heads)
        for b in range(x.shape[0]):
            shares: list[Tensor] = []
            if names != ("window",):
                past = [i for i in range(compressed[0].shape[2]) if _last(mixer, i) <= t]
                asking = plain if "compressed" in names else q
                y, shares = _attended(asking[b, :, t], compressed[0][b], compressed[1][b], [past] * groups)
            for c, name in enumerate(names):
                if name == "selected":
                    seen_here = [_selected_tokens(mixer, share.detach(), t) for share in shares]
                elif name == "window":
                    seen_here = seen
                if name != "compressed":
                    y, _ = _attended(q[b, :, t], k[name][b], v[name][b], seen_here)
                row[b] = row[b] + gates[b, c, :, None] * y
        rows.append(rearrange(row, "b h v -> b (h v)"))
    return mixer.out(_stacked(rows, x, mixer.n_heads * width))


def _last(mixer: Any, i: int) -> int:
    """The last token of compression block i."""
    return i * mixer.compress_stride + mixer.compress_block - 1


def _compress(mixer: Any, phi: Any, x: Tensor) -> Tensor:
    """[B, G, T, K] -> [B, G, C, K]: equation 7."""
    found = []
    i = 0
    while _last(mixer, i) < x.shape[2]:
        tokens = x[:, :, i * mixer.compress_stride : _last(mixer, i) + 1]
        if phi.how == "mean":
            found.append(tokens.mean(2))
        else:
            places = phi.places if phi.how == "mlp" else 0
            joined = (tokens + places).flatten(2)
            if phi.how == "mlp":
                hidden = joined @ phi.hidden.weight.T
                joined = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
            found.append(joined @ phi.weight.weight.T)
        i += 1
    return torch.stack(found, 2) if found else x[:, :, :0]


def _attended(q: Tensor, k: Tensor, v: Tensor, seen: list[list[int]]) -> tuple[Tensor, list[Tensor]]:
    """q [H, K] over the keys [G, S, K] that each group sees: [H, V], and each group's sum of weights over its heads."""
    outputs, shares = [], []
    for g, rows in enumerate(q.chunk(len(seen))):
        weights = (rows @ k[g, seen[g]].T * q.shape[1] ** -0.5).exp()
        weights = weights / weights.sum(-1, keepdim=True)
        outputs.append(weights @ v[g, seen[g]])
        shares.append(weights.sum(0))
    return torch.cat(outputs), shares


def _selected_tokens(mixer: Any, share: Tensor, t: int) -> list[int]:
    """Tokens up to t of the blocks that the equations 9 to 11 choose."""
    own, scores, sizes = t // mixer.select_block, [], (mixer.compress_block, mixer.compress_stride, mixer.select_block)
    for j in range(own + 1):
        score = sum(p * _common(i, j, *sizes) / mixer.compress_stride for i, p in enumerate(share.tolist()))
        scores.append((j == own, j == 0, j == own - 1, score))
    best = sorted(range(own + 1), key=lambda j: scores[j], reverse=True)[: mixer.n_selected]
    return [s for j in sorted(best) for s in range(j * mixer.select_block, (j + 1) * mixer.select_block) if s <= t]


@cache
def _common(i: int, j: int, block: int, stride: int, select_block: int) -> int:
    """Tokens of both compression block i and selection block j."""
    return len(set(range(i * stride, i * stride + block)) & set(range(j * select_block, (j + 1) * select_block)))


def _visible(i: int, j: int, causal: bool, window: int | None) -> bool:
    return (j <= i or not causal) and (window is None or abs(i - j) < window)


def _heads(x: Tensor, width: int) -> Tensor:
    return rearrange(x, "b t (h k) -> b h t k", k=width)


def _rms(norm: Any, x: Tensor) -> Tensor:
    weight = getattr(norm, "weight", None)
    return x if weight is None else x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _turned(x: Tensor, rope: Any) -> Tensor:
    """Pair i of R channels as one complex number, turned by t base^(-2i/R): Su et al. 2021, section 3.4.2.

    LongRoPE divides that by the pair's factor: Ding et al. 2024, equation 2.
    """
    half = int(x.shape[-1] * rope.fraction) // 2
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    pairs = turning.split(half, -1) if rope.layout == "half" else turning.unflatten(-1, (half, 2)).unbind(-1)
    angles = torch.arange(x.shape[2]).to(x)[:, None] * rope.base ** (-torch.arange(half).to(x) / half)
    size = torch.ones_like(angles)
    if isinstance(rope.scaling, Linear):
        angles = angles / rope.scaling.factor
    if isinstance(rope.scaling, LongRope):
        angles, size = angles / torch.tensor(rope.scaling.short_factor).to(x), size * rope.scaling.amplitude
    turned = torch.complex(*pairs) * torch.polar(size, angles)
    if rope.layout == "half":
        return torch.cat([turned.real, turned.imag, rest], -1)
    return torch.cat([torch.view_as_real(turned).flatten(-2), rest], -1)


def _stacked(rows: list[Tensor], x: Tensor, width: int) -> Tensor:
    return torch.stack(rows, 1) if rows else x.new_zeros(x.shape[0], 0, width)


def _softmax(options: dict[str, Any], alternatives: dict[str, Any], growth: float) -> Conformance:
    shared = {
        "n_heads": 2,
        "head_dim": 6,
        "causal": False,
        "position": "none",
        "rope_base": 7.0,
        "rope_fraction": 0.5,
        "rope_layout": "interleaved",
        # Turns cached keys anew in each call, at one length so far; other scalings: tests/mixers/test_rope_scaling.py.
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.5, 3.0],
            "long_factor": [9.0, 9.0],
            "original_max_position_embeddings": 4096,
            "attention_factor": 1.2,
        },
        "bias": True,
        "qk_norm": True,
        "scale": 1.0,
        "softcap": 0.1,
        "sinks": True,
        "dropout": 0.5,
    }
    return Conformance(
        options={"n_heads": 4} | options,
        alternatives=shared | alternatives,
        reference=attention,
        growth=growth,
        unordered={"causal": False, "position": "none"} | ({"window": 64} if "window" in options else {}),
    )


def _linear(features: Callable[[Any, Tensor], Tensor], options: dict[str, Any], **alternatives: Any) -> Conformance:
    return Conformance(
        options={"n_heads": 2} | options,
        alternatives={"n_heads": 4, "causal": False, "bias": True} | alternatives,
        reference=kernelised(features),
        growth=1,
        unordered={"causal": False},
    )


_MAMBA = dict(d_state=3, d_conv=2, expand=3, dt_min=0.01, dt_max=0.05, conv_bias=False, bias=True)

_BUILT_IN = {
    "mha": _softmax({}, {"position": "alibi"}, growth=2),
    "gqa": _softmax({"n_kv_heads": 2}, {"n_kv_heads": 1}, growth=2),
    "mqa": _softmax({}, {}, growth=2),
    "window": _softmax({"window": 5}, {"window": 3, "n_kv_heads": 2, "position": "alibi"}, growth=1),
    "linear": _linear(linear_features, {}, feature_map="softmax_pair"),
    "retention": Conformance(
        options={"n_heads": 2, "decay": "slopes"},
        alternatives={
            "n_heads": 4, "expand": 1, "decay": "retention", "slope_scale": 3.0, "position": "none", "rope_base": 7.0,
            "activation": "silu", "norm": "rms", "gate": "sigmoid", "scale": 2.0, "bias": True,
        },
        reference=retention,
        growth=1,
    ),
    "gated_linear": Conformance(
        options={"n_heads": 2},
        alternatives={"n_heads": 4, "tau": 2.0, "bias": True},
        reference=gated_linear,
        growth=1,
    ),
    "based": _linear(taylor_features, {"feature_dim": 3}, feature_dim=2, scale=2.0),
    "mamba": Conformance(
        options={"d_state": 4, "dt_max": 1.0},
        alternatives=_MAMBA | {"dt_rank": 2, "inner_norm": True},
        reference=selective,
        growth=1,
    ),
    "mamba2": Conformance(
        options={"d_state": 4, "head_dim": 4, "n_heads": None, "dt_max": 1.0},
        alternatives=_MAMBA
        | {"head_dim": 8, "n_heads": 6, "n_groups": 4, "dt_floor": 0.2, "a_min": 8.0, "a_max": 2.0, "norm": "none"},
        reference=heads_of_states,
        growth=1,
    ),
    "additive": Conformance(
        options={"n_heads": 4},
        alternatives={"n_heads": 2, "attention_dim": 3, "window": 5, "causal": False, "bias": False},
        reference=additive,
        growth=2,
        unordered={"causal": False},
    ),
    "nsa": Conformance(
        options={
            "n_heads": 4,
            "n_kv_heads": 2,
            "compress_block": 6,
            "compress_stride": 2,
            "select_block": 4,
            "n_selected": 4,
            "window": 6,
        },
        alternatives={
            "n_heads": 2,
            "n_kv_heads": 1,
            "head_dim": 6,
            "branches": ["selected", "window"],
            "compress_block": 4,
            "compress_stride": 1,
            "compression": "linear",
            "select_block": 8,
            "n_selected": 2,
            "window": 2,
            "shrink": 2,
            "position": "none",
            "rope_base": 7.0,
            "rope_fraction": 0.5,
            "rope_layout": "interleaved",
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
        together=(
            ("n_heads", "n_kv_heads", "head_dim", "position"),
            ("branches", "rope_base", "rope_fraction", "rope_layout", "rope_scaling"),
            # Longer rows hold more than 4 blocks of 8: some are chosen by score.
            ("compress_block", "compress_stride", "compression", "select_block"),
            # Two blocks are the own one and the first: not even the one before has room.
            ("n_selected", "window", "shrink"),
        ),
        reference=native_sparse,
        growth=2,
        smooth={"n_selected": 512},
        reads=0.1,
    ),
}
