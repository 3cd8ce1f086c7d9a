"""One byte a number: what it costs in error, and that heads stay apart."""

import pytest
import torch
from torch import Tensor

from kv_tier import KvLayout
from kv_tier.redis import Encoding, encoding_error
from kv_tier.redis.encoding import block_bytes, decode, encode, fp8_values

SMALL = [Encoding.FP8, Encoding.INT8]
# The largest error of one number, as a share of its token's largest magnitude.
LARGEST_ERROR = {Encoding.FP8: 1 / 16, Encoding.INT8: 0.5 / 127}


def kv(dtype: torch.dtype, *, num_blocks: int = 6, num_tokens: int = 33, seed: int = 0) -> Tensor:
    """[num_blocks, num_tokens, head_dim], tokens of very different size"""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_blocks, num_tokens, 64, generator=generator)
    sizes = torch.logspace(-3, 3, num_tokens).unsqueeze(1)
    return (values * sizes).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("encoding", SMALL)
def test_the_error_is_bounded_by_each_tokens_own_size(
    encoding: Encoding, dtype: torch.dtype
) -> None:
    stored = kv(dtype)
    blocks = encode(stored, encoding)
    assert torch.equal(stored, kv(dtype))  # it is the caller's memory
    found = torch.empty_like(stored)
    decode(blocks, encoding, found)
    largest = stored.float().abs().amax(dim=2, keepdim=True)
    # float16 has no more than 1e-3 of precision itself, and bfloat16 4e-3.
    bound = LARGEST_ERROR[encoding] + 2 * torch.finfo(dtype).eps
    assert ((found.float() - stored.float()).abs() <= bound * largest).all()


@pytest.mark.parametrize(
    ("encoding", "relative_rms"), [(Encoding.FP8, 0.03), (Encoding.INT8, 0.01)]
)
def test_the_measured_error_of_normal_numbers(encoding: Encoding, relative_rms: float) -> None:
    values = torch.randn(4, 128, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    error = encoding_error(values, encoding)
    assert 0.2 * relative_rms <= error.relative_rms <= relative_rms
    assert error.max_abs > 0.0


@pytest.mark.parametrize("encoding", SMALL)
def test_some_blocks_decode_as_all_do(encoding: Encoding) -> None:
    stored = kv(torch.bfloat16)
    blocks = encode(stored, encoding)
    layout = KvLayout(num_layers=1, num_kv_heads=3, head_dim=64, dtype="bfloat16")
    assert blocks.shape == (6, block_bytes(encoding, layout, 33))
    whole, part = torch.empty_like(stored), torch.empty_like(stored[2:4])
    decode(blocks, encoding, whole)
    decode(blocks[2:4], encoding, part)
    assert torch.equal(whole[2:4], part)


def test_fp8_codes_are_torchs() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    wanted = codes.view(torch.float8_e4m3fn).float()
    found = fp8_values(codes.view(torch.int8))
    is_number = wanted.isfinite()
    assert is_number.sum() == 254
    assert torch.equal(found[is_number], wanted[is_number])


@pytest.mark.parametrize("encoding", SMALL)
def test_zeros_stay_zeros_and_what_is_not_finite_stays_so(encoding: Encoding) -> None:
    stored = torch.zeros(1, 4, 8)
    stored[0, 1, 3], stored[0, 2, 5] = float("nan"), float("inf")
    found = torch.empty_like(stored)
    decode(encode(stored, encoding), encoding, found)
    assert torch.equal(found[0, 0], torch.zeros(8)) and torch.equal(found[0, 3], torch.zeros(8))
    assert not found[0, 1].isfinite().all()
    assert not found[0, 2].isfinite().all()
