#!/usr/bin/env python3
"""Writes tests/data/torch.pt: a state dict as torch.save writes it, with every kind of tensor that crates/model/src/checkpoint/pickle.rs
reads. `crates/model/src/checkpoint/pickle/tests.rs` knows the values.

    python3 scripts/make-pickle-fixture.py

Needs PyTorch (1.13.1 was used).
"""

import pathlib

import torch

FILE = pathlib.Path(__file__).resolve().parent.parent / "tests/data/torch.pt"


def main():
    module = torch.nn.Linear(3, 2)
    with torch.no_grad():
        module.weight.copy_(torch.arange(6.0).reshape(2, 3))
        module.bias.copy_(torch.tensor([-1.0, 0.5]))
    state = module.state_dict()  # An OrderedDict with the attribute _metadata.
    shared = torch.arange(24.0).reshape(4, 6)
    state["shared"] = shared
    state["shared.rows"] = shared[1:3]
    state["shared.transposed"] = shared.t()
    state["parameter"] = torch.nn.Parameter(torch.tensor([[1.5, -2.5]]))
    for dtype in ("float64", "float16", "bfloat16", "int64", "int32", "int16", "uint8", "bool"):
        state[dtype] = torch.tensor([0, 1, 2, 3]).to(getattr(torch, dtype))
    state["float16.columns"] = torch.arange(24).reshape(2, 3, 4).to(torch.float16).permute(2, 1, 0)
    state["int64.large"] = torch.tensor([-(2**62), 2**62])
    state["scalar"] = torch.tensor(7.0)
    state["empty"] = torch.zeros(0, 3)
    state["version"] = 3
    state["name"] = "a text"
    state["nested"] = {"ignored": torch.zeros(2)}
    torch.save(state, FILE)


if __name__ == "__main__":
    main()
