"""Two right mixers, and copies of them with one deliberate fault each.

`caught_by` names the property that must catch it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn

from kernels.conv.op import causal_conv
from mixers.base import Memory, Mixer, Packing, State
from mixers.conformance.definitions import Conformance, attention, kernelised, linear_features
from mixers.convolution import ShortConvolution
from mixers.linear import LinearAttention
from mixers.mha import MultiHeadAttention
from mixers.window import SlidingWindowAttention

LINEAR = Conformance(options={"n_heads": 2}, reference=kernelised(linear_features), growth=1)
SOFTMAX = Conformance(options={"n_heads": 2}, reference=attention, growth=2)


class Linear(LinearAttention):
    """Right: what the faults below start from."""

    conformance: ClassVar = LINEAR
    caught_by: ClassVar[str] = ""


class Softmax(MultiHeadAttention):
    """Right: what the faults below start from."""

    conformance: ClassVar = SOFTMAX
    caught_by: ClassVar[str] = ""


class Convolution(ShortConvolution):
    """Right: what the fault below starts from."""

    caught_by: ClassVar[str] = ""


class LeakByOne(Linear):
    """A token sees the next one."""

    caught_by = "causality of gradients"

    def forward(self, x: Tensor, packing: Packing | None = None, memory: Memory | None = None) -> Tensor:
        y = super().forward(x, packing, memory)
        return torch.cat([y[:, :-1] + 0.01 * x[:, 1:], y[:, -1:]], 1)


class LeakPastBlock(Linear):
    """The last token of a block of 64 sees the first of the next; shorter inputs are right."""

    caught_by = "causality of values"

    def forward(self, x: Tensor, packing: Packing | None = None, memory: Memory | None = None) -> Tensor:
        y = super().forward(x, packing, memory).clone()
        if x.shape[1] > 64:
            y[:, 63] += 1e-6 * x[:, 64]
        return y


class WindowOneTooWide(SlidingWindowAttention):
    """Sees one key more than its definition; consistent with itself everywhere."""

    caught_by = "definition"
    conformance = Conformance(options={"n_heads": 2, "window": 5}, reference=lambda m, x: attention(_Narrower(m), x))

    def __init__(self, d_model: int, *, window: int = 5, n_heads: int | None = None):
        super().__init__(d_model, window=window + 1, n_heads=n_heads)


class _Narrower:
    """A mixer as its definition should see it: the window that was asked for."""

    def __init__(self, mixer: Mixer):
        self.mixer, self.window = mixer, mixer.window - 1

    def __getattr__(self, name: str):
        return getattr(self.mixer, name)


class StateNotCarried(Linear):
    """Every piece starts from nothing."""

    caught_by = "cuts of extend"

    def mix(self, x, past, documents, memory=None):
        if past is not None:
            past = State({**past.tensors, "kv": past["kv"] * 0, "z": past["z"] * 0}, past.length)
        return super().mix(x, past, documents, memory)


class NormaliserNotCarried(Linear):
    """S is carried, z is not."""

    caught_by = "cuts of extend"

    def mix(self, x, past, documents, memory=None):
        if past is not None:
            past = State({**past.tensors, "z": past["z"] * 0}, past.length)
        return super().mix(x, past, documents, memory)


class PaddingCountedInState(Linear):
    """elu(0) + 1 = 1: pads enter the normaliser that is carried on."""

    caught_by = "decode after padding"

    def mix(self, x, past, documents, memory=None):
        if documents is not None and past is not None:
            documents = torch.where(documents == 0, documents.amax(1, keepdim=True), documents)
        return super().mix(x, past, documents, memory)


class PaddingCounted(Linear):
    """Goes around the door: pads are tokens like others."""

    caught_by = "padding"

    def forward(self, x: Tensor, packing: Packing | None = None, memory: Memory | None = None) -> Tensor:
        if packing is None or (packing.documents > 1).any():
            return super().forward(x, packing, memory)
        return super().forward(x)


class DocumentsMixedByConvolution(Convolution):
    """Taps reach into the document before."""

    caught_by = "packing"

    def mix(self, x, past, documents, memory=None):
        if past is None:
            return causal_conv(x, self.weight), {}
        return super().mix(x, past, documents, memory)


class PackedRowsInOrder(Linear):
    """Forgets the documents of pieces that are fed to `extend`."""

    caught_by = "recomputation"

    def mix(self, x, past, documents, memory=None):
        return super().mix(x, past, documents if past is None else documents.clamp(max=1), memory)


class DropoutInEval(Softmax):
    """Drops attention weights whatever the mode."""

    caught_by = "dropout"

    def __init__(self, d_model: int, *, n_heads: int | None = None, dropout: float = 0.5):
        super().__init__(d_model, n_heads=n_heads)
        self.rate = dropout

    def mix(self, x, past, documents, memory=None):
        return super().mix(nn.functional.dropout(x, self.rate, training=True), past, documents, memory)


class KeysDetached(Linear):
    """No gradient flows through the keys to the input."""

    caught_by = "gradients"

    def encode(self, q: Tensor, k: Tensor, documents: Tensor | None, past: State | None) -> tuple[Tensor, Tensor]:
        q, k = super().encode(q, k, documents, past)
        return q, k.detach()


class DeadParameter(Linear):
    """A parameter that nothing uses."""

    caught_by = "parameters"

    def __init__(self, d_model: int, *, n_heads: int | None = None):
        super().__init__(d_model, n_heads=n_heads)
        self.gate = nn.Parameter(torch.ones(d_model))


class UnusedOption(Linear):
    """`sharpness` never reaches the computation."""

    caught_by = "options"
    conformance = replace(LINEAR, alternatives={"n_heads": 4, "sharpness": 3.0})

    def __init__(self, d_model: int, *, n_heads: int | None = None, sharpness: float = 1.0):
        super().__init__(d_model, n_heads=n_heads)


class PaddedState(Softmax):
    """Holds 1024 slots from the start."""

    caught_by = "state bytes"
    conformance = replace(SOFTMAX, reference=None)

    def empty(self, batch: int, like: Tensor) -> dict[str, Tensor]:
        shape = (batch, self.n_heads, 1024, self.head_dim)
        return {"k": like.new_zeros(shape), "v": like.new_zeros(shape)}


class StateOnMeta(Linear):
    """Counts less on meta than it holds."""

    caught_by = "state bytes"

    def empty(self, batch: int, like: Tensor) -> dict[str, Tensor]:
        kept = super().empty(batch, like)
        return kept if like.is_meta else {**kept, "spare": like.new_zeros(batch, 3)}

    def mix(self, x, past, documents, memory=None):
        y, kept = super().mix(x, past, documents, memory)
        return y, {**kept, "spare": past["spare"]} if past is not None and "spare" in past.tensors else kept


class StateKeepsInputs(Convolution):
    """A tail of three tokens that is a view of the whole input."""

    caught_by = "state bytes"

    def mix(self, x, past, documents, memory=None):
        y, kept = super().mix(x, past, documents, memory)
        if past is not None and documents is None and x.shape[1] >= 3:
            kept["tail"] = x.clone()[:, -3:]
        return y, kept


class RowsMixed(Linear):
    """A trace of the mean over the batch."""

    caught_by = "batch rows"

    def forward(self, x: Tensor, packing: Packing | None = None, memory: Memory | None = None) -> Tensor:
        y = super().forward(x, packing, memory)
        return y + 1e-3 * (x - x.mean(0, keepdim=True))


class _Shared(State):
    """Its copies share their tensors."""

    def clone(self) -> State:
        return _Shared(dict(self.tensors), self.length)


class CloneThatAliases(Softmax):
    """A fork writes into the cache of its origin."""

    caught_by = "fork"

    def extend(self, x: Tensor, state: State, packing: Packing | None = None) -> tuple[Tensor, State]:
        y, after = super().extend(x, state, packing)
        return y, _Shared(after.tensors, after.length)


class HeadsSwappedInExtend(Softmax):
    """The heads' outputs are put together in another order when a state is carried."""

    caught_by = "cuts of extend"

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, **places) -> Tensor:
        y = super()._attend(q, k, v, **places)
        return y.flip(2) if self.extending else y

    extending = False

    def mix(self, x, past, documents, memory=None):
        self.extending = past is not None
        return super().mix(x, past, documents, memory)


