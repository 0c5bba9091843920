"""Is the model the one that its configuration says, and does it start where its seed says?"""

import math

import pytest
import torch
import torch.nn.functional as F

from hardware import peak_tflops
from loss import projection_loss
from model import Attention, Transformer, apply_rope, rope_tables
from model_config import TransformerConfig, build_config, count_params, flops_per_token
from weights import digest_weights, init_weights

VOCABULARY = 131_072
PARAMETERS = {
    ("all", 1): 75_501_824,
    ("all", 2): 190_857_728,
    ("all", 4): 704_709_632,
    ("all", 6): 1_856_128_512,
    ("all", 8): 3_959_687_168,
    ("all", 9): 5_530_523_904,
    ("all", 10): 7_329_958_400,
    ("all", 12): 12_281_515_008,
    ("all", 13): 15_581_486_336,
    ("all", 14): 19_128_929_792,
    ("all", 15): 23_184_940_800,
    ("all", 19): 46_322_328_320,
    ("n_layers", 1): 8_053_329_920,
    ("n_layers", 24): 48_185_937_920,
}
TINY = TransformerConfig(
    dim=64, n_layers=2, n_heads=8, n_kv_heads=2, multiple_of=32, vocab_size=500
)


def build(config: TransformerConfig, length: int = 32, dtype=torch.float32) -> Transformer:
    with torch.device("meta"):
        model = Transformer(config, sequence_length=length, compute_dtype=dtype)
    return model.to(dtype)


def on_cpu(model: Transformer, seed: int = 3) -> Transformer:
    model.to_empty(device="cpu")
    model.build_rope_tables(torch.device("cpu"))
    init_weights(model, seed=seed, device=torch.device("cpu"), init_std=model.init_std)
    return model


@pytest.mark.parametrize(("strategy", "factor"), PARAMETERS)
def test_parameter_table(strategy, factor) -> None:
    config = build_config(strategy, factor, VOCABULARY)
    expected = PARAMETERS[strategy, factor]
    assert count_params(config) == expected
    assert sum(p.numel() for p in build(config).parameters()) == expected


def test_flops_per_token_by_hand() -> None:
    # dim 256, 8 layers of 8 heads of 32, hidden 1024, 131,072 words, T = 4096.
    hidden = 1024
    block = 4 * 256 * 256 + 3 * 256 * hidden + 2 * 256
    matmul = 8 * block + 256 + VOCABULARY * 256
    expected = 6 * matmul + 12 * 8 * 256 * 4096
    assert flops_per_token(build_config("all", 1, VOCABULARY), 4096) == expected


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        build_config("all", 0, VOCABULARY)
    with pytest.raises(ValueError, match="must be one of"):
        build_config("depth", 1, VOCABULARY)  # pyright: ignore[reportArgumentType]


def test_peak_is_never_guessed() -> None:
    assert peak_tflops("NVIDIA H200") == 989.0
    assert peak_tflops("NVIDIA H200 NVL") == 836.0
    assert peak_tflops("NVIDIA H2000") is None


def test_rope_tables_are_fp32_whatever_the_parameters() -> None:
    model = build(TINY, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    model.build_rope_tables(torch.device("cpu"))
    assert next(model.parameters()).dtype == torch.bfloat16
    assert model.cos_TK.dtype == model.sin_TK.dtype == torch.float32
    position, half = 17, TINY.head_size // 2
    angle = position * TINY.rope_theta ** (-1 / half)
    assert model.cos_TK[position, 1].item() == pytest.approx(math.cos(angle), abs=1e-6)
    assert model.sin_TK[position, 1 + half].item() == pytest.approx(math.sin(angle), abs=1e-6)


def test_rope_scores_depend_on_distance_only() -> None:
    cos_TK, sin_TK = rope_tables(TINY, 64, "cpu")
    q, k = torch.randn(1, 1, 1, TINY.head_size), torch.randn(1, 1, 1, TINY.head_size)
    q_at, k_at = (apply_rope(x.expand(1, 64, 1, -1), cos_TK, sin_TK)[0, :, 0] for x in (q, k))
    scores = q_at @ k_at.T
    torch.testing.assert_close(scores[10, 3], scores[50, 43], rtol=1e-4, atol=1e-4)
    assert (scores[10, 3] - scores[10, 9]).abs() > 1e-3


def test_attention_equals_the_textbook() -> None:
    torch.manual_seed(0)
    attention = Attention(TINY)
    x = torch.randn(2, 16, TINY.dim)
    cos_TK, sin_TK = rope_tables(TINY, 16, "cpu")
    heads = (2, 16, -1, TINY.head_size)
    q = apply_rope(attention.query(x).view(heads), cos_TK, sin_TK)
    k = apply_rope(attention.key(x).view(heads), cos_TK, sin_TK)
    v = attention.value(x).view(heads)
    group = TINY.n_heads // TINY.n_kv_heads
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scores = torch.einsum("bthk,bshk->bhts", q, k) / TINY.head_size**0.5
    scores = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), float("-inf"))
    expected = torch.einsum("bhts,bshk->bthk", scores.softmax(-1), v).flatten(2)
    expected = attention.output(expected)
    torch.testing.assert_close(attention(x, cos_TK, sin_TK), expected, rtol=1e-4, atol=1e-5)


