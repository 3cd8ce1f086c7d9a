"""How a head's K or V lies in a Redis value: as in the arena, or as one byte a number.

    raw         [num_tokens, head_dim] in the arena's dtype
    fp8, int8   [num_tokens] float32 scales, then [num_tokens, head_dim] codes of one byte

A scale is of one head and token, so that a token with large values costs the others no precision.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from kv_tier.layout import KvLayout

_SCALE_BYTES = 4
_TINY = torch.finfo(torch.float32).tiny


class Encoding(StrEnum):
    RAW = "raw"
    FP8 = "fp8"  # e4m3: 3 bits of mantissa, whatever the size of the number
    INT8 = "int8"  # 255 even steps between a token's largest magnitudes


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingError:
    """What encoding and decoding did to a tensor."""

    relative_rms: float  # RMS of the error over RMS of the input
    max_abs: float


def block_bytes(encoding: Encoding, layout: KvLayout, num_tokens: int) -> int:
    """Bytes of one head's K or V of one layer."""
    if encoding is Encoding.RAW:
        return layout.head_bytes(num_tokens)
    return num_tokens * (_SCALE_BYTES + layout.head_dim)


def encode(kv: Tensor, encoding: Encoding) -> Tensor:
    """kv: [num_blocks, num_tokens, head_dim], contiguous, any float dtype, on the CPU

    encoding: fp8 or int8; raw blocks are the arena's own bytes
    returns: [num_blocks, block_bytes], uint8. What is not finite comes back as not finite.
    """
    num_blocks = kv.shape[0]
    values = kv.float()
    scales = values.abs().amax(dim=2).div_(_largest_code(encoding)).clamp_(min=_TINY)
    scaled = values / scales.unsqueeze(2)  # a copy: `values` may be the caller's memory
    if encoding is Encoding.FP8:
        codes = scaled.to(torch.float8_e4m3fn)
    else:
        codes = scaled.round_().nan_to_num_(0.0).to(torch.int8)
    return torch.cat(
        (scales.view(torch.uint8), codes.view(torch.uint8).view(num_blocks, -1)), dim=1
    )


def decode(blocks: Tensor, encoding: Encoding, out: Tensor) -> None:
    """blocks: [num_blocks, block_bytes], uint8; out: [num_blocks, num_tokens, head_dim], written"""
    num_blocks, num_tokens, head_dim = out.shape
    scale_bytes = num_tokens * _SCALE_BYTES
    # Rows of blocks need not start on 4 bytes, so scales are copied before they are read as floats.
    scales = blocks[:, :scale_bytes].clone().view(torch.float32)
    codes = blocks[:, scale_bytes:].view(torch.int8).view(num_blocks, num_tokens, head_dim)
    values = fp8_values(codes) if encoding is Encoding.FP8 else codes.float()
    out.copy_(values.mul_(scales.unsqueeze(2)))


def fp8_values(codes: Tensor) -> Tensor:
    """e4m3 codes, as int8, to float32; the same as torch's own conversion, several times as fast.

    e4m3 is float16 with the lowest 7 bits of the fraction and the upper values of the exponent cut
    off: moved there, a code is its number over 256. The code for NaN comes out as 480; where encode
    made one, the scale is not finite.
    """
    wide = codes.to(torch.int16)
    half = (wide & 0x7F).bitwise_left_shift_(7).bitwise_or_(wide.bitwise_and_(-0x8000))
    return half.view(torch.float16).float().mul_(256.0)


def encoding_error(kv: Tensor, encoding: Encoding) -> EncodingError:
    """kv: [num_blocks, num_tokens, head_dim], finite"""
    found = torch.empty_like(kv)
    decode(encode(kv, encoding), encoding, found)
    error = found.double() - kv.double()
    rms = kv.double().square().mean().sqrt().item()
    error_rms = error.square().mean().sqrt().item()
    return EncodingError(
        relative_rms=error_rms / rms if rms else 0.0, max_abs=error.abs().max().item()
    )


def _largest_code(encoding: Encoding) -> float:
    return torch.finfo(torch.float8_e4m3fn).max if encoding is Encoding.FP8 else 127.0
