"""Write gguf.txt: random blocks of each GGUF format and what the package gguf (0.19) makes of them.

    python rust/cpu/tests/weights/gguf_vectors.py > rust/cpu/tests/weights/gguf.txt

A line: format, the bytes of one row of 512 numbers, the numbers as little-endian f32; both in hexadecimal.
"""

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

WIDTH = 512
# Where a block holds f16 numbers, in units of two bytes.
HALVES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 1], "Q4_K": [0, 1], "Q5_K": [0, 1], "Q6_K": [104], "F16": [0]}


def main() -> None:
    random = np.random.default_rng(0)
    for name, halves in HALVES.items():
        kind = GGMLQuantizationType[name]
        columns, size = GGML_QUANT_SIZES[kind]
        blocks = random.integers(0, 256, (WIDTH // columns, size), dtype=np.uint8)
        blocks.view(np.float16)[:, halves] = random.normal(size=(len(blocks), len(halves))).astype(np.float16)
        numbers = dequantize(blocks.reshape(1, -1), kind)
        print(name, blocks.tobytes().hex(), numbers.astype("<f4").tobytes().hex())


if __name__ == "__main__":
    main()