def test_model_is_causal_and_its_loss_is_the_sum() -> None:
    model = on_cpu(build(TINY))
    tokens = torch.randint(0, 500, (2, 32))
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 500
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])
    labels = tokens.roll(-1, 1)
    labels[0, 5:] = -100
    expected = F.cross_entropy(before.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(model(tokens, labels), expected, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunked_loss_equals_the_whole(monkeypatch, chunk, dtype) -> None:
    monkeypatch.setattr("loss.CHUNK_EAGER", chunk)
    torch.manual_seed(0)
    x = torch.randn(2, 32, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(100, 16).to(dtype).requires_grad_()
    labels = torch.randint(0, 100, (2, 32))
    labels[0, 5:20] = -100
    logits = (x @ weight.T).float().flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten(), reduction="sum")
    (0.3 * expected).backward()
    expected_grads = [tensor.grad for tensor in (x, weight)]
    x.grad = weight.grad = None
    loss = projection_loss(x, weight, labels)
    (0.3 * loss).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    limit = 1e-6 if dtype == torch.float32 else 2**-7
    for ours, theirs in zip((x.grad, weight.grad), expected_grads, strict=True):
        assert ours is not None and theirs is not None
        assert (ours - theirs).norm() / theirs.norm() <= limit


def test_initial_weights_are_what_the_init_says() -> None:
    config = build_config("all", 1, 4096)
    model = on_cpu(build(config))
    for name, parameter in model.named_parameters():
        std = model.init_std(name)
        if std is None:
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        error = std / parameter.numel() ** 0.5
        assert abs(parameter.mean().item()) < 5 * error, name
        assert abs(parameter.std().item() - std) < 5 * error, name
    assert model.init_std("embedding.weight") == 1
    down = model.init_std("blocks.0.feed_forward.down.weight")
    assert down == pytest.approx(0.02 / 4)  # 8 layers write twice each to the residual stream


def test_initial_weights_depend_on_seed_and_name() -> None:
    first, again, other = (on_cpu(build(TINY), seed) for seed in (1, 1, 2))
    for (name, one), same, different in zip(
        first.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(one, same)
        assert torch.equal(one, different) == (first.init_std(name) is None)
    weights = dict(first.named_parameters())
    first_layer, second_layer = (f"blocks.{i}.attention.query.weight" for i in (0, 1))
    assert not torch.equal(weights[first_layer], weights[second_layer])


def test_digest_sees_every_change() -> None:
    model = on_cpu(build(TINY))

    def digest() -> dict:
        return digest_weights(
            model,
            seed=3,
            device=torch.device("cpu"),
            init_std=model.init_std,
            sum_over_shards=lambda value: value,
        )

    untouched = digest()
    assert untouched["moved_share"] == 0
    with torch.no_grad():
        dict(model.named_parameters())["blocks.1.attention.key.weight"][3, 4] += 0.5
    changed = digest()
    moved = changed["parameters"]["blocks.1.attention.key.weight"]
    assert moved["norm"] == pytest.approx(0.5, rel=1e-5)
    assert all(projection != 0 for projection in moved["projections"])
    assert changed["moved_share"] == pytest.approx(1 / count_params(TINY))
    del changed["parameters"]["blocks.1.attention.key.weight"]
    for name, row in changed["parameters"].items():
        assert row["norm"] == 0, name
