"""llama.cpp, by way of llama-cpp-python and a GGUF file that the package gguf writes: Mamba and RWKV-7."""

from __future__ import annotations

import ctypes
import re
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linattn._checks import fail
from linattn.benchmark.peers import Reader, Stepper
from linattn.checkpoints.assemble import distinct_tensors
from linattn.models import LanguageModel

PRECISIONS: Mapping[str, Any] = {"fp32": "F32", "bf16": "BF16", "int8": "Q8_0"}
SEQUENCES, TOKENS = 16, 2048

# Names of tensors: ours -> GGUF's. A matrix listed in MATRICES takes the file's type, everything else is float32, as
# llama.cpp's own converter and quantizer have it.
MODEL = {
    "embedding.weight": "token_embd.weight", "embedding_norm": "token_embd_norm", "norm": "output_norm",
    "head.weight": "output.weight",
}  # fmt: skip
BLOCK = {
    "mamba": {
        "mixer_norm": "attn_norm", "mixer.in_proj": "ssm_in", "mixer.conv1d": "ssm_conv1d", "mixer.x_proj": "ssm_x",
        "mixer.dt_proj": "ssm_dt", "mixer.A_log": "ssm_a", "mixer.D": "ssm_d", "mixer.out_proj": "ssm_out",
    },
    "rwkv7": {
        "mixer_norm": "attn_norm", "mlp_norm": "attn_norm_2", "mixer.shift_mix": "time_mix_lerp_fused.weight",
        **{
            f"mixer.{ours}.{part}": f"time_mix_{letter}{number}.weight"
            for ours, letter in (("decay", "w"), ("rate", "a"), ("residual", "v"), ("gate", "g"))
            for number, part in enumerate(("bias", "down.weight", "up.weight"))
        },
        **{f"mixer.{name}": f"time_mix_{name}.weight" for name in ("k_k", "k_a", "r_k")},
        **{f"mixer.{name}": f"time_mix_{name}" for name in ("receptance", "key", "value", "output")},
        "mixer.norm": "time_mix_ln", "mlp.shift_mix": "channel_mix_lerp_k.weight", "mlp.key": "channel_mix_key",
        "mlp.value": "channel_mix_value",
    },
}  # fmt: skip
MATRICES = re.compile(
    r"(token_embd|output|ssm_(in|x|dt|out)|time_mix_(receptance|key|value|output|[avg][12])|channel_mix_(key|value))\.weight"
)
PLAIN_WHERE_QUANTIZED = re.compile(r"time_mix_[avg][12]\.weight")


def reader(model: LanguageModel, folder: Path, precision: str) -> Reader:
    """Our weights in llama.cpp; the sequences read at a time are at most ``SEQUENCES``, their tokens ``TOKENS``."""
    import llama_cpp

    kind = PRECISIONS[precision]
    file = folder / f"{kind}.gguf"
    if not file.exists():
        write(file, model, kind)
    llama_cpp.llama_log_set(_SILENT, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    theirs = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = TOKENS
    options.n_seq_max = SEQUENCES
    options.n_threads = options.n_threads_batch = torch.get_num_threads()
    context = llama_cpp.llama_init_from_model(theirs, options) if theirs else None
    if not context:
        raise RuntimeError(f"llama.cpp refuses {file.name}")
    pieces = llama_cpp.llama_batch_init(TOKENS, 0, 1)
    vocabulary = model.config.vocab_size

    def decode(ids: Tensor, start: int) -> Tensor:
        rows, length = ids.shape
        pieces.n_tokens = rows * length
        for n, token in enumerate(ids.flatten().tolist()):
            row, column = divmod(n, length)
            pieces.token[n], pieces.pos[n], pieces.n_seq_id[n] = token, start + column, 1
            pieces.seq_id[n][0], pieces.logits[n] = row, column == length - 1
        if code := llama_cpp.llama_decode(context, pieces):
            raise RuntimeError(f"llama_decode: code {code}")
        last = (llama_cpp.llama_get_logits_ith(context, (row + 1) * length - 1) for row in range(rows))
        return torch.stack([torch.tensor(np.ctypeslib.as_array(logits, (vocabulary,))) for logits in last])

    def read(ids: Tensor) -> tuple[Tensor, Stepper]:
        if len(ids) > SEQUENCES or ids.numel() > TOKENS:
            raise fail("ids", list(ids.shape), f"at most {SEQUENCES} sequences and {TOKENS} tokens")
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        position = ids.shape[1]

        def step(ids: Tensor) -> Tensor:
            nonlocal position
            position += 1
            return decode(ids[:, None], position - 1)

        return decode(ids, 0), step

    weakref.finalize(read, _free, llama_cpp, pieces, context, theirs)
    return read


def _free(llama_cpp: Any, pieces: Any, context: Any, model: Any) -> None:
    llama_cpp.llama_batch_free(pieces)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)


