"""Llama with low-rank adapters on its linear layers, for training on one CPU thread.

Only the adapters learn. Before a step they are added into copies of the base weights, in the type
of the forward pass: the long products run at full width once, and the network that is trained is,
rounding included, the one that a merged folder holds.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

RANK, ALPHA = 16, 32
GROUPS = (  # linears that read the same input are one product
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
QKV, OUT, GATE_UP, DOWN = range(4)
TARGETS = tuple(name for group in GROUPS for name in group)
QUERY_BLOCK = 256  # queries at once: the later keys are left out
MASKED = -1e4  # bfloat16 needs no minus infinity

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the forward pass reads of a Llama config.json."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float

    @classmethod
    def of_folder(cls, folder: Path) -> "Sizes":
        config = json.loads((folder / "config.json").read_text())
        rope = config.get("rope_parameters") or config
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"{folder} scales its positions, which training does not")
        heads = config["num_attention_heads"]
        return cls(
            num_layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            num_heads=heads,
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            eps=config["rms_norm_eps"],
            rope_theta=rope["rope_theta"],
        )


class AdaptedLlama:
    """Base weights of one folder, and the adapters that are trained on top of them."""

    def __init__(self, folder: Path, dtype: torch.dtype, seed: int = 0) -> None:
        self.folder, self.dtype = folder, dtype
        self.sizes = Sizes.of_folder(folder)
        weights = {
            name: weight.to(dtype)
            for name, weight in load_file(folder / "model.safetensors").items()
        }
        self._embedding = weights["model.embed_tokens.weight"]
        self._head = weights.get("lm_head.weight", self._embedding)
        self._last_norm = weights["model.norm.weight"]
        random = torch.Generator().manual_seed(seed)
        self.adapters: dict[str, tuple[Tensor, Tensor]] = {}  # module: (A, B), float32
        self._layers = []
        for index in range(self.sizes.num_layers):
            prefix = f"model.layers.{index}."
            linears = []
            for group in GROUPS:
                modules = [prefix + name for name in group]
                for module in modules:
                    rows, columns = weights[f"{module}.weight"].shape
                    a = torch.randn(RANK, columns, generator=random) / math.sqrt(columns)
                    pair = (a.requires_grad_(), torch.zeros(rows, RANK).requires_grad_())
                    self.adapters[module] = pair
                base = torch.cat([weights.pop(f"{module}.weight") for module in modules])
                linears.append(_Linear(base, [self.adapters[module] for module in modules]))
            norms = ("input_layernorm", "post_attention_layernorm")
            self._layers.append((linears, [weights[f"{prefix}{name}.weight"] for name in norms]))

    def parameters(self) -> list[Tensor]:
        return [tensor for pair in self.adapters.values() for tensor in pair]

    def refresh(self) -> None:
        """Adds the adapters into the working weights: after every change of them."""
        with torch.no_grad():
            for linears, _ in self._layers:
                for linear in linears:
                    linear.refresh()

    def logits(
        self, ids: Tensor, positions: Tensor, masks: Sequence["BlockMask"], wanted: Tensor
    ) -> Tensor:
        """Logits at the indices `wanted`, float32.

        ids, positions: [n], of sequences one after the other; masks: one for each of these.
        """
        sizes = self.sizes
        tables = _rotary(positions, sizes, self.dtype)
        num_rotated = sizes.num_heads + sizes.num_kv_heads
        x = F.embedding(ids, self._embedding)
        for linears, (norm_1, norm_2) in self._layers:
            qkv = linears[QKV](_RmsNorm.apply(x, norm_1, sizes.eps))
            qkv = qkv.view(len(ids), -1, sizes.head_dim)
            qk = _Rotate.apply(qkv[:, :num_rotated], *tables)
            mixed = _Attention.apply(qk, qkv[:, num_rotated:], sizes.num_heads, masks)
            x = x + linears[OUT](mixed)
            gate_up = linears[GATE_UP](_RmsNorm.apply(x, norm_2, sizes.eps))
            x = x + linears[DOWN](_SwiGlu.apply(gate_up))
        last = _RmsNorm.apply(x[wanted], self._last_norm, sizes.eps)
        return F.linear(last, self._head).float()

    def save_adapter(self, folder: Path) -> None:
        """The files of PEFT, in bfloat16."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for module, pair in self.adapters.items():
            for letter, tensor in zip("AB", pair, strict=True):
                name = f"{PEFT_PREFIX}{module}.lora_{letter}.weight"
                tensors[name] = tensor.detach().bfloat16().contiguous()
        part = folder / f".{ADAPTER_WEIGHTS}.part"  # a run that is cut off leaves the last one
        save_file(tensors, part, metadata={"format": "pt"})
        part.chmod(0o644)
        part.rename(folder / ADAPTER_WEIGHTS)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.folder.name,
            "r": RANK,
            "lora_alpha": ALPHA,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "use_rslora": False,
            "use_dora": False,
            "modules_to_save": None,
            "target_modules": [name.split(".")[-1] for name in TARGETS],
        }
        (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")

    def load_adapter(self, folder: Path) -> None:
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        with torch.no_grad():
            for module, pair in self.adapters.items():
                for letter, tensor in zip("AB", pair, strict=True):
                    tensor.copy_(tensors[f"{PEFT_PREFIX}{module}.lora_{letter}.weight"])


class BlockMask:
    """Who sees whom in one sequence, cut into blocks of queries; the same for all layers."""

    def __init__(self, visible: Tensor, group: int, dtype: torch.dtype) -> None:
        """visible: [tokens, tokens] of bool; group: query heads on one key-value head."""
        self.num_tokens = len(visible)
        added = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, MASKED)
        self.blocks: list[tuple[int, int, Tensor]] = []  # first and last query, [1, group * n, end]
        for start in range(0, self.num_tokens, QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, self.num_tokens)
            self.blocks.append((start, end, added[start:end, :end].repeat(group, 1)[None]))


