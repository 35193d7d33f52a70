"""The contests of language models: reading a prompt, generating, training. All have the same random weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from linattn import engine, state
from linattn.benchmark.contest import Contest, Entrant, Opening
from linattn.benchmark.measure import reading, relative_error
from linattn.benchmark.peers import Peer, Reader, Stepper, llama_cpp_python, rwkv_package, transformers_mamba
from linattn.evaluation import next_token_loss
from linattn.generation import compile_decode
from linattn.models import LanguageModel, ModelConfig
from linattn.models.presets import preset

STEPS = 16  # tokens generated as one run
PROMPT, CONTINUED = 24, 8  # tokens read and then stepped through to find an error
BATCH = 16
ITEM = {"fp32": 4, "bf16": 2, "int8": 1}  # bytes of a weight
OF_BANDWIDTH = {"fp32": 0.8, "bf16": 0.65, "int8": 0.55}
"""Parts of the read bandwidth that generation is meant to reach."""

Targets = Mapping[str, float]
PREFILL: Targets = {"transformers": 4, "llama.cpp": 2}


def mamba() -> Iterator[Contest]:
    """Mamba 130M beside transformers and llama.cpp."""
    return language_model(
        "Mamba 130M", preset("mamba-130m", initializer_range=0.02),
        {"transformers": transformers_mamba, "llama.cpp": llama_cpp_python},
        prefill={(512, "fp32"): PREFILL, (2048, "fp32"): PREFILL},
        decode={"fp32": {"llama.cpp": 1.1}, "bf16": {"llama.cpp": 1.1}, "int8": {"llama.cpp": 1.2}},
    )  # fmt: skip


def rwkv7() -> Iterator[Contest]:
    """RWKV-7 191M beside the package rwkv and llama.cpp."""
    return language_model(
        "RWKV-7 191M", preset("rwkv7-0.1b", initializer_range=0.02),
        {"rwkv": rwkv_package, "llama.cpp": llama_cpp_python},
        prefill={(512, "fp32"): {"llama.cpp": 1.1}, (128, "bf16"): {"llama.cpp": 1.1}},
        decode={"fp32": {"llama.cpp": 1.1}, "bf16": {"llama.cpp": 1.1}, "int8": {"llama.cpp": 1}},
    )  # fmt: skip


def language_model(
    title: str,
    config: ModelConfig,
    peers: Mapping[str, Peer],
    *,
    prefill: Mapping[tuple[int, str], Targets],
    decode: Mapping[str, Targets],
    batch: int = BATCH,
) -> Iterator[Contest]:
    """Reading prompts of each length and precision in ``prefill``, generating in each precision of ``decode``, and in
    the first of them ``batch`` sequences at a time.

    The mappings' values are the targets. What the peers read lies in a temporary folder until the last contest is over;
    a peer without a precision is no part of its contests.
    """
    with TemporaryDirectory(prefix="linattn-") as folder:
        subject = _Subject(config, peers, Path(folder))
        for (tokens, precision), targets in prefill.items():
            openings = subject.openings(precision, partial(subject.reading, tokens=tokens))
            yield Contest(title, f"prefill {precision}, T={tokens}", *openings, targets, "tokens/s", 2)
        one, many = partial(subject.stepping, batch=1), partial(subject.stepping, batch=batch)
        for precision, targets in decode.items():
            ours, others = subject.openings(precision, one)
            others["read bandwidth"] = partial(subject.bandwidth, precision)
            targets = {**targets, "read bandwidth": OF_BANDWIDTH[precision]}
            yield Contest(title, f"decode {precision}", ours, others, targets, "tokens/s", 2)
        precision = next(iter(decode))
        ours, others = subject.openings(precision, many)
        others = {"ours, batch 1": subject.openings(precision, one)[0], **others}
        yield Contest(title, f"decode {precision}, batch {batch}", ours, others, {"ours, batch 1": 5}, "tokens/s", 2)


class _Subject:
    """A model, what it should say, and the readers of it, each made when it is first asked for."""

    def __init__(self, config: ModelConfig, peers: Mapping[str, Peer], folder: Path) -> None:
        self.config, self.peers, self.folder = config, peers, folder
        self.reader = cache(self._reader)
        random = torch.Generator().manual_seed(0)
        self.ids = torch.randint(config.vocab_size, (1, 1 << 12), generator=random)

    @cached_property
    def model(self) -> LanguageModel:
        torch.manual_seed(0)
        return LanguageModel(self.config).eval().requires_grad_(False)

    @cached_property
    def truth(self) -> tuple[Tensor, Tensor]:
        """Logits in float64 after the prompt and after the tokens that continue it."""
        ids = self.ids[:, : PROMPT + CONTINUED]
        with torch.no_grad():
            logits, _ = copy.deepcopy(self.model).double()(ids, backend="reference")
        return logits[:, PROMPT - 1], logits[:, -1]

    def openings(self, precision: str, enter: Callable[[Reader], Entrant]) -> tuple[Opening, dict[str, Opening]]:
        """Ours, and the peers that have this precision."""

        def opening(name: str) -> Opening:
            return lambda: enter(self.reader(name, precision))

        return opening(""), {name: opening(name) for name, peer in self.peers.items() if precision in peer.PRECISIONS}

    def _reader(self, peer: str, precision: str) -> Reader:
        return self.peers[peer].reader(self.model, self.folder, precision) if peer else ours(self.model, precision)

    def reading(self, reader: Reader, tokens: int) -> Entrant:
        """The logits after ``tokens`` tokens."""
        return Entrant(
            lambda: reader(self.ids[:, :tokens]), tokens,
            lambda: relative_error(reader(self.ids[:, :PROMPT])[0], self.truth[0]),
        )  # fmt: skip

    def stepping(self, reader: Reader, batch: int) -> Entrant:
        """``STEPS`` tokens more, for each of ``batch`` sequences."""
        logits, step = reader(self.ids[:, :PROMPT].expand(batch, -1))
        for n in range(PROMPT, PROMPT + CONTINUED):
            logits = step(self.ids[:, n].expand(batch))
        error = relative_error(logits, self.truth[1].expand_as(logits))
        token = self.ids[:, 0].expand(batch)

        def call() -> None:
            for _ in range(STEPS):
                step(token)

        return Entrant(call, STEPS * batch, lambda: error)

    def bandwidth(self, precision: str) -> Entrant:
        """Reading as many bytes as a token needs: every weight once, the state once and written once.

        Vectors count as float32 in every precision, embeddings that are not the head not at all.
        """
        embedding, head = self.model.embedding.weight, self.model.head.weight
        weights = [head, *(p for p in self.model.parameters() if p is not embedding and p is not head)]
        moved = sum(p.numel() * (ITEM[precision] if p.dim() > 1 else 4) for p in weights)
        with torch.no_grad():
            moved += 2 * state.nbytes(self.model(self.ids[:, :1])[1])
        call, read = reading()
        return Entrant(call, read / moved)


def ours(model: LanguageModel, precision: str) -> Reader:
    """Prompts by the model, in bfloat16 for bf16; then the compiled step, whose weights have that precision."""
    model = copy.deepcopy(model).bfloat16() if precision == "bf16" else model
    weights = {"fp32": "float32", "bf16": "bfloat16"}.get(precision, precision)

    def read(ids: Tensor) -> tuple[Tensor, Stepper]:
        with torch.inference_mode():
            hidden, after = model.features(ids)
            logits = model.head(hidden[:, -1])
        decoding = cache(lambda: compile_decode(model, batch=len(ids), weights=weights).start(after))
        return logits, lambda ids: decoding().step(ids)

    return read


def training(mechanism: str, *, d_model: int = 128, num_layers: int = 4, batch: int = 4, tokens: int = 256) -> Contest:
    """Steps of the optimizer as `linattn demo` makes them, on random bytes, beside the same by the chunked backend."""
    ids = torch.randint(256, (batch, tokens + 1), generator=torch.Generator().manual_seed(0))

    @cache
    def model() -> LanguageModel:
        torch.manual_seed(0)
        return LanguageModel(ModelConfig(d_model=d_model, num_layers=num_layers, pattern=mechanism))

    def gradients(backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
        exact = copy.deepcopy(model()).to(dtype)
        with preferring(backend):
            next_token_loss(exact, ids[:1, :65]).backward()
        return {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}

    def enter(backend: str) -> Entrant:
        trained = copy.deepcopy(model())
        optimizer = torch.optim.AdamW(trained.parameters(), fused=True)

        def call() -> None:
            with preferring(backend):
                next_token_loss(trained, ids).backward()
            optimizer.step()
            optimizer.zero_grad()

        def error() -> float:
            found, right = gradients(backend, torch.float32), gradients("reference", torch.float64)
            return max(relative_error(found[name], value) for name, value in right.items())

        return Entrant(call, batch * tokens, error)

    return Contest(
        f"training, {num_layers} layers of {d_model}, batches of {batch}×{tokens}", mechanism, lambda: enter("auto"),
        {"chunked torch": lambda: enter("chunked")}, rate="tokens/s", seconds=2,
    )  # fmt: skip


@contextmanager
def preferring(backend: str) -> Iterator[None]:
    """Within it, "auto" means this backend, as with the environment variable LINATTN_BACKEND."""
    before: Any = engine.PREFERRED
    engine.PREFERRED = backend
    try:
        yield
    finally:
        engine.PREFERRED = before
