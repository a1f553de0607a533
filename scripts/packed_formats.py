"""How matrices are packed, for make-packed-fixtures.py. Each function takes a matrix `[outputs, inputs]` in f32 and its
name, and returns the tensors that a checkpoint has of it, by the ends of their names, and the matrix that they mean.

AWQ, GPTQ, fp8 and NF4 are written from the definitions of the formats; what compressed-tensors has is written and read by
its own library (pip install compressed-tensors)."""

import json

import torch

E4M3 = torch.float8_e4m3fn


def spread(tiles, tile, shape):
    """A value for each weight, of values for tiles."""
    rows = tiles.repeat_interleave(tile[0], 0)[: shape[0]]
    return rows.repeat_interleave(tile[1], 1)[:, : shape[1]]


def largest(weight, tile):
    """The largest size of each tile."""
    outputs, inputs = weight.shape
    grid = [-(-outputs // tile[0]), -(-inputs // tile[1])]
    out = torch.zeros(grid)
    for i in range(grid[0]):
        for j in range(grid[1]):
            part = weight[i * tile[0] : (i + 1) * tile[0], j * tile[1] : (j + 1) * tile[1]]
            out[i, j] = part.abs().max()
    return out


def fp8(weight, tile=None, name="weight_scale", static=False):
    """`quant_method: fp8`: a scale of f32 for each tile, or one without dimensions."""
    size = tile or weight.shape
    scales = largest(weight, size) / 448
    numbers = (weight / spread(scales, size, weight.shape)).to(E4M3)
    parts = {"weight": numbers, name: scales if tile else scales.reshape(())}
    if static:
        parts["input_scale"] = torch.tensor(0.5)
    return parts, numbers.float() * spread(scales, size, weight.shape)


def integers(weight, bits, group, symmetric, groups=None):
    """Numbers, and scales of f16 and zero points of each group, `[outputs, groups]`; `groups` lists those of inputs."""
    outputs, inputs = weight.shape
    group = inputs if group == -1 else group
    if groups is None:
        groups = torch.arange(inputs) // group
    count, top = int(groups.max()) + 1, 2**bits - 1
    scales, zeros = torch.zeros(outputs, count), torch.zeros(outputs, count)
    for g in range(count):
        part = weight[:, groups == g]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scales[:, g] = ((high - low) / top).to(torch.float16).float()
        zeros[:, g] = (top + 1) // 2 if symmetric else (-low / scales[:, g]).round().clamp(0, top)
    numbers = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, top)
    meant = scales[:, groups] * (numbers - zeros[:, groups])
    return numbers.int(), scales, zeros.int(), groups, meant


def words(numbers, bits, dim, order=None):
    """Numbers as words of 32 bits along `dim`; place `i` of a word has number `order[i]`."""
    pack = 32 // bits
    order = order or list(range(pack))
    numbers = numbers.movedim(dim, -1).long().unflatten(-1, (-1, pack))
    packed = sum(numbers[..., order[i]] << (bits * i) for i in range(pack))
    return packed.to(torch.int32).movedim(-1, dim).contiguous()


def awq(weight, group=32):
    numbers, scales, zeros, _, meant = integers(weight, 4, group, False)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    parts = {
        "qweight": words(numbers.t(), 4, 1, order),
        "qzeros": words(zeros.t(), 4, 1, order),
        "scales": scales.t().to(torch.float16).contiguous(),
    }
    return parts, meant


def gptq(weight, bits=4, group=32, symmetric=True, ordered=False, version=1, bias=False):
    inputs = weight.shape[1]
    size = inputs if group == -1 else group
    groups = torch.arange(inputs) // size
    if ordered:
        # As of activations of falling size.
        generator = torch.Generator().manual_seed(inputs)
        groups = groups[torch.randperm(inputs, generator=generator)]
    numbers, scales, zeros, groups, meant = integers(weight, bits, group, symmetric, groups)
    if version == 1:
        zeros = (zeros - 1) % 2**bits
    parts = {
        "qweight": words(numbers.t(), bits, 0),
        "qzeros": words(zeros.t(), bits, 1),
        "scales": scales.t().to(torch.float16).contiguous(),
        "g_idx": groups.to(torch.int32),
    }
    if bias:
        parts["bias"] = torch.zeros(weight.shape[0], dtype=torch.float16)
    return parts, meant


def compressed(weight, weights, format, dtype=torch.bfloat16, ordered=False):
    """compressed-tensors: `weights` are those of a group of the configuration."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    # The library no longer knows an order of groups, which published checkpoints have.
    args = QuantizationArgs(**{key: value for key, value in weights.items() if key != "actorder"})
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=format)
    outputs, inputs = weight.shape
    parts = {"weight": weight.to(dtype)}
    order = torch.arange(inputs)
    if ordered:
        generator = torch.Generator().manual_seed(inputs)
        order = torch.randperm(inputs, generator=generator)
        parts["weight_g_idx"] = torch.empty(inputs, dtype=torch.int32)
        parts["weight_g_idx"][order] = torch.arange(inputs, dtype=torch.int32) // args.group_size
    values = parts["weight"][:, order]
    if args.strategy == "tensor":
        limits = values.amin().reshape(1), values.amax().reshape(1)
    elif args.strategy == "channel":
        limits = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    elif args.strategy == "block":
        size = largest(values.float(), args.block_structure).to(dtype)
        limits = -size, size
    else:
        grouped = values.unflatten(1, (-1, args.group_size))
        limits = grouped.amin(2), grouped.amax(2)
    more = {}
    if args.strategy == "tensor_group":
        more["global_scale"] = generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1)).float()
        parts["weight_global_scale"] = more["global_scale"]
    scale, zero = calculate_qparams(*limits, args, **more)
    parts["weight_scale"] = scale
    if not args.symmetric:
        parts["weight_zero_point"] = zero
    compressor = BaseCompressor.get_value_from_registry(format)
    listed = parts.pop("weight_g_idx", None)
    parts["weight"] = values
    stored = compressor.compress(parts, scheme)
    if "fp4" in format:
        return stored, fp4(stored)
    # In f32, so that nothing is rounded.
    wide = stored | {"weight_scale": stored["weight_scale"].float()} if scale.dtype == dtype else stored
    meant = compressor.decompress(wide, scheme)["weight"].float()
    if listed is not None:
        # The numbers are in the order of the inputs.
        back = order.argsort()
        numbers, inverse = by_order(stored, args, (outputs, inputs), back)
        stored, meant = stored | {"weight_packed": numbers, "weight_g_idx": listed}, meant[:, inverse]
    return {end: part.contiguous() for end, part in stored.items()}, meant


def by_order(stored, args, shape, back):
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    numbers = unpack_from_int32(stored["weight_packed"], args.num_bits, torch.Size(shape))
    return pack_to_int32(numbers[:, back].contiguous(), args.num_bits), back


def fp4(stored):
    """What NVFP4 and MXFP4 mean, in f32."""
    half = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([half, -half])
    packed = stored["weight_packed"]
    numbers = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    scales = stored["weight_scale"]
    if scales.dtype == torch.uint8:
        scales = (scales.float() - 127).exp2()
    else:
        scales = scales.float() / stored["weight_global_scale"]
    return values[numbers.long()] * scales.repeat_interleave(numbers.shape[1] // scales.shape[1], 1)


# The values of NF4: quantiles of a normal distribution, as bitsandbytes has them.
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]


def nf4(weight, nested=True, block=64):
    """NF4 with scales of blocks of all values, which are quantized, too, if `nested`."""
    table, flat = torch.tensor(NF4), weight.reshape(-1, block)
    scales = flat.abs().amax(1)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(weight.shape)}
    parts = {"weight.absmax": scales, "weight.quant_map": table}
    if nested:
        offset = scales.mean()
        outer = torch.linspace(-1, 1, 256)
        size = (scales - offset).abs().max().reshape(1)
        numbers = ((scales - offset)[:, None] / size - outer).abs().argmin(1).to(torch.uint8)
        parts |= {
            "weight.absmax": numbers, "weight.nested_absmax": size, "weight.nested_quant_map": outer,
        }
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
        scales = outer[numbers.long()] * size + offset
    numbers = (flat[..., None] / scales[:, None, None] - table).abs().argmin(-1)
    pairs = numbers.flatten().unflatten(0, (-1, 2))
    parts["weight"] = (pairs[:, 0] << 4 | pairs[:, 1]).to(torch.uint8)[:, None]
    text = list(json.dumps(state).encode())
    parts["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(text, dtype=torch.uint8)
    return parts, (scales[:, None] * table[numbers]).reshape(weight.shape)
