"""The counting mode: what is counted, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from kernels.attention.op import attention
from kernels.flops import FlopCounter, Formula
from kernels.linear.op import linear_attention
from mixers import registry


def test_matrix_products_count_two_a_multiply_add():
    with FlopCounter() as count:
        linear(torch.empty(2, 3, 5, device="meta"), torch.empty(7, 5, device="meta"))
        torch.einsum("bik,bkj->bij", torch.empty(2, 3, 4, device="meta"), torch.empty(2, 4, 5, device="meta"))
    assert count.total == 2 * 2 * 3 * 5 * 7 + 2 * 2 * 3 * 4 * 5


def test_elementwise_work_is_not_counted():
    x = torch.empty(4, 8, device="meta")
    with FlopCounter() as count:
        (x * x + x).exp().sum()
    assert count.total == 0


def test_heads_may_have_values_of_another_width():
    """A score takes K multiply-adds a pair, its part of the sum V; linear attention updates and reads K (V + 1)."""
    q, v = torch.empty(2, 5, 3, 8, device="meta"), torch.empty(2, 5, 3, 6, device="meta")
    with FlopCounter() as count:
        attention(q, q, v)
        linear_attention(q, q, v)
        linear_attention(q, q, v, normalise=False)
    assert count.flops["attention"] == 2 * 2 * 3 * 15 * (8 + 6)
    assert count.flops["linear_attention"] == 2 * 2 * 5 * 3 * 2 * 8 * (7 + 6)
    assert count.attention_bytes == 2 * 5 * 3 * (8 + 8 + 6 + 6) * 4 and count.score_bytes == 2 * 3 * 5 * 5 * 4


def test_our_ops_count_nothing_inside():
    """On live tensors the portable form would run matrix products; only the formula may be counted."""
    q = torch.randn(1, 4, 1, 8)
    with FlopCounter() as count:
        attention(q, q, q)
    assert dict(count.flops) == {"attention": 4 * 8 * 10}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_foreign_attention_is_tagged_as_densely_counted(device):
    q = torch.empty(1, 2, 16, 8, device=device)
    with FlopCounter() as fused:
        scaled_dot_product_attention(q, q, q, is_causal=True)
    with FlopCounter() as eager:
        (q @ q.transpose(-1, -2)).masked_fill(
            torch.ones(16, 16, dtype=torch.bool, device=device).triu(1), float("-inf")
        ).softmax(-1) @ q
    assert fused.dense and eager.dense
    assert fused.total == eager.total == 4 * 2 * 16 * 16 * 8


def test_custom_operator_without_a_formula_is_refused():
    @torch.library.custom_op("mixerlab_test::mystery", mutates_args=())
    def mystery(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    mystery.register_fake(torch.empty_like)
    with pytest.raises(ValueError, match=r"mixerlab_test\.mystery has no FLOP formula"), FlopCounter():
        mystery(torch.empty(3, device="meta"))


def test_a_formula_shows_what_it_evaluates():
    formula = Formula.of("2 * B*H*(K+V) * visible_pairs", B=1, H=4, K=16, V=16, visible_pairs=2080)
    assert formula.value == 2 * 4 * 32 * 2080
    assert str(formula) == "2 * B*H*(K+V) * visible pairs = 2 * 1*4*(16+16) * 2,080 = 532,480"


@pytest.mark.parametrize("name", registry.names())
def test_every_mixer_shows_its_formulas(name):
    """A formula in names: a bare number would explain nothing."""
    with torch.device("meta"):
        mixer = registry.build(name, 64)
    with FlopCounter() as count:
        mixer(torch.empty(1, 8, 64, device="meta"))
    assert count.calls and all(formula.sizes for _, formula in count.calls)
