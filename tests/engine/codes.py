"""Random quantized weights."""

from __future__ import annotations

import torch

from decant.engine.checkpoint.weight import CodeKind, Codes


def make_codes(
    kind: CodeKind,
    outputs: int,
    inner: int,
    group: int,
    *,
    has_zeros: bool = False,
    has_mins: bool = False,
    has_half_scales: bool = True,
) -> Codes:
    generator = torch.Generator().manual_seed(outputs + 31 * inner + group)
    groups = -(-inner // group)
    scales = torch.rand(groups, outputs, generator=generator) / 50 + 0.001
    zeros = torch.randint(16, (groups, outputs), generator=generator).to(torch.uint8) if has_zeros else None
    mins = torch.rand(groups, outputs, generator=generator) / 5 if has_mins else None
    match kind:
        case CodeKind.INT8:
            codes = torch.randint(-128, 128, (outputs, inner), generator=generator).to(torch.int8)
        case CodeKind.INT4 | CodeKind.E2M1:
            codes = torch.randint(16, (outputs, inner), generator=generator).to(torch.uint8)
        case CodeKind.FP8:
            some = torch.randint(256, (outputs, inner), generator=generator).to(torch.uint8)
            codes = torch.where(some & 127 == 127, 0, some).view(torch.float8_e4m3fn)
    return Codes(kind, codes, scales.half().float() if has_half_scales else scales, group, zeros, mins=mins)
