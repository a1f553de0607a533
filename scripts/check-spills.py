#!/usr/bin/env python3
"""Finds loops of the quantized products whose vectors do not fit in registers.

    cargo build --release && scripts/check-spills.py target/release/foretoken

Takes a stripped program too: an innermost loop is code up to a jump back, and one with vpdpbusd is a product. Prints,
for loops of 512 and of 256 bits, how many there are and those that load or store a vector on the stack more often than
--allowed for each product. Fails if one of 512 bits does, or if there is none: with the 16 registers of 256 bits some
spill whatever the compiler does."""

import argparse
import re
import subprocess
import sys

PRODUCT = re.compile(r"vpdpbusd")
LINE = re.compile(r"^\s*([0-9a-f]+):\s+(.*)$")
JUMP = re.compile(r"^j\w+\s+(?:0x)?([0-9a-f]+)")
SPILLED = re.compile(r"\(%rsp[,)].*%[xyz]mm|%[xyz]mm.*\(%rsp[,)]")


def loops(lines):
    """The address and the instructions of each innermost loop with a product."""
    code, places = [], {}
    for line in lines:
        if not (found := LINE.match(line)):
            continue
        places[int(found[1], 16)] = len(code)
        code.append(found[2])
        jump = JUMP.match(found[2])
        start = places.get(int(jump[1], 16)) if jump else None
        if start is None:
            continue
        body = code[start:]
        if not any(PRODUCT.search(one) for one in body):
            continue
        # An outer loop has another jump back inside it.
        others = [JUMP.match(one) for one in body[:-1]]
        targets = [(i, places.get(int(other[1], 16), -1)) for i, other in enumerate(others) if other]
        if not any(start <= target <= start + i for i, target in targets):
            yield int(jump[1], 16), body


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--allowed", type=float, default=0.1, help="loads and stores for each product (0.1)")
    args = parser.parse_args()
    command = ["objdump", "--disassemble", "--no-show-raw-insn", "--section=.text", args.program]
    count, spilled = {512: 0, 256: 0}, {512: [], 256: []}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as objdump:
        for address, body in loops(objdump.stdout):
            products = [one for one in body if PRODUCT.search(one)]
            bits = 512 if "%zmm" in products[0] else 256
            stack = sum(bool(SPILLED.search(one)) for one in body)
            count[bits] += 1
            if stack > args.allowed * len(products):
                spilled[bits].append(f"  {address:x}: {stack} for {len(products)} products")
    for bits, loop in count.items():
        print(f"{bits} bits: {len(spilled[bits])} of {loop} loops spill")
        print("\n".join(spilled[bits]))
    if objdump.returncode or spilled[512] or not count[512]:
        sys.exit(1)


if __name__ == "__main__":
    main()
