"""A decoder whose embedding and logits have constant factors, and whose logits have a softcap."""

from __future__ import annotations

from torch import Tensor

from minisgl.layers import BuildContext
from minisgl.models.blocks.decoder import Decoder
from minisgl.models.spec import ModelSpec


class ScaledDecoder(Decoder):
    """embedding_scale: multiplies the embedding. logit_scale: multiplies the logits; to save work
    it is applied to the hidden states before the LM head. softcap: logits x become softcap * tanh(x
    / softcap); None for none."""

    def __init__(
        self,
        spec: ModelSpec,
        build: BuildContext,
        num_positions: int,
        *,
        embedding_scale: float = 1.0,
        logit_scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        super().__init__(spec, build, num_positions)
        self.embedding_scale, self.logit_scale = embedding_scale, logit_scale
        self.softcap = softcap

    def embed(self, ids_T: Tensor) -> Tensor:
        return super().embed(ids_T) * self.embedding_scale

    def logits(self, x_SD: Tensor, own_rows: bool = False) -> Tensor:
        if self.logit_scale != 1.0:
            x_SD = x_SD * self.logit_scale
        logits_SV = super().logits(x_SD, own_rows)
        if self.softcap is not None:
            logits_SV.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_SV