class _Linear:
    """Linears side by side: one frozen weight, an adapter for each part of its rows."""

    def __init__(self, base: Tensor, adapters: list[tuple[Tensor, Tensor]]) -> None:
        self._base, self._adapters = base, adapters
        self._working = base.clone()

    def refresh(self) -> None:
        scale, start = ALPHA / RANK, 0
        for a, b in self._adapters:
            rows = slice(start, start + len(b))
            torch.addmm(
                self._base[rows],
                b.to(self._base.dtype),
                a.to(self._base.dtype),
                alpha=scale,
                out=self._working[rows],
            )
            start += len(b)

    def __call__(self, x: Tensor) -> Tensor:
        flat = [tensor for pair in self._adapters for tensor in pair]
        return _AdaptedProduct.apply(x, self._working, *flat)


class _AdaptedProduct(torch.autograd.Function):
    """x times the working weight; gradients for x and the adapters, none for the weight."""

    @staticmethod
    def forward(ctx, x: Tensor, working: Tensor, *adapters: Tensor) -> Tensor:
        ctx.save_for_backward(x, working, *adapters)
        return F.linear(x, working)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, working, *adapters = ctx.saved_tensors
        scale, start, grads = ALPHA / RANK, 0, []
        a_all = torch.cat([a.to(x.dtype) for a in adapters[::2]])
        z_all = F.linear(x, a_all)  # [n, rank * parts]
        t_all = []
        for index, b in enumerate(adapters[1::2]):
            dy_part = dy[:, start : start + len(b)]
            z = z_all[:, index * RANK : (index + 1) * RANK]
            grads.append((dy_part.t() @ z).float() * scale)
            t_all.append(dy_part @ b.to(x.dtype))
            start += len(b)
        da_all = (torch.cat(t_all, dim=1).t() @ x).float() * scale
        pairs = zip(da_all.split(RANK), grads, strict=True)
        dx = dy @ working if ctx.needs_input_grad[0] else None
        return dx, None, *(grad for pair in pairs for grad in pair)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        inverse = (norm.square() / x.shape[-1] + eps).rsqrt().to(x.dtype)
        normed = x * inverse
        ctx.save_for_backward(normed, inverse, weight)
        return normed * weight

    @staticmethod
    def backward(ctx, dy: Tensor):
        normed, inverse, weight = ctx.saved_tensors
        d_normed = dy * weight
        mean = (d_normed * normed).mean(dim=-1, keepdim=True)
        return torch.addcmul(d_normed, normed, mean, value=-1).mul_(inverse), None, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, dy: Tensor):
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad = torch.empty_like(gate_up)
        d_gate, d_up = grad.chunk(2, dim=-1)
        torch.mul(dy, F.silu(gate), out=d_up)
        d_gate.copy_(torch.ops.aten.silu_backward(dy * up, gate))
        return grad