class OnlyWholeChunks(Mixer):
    """A running sum over chunks of 16 that drops what does not fill one."""

    caught_by = "lengths"

    def __init__(self, d_model: int):
        super().__init__()
        self.project = nn.Linear(d_model, d_model, bias=False)

    def whole(self, x: Tensor) -> Tensor:
        full = x.shape[1] // 16 * 16
        chunks = rearrange(self.project(x[:, :full]), "b (n c) d -> b n c d", c=16)
        y = rearrange(chunks.cumsum(2), "b n c d -> b (n c) d")
        return torch.cat([y, torch.zeros_like(x[:, full:])], 1)


class OverflowInHalf(Linear):
    """A detour through numbers that fp16 cannot hold."""

    caught_by = "low precision"

    def mix(self, x, past, documents, memory=None):
        y, kept = super().mix(x, past, documents, memory)
        return y * 3e4 / 3e4 * (1 + 0 * (y.abs() * 1e6).sum()), kept


class RowsSecond(Linear):
    """The state has its heads before the batch."""

    caught_by = "state rows"

    def empty(self, batch: int, like: Tensor) -> dict[str, Tensor]:
        return {name: t.transpose(0, 1) for name, t in super().empty(batch, like).items()}

    def mix(self, x, past, documents, memory=None):
        if past is not None:
            turned = {name: past[name].transpose(0, 1) for name in ("kv", "z")}
            past = State({**past.tensors, **turned}, past.length)
        y, kept = super().mix(x, past, documents, memory)
        return y, {name: t.transpose(0, 1) for name, t in kept.items()}


