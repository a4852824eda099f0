"""The parts that pretrained Transformers need: orders of norms, biases, learned positions, heads, features of each head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear

from protperf.config import ModelConfig
from protperf.model import ProteinModel
from protperf.vocab import VOCABULARY

TWO_PROTEINS = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, -1, -1]], dtype=torch.int32)


def make_model(**choice: Any) -> ProteinModel:
    """Return a small model, its weights wide, so that each part has a say."""
    config = ModelConfig(**{"num_layers": 2, "model_dim": 32, "feedforward_dim": 48, **choice})
    torch.manual_seed(0)
    model = ProteinModel(config, causal=False).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "projection" not in name:
                parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.5))
    return model


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(VOCABULARY.num_residues, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_block_is_the_transformer_layer_of_torch(norm: str):
    model = make_model(
        attention="softmax", norm=norm, biases=True, positions="none", norm_eps=1e-12, num_layers=1
    )
    peer = nn.TransformerEncoderLayer(
        32, 4, 48, 0.0, "gelu", layer_norm_eps=1e-12, batch_first=True, norm_first=norm == "pre"
    ).eval()
    own: Any = model.blocks[0]
    pairs = {
        "self_attn.in_proj_weight": own.attention.qkv.weight,
        "self_attn.in_proj_bias": own.attention.qkv.bias,
        "self_attn.out_proj.weight": own.attention.out.weight,
        "self_attn.out_proj.bias": own.attention.out.bias,
        "linear1.weight": own.feedforward.into.weight,
        "linear1.bias": own.feedforward.into.bias,
        "linear2.weight": own.feedforward.out.weight,
        "linear2.bias": own.feedforward.out.bias,
        "norm1.weight": own.attention_norm.weight,
        "norm1.bias": own.attention_norm.bias,
        "norm2.weight": own.feedforward_norm.weight,
        "norm2.bias": own.feedforward_norm.bias,
    }
    peer.load_state_dict(pairs)
    x = torch.randn(2, 7, 32)
    torch.testing.assert_close(own(x, None, None), peer(x), atol=1e-5, rtol=1e-5)


def test_without_a_final_norm_the_last_state_is_what_leaves_the_last_block():
    model = make_model(norm="post")
    tokens = random_tokens(2, 6)
    last, before = model.states(tokens, layers=(2, 1))
    assert torch.equal(last, model.blocks[1](before, None, _rotation(model, 6)))


def _rotation(model: ProteinModel, length: int) -> Any:
    return model._enter(random_tokens(1, length), torch.arange(length).unsqueeze(0))[1]


@pytest.mark.parametrize("tied", [True, False])
def test_the_dense_head_is_the_one_of_bert(tied: bool):
    model = make_model(head="dense", tied_head=tied, norm_eps=1e-12)
    hidden = torch.randn(3, 32)
    weights = model.state_dict()
    matrix = weights["embedding.weight"] if tied else weights["head_matrix"]
    inner = gelu(linear(hidden, weights["head.dense.weight"], weights["head.dense.bias"]))
    normed = layer_norm(inner, (32,), weights["head.norm.weight"], weights["head.norm.bias"], 1e-12)
    torch.testing.assert_close(model.logits(hidden), normed @ matrix.T + weights["head.bias"])


def test_learned_positions_restart_with_each_protein_and_end():
    model = make_model(positions="learned", max_positions=5, embedding_norm=True, num_layers=1)
    tokens = random_tokens(1, 10)
    packed = model(tokens, TWO_PROTEINS)
    for first, last in ((0, 5), (5, 8)):
        alone = model(tokens[:, first:last])
        torch.testing.assert_close(packed[:, first:last], alone, atol=1e-5, rtol=1e-5)
    assert model.max_length == 5
    with pytest.raises(ValueError, match=r"a protein of 6 tokens; .* 5 positions: at most 3 residues"):
        model(tokens[:, :6])


def test_learned_positions_need_not_reach_over_the_padding():
    model = make_model(positions="learned", max_positions=5, token_dropout=True, attention="softmax")
    tokens = random_tokens(2, 20)
    documents = torch.full((2, 20), -1, dtype=torch.int32)
    documents[0, 9:13] = 0
    found = model(tokens, documents)[0, 9:13]
    torch.testing.assert_close(found, model(tokens[:1, 9:13])[0], atol=1e-5, rtol=1e-5)


def test_token_dropout_scales_by_the_masks_of_each_protein():
    model = make_model(token_dropout=True, positions="none", num_layers=1)
    tokens = random_tokens(1, 10)
    tokens[0, 1] = tokens[0, 3] = VOCABULARY.mask
    (entered,) = model.states(tokens, TWO_PROTEINS, layers=(0,))
    rows = model.embedding.weight[tokens[0]]
    expected = torch.cat((rows[:5] * 0.88 / (1 - 2 / 5), rows[5:8] * 0.88))
    expected[[1, 3]] = 0.0
    torch.testing.assert_close(entered[0, :8], expected)


def test_a_protein_of_masks_alone_enters_as_zeros():
    model = make_model(token_dropout=True, positions="none", num_layers=1)
    tokens = random_tokens(1, 10)
    tokens[0, 5:8] = VOCABULARY.mask
    (entered,) = model.states(tokens, TWO_PROTEINS, layers=(0,))
    assert entered[0, 5:8].eq(0).all()
    assert entered[0, :5].ne(0).any()
    assert model(tokens, TWO_PROTEINS).isfinite().all()


def test_some_layers_may_keep_exact_attention():
    model = make_model(attention="favor", softmax_layers=(1,))
    kinds = [block.attention.kind for block in model.blocks]
    assert kinds == ["favor", "softmax"]
    assert model.config.is_exact_somewhere
    assert not make_model(attention="favor").config.is_exact_somewhere
    names = [name for name in model.state_dict() if name.endswith("projection")]
    assert names == ["blocks.0.attention.projection"]
    exact, mixed = make_model(attention="softmax"), make_model(attention="favor", softmax_layers=(0, 1))
    tokens = random_tokens(1, 9)
    assert torch.equal(exact(tokens), mixed(tokens))


def test_norms_are_told_to_layers_of_oprf_beside_exact_ones():
    model = make_model(attention="oprf", softmax_layers=(0,))
    model.set_pair_squares(torch.tensor([[1.0] * 4, [2.0, 3.0, 4.0, 5.0]]))
    exact, estimated = (block.attention.pair_square for block in model.blocks)
    assert exact is None
    assert estimated.tolist() == [2.0, 3.0, 4.0, 5.0]


def test_learned_features_begin_as_the_drawn_ones_and_are_never_redrawn():
    tokens = random_tokens(2, 70)
    drawn, learned = make_model(attention="favor"), make_model(attention="favor", features="learned")
    learned.load_state_dict({**learned.state_dict(), **_shared(drawn)})
    with torch.no_grad():
        for block in learned.blocks:
            block.attention.log_factor.zero_()  # type: ignore[union-attr, operator]
    torch.testing.assert_close(learned(tokens), drawn(tokens), atol=1e-5, rtol=1e-5)
    learned(tokens).square().sum().backward()
    before = {}
    for name, parameter in learned.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
        before[name] = parameter.detach().clone()
    learned.redraw_projections(1)
    assert all(torch.equal(before[name], parameter) for name, parameter in learned.named_parameters())


def _shared(model: ProteinModel) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if not name.endswith("projection")}


def test_weights_of_these_parts_begin_as_the_docs_say():
    torch.manual_seed(0)
    parts = ModelConfig(positions="learned", max_positions=99, head="dense", tied_head=False, biases=True)
    for name, parameter in ProteinModel(parts, causal=False).named_parameters():
        if parameter.dim() == 2:
            assert 0.006 < parameter.std() < 0.022, name
        else:
            expected = 0.0 if name.endswith("bias") else 1.0
            assert torch.equal(parameter, torch.full_like(parameter, expected)), name


def test_a_factor_of_the_logits_is_one_of_both_queries_and_keys():
    model = make_model(attention="favor", features="learned", num_layers=1, positions="none")
    attention: Any = model.blocks[0].attention
    with torch.no_grad():
        attention.log_factor.copy_(torch.tensor([0.0, 1.0, -1.0, 0.5]))
    x = torch.randn(1, 5, 32)
    q, k, _ = attention.queries_keys_values(x, None)
    plain_q, plain_k, _ = attention.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
    ratio = (q @ k.mT) / (plain_q @ plain_k.mT)
    expected = torch.exp(attention.log_factor)[None, :, None, None].expand_as(ratio)
    torch.testing.assert_close(ratio, expected, atol=1e-3, rtol=1e-3)
