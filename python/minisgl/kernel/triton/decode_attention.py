"""Attention of decode rows over the paged cache: split-KV flash-decode.

Keys and values are read from their pages (`minisgl.kernel.triton.attend`). Contexts are divided
into KV splits that run in parallel (`minisgl.kernel.triton.kv_split`). The split of a row that
ends last merges the row's partial sums (Flash-Decoding, Dao et al. 2023).

A common prefix, which all rows have in the same pages, is read once for all rows (cascade
attention: Ye et al. 2024; Hydragen: Juravsky et al. 2024). `_decode_prefix` takes the queries of
many rows as one block. Its splits are merged with those of the rows' own contexts::

    context of a row   |=== common prefix ====|== own split ==|== own split ==|
                       0                      prefix                          end

Latents are one key/value head, whose query heads are divided into groups of one size. K and G are
then the groups and their heads.

Axes: B rows, N query heads, K key/value heads, G query heads per key/value head, H head dim, V dims
of a value, P pages of a table row, S splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.attend import (
    ENDED,
    attend,
    block_h_of,
    no_keys,
    rest_of,
    scaled,
    times_value_scale,
)
from minisgl.kernel.triton.decode_config import LIGHT, LIGHT_8
from minisgl.kernel.triton.kv_split import (
    BASE,
    COUNT,
    END,
    FIELDS,
    FIRST,
    LAST,
    MIN_SPLIT,
    PREFIX_SPLITS,
    ROW,
    TABLE_IDX,
    KVSplits,
    first_own,
    split_size,
)
from minisgl.kernel.triton.launch import Launcher, begin, fetch_lines, has_pdl, power_of_2
from minisgl.kernel.triton.merge import MERGED, merge, merge_sizes, prefix_split_size
from minisgl.kernel.triton.quantised import (
    FP8,
    INT8,
    kind_of,
    largest_of,
    scale_of_int8,
    tensors_of,
    to_fp8,
    to_int8,
)

if TYPE_CHECKING:
    from minisgl.kvcache.pool import LayerPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Lets `decode` norm, rotate and store q, k and v itself.

    Requires that the head dim is a power of two, and that all of its dims rotate.
    qkv: [B, (N + 2K) * H], contiguous. slots: int32 [B]. cos_sin: float32 [P, H]. q_weight,
    k_weight: of the norms, [H], or None. norms_values: see `QKVSteps`.
    """

    qkv: Tensor
    slots: Tensor
    cos_sin: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    norms_values: bool = False


