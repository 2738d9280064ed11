"""Smaller states below the device: 8-bit codes with a scale for each row of the last axis.

Lossy, so opt-in, and only for states that tolerate it: the error (at most half a scale for each
element) enters once per checkpoint and fades with the state. Never for copy on write, and never
from something decoded: keep the first encoding while the device's copy is unchanged. Coding costs
less than the link time it saves on a device, more on a CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from phloem.cuda_streams.specs import torch_dtype
from phloem.errors import InvalidRequest

__all__ = ["Int8Codec"]


@dataclass(frozen=True, slots=True)
class Int8Codec:
    """Codes of one named state in one layer.

    A coded row is [ scales, float32 | codes, int8 ]; a plain one is `part_bytes` long and begins
    with the state. What is not finite comes back as NaN, with all of its last axis. Raises
    InvalidRequest for states that are not floating-point.
    """

    shape: tuple[int, ...]
    dtype: str
    part_bytes: int

    def __post_init__(self) -> None:
        if not torch_dtype(self.dtype).is_floating_point:
            raise InvalidRequest(f"int8 codes are for floating-point states, not {self.dtype}")

    @property
    def _scales(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def _plain_bytes(self) -> int:
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize

    @property
    def coded_bytes(self) -> int:
        """Bytes of a coded row."""
        return 4 * self._scales + math.prod(self.shape)

    def encode(self, rows: Tensor) -> Tensor:
        """Plain rows, uint8 [n, part_bytes], as coded ones, uint8 [n, coded_bytes]."""
        plain = rows[:, : self._plain_bytes].view(torch_dtype(self.dtype)).float()
        plain = plain.view(len(rows), self._scales, self.shape[-1])
        scales = plain.abs().amax(dim=2, keepdim=True) / 127
        codes = (plain / scales.where(scales > 0, 1)).round().clamp(-127, 127).to(torch.int8)
        parts = (scales.view(len(rows), -1).view(torch.uint8), codes.view(len(rows), -1))
        return torch.cat((parts[0], parts[1].view(torch.uint8)), dim=1)

    def decode(self, rows: Tensor) -> Tensor:
        """Coded rows as plain ones; the padding comes back as zeros."""
        start = 4 * self._scales
        scales = rows[:, :start].contiguous().view(torch.float32)
        codes = rows[:, start : self.coded_bytes].contiguous().view(torch.int8)
        codes = codes.view(len(rows), self._scales, self.shape[-1])
        plain = (codes.float() * scales.unsqueeze(2)).to(torch_dtype(self.dtype))
        out = torch.zeros((len(rows), self.part_bytes), dtype=torch.uint8, device=rows.device)
        out[:, : self._plain_bytes] = plain.view(len(rows), -1).view(torch.uint8)
        return out
