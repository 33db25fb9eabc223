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


FP8 = {"e4m3": (torch.float8_e4m3fn, 448), "e5m2": (torch.float8_e5m2, 57344)}


def fp8_candidates(x, kind="e4m3"):
    """fp8 values `[8, …, dim]`, scales `[8, …, 1]` and squared errors `[8, …, 1]` of the eight scales that are tried
    within an octave: the smallest maps the largest element to the format's largest, each next is 2**(1/8) larger."""
    dtype, largest = FP8[kind]
    x = x.float()
    least = x.abs().amax(-1, keepdim=True) / largest
    scales = torch.stack([bf16_above(least * 2.0 ** (phase / 8)) for phase in range(8)])
    step = torch.where(scales > 0, scales, torch.ones_like(scales))
    values = (x / step).clamp(-largest, largest).to(dtype).float()
    return values, scales, (values.double() * scales - x).square().sum(-1, keepdim=True)


def channel_parts(x, levels, group_size):
    """As `integer_parts`, for each channel over groups of tokens: codes `[batch, heads, tokens, dim]`, scale and zero
    `[batch, heads, groups, dim]`."""
    parts = [integer_parts(group.transpose(2, 3), levels) for group in x.split(group_size, dim=2)]
    return [torch.cat([t.transpose(2, 3) for t in each], dim=2) for each in zip(*parts, strict=True)]


def group_parts(x, levels, group_size):
    """As `integer_parts`, for each group of channels: scale and zero `[…, groups]`."""
    parts = [integer_parts(group, levels) for group in x.split(group_size, dim=-1)]
    return [torch.cat(each, dim=-1) for each in zip(*parts, strict=True)]


def unpacked(fields, bits, dim):
    """Codes `[…, dim]` from the stored bytes, a channel at a time."""
    upper = min(bits, 2) if bits < 4 else bits
    width = -(-dim * upper // 8)
    out = []
    for channel in range(dim):
        part, place = divmod(channel, width)
        code = fields["codes"][..., place].long() // 2 ** (upper * part) % 2**upper
        if bits == 3:
            half, place = divmod(place, -(-width // 2))
            code = 2 * code + fields["low"][..., place].long() // 2 ** (2 * part + half) % 2
        out.append(code)
    return torch.stack(out, dim=-1)


def rotation(dim):
    """What a vector is multiplied by, `[dim, dim]` in fp64: a sign for each channel, then Hadamard. A sign is negative
    where the channel's number in binary has an odd number of "11", overlapping ones counted."""
    pairs = [sum(a == b == "1" for a, b in zip(bin(i), bin(i)[1:], strict=False)) for i in range(dim)]
    return torch.diag(torch.tensor([(-1.0) ** count for count in pairs])).double() @ hadamard(dim).double()


def levels(bits, codebook="uniform"):
    """The levels of the rotated codec, fp64: odd numbers t, or t * (cubic + t * t) in units of a power of two."""
    odd = torch.arange(1 - 2**bits, 2**bits, 2).double()
    if codebook == "uniform":
        return odd
    cubic, unit = {2: (71, 2**-7), 3: (163, 2**-9), 4: (459, 2**-12)}[bits]
    return odd * (cubic + odd * odd) * unit


FIRST = {
    "uniform": {2: 0.4979, 3: 0.2930, 4: 0.1676},
    "lloyd_max": {2: 0.8053, 3: 0.7418, 4: 1.0739},
}
TRIED = [0.8 * (1.25 / 0.8) ** (i / 7) for i in range(8)]


def nearest(y, scale, bits, codebook):
    """The code of the level nearest to each element of y / scale."""
    step = torch.where(scale > 0, scale, torch.ones_like(scale))
    return ((y / step)[..., None] - levels(bits, codebook)).abs().argmin(-1)


def least_squares(y, codes, bits, codebook):
    level = levels(bits, codebook)[codes]
    return (y * level).sum(-1, keepdim=True) / level.square().sum(-1, keepdim=True)


def rotated_parts(x, bits, group_size=None, codebook="uniform", unbiased=False):
    """Codes, scale `[…, tokens, 1]` and offset `[…, groups, dim]` (or None) of the rotated codec, all in fp64: of eight
    scales the one whose levels make the smallest angle with the vector, and from there one step of Lloyd's."""
    y, offset = x.double() @ rotation(x.shape[-1]), None
    if group_size is not None:
        offset = torch.stack([group.mean(2) for group in y.split(group_size, dim=2)], dim=2).bfloat16().double()
        y = torch.cat([g - offset[:, :, i, None] for i, g in enumerate(y.split(group_size, dim=2))], dim=2)
    first = y.square().mean(-1, keepdim=True).sqrt() * FIRST[codebook][bits]
    tried = torch.stack([nearest(y, first * factor, bits, codebook) for factor in TRIED])
    cosines = torch.nn.functional.cosine_similarity(y[None], levels(bits, codebook)[tried], dim=-1)
    codes = tried.take_along_dim(cosines.argmax(0)[None, ..., None], dim=0)[0]
    codes = nearest(y, least_squares(y, codes, bits, codebook), bits, codebook)
    scale = least_squares(y, codes, bits, codebook)
    if unbiased:
        product = (y * levels(bits, codebook)[codes]).sum(-1, keepdim=True)
        scale = torch.where(product > 0, y.square().sum(-1, keepdim=True) / product, scale)
    return codes, scale.bfloat16().double(), offset


def rotated_values(codes, scale, offset, bits, group_size=None, codebook="uniform"):
    """What the parts stand for, fp64 `[…, tokens, dim]`."""
    y = levels(bits, codebook)[codes.long()] * scale.double()
    if offset is not None:
        groups = y.split(group_size, dim=2)
        y = torch.cat([g + offset[:, :, i, None].double() for i, g in enumerate(groups)], dim=2)
    return y @ rotation(y.shape[-1]).T


def int8(x):
    codes, scale, zero = integer_parts(x, 255)
    return (codes * scale + zero).to(x.dtype)


def fp8(x):
    values, scales, errors = fp8_candidates(x)
    best = errors.argmin(0, keepdim=True)
    return (values * scales).take_along_dim(best, dim=0)[0].to(x.dtype)


ROUND_TRIPS = {"dense": lambda x: x, "fp8": fp8, "int8": int8}