def decode(
    q_BNH: Tensor,
    pool: LayerPool,
    page_table: Tensor,
    rows: Tensor,
    splits: KVSplits,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    common_prefix: Tensor | None,
    rotation: Rotation | None = None,
    out_BNV: Tensor,
) -> None:
    """Attend with one query per row, and write the result to out_BNV.

    rows, window, common_prefix: the arguments of `split_contexts`. scale, softcap, sinks: see
    `AttnLayer`. rotation: with it only the shape and dtype of q_BNH count; requires no
    common_prefix.
    """
    num_rows, num_q_heads, head_dim = q_BNH.shape
    value_dim, page_size = out_BNV.shape[2], pool.k.shape[1]
    num_kv_heads, group = splits.num_groups, num_q_heads // splits.num_groups
    config, block_h = splits.config, block_h_of(value_dim)
    block_g = config.heads or max(power_of_2(group), 16)
    factor, cap = scaled(scale, softcap)
    cascade = common_prefix is not None
    prefix = rows if common_prefix is None else common_prefix
    heads = (num_kv_heads, group, head_dim, value_dim)
    common = (page_table.stride(0), page_size, *heads, kind_of(pool))
    dtypes = (q_BNH.dtype, pool.k.dtype)
    if cascade:
        is_wide = block_h > 128 and q_BNH.dtype.itemsize == 4  # 64 take 136 KiB, not all GPUs have
        block_m, num_stages = (32, 1) if is_wide else (64, min(config.stages, 3))
        num_warps = 4
        if config.heads:
            block_m, num_stages, num_warps = block_g, config.stages, config.warps
        blocks = -(-num_rows * group // block_m)
        _launch_decode_prefix(
            (blocks, num_kv_heads, PREFIX_SPLITS),
            (
                q_BNH, *tensors_of(pool), page_table, rows, prefix, splits.partial, splits.mass,
                factor, num_rows, splits.num_splits,
            ),
            (*common, PREFIX_SPLITS, cap, block_m, block_h, config.keys),
            dtype=dtypes, num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
    merged = MERGED * config.warps if config.heads else MERGED
    merge_g, merge_p = merge_sizes(group, block_h, merged)
    fused: tuple[Any, ...] = (q_BNH, rows, q_BNH, q_BNH, q_BNH, 0.0)
    normed, weights = False, (q_BNH, q_BNH)
    if rotation is not None:
        if rotation.q_weight is not None and rotation.k_weight is not None:
            normed, weights = True, (rotation.q_weight, rotation.k_weight)
        fused = (rotation.qkv, rotation.slots, rotation.cos_sin, *weights, rotation.eps)
    _launch_decode(
        (num_kv_heads, splits.num_splits, 1),  # unused splits come last
        (
            q_BNH, *tensors_of(pool), page_table, rows, prefix, out_BNV, splits.partial,
            splits.mass, splits.done, splits.table, q_BNH if sinks is None else sinks, *fused,
            factor, window or 0, rows.stride(0),
        ),
        (
            *common, splits.splits_each, PREFIX_SPLITS, bool(window), cap,
            sinks is not None, cascade,
            block_g, merge_g, merge_p, block_h, config.keys, MIN_SPLIT,
            rotation is not None, normed, rotation is not None and rotation.norms_values,
            config in (LIGHT, LIGHT_8) and splits.splits_each > 0 and has_pdl(),
        ),
        dtype=(*dtypes, weights[0].dtype), num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["window", "rows_stride"],
    do_not_specialize_on_alignment=["rows_ptr", "prefix_ptr", "slots_ptr", "splits_ptr"],
)
def _decode(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, rows_ptr, prefix_ptr, out_ptr,
    partial_ptr, mass_ptr,
    done_ptr, splits_ptr, sinks_ptr, qkv_ptr, slots_ptr, cos_sin_ptr, q_weight_ptr, k_weight_ptr,
    eps, scale, window, rows_stride,
    TABLE_STRIDE: tl.constexpr,
    Z: tl.constexpr, K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    KV: tl.constexpr,
    SPLITS_EACH: tl.constexpr, PREFIX_SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, CASCADE: tl.constexpr,
    BLOCK_G: tl.constexpr, MERGE_G: tl.constexpr, MERGE_P: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    MIN_SPLIT: tl.constexpr, ROTATE: tl.constexpr, NORM: tl.constexpr, VALUES: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    kv_head, split = tl.program_id(0), tl.program_id(1)
    # The rows were uploaded and the table was made before the kernels of this layer. Reading them
    # need not wait for the kernel before.
    if SPLITS_EACH > 0:
        row, index = split // SPLITS_EACH, split % SPLITS_EACH
        table_idx = tl.load(rows_ptr + row)
        end = tl.load(rows_ptr + 3 * rows_stride + row)
        low = first_own(end, window, prefix_ptr, WINDOWED, CASCADE)
        size = split_size(end - low, SPLITS_EACH, G, BLOCK_N, MIN_SPLIT)
        first = low + index * size
        last = tl.minimum(first + size, end)
        base, count = row * SPLITS_EACH, tl.cdiv(end - low, size)
    else:
        entry = splits_ptr + split * FIELDS  # not from L1, which may hold the table of another step
        row = tl.load(entry + ROW, cache_modifier=".cg")
        table_idx = tl.load(entry + TABLE_IDX, cache_modifier=".cg")
        first = tl.load(entry + FIRST, cache_modifier=".cg")
        last = tl.load(entry + LAST, cache_modifier=".cg")
        end = tl.load(entry + END, cache_modifier=".cg")
        base = tl.load(entry + BASE, cache_modifier=".cg")
        count = tl.load(entry + COUNT, cache_modifier=".cg")
    if first < last:
        table = table_ptr + table_idx.to(tl.int64) * TABLE_STRIDE
        g = tl.arange(0, BLOCK_G)
        h = tl.arange(0, BLOCK_H)
        head = kv_head * G + g
        if ROTATE:
            cos, sin = _turn(cos_sin_ptr + (end - 1) * H, H)
            if NORM:
                q_weight = _with_partners(q_weight_ptr, H)
                k_weight = _with_partners(k_weight_ptr, H)
            else:
                q_weight, k_weight = (cos, cos), (cos, cos)
            if EARLY:
                LINES: tl.constexpr = (H * k_ptr.dtype.element_ty.primitive_bitwidth + 1023) // 1024
                n = first + tl.arange(0, BLOCK_N)
                near = n < last
                page = tl.load(table + n // Z, mask=near, other=0).to(tl.int64)
                at = ((page * Z + n % Z) * K + kv_head) * H
                line = at[:, None] + (tl.arange(0, LINES) * (H // LINES))[None, :]
                near = tl.broadcast_to(near[:, None], [BLOCK_N, LINES])
                fetch_lines(k_ptr + line, near)
                fetch_lines(v_ptr + line, near)
        begin(PDL)
        of_head = row.to(tl.int64) * K * G + head
        in_q = (g[:, None] < G) & (h[None, :] < V)
        if ROTATE:
            base_ptr = qkv_ptr + row.to(tl.int64) * (K * G + 2 * K) * H
            q_row = base_ptr + head[:, None] * H
            q = _rotated(q_row, g[:, None] < G, cos, sin, q_weight, eps, H, NORM)
            new = tl.load(slots_ptr + row).to(tl.int64)
            if (last == end) & (new >= 0):
                one = tl.arange(0, 1)[:, None]
                k_row = base_ptr + (K * G + kv_head + one) * H
                k_new = _rotated(k_row, one < 1, cos, sin, k_weight, eps, H, NORM)
                v_new = tl.load(base_ptr + (K * G + K + kv_head) * H + h)
                if VALUES:
                    v32 = v_new.to(tl.float32)
                    v_new = (v32 * tl.rsqrt(tl.sum(v32 * v32, 0) / H + eps)).to(v_new.dtype)
                head_new = new * K + kv_head
                if KV == FP8:
                    k_new = to_fp8(k_new, tl.load(k_scale_ptr + kv_head))
                    v_new = to_fp8(v_new, tl.load(v_scale_ptr + kv_head))
                if KV == INT8:
                    k_scale = scale_of_int8(largest_of(k_new))
                    v_scale = scale_of_int8(largest_of(v_new[None, :]))
                    tl.store(k_scale_ptr + head_new + tl.arange(0, 1), k_scale)
                    tl.store(v_scale_ptr + head_new + tl.arange(0, 1), v_scale)
                    k_new, v_new = to_int8(k_new, k_scale[:, None]), to_int8(v_new, v_scale)
                tl.store(k_ptr + head_new * H + one * H + h[None, :], k_new)
                tl.store(v_ptr + head_new * H + h, v_new)
                tl.debug_barrier()  # this program reads them back
        else:
            q = tl.load(q_ptr + of_head[:, None] * H + h[None, :], mask=in_q, other=0.0)
        q_rest = rest_of(q, q_ptr, of_head * H, g < G, H, V)
        key_head = kv_head if V == H else 0
        # The first split of a row adds the sinks.
        with_sink = (g < G) & (split == base)
        mass, top = no_keys(sinks_ptr, head, with_sink, SINKS, BLOCK_G)
        acc = tl.zeros([BLOCK_G, BLOCK_H], tl.float32)
        query = tl.zeros([BLOCK_G], tl.int32)
        acc, mass, top = attend(
            acc, mass, top, q, q_rest, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, query, last,
            h, key_head, scale, window, first, last, last,
            ENDED, Z, K if V == H else 1, H, V, KV, False, SOFTCAP, BLOCK_N,
        )  # fmt: skip
        acc = times_value_scale(acc, v_scale_ptr, key_head, KV)
        if (count == 1) & (not CASCADE):
            out = (acc / mass[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + of_head[:, None] * V + h[None, :], out, mask=in_q)
        else:
            sums = split.to(tl.int64) * K * G + head
            tl.store(
                partial_ptr + sums[:, None] * BLOCK_H + h[None, :], acc / mass[:, None],
                mask=g[:, None] < G,
            )  # fmt: skip
            tl.store(mass_ptr + sums, top + tl.log2(mass), mask=g < G)
            # The split that ends last merges all. The sums of the others are visible to it.
            tl.debug_barrier()
            done = done_ptr + row * K + kv_head
            before = tl.atomic_add(done, 1, sem="acq_rel")
            if before == count - 1:
                tl.store(done, 0)
                tl.debug_barrier()
                merge(
                    out_ptr, partial_ptr, mass_ptr, prefix_ptr, row, kv_head, base, count,
                    K, G, V, PREFIX_SPLITS, CASCADE, MERGE_G, MERGE_P, BLOCK_H, BLOCK_N,
                )  # fmt: skip
    elif split == 0:
        begin(PDL)  # without it the next kernel would start too early


@triton.jit(
    do_not_specialize=["num_rows", "num_splits"],
    do_not_specialize_on_alignment=["rows_ptr", "prefix_ptr"],
)
def _decode_prefix(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, rows_ptr, prefix_ptr, partial_ptr,
    mass_ptr, scale, num_rows, num_splits,
    TABLE_STRIDE: tl.constexpr,
    Z: tl.constexpr, K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    KV: tl.constexpr,
    PREFIX_SPLITS: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block, kv_head, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin(PDL)
    prefix = tl.load(prefix_ptr)
    size = prefix_split_size(prefix, PREFIX_SPLITS, BLOCK_N)
    first = index * size
    last = tl.minimum(first + size, prefix)
    if first < last:
        # All rows have the pages of the first row here.
        table = table_ptr + tl.load(rows_ptr).to(tl.int64) * TABLE_STRIDE
        m = block * BLOCK_M + tl.arange(0, BLOCK_M)
        h = tl.arange(0, BLOCK_H)
        inside = m < num_rows * G
        head_at = (m // G).to(tl.int64) * K * G + kv_head * G + m % G
        q = tl.load(
            q_ptr + head_at[:, None] * H + h[None, :],
            mask=inside[:, None] & (h[None, :] < V), other=0.0,
        )  # fmt: skip
        q_rest = rest_of(q, q_ptr, head_at * H, inside, H, V)
        key_head = kv_head if V == H else 0
        top = tl.full([BLOCK_M], -1e30, tl.float32)
        mass = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
        acc, mass, top = attend(
            acc, mass, top, q, q_rest, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, m, last,
            h, key_head, scale, 0, first, last, last,
            ENDED, Z, K if V == H else 1, H, V, KV, False, SOFTCAP, BLOCK_N,
        )  # fmt: skip
        acc = times_value_scale(acc, v_scale_ptr, key_head, KV)
        sums = num_splits + (m // G) * PREFIX_SPLITS + index
        at = sums.to(tl.int64) * K * G + kv_head * G + m % G
        tl.store(
            partial_ptr + at[:, None] * BLOCK_H + h[None, :], acc / mass[:, None],
            mask=inside[:, None],
        )  # fmt: skip
        tl.store(mass_ptr + at, top + tl.log2(mass), mask=inside)


@triton.jit
def _with_partners(ptr, H: tl.constexpr):
    """Return the elements [1, H] at ptr, and the elements that each is rotated with."""
    h = tl.arange(0, H)[None, :]
    return tl.load(ptr + h), tl.load(ptr + (h + H // 2) % H)


@triton.jit
def _turn(cos_sin_ptr, H: tl.constexpr):
    """Return the cosines and sines [1, H] of one position."""
    h = tl.arange(0, H)[None, :] % (H // 2)
    return tl.load(cos_sin_ptr + h), tl.load(cos_sin_ptr + H // 2 + h)


@triton.jit
def _rotated(
    row_ptr, inside, cos, sin, weight, eps, H: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """Return the heads [X, H] at row_ptr [X, 1], normed, rotated and rounded as
    `Ops.rms_norm` and `Ops.apply_rope` do."""
    h = tl.arange(0, H)[None, :]
    partner = (h + H // 2) % H
    x = tl.load(row_ptr + h, mask=inside, other=0.0)
    y = tl.load(row_ptr + partner, mask=inside, other=0.0)
    dtype = x.dtype
    if NORM:
        x32, y32 = x.to(tl.float32), y.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x32 * x32, 1)[:, None] / H + eps)
        x = (x32 * scale * weight[0].to(tl.float32)).to(dtype)
        y = (y32 * scale * weight[1].to(tl.float32)).to(dtype)
    cos, sin = cos.to(dtype), sin.to(dtype)
    crossed = (y * sin).to(dtype)
    return (x * cos).to(dtype) + tl.where(h < H // 2, -crossed, crossed)


_launch_decode = Launcher(_decode)
_launch_decode_prefix = Launcher(_decode_prefix)
