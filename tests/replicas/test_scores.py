"""What ranks tokens, against plain computations."""

import pytest
import torch

from planner.types import Deviation
from replicas.scores import attention_mass, kv_deviation

FLOAT32 = {"atol": 1e-5, "rtol": 1e-5}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_mass_is_the_softmax_summed(seed, dtype):
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(5, 6, 8, generator=gen).to(dtype)
    k = torch.randn(20, 2, 8, generator=gen).to(dtype)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float().repeat_interleave(3, dim=1)) * 0.3
    mass = attention_mass(q, k, 0.3)
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass, scores.softmax(dim=-1).sum(dim=(0, 1)), **FLOAT32)


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


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (Deviation.K, [0.0, 0, 9, 0, 0, 0]),
        (Deviation.V, [0.0, 0, 0, 0, 4, 0]),
        (Deviation.KV, [0.0, 0, 9, 0, 4, 0]),
    ],
)
def test_kv_deviation_of_what_is_asked_for(parts, expected):
    gen = torch.Generator().manual_seed(0)
    k = torch.randn(6, 2, 8, generator=gen)
    v = torch.randn(6, 2, 8, generator=gen)
    assert kv_deviation(k, v, k, v, parts=parts).tolist() == [0.0] * 6
    moved_k, moved_v = k.clone(), v.clone()
    moved_k[2, 0, 0] += 3.0
    moved_v[4, 1, 7] += 2.0
    deviation = kv_deviation(k, v, moved_k, moved_v, parts=parts)
    torch.testing.assert_close(deviation, torch.tensor(expected))


@pytest.mark.parametrize("parts", Deviation)
def test_kv_deviation_is_float32_and_leaves_its_inputs(parts):
    gen = torch.Generator().manual_seed(0)
    given = [torch.randn(6, 2, 8, generator=gen).bfloat16() for _ in range(4)]
    before = [tensor.clone() for tensor in given]
    dk, dv = (given[2].double() - given[0].double(), given[3].double() - given[1].double())
    wanted = {"k": [dk], "v": [dv], "kv": [dk, dv]}[parts]
    deviation = kv_deviation(*given, parts=parts)
    assert deviation.dtype == torch.float32
    torch.testing.assert_close(
        deviation.double(), sum(d.square().sum(dim=(1, 2)) for d in wanted), rtol=1e-5, atol=1e-5
    )
    assert all(map(torch.equal, given, before))
    wide = [tensor.float() for tensor in given]
    assert torch.equal(kv_deviation(*wide, parts=parts), deviation)
    assert all(map(torch.equal, wide, (b.float() for b in before)))
