"""Small parts of the walk."""

import pytest
import torch

from replicas.walk import scatter_heads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [2, 3, 16, 80])
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_heads_are_scattered_to_rows(dtype, head_dim, is_contiguous):
    torch.manual_seed(head_dim)
    stored = torch.randn(3, 7, head_dim).to(dtype)
    if not is_contiguous:
        stored = torch.randn(3, 9, head_dim).to(dtype)[:, 1:8]
    out = torch.zeros(20, 3, head_dim, dtype=dtype)
    scatter_heads(out[5:12], stored)
    assert torch.equal(out[5:12], stored.transpose(0, 1))
    assert not out[:5].any() and not out[12:].any()
