"""Attention to one latent vector per token (DeepSeek-V2, 2024).

Head n's key is W_k[n] @ latent, and its value is W_v[n] @ latent. So its score is q @ W_k[n] @
latent, and its output is W_v[n] @ (the weighted sum of latents): attention of all heads to one key,
the latent, which is also the value. Only latents are cached.

Axes: T tokens of this step, N query heads of this rank, K dims of a head's key, V of its value, R
dims of a key that rotate, L dims of the latent, C = L + R, which are cached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.attention import AttnLayer
from minisgl.core import Batch
from minisgl.layers import RMSNorm, RMSNormFused
from minisgl.layers.base import BaseOP
from minisgl.layers.linear import Linear
from minisgl.layers.rotary import RotaryConfig
from minisgl.layers.shard import split_heads, times
from minisgl.models.blocks.decoder import Block, LayerBuild
from minisgl.models.config import ModelConfig
from minisgl.models.loading.reading import MAX_HEAD_DIM
from minisgl.models.loading.rotation import rotary_config
from minisgl.models.spec import LayerSpec, layers_of
from minisgl.quantization import Part, PlainWeight, Weight, WeightBuild
from minisgl_zoo.blocks.layer_kinds import refuse, rope_fields


class LatentHeads(BaseOP):
    """W_k and W_v of this rank's heads."""

    def __init__(self, at: LayerBuild, sizes: LatentSizes, heads: range) -> None:
        super().__init__()
        rows, latent_size, build = sizes.plain + sizes.value, sizes.latent, at.build
        part = Part(
            name=f"{at.layer.prefix}.self_attn.kv_b_proj.weight",
            shape=(at.layer.num_heads * rows, latent_size),
            axis=0,
            share=times(heads, rows),
        )
        format = build.formats.of([part.module], "Linear")
        self.weight = format.weight(WeightBuild(ops=build.ops, dtype=build.dtype, parts=[part]))
        # After the weight, whose buffers must be ready.
        self.plain = Dense(self.weight, part.local_shape)
        self.key_size, self.shape = sizes.plain, (len(heads), rows, latent_size)

    def queries(self, q_TNK: Tensor) -> Tensor:
        """Return q @ W_k, [T, N, L]: queries for latents."""
        keys_NKL = self.plain.tensor.view(self.shape)[:, : self.key_size]
        return torch.bmm(q_TNK.transpose(0, 1), keys_NKL).transpose(0, 1)

    def values(self, sums_TNL: Tensor) -> Tensor:
        """Return the heads' outputs side by side, [T, N * V]. sums: their sums of latents."""
        values_NVL = self.plain.tensor.view(self.shape)[:, self.key_size :]
        # In this order one token takes a third of the other order's time on a CPU.
        out_NVT = torch.bmm(values_NVL, sums_TNL.permute(1, 2, 0))
        return out_NVT.permute(2, 0, 1).flatten(1)


class Dense(BaseOP):
    """A weight as a tensor; a copy if the weight is quantised."""

    tensor: Tensor

    def __init__(self, weight: Weight, shape: tuple[int, ...]) -> None:
        super().__init__()
        self._source = (weight,)  # in a tuple: another node owns it
        self._size = torch.Size(shape).numel() * weight.dtype.itemsize

    def init_buffers(self, device: torch.device) -> None:
        self.tensor = self._source[0].dense()

    @property
    def num_buffer_bytes(self) -> int:
        return 0 if isinstance(self._source[0], PlainWeight) else self._size