def write(file: Path, model: LanguageModel, kind: str) -> None:
    """Write the model as GGUF, its matrices of type ``kind``; without a vocabulary, since none is needed here."""
    import gguf

    (mechanism,) = set(model.config.layers)
    mixer: Any = model.blocks[0].mixer
    writer: Any = gguf.GGUFWriter(file, mechanism)
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(model.config.d_model)
    writer.add_block_count(model.config.num_layers)
    writer.add_head_count(0)
    writer.add_feed_forward_length(model.config.mlp_size)
    writer.add_vocab_size(model.config.vocab_size)
    writer.add_tokenizer_model("none")
    if mechanism == "mamba":
        rank, states, _ = mixer.sizes
        writer.add_layer_norm_rms_eps(model.config.norm_eps)
        writer.add_ssm_conv_kernel(mixer.conv1d.width)
        writer.add_ssm_inner_size(mixer.out_proj.in_features)
        writer.add_ssm_state_size(states)
        writer.add_ssm_time_step_rank(rank)
        writer.add_ssm_dt_b_c_rms(False)
    else:
        later: Any = model.blocks[-1].mixer  # the first layer has no residual
        writer.add_layer_norm_eps(model.config.norm_eps)
        writer.add_wkv_head_size(mixer.k_k.shape[-1])
        writer.add_token_shift_count(2)
        writer.add_decay_lora_rank(len(mixer.decay.down.weight))
        writer.add_iclr_lora_rank(len(mixer.rate.down.weight))
        writer.add_value_residual_mix_lora_rank(len(later.residual.down.weight))
        writer.add_gate_lora_rank(len(mixer.gate.down.weight))
    for name, tensor in tensors(model).items():
        as_type = gguf.GGMLQuantizationType[_type(name, tensor, kind)]
        writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), as_type), raw_dtype=as_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _type(name: str, tensor: Tensor, kind: str) -> str:
    if not MATRICES.search(name) or (kind == "Q8_0" and PLAIN_WHERE_QUANTIZED.search(name)):
        return "F32"
    return "F16" if kind == "Q8_0" and tensor.shape[-1] % 32 else kind  # it quantizes 32 numbers at a time


def tensors(model: LanguageModel) -> Mapping[str, Tensor]:
    """The model's tensors by GGUF's names, in float32."""
    (mechanism,) = set(model.config.layers)
    found = {}
    for name, tensor in distinct_tensors(model).items():
        value = tensor.detach().float()
        place, own, names = "", name, MODEL
        if block := re.match(r"blocks\.(\d+)\.(.+)", name):
            place, own, names = f"blk.{block[1]}.", block[2], BLOCK[mechanism]
        stem, _, last = own.rpartition(".")
        theirs = names[own] if own in names else f"{names[stem]}.{last}"
        if own == "mixer.A_log":
            value = -value.exp()
        elif own == "mixer.conv1d.weight":
            value = value[:, 0]
        elif own == "mixer.shift_mix":
            value = value[:, None, None]
        elif own in ("mixer.k_k", "mixer.k_a", "mixer.r_k", "mlp.shift_mix"):
            value = value.flatten()
        found[place + theirs] = value
    first = {name: value for name, value in found.items() if name.startswith("blk.0.time_mix_a")}
    # Demanded by llama.cpp, though nothing reads them.
    return found | {name.replace("time_mix_a", "time_mix_v"): value for name, value in first.items()}


def _silent(level: int, text: bytes, data: Any) -> None:
    """llama.cpp reports every tensor that it loads."""


_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_silent)