class StateStaysWide(Linear):
    """A state that was moved to another dtype comes back in float64."""

    caught_by = "state moves"

    def mix(self, x, past, documents, memory=None):
        y, kept = super().mix(x, past, documents, memory)
        return y, {name: t.double() for name, t in kept.items()}


class InputChanged(Linear):
    """Scales its input in place and back."""

    caught_by = "strides"

    def forward(self, x: Tensor, packing: Packing | None = None, memory: Memory | None = None) -> Tensor:
        y = super().forward(x, packing, memory)
        if not torch.is_grad_enabled() and not x.is_meta and 0 not in x.stride():
            x.mul_(1.5)
        return y


class ReadsValues(Linear):
    """Looks at a value, which meta and a compiled graph do not have."""

    caught_by = "meta"

    def mix(self, x, past, documents, memory=None):
        if x.numel() and x.abs().max().item() > 1e9:
            raise OverflowError
        return super().mix(x, past, documents, memory)


class GraphBreak(Linear):
    """Compiles in two graphs."""

    caught_by = "compile"

    def mix(self, x, past, documents, memory=None):
        torch._dynamo.graph_break()
        return super().mix(x, past, documents, memory)


class RandomWithoutSeed(Linear):
    """Draws from a generator of its own."""

    caught_by = "determinism"

    def __init__(self, d_model: int, *, n_heads: int | None = None):
        super().__init__(d_model, n_heads=n_heads)
        generator = torch.Generator()
        generator.seed()
        with torch.no_grad():
            self.v.weight += torch.rand(self.v.weight.shape, generator=generator)


class NotInStateDict(Linear):
    """A random table that is not saved."""

    caught_by = "state_dict"

    def __init__(self, d_model: int, *, n_heads: int | None = None):
        super().__init__(d_model, n_heads=n_heads)
        self.register_buffer("table", torch.rand(d_model), persistent=False)

    def mix(self, x, past, documents, memory=None):
        return super().mix(x * self.table, past, documents, memory)


class DecodesBackwards(Softmax):
    """A bidirectional form that does not refuse to decode."""

    caught_by = "bidirectional"

    def start(self, batch: int, like: Tensor, memory: Memory | None = None) -> State:
        return State(self.empty(batch, like))


class OrderMatters(Softmax):
    """Claims to ignore order, with positions on."""

    caught_by = "permutation"
    conformance = replace(SOFTMAX, unordered={"causal": False})


class WorkNotNeeded(Linear):
    """Projects twice and uses it once."""

    caught_by = "flops"
    conformance = LINEAR

    def mix(self, x, past, documents, memory=None):
        self.q(x)
        return super().mix(x, past, documents, memory)


class LinearInName(Softmax):
    """Claims linear growth."""

    caught_by = "growth"
    conformance = replace(SOFTMAX, growth=1)


class HalfTheTypes(Linear):
    """Always answers in float32."""

    caught_by = "shape"

    def forward(self, x: Tensor, packing: Packing | None = None, memory: Memory | None = None) -> Tensor:
        return super().forward(x, packing, memory).float()


RIGHT = (Linear, Softmax, Convolution)
FAULTY = tuple(
    cls
    for cls in list(globals().values())
    if isinstance(cls, type) and issubclass(cls, Mixer) and vars(cls).get("caught_by")
)


class NeedsAnOption(Mixer):
    """No default."""

    def __init__(self, d_model: int, *, order: int):
        super().__init__()


class Raises(Mixer):
    """Cannot run."""

    def __init__(self, d_model: int):
        super().__init__()

    def whole(self, x: Tensor) -> Tensor:
        raise RuntimeError("not today")


class HalfAsLong(Raises):
    """Gives the wrong shape."""

    def whole(self, x: Tensor) -> Tensor:
        return x[:, ::2]


class NoMixer(nn.Linear):
    """A module, but no mixer."""


class Swallows(Raises):
    """Takes any option."""

    def __init__(self, d_model: int, **options):
        super().__init__(d_model)