NORM_EPS = 1e-6
"""Of the norms of latents, whatever config.json says, as in Hugging Face."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """plain, rotated: the dims of a key that do not rotate, and those that do. value: those of a
    value. latent: those of keys' and values' latent. queries: those of the queries' latent; None if
    queries have none."""

    plain: int
    rotated: int
    value: int
    latent: int
    queries: int | None

    @classmethod
    def of(cls, config: ModelConfig) -> LatentSizes:
        """Read the sizes. Raises ConfigError."""
        fields = config.fields
        return cls(
            plain=fields.integer("qk_nope_head_dim"),
            rotated=fields.integer("qk_rope_head_dim"),
            value=fields.integer("v_head_dim"),
            latent=fields.integer("kv_lora_rank"),
            queries=fields.optional_integer("q_lora_rank"),
        )


def latent_layers(config: ModelConfig, rope: RotaryConfig | None = None) -> tuple[LayerSpec, ...]:
    """Return the layers of a model that attends to latents in each. Raises ConfigError.

    rope: the rotation of `LatentSizes.rotated` dims; None is the one that config.json describes.
    """
    fields, sizes = config.fields, LatentSizes.of(config)
    refuse(fields, "attention_bias", "biases of attention are not supported")
    if (cached := sizes.latent + sizes.rotated) > MAX_HEAD_DIM:
        raise fields.error("kv_lora_rank", f"at most {MAX_HEAD_DIM - sizes.rotated}")
    rope = rope or rotary_config(fields, sizes.rotated)
    scale = (sizes.plain + sizes.rotated) ** -0.5
    if rope.rope_type != "default" and rope.factor > 1:
        stretch = rope_fields(config)
        all_dims = stretch.optional_number("mscale_all_dim") or 0.0
        if all_dims > 1e6:  # 1 in released files
            raise stretch.error("mscale_all_dim", "at most 1000000")
        scale *= (0.1 * all_dims * math.log(rope.factor) + 1) ** 2
    return layers_of(
        config,
        num_kv_heads=1,
        head_dim=cached,
        rope=rope,
        scale=scale,
        block=LatentBlock,
        latent=sizes.latent,
    )


class LatentAttention(BaseOP):
    """One GEMM computes the latents and the rotating part of the key."""

    def __init__(self, at: LayerBuild) -> None:
        super().__init__()
        config, layer, build = at.spec.config, at.layer, at.build
        self.sizes = sizes = LatentSizes.of(config)
        self.rope, prefix = at.rope, f"{layer.prefix}.self_attn"
        self.interleaved = config.fields.flag("rope_interleave", True)
        heads = split_heads(layer.num_heads, 1, build.comm.size)[build.comm.rank].q
        key, hidden = sizes.plain + sizes.rotated, config.hidden_size

        def of_heads(name: str, in_size: int) -> Part:
            name, shape = f"{prefix}.{name}.weight", (layer.num_heads * key, in_size)
            return Part(name=name, shape=shape, axis=0, share=times(heads, key))

        if sizes.queries is None:
            first = of_heads("q_proj", hidden)
        else:
            first = Part.whole(f"{prefix}.q_a_proj.weight", sizes.queries, hidden)
            norm = f"{prefix}.q_a_layernorm.weight"
            self.q_norm = RMSNorm(build, size=sizes.queries, eps=NORM_EPS, name=norm)
            self.q_up = Linear(build, of_heads("q_b_proj", sizes.queries), bias=False)
        latent = Part.whole(f"{prefix}.kv_a_proj_with_mqa.weight", layer.head_dim, hidden)
        self.down = Linear(build, first, latent, bias=False)
        norm = f"{prefix}.kv_a_layernorm.weight"
        self.latent_norm = RMSNorm(build, size=sizes.latent, eps=NORM_EPS, name=norm)
        self.heads = LatentHeads(at, sizes, heads)
        assert layer.scale is not None
        self.layer = AttnLayer(
            pool=at.place[0],
            layer_id=at.place[1],
            num_q_heads=len(heads),
            num_kv_heads=1,
            head_dim=layer.head_dim,
            scale=layer.scale,
            latent=layer.latent,
        )
        in_size, share = layer.num_heads * sizes.value, times(heads, sizes.value)
        self.out = at.back("self_attn.o_proj", in_size=in_size, share=share)

    def forward(
        self,
        norm: RMSNormFused,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        batch: Batch,
        rows_S: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """See `Attention.forward`."""
        sizes, view = self.sizes, batch.pools[self.layer.pool]
        projected, residual_TD = self.down.forward_normed(norm, x_TD, residual_TD)
        ends = -self.layer.head_dim, -sizes.rotated
        q, latent_TL, rotated_TR = projected.tensor_split(ends, dim=1)
        if sizes.queries is not None:
            q = self.q_up.forward(self.q_norm.forward(q.contiguous()))
        q_TNK = q.view(len(q), self.layer.num_q_heads, sizes.plain + sizes.rotated)
        q_TNK = self.scaled(q_TNK, view.positions)
        plain_TNK, q_TNR = q_TNK.tensor_split([sizes.plain], dim=-1)
        q_TNR, k_T1R = self._rotate(q_TNR, rotated_TR[:, None], view.positions)
        q_TNC = torch.cat((self.heads.queries(plain_TNK), q_TNR), dim=-1)
        latent_T1L = self.latent_norm.forward(latent_TL.contiguous())[:, None]
        k_T1C = torch.cat((latent_T1L, k_T1R), dim=-1)
        attended_TNL = view.context.attn.forward(q_TNC, k_T1C, k_T1C, self.layer, view)
        residual_TD, sums_TNL = norm.select(rows_S, residual_TD, attended_TNL)
        return self.out.forward(self.heads.values(sums_TNL)), residual_TD

    def scaled(self, q_TNK: Tensor, positions_T: Tensor) -> Tensor:
        """Return the queries times a factor of their position; here as they are."""
        return q_TNK

    def _rotate(self, q: Tensor, k: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        if self.interleaved:
            q, k = (torch.cat((x[..., ::2], x[..., 1::2]), dim=-1) for x in (q, k))
        return self.rope.forward(q.contiguous(), k.contiguous(), positions_T)


class LatentBlock(Block):
    attention_type = LatentAttention
