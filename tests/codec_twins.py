"""The stored formats once more, from their description: slow, plain tensor arithmetic, no code of the package.

Each `*_parts` gives the codes and the 16-bit scales that must be stored; each of `ROUND_TRIPS` gives back `[..., dim]`.
"""

import torch


def bf16_below(x):
    """The largest bfloat16 that is not above fp32 `x`: the upper half of its bits, one on where a negative is cut."""
    bits = x.float().contiguous().view(torch.int32)
    cut = bits & -65536
    return torch.where((bits != cut) & (bits < 0), cut + 65536, cut).view(torch.float32).view_as(x)


def bf16_above(x):
    return -bf16_below(-x)


def hadamard(dim):
    """Sylvester–Hadamard in blocks of the largest power of two that divides `dim`, `[dim, dim]`, orthonormal."""
    block = dim & -dim
    signs = [[(-1) ** bin(i & j).count("1") for j in range(block)] for i in range(block)]
    return torch.block_diag(*[torch.tensor(signs, dtype=torch.float32) / block**0.5] * (dim // block))


def integer_parts(x, levels):
    """codes 0 … levels, scale and zero point, for each vector along the last dimension; one that reaches further below
    zero than above is written mirrored, with scale and zero point negative."""
    x = x.float()
    mirrored = -x.amin(-1, keepdim=True) > x.amax(-1, keepdim=True)
    x = torch.where(mirrored, -x, x)
    zero = bf16_below(x.amin(-1, keepdim=True))
    scale = bf16_above((x.amax(-1, keepdim=True) - zero) / levels)
    step = torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = ((x - zero) / step).round().clamp(0, levels)
    return codes, torch.where(mirrored, -scale, scale), torch.where(mirrored, -zero, zero)


def fp8_candidates(x):
    """e4m3 values `[8, …, dim]`, scales `[8, …, 1]` and squared errors `[8, …, 1]` of the eight scales that are tried
    within an octave: the smallest maps the largest element to 448, each next one is 2**(1/8) larger."""
    x = x.float()
    least = x.abs().amax(-1, keepdim=True) / 448
    scales = torch.stack([bf16_above(least * 2.0 ** (phase / 8)) for phase in range(8)])
    step = torch.where(scales > 0, scales, torch.ones_like(scales))
    values = (x / step).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return values, scales, (values.double() * scales - x).square().sum(-1, keepdim=True)


def int8(x):
    codes, scale, zero = integer_parts(x, 255)
    return (codes * scale + zero).to(x.dtype)


def int4(x):
    rotation = hadamard(x.shape[-1])
    codes, scale, zero = integer_parts(x.float() @ rotation, 15)
    return ((codes * scale + zero) @ rotation).to(x.dtype)


def fp8(x):
    values, scales, errors = fp8_candidates(x)
    best = errors.argmin(0, keepdim=True)
    return (values * scales).take_along_dim(best, dim=0)[0].to(x.dtype)


ROUND_TRIPS = {"dense": lambda x: x, "fp8": fp8, "int8": int8, "int4": int4}
