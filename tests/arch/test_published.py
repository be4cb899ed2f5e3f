"""Whole Mamba models of `transformers` and mamba-ssm, with random weights, against ours with the same state_dict."""

from __future__ import annotations

import pytest
import torch

from arch.language_model import LanguageModel
from arch.published import from_mamba, to_mamba

transformers = pytest.importorskip("transformers")

SIZES = dict(vocab_size=32, hidden_size=32, num_hidden_layers=3, state_size=8)


def published(name):
    """A small model of theirs."""
    torch.manual_seed(0)
    if name == "mamba":
        return transformers.MambaForCausalLM(transformers.MambaConfig(**SIZES, initializer_range=0.02))
    config = transformers.Mamba2Config(
        **SIZES, num_heads=4, head_dim=16, n_groups=1, chunk_size=16, tie_word_embeddings=True
    )
    return transformers.Mamba2ForCausalLM(config)


def ours(name):
    options = {"d_state": 8} | ({"head_dim": 16} if name == "mamba2" else {})
    sizes = dict(vocabulary=32, d_model=32, n_layers=3)
    return LanguageModel(name, **sizes, mlp="none", norm_eps=1e-5, mixers={name: options})


both = pytest.mark.parametrize("name", ["mamba", "mamba2"])


@both
def test_a_model_of_transformers_gives_the_same_logits(name):
    theirs, model, tokens = published(name), ours(name), torch.randint(0, 32, (2, 19))
    model.load_state_dict(from_mamba(theirs.state_dict()))
    with torch.no_grad():
        got, expected = model(tokens), theirs(tokens).logits
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()


@both
@pytest.mark.parametrize("package", ["transformers", "mamba-ssm"])
def test_names_go_there_and_back(name, package):
    model = ours(name)
    there = to_mamba(model.state_dict(), package)
    assert ("backbone.embedding.weight" in there) == (package == "mamba-ssm")
    back = from_mamba(there)
    assert set(back) == set(model.state_dict())
    assert all(torch.equal(back[n], t) for n, t in model.state_dict().items())


@both
def test_ours_loads_into_transformers(name):
    theirs = published(name)
    missing = theirs.load_state_dict(to_mamba(ours(name).state_dict()))
    assert not missing.missing_keys and not missing.unexpected_keys


def test_a_head_that_is_the_embedding_may_be_missing():
    state = to_mamba(ours("mamba").state_dict(), "mamba-ssm")
    del state["lm_head.weight"]
    found = from_mamba(state)
    assert found["head.weight"] is state["backbone.embedding.weight"]
    assert not any(ours("mamba").load_state_dict(found))


def test_a_foreign_name_is_named():
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.mlp\.up\.weight' is no parameter of a Mamba"):
        from_mamba({"model.layers.0.mlp.up.weight": torch.zeros(1)})
