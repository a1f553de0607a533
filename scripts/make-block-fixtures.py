#!/usr/bin/env python3
"""Writes tests/data/block-types.json: random blocks of types that candle does not read, and their values
according to the package `gguf` (pip install gguf), which llama.cpp's project maintains."""

import json
import random
from pathlib import Path

import gguf
import numpy as np

random.seed(30)
SCALES = [0x3C00, 0xB800, 0x1234, 0x0001]  # Halves: 1, -0.5, a small one, and the smallest.


def block(kind):
    size = gguf.GGML_QUANT_SIZES[kind][1]
    return bytearray(random.randbytes(size))


def main():
    out = {}
    small = ("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M")
    for kind in ("IQ4_NL", "IQ4_XS", "MXFP4", *small):
        quant = gguf.GGMLQuantizationType[kind]
        blocks = []
        for i in (1, 3) if kind in small else range(4):
            data = block(quant)
            if kind == "MXFP4":
                data[0] = [0, 1, 127, 252][i]
            elif kind == "IQ1_M":
                for j in range(4):  # Four bits of the scale in the upper half of each.
                    data[49 + 2 * j] = data[49 + 2 * j] & 15 | (SCALES[i] >> 4 * j & 15) << 4
            else:
                data[:2] = SCALES[i].to_bytes(2, "little")
            blocks.append(data)
        data = np.frombuffer(b"".join(blocks), dtype=np.uint8)
        values = gguf.quants.dequantize(data, quant)
        # As bits, which say of each value exactly which it is.
        bits = values.astype(np.float32).view(np.uint32)
        out[kind] = {"blocks": data.tobytes().hex(), "values": [int(b) for b in bits]}
    file = Path(__file__).parent.parent / "tests/data/block-types.json"
    file.write_text(json.dumps(out) + "\n")


main()