class _Rotate(torch.autograd.Function):
    """Rotary positions; the gradient turns the other way."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return _turned(dy, *ctx.saved_tensors, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """x: [n, heads, head_dim]; cos, sin: [n, 1, head_dim / 2]."""
    left, right = x.chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype)
    out_left, out_right = out.chunk(2, dim=-1)
    torch.mul(left, cos, out=out_left).addcmul_(right, sin, value=-sign)
    torch.mul(right, cos, out=out_right).addcmul_(left, sin, value=sign)
    return out


def _rotary(positions: Tensor, sizes: Sizes, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    exponents = torch.arange(0, sizes.head_dim, 2, dtype=torch.float32) / sizes.head_dim
    angles = positions.float()[:, None, None] * sizes.rope_theta**-exponents
    return angles.cos().to(dtype), angles.sin().to(dtype)


class _Attention(torch.autograd.Function):
    """Softmax attention of sequences one after the other, in blocks of queries.

    qk: [n, heads + kv_heads, head_dim]; v: [n, kv_heads, head_dim].
    Returns [n, heads * head_dim]. The weights are kept: on a CPU, computing them again costs more.
    """

    @staticmethod
    def forward(ctx, qk: Tensor, v: Tensor, num_heads: int, masks: Sequence[BlockMask]) -> Tensor:
        kv_heads, head_dim = v.shape[1:]
        out = torch.empty(len(qk), num_heads, head_dim, dtype=qk.dtype)
        kept, offset = [], 0
        for mask in masks:
            end = offset + mask.num_tokens
            keys = qk[offset:end, num_heads:].transpose(0, 1).contiguous()
            values = v[offset:end].transpose(0, 1).contiguous()
            for first, last, added in mask.blocks:
                q = _by_kv_head(qk[offset + first : offset + last, :num_heads], kv_heads)
                scores = torch.baddbmm(
                    added, q, keys[:, :last].transpose(1, 2), alpha=head_dim**-0.5
                )
                shares = torch.softmax(scores, dim=-1)
                mixed = torch.bmm(shares, values[:, :last])
                out[offset + first : offset + last] = _by_token(mixed, last - first)
                kept.append(shares)
            offset = end
        ctx.save_for_backward(qk, v, *kept)
        ctx.num_heads, ctx.masks = num_heads, masks
        return out.view(len(qk), -1)

    @staticmethod
    def backward(ctx, d_out: Tensor):
        qk, v, *kept = ctx.saved_tensors
        num_heads, (kv_heads, head_dim) = ctx.num_heads, v.shape[1:]
        d_out = d_out.view(len(qk), num_heads, head_dim)
        d_qk, d_v = torch.empty_like(qk), torch.empty_like(v, memory_format=torch.contiguous_format)
        kept_blocks, offset, scale = iter(kept), 0, head_dim**-0.5
        for mask in ctx.masks:
            end = offset + mask.num_tokens
            keys = qk[offset:end, num_heads:].transpose(0, 1).contiguous()
            values = v[offset:end].transpose(0, 1).contiguous()
            d_keys, d_values = torch.zeros_like(keys), torch.zeros_like(values)
            for first, last, _ in mask.blocks:
                shares = next(kept_blocks)
                rows = slice(offset + first, offset + last)
                q = _by_kv_head(qk[rows, :num_heads], kv_heads)
                d_mixed = _by_kv_head(d_out[rows], kv_heads)
                d_shares = torch.bmm(d_mixed, values[:, :last].transpose(1, 2))
                d_scores = torch.ops.aten._softmax_backward_data(d_shares, shares, -1, qk.dtype)
                d_q = torch.bmm(d_scores, keys[:, :last]).mul_(scale)
                d_qk[rows, :num_heads] = _by_token(d_q, last - first)
                d_keys[:, :last] += torch.bmm(d_scores.transpose(1, 2), q)
                d_values[:, :last] += torch.bmm(shares.transpose(1, 2), d_mixed)
            d_qk[offset:end, num_heads:] = d_keys.mul_(scale).transpose(0, 1)
            d_v[offset:end] = d_values.transpose(0, 1)
            offset = end
        return d_qk, d_v, None, None


def _by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """[n, heads, head_dim] to [kv_heads, group * n, head_dim]."""
    n, heads, head_dim = x.shape
    x = x.reshape(n, kv_heads, heads // kv_heads, head_dim)
    return x.permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)


def _by_token(x: Tensor, n: int) -> Tensor:
    kv_heads, _, head_dim = x.shape
    return x.view(kv_heads, -1, n, head_dim).permute(2, 0, 1, 3).reshape(n, -1, head_dim)
