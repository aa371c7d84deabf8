"""Attention to latents on a GPU against float64: the backends that have kernels for it.

`TRITON_INTERPRET=1` runs our own backend on a CPU, but not in bfloat16.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.attention_cases import LATENTS as CASES
from helpers.attention_cases import Case, make_step
from helpers.attention_error import worst_share
from helpers.gpu_batches import layer_on, make_backend, make_batch, make_shared_batch

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from minisgl.attention import BaseAttnBackend, create_attention_backend, cuda, flash_attn
from minisgl.attention.base import LATENTS
from minisgl.attention.triton_backend import TritonAttnBackend
from minisgl.errors import ConfigError
from minisgl_kernels.ops import TunedOps

SIZES: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 576, "latent": 512}
MANY = tuple((3 * i, 3 * i + 1) for i in range(300))
ENDS = ((900, 901), (39_999, 40_000), (63, 64), (0, 1), (130, 400), (39_960, 40_000), (0, 300))
LONG = (
    Case(name="40,000 keys", rows=ENDS, num_q_heads=20, **SIZES),
    Case(name="40,000 keys, 64 heads", rows=ENDS, num_q_heads=64, page_size=64, **SIZES),
    Case(name="300 rows", rows=MANY, num_q_heads=20, **SIZES),
    Case(name="300 rows, 128 heads", rows=MANY, num_q_heads=128, **SIZES),
    Case(name="68 heads", rows=((900, 901), (0, 300)), num_q_heads=68, num_kv_heads=1, head_dim=80,
         latent=64),
)  # fmt: skip
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def named(value: object) -> str:
    return value.name if isinstance(value, Case) else str(value).removeprefix("torch.")


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
@pytest.mark.parametrize("case", [*CASES, *LONG], ids=named)
@pytest.mark.parametrize("name", ["triton", "fa", "fa,triton"])
def test_rounding_explains_the_error(
    name: str, case: Case, dtype: torch.dtype, device: torch.device
) -> None:
    backend = make_backend(name, case, dtype, device)
    step = make_step(case, dtype, "torch")
    q, k = step.q.to(device), step.k.to(device)
    out = backend.forward(q, k, k, layer_on(step, device), make_batch(step, backend, device))
    assert out.dtype == dtype
    assert out.shape == (*q.shape[:2], case.latent)
    share = worst_share(out, step)
    assert share <= 1, f"{share:.2f} of the error that rounding explains"


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
@pytest.mark.parametrize(("num_rows", "shared"), [(5, 512), (70, 256), (5, 2048)])
@pytest.mark.parametrize(("heads", "dim", "latent"), [(20, 576, 512), (68, 28, 20)])
def test_decode_of_a_common_prefix(
    heads: int, dim: int, latent: int, num_rows: int, shared: int, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    ends = [shared + 1 + 13 * i * i % 700 for i in range(num_rows)]
    case = Case(
        name="shared", rows=tuple((end - 1, end) for end in ends), num_q_heads=heads,
        num_kv_heads=1, head_dim=dim, latent=latent,
    )  # fmt: skip
    backend = make_backend("triton", case, dtype, device)
    step = make_step(case, dtype, "torch")
    batch = make_shared_batch(step, shared, backend, device)
    q, k = step.q.to(device), step.k.to(device)
    share = worst_share(backend.forward(q, k, k, layer_on(step, device), batch), step)
    assert share <= 1, f"{share:.2f} of the error that rounding explains"


def pretend_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(cuda, "num_cores", lambda _: 132)
    monkeypatch.setattr(
        cuda, "TritonAttnBackend", lambda ops, *_: TritonAttnBackend(ops, 132, torch.device("cpu"))
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fi,triton", "'fi' has no attention to latents, which this model needs"),
        ("triton,trtllm", "'trtllm' has no attention to latents"),
        ("fa2,triton", "'fa2' has no attention to latents"),
        ("fa", "keys of 576 with latents of 512; here are float16 and 28 with 20"),
    ],
)
def test_a_backend_without_kernels_for_the_latents_is_refused(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_hopper(monkeypatch)

    def create(name: str) -> BaseAttnBackend:
        return create_attention_backend(
            name, TunedOps(), torch.device("cuda"), dtype=torch.float16, head_dim=28, latent=20,
            needs=[LATENTS],
        )  # fmt: skip

    with pytest.raises(ConfigError, match=message):
        create(name)
    assert create("auto").name == "triton"


@pytest.mark.parametrize(
    ("sizes", "chosen"),
    [
        ({"head_dim": 576, "latent": 512}, "fa"),
        ({"head_dim": 320, "latent": 256}, "triton"),
        ({"head_dim": 576}, "triton"),
        ({"head_dim": 128}, "fa,triton"),
    ],
)
def test_auto_takes_flash_attention_for_all_steps_with_latents(
    sizes: dict[str, int], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_hopper(monkeypatch)
    monkeypatch.setattr(flash_attn, "_load", lambda: (None, None))
    backend = create_attention_backend(
        "auto", TunedOps(), torch.device("cuda"), dtype=torch.bfloat16, **sizes
    )
    assert backend.name == chosen
