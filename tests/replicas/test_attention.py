"""The fast attention against its plain reference, on random ragged inputs."""

import pytest
import torch

from replicas import attention
from replicas.attention import (
    attention_mass,
    kv_deviation,
    selected_attention,
    selected_attention_ref,
)


def ragged(seed, *, num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32, share=0.3):
    gen = torch.Generator().manual_seed(seed)
    q_offsets, k_offsets, positions = [0], [0], []
    for i in range(4):
        num_keys = int(torch.randint(1, 90, (), generator=gen))
        keep = torch.rand(num_keys, generator=gen) < (1.0 if i == 2 else share)
        keep[: num_keys // 2] |= i == 1  # a dense beginning, such as a prefix and missed chunks
        chosen = keep.nonzero()[:, 0]
        positions.append(chosen)
        q_offsets.append(q_offsets[-1] + len(chosen))
        k_offsets.append(k_offsets[-1] + num_keys)

    def rand(rows, heads):
        return torch.randn(rows, heads, head_dim, generator=gen).to(dtype)

    return (
        rand(q_offsets[-1], num_heads),
        rand(k_offsets[-1], num_kv_heads),
        rand(k_offsets[-1], num_kv_heads),
        torch.cat(positions),
        q_offsets,
        k_offsets,
        head_dim**-0.5,
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 2), (3, 1)])
def test_fast_equals_reference(seed, num_heads, num_kv_heads, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK_ROWS", 7)  # several blocks at test sizes
    monkeypatch.setattr(attention, "MAX_KEPT_MASK", 200)  # some masks kept, some not
    args = ragged(seed, num_heads=num_heads, num_kv_heads=num_kv_heads)
    torch.testing.assert_close(
        selected_attention(*args), selected_attention_ref(*args), atol=1e-5, rtol=1e-5
    )


def test_bfloat16_is_close_to_the_float32_reference():
    args = ragged(9, dtype=torch.bfloat16)
    wide = [a.float() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    # bf16 has 8 bits of mantissa: 2^-8 relative on outputs of magnitude 1 to 3
    torch.testing.assert_close(
        selected_attention(*args).float(), selected_attention_ref(*wide), atol=3e-2, rtol=3e-2
    )


def test_a_query_never_sees_later_keys():
    q, k, v, positions, q_offsets, k_offsets, scale = ragged(3)
    before = selected_attention(q, k, v, positions, q_offsets, k_offsets, scale)
    row = q_offsets[1] - 1  # the last query of the first request
    later = slice(int(positions[row]) + 1, k_offsets[1])
    k[later], v[later] = 1e3, 1e3
    after = selected_attention(q, k, v, positions, q_offsets, k_offsets, scale)
    torch.testing.assert_close(before, after)


def test_attention_mass_sums_to_heads_times_queries():
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(5, 4, 8, generator=gen)
    k = torch.randn(20, 2, 8, generator=gen)
    mass = attention_mass(q, k, 8**-0.5)
    assert mass.shape == (20,)
    torch.testing.assert_close(mass.sum(), torch.tensor(20.0))
    # a key that equals a query stands out
    k[7] = q[:, 0].mean(0) * 10
    assert int(attention_mass(q, k, 1.0).argmax()) == 7


def test_kv_deviation_adds_keys_and_values():
    k = torch.randn(6, 2, 8)
    v = torch.randn(6, 2, 8)
    assert kv_deviation(k, v, k, v).tolist() == [0.0] * 6
    moved_k, moved_v = k.clone(), v.clone()
    moved_k[2, 0, 0] += 3.0
    moved_v[4, 1, 7] += 2.0
    torch.testing.assert_close(
        kv_deviation(k, v, moved_k, moved_v), torch.tensor([0.0, 0, 9, 0, 4, 0])
    )
