"""Tokens whose numbers lie beyond 2^31 elements: the kernels are given pointers so far before real memory."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import torch
from linattn.backends.cpu import library
from linattn.backends.cpu.layout import scratch

T, H, K, V = 70, 2, 8, 12
far = 1 << 28  # tokens, so 2^32 elements of q, and a multiple of the block
torch.manual_seed(0)
native = library.loaded()
inputs = [torch.randn(T, H, n) for n in (K, K, V)]
inputs[1] = torch.nn.functional.normalize(inputs[1], dim=-1)
g, beta = torch.nn.functional.logsigmoid(torch.randn(T, H, K)), torch.rand(T, H)
a = torch.nn.functional.normalize(torch.randn(T, H, K), dim=-1)
d_o, state, d_final = torch.randn(T, H, V), torch.randn(1, H, K, V), torch.randn(1, H, K, V)


def run(start, write, dtype):
    given, dy, kind = [x.to(dtype) for x in inputs], d_o.to(dtype), library.TYPES[dtype]
    rows = T // library.BLOCK + 1

    def at(x, rows_before=start):
        return (x.data_ptr() - rows_before * x[0].numel() * x.element_size()) % 2**64  # memory may lie low

    def call(outputs):
        ends = torch.tensor([start, start + T])
        low = [at(beta) if write == 1 else 0, *([at(a), at(b)] if write == 2 else [0, 0])]
        b_and_rest = [0, state.data_ptr(), ends.data_ptr()]
        pointers = [*map(at, given), at(g), *low, *b_and_rest, *outputs]
        sizes = [1, start + T, start + T, H, H, K, V, write, 0, 4, kind, 0, 0, 0, 0, 1, 1]
        scale = 0.5
        memory, begin = scratch(1, native.scratch(library.matrix_problem([*pointers, 0], sizes, scale)))
        return library.matrix_problem([*pointers, begin], sizes, scale), (memory, ends)

    b = -a
    o, final = torch.zeros_like(dy), torch.zeros_like(state)
    writes, states = torch.zeros(T, H, V), torch.zeros(rows, H, K, V)
    kept = [0 if write == 0 else at(writes), at(states, start // library.BLOCK)]
    problem, _alive = call([at(o), final.data_ptr(), *kept, *[0] * 11])
    assert native.forward(problem)
    dq, dk, dg, da, db = (torch.zeros(T, H, K) for _ in range(5))
    dv, dbeta, dstate = torch.zeros_like(dy), torch.zeros(T, H), torch.zeros_like(state)
    low = [at(dbeta) if write == 1 else 0, *([at(da), at(db)] if write == 2 else [0, 0])]
    grads = [at(dy), d_final.data_ptr(), at(dq), at(dk), at(dv), at(dg), *low, 0, dstate.data_ptr()]
    problem, _alive = call([0, 0, *kept, *grads])
    native.backward(problem)
    return [o, final, states, writes, dq, dk, dv, dg, dbeta, da, db, dstate]


for write in range(3):
    for dtype in (torch.float32, torch.bfloat16):
        near, beyond = (run(start, write, dtype) for start in (0, far))
        assert near[0].abs().sum() > 0 and near[4].abs().sum() > 0
        assert all(torch.equal(x, y) for x, y in zip(near, beyond)), (write, dtype)
print("same")
"""


def test_tokens_beyond_31_bits() -> None:
    command = [sys.executable, "-c", CODE]  # a wrong address ends the process
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.stdout.split() == ["same"], f"exit {result.returncode}\n{result.stderr[-4000:]}"
