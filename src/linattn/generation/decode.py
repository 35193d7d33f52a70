"""Generation's step compiled for a CPU: one call of the library a token, weights in float32, bfloat16 or int8."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from linattn._checks import fail, one_of
from linattn.backends.cpu.library import Library, LibraryError, loaded
from linattn.backends.cpu.program import WEIGHTS, Packed, Program, Session, Unsupported, settle
from linattn.generation.lowering import Step, lower
from linattn.models import LanguageModel
from linattn.models.decoder import ModelState, check_vocabulary


class Decoder:
    """A model's step for one token of each of ``batch`` rows, as :func:`compile_decode` makes it.

    It goes with the parameters that the model had then: when they have changed, compile again. ``weight_bytes`` is what
    a token reads of the matrices.
    """

    def __init__(self, step: Step, state: ModelState, batch: int, weights: str, vocab_size: int) -> None:
        self.batch, self.weights, self.vocab_size = batch, weights, vocab_size
        self.program: Program = step.program
        self.weight_bytes = sum(weight.nbytes for weight in self.program.weights)
        self._step, (self._leaves, self._tree) = step, pytree.tree_flatten(state)

    def start(self, state: ModelState) -> Decoding:
        """Begin after what ``state`` has read, as the model's forward returned it. Raises ValueError for another's."""
        return Decoding(self, state)

    def step(self, ids: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """The same as the model's forward for ids [B] or [B, 1]: logits [B, vocab_size] and the state after them.

        Both are values, so each call copies the state twice; :meth:`start` keeps it in place.
        """
        decoding = self.start(state)
        return decoding.step(ids), decoding.state


class Decoding:
    """Tokens being generated: the state lies here and changes in place."""

    def __init__(self, decoder: Decoder, state: ModelState) -> None:
        self._decoder, step = decoder, decoder._step
        with torch.inference_mode(False):  # memory that may be written to later, in any mode
            self._session = Session(step.program)
        self._ids = self._session.slots[step.ids].view(torch.int64)
        self._logits = self._session.slots[step.logits].view(torch.float32).view(decoder.batch, -1)
        leaves, tree = pytree.tree_flatten(state)
        if tree != decoder._tree:
            raise fail("state", "one of another structure", "a state of the model that was compiled")
        self._leaves = []
        pairs = [(a, b) for a, b in zip(leaves, decoder._leaves, strict=True) if isinstance(b, Tensor)]
        for slot, (leaf, like) in zip(step.states, pairs, strict=True):
            if leaf.shape != like.shape:
                wanted = f"{list(like.shape)}, as for a batch of {decoder.batch}"
                raise fail("state", f"a tensor {list(leaf.shape)}", wanted)
            kind = torch.float32 if like.dtype in (torch.bfloat16, torch.float16) else like.dtype
            place = self._session.slots[slot].view(kind).view(like.shape)
            self._leaves.append(place)
            with torch.no_grad():
                place.copy_(leaf)

    def step(self, ids: Tensor) -> Tensor:
        """Read a token of each row, ids [B] or [B, 1]; return the logits [B, vocab_size] in float32.

        Raises ValueError for ids that do not fit.
        """
        if ids.dtype != torch.int64 or ids.shape not in ((self._decoder.batch,), (self._decoder.batch, 1)):
            raise fail("ids", f"{ids.dtype} {list(ids.shape)}", f"an int64 tensor [{self._decoder.batch}]")
        check_vocabulary(ids, self._decoder.vocab_size)
        self._ids.copy_(ids.view(-1))
        self._session.run()
        return self._logits.clone()

    @property
    def state(self) -> ModelState:
        """The state after all tokens that were read, as the model's forward would return it."""
        places = iter(self._leaves)
        likes = self._decoder._leaves
        leaves = [next(places).to(like.dtype, copy=True) if isinstance(like, Tensor) else like for like in likes]
        state: ModelState = pytree.tree_unflatten(leaves, self._decoder._tree)
        return state


class _Compiled:
    """What was compiled of a model while its parameters stayed the same."""

    def __init__(self, version: object) -> None:
        self.version = version
        self.decoders: dict[tuple[Library, int, str], Decoder | Unsupported] = {}
        self.packed: dict[tuple[Library, str], dict[Any, Packed]] = {}
        self.settled: set[str] = set()


_COMPILED: weakref.WeakKeyDictionary[LanguageModel, _Compiled] = weakref.WeakKeyDictionary()


def _version(model: LanguageModel) -> object:
    tensors = [*model.parameters(), *model.buffers()]
    return [(t.data_ptr(), t.dtype, -1 if t.is_inference() else t._version) for t in tensors]


def compiled_already(model: LanguageModel, batch: int, weights: str) -> bool:
    """Whether :func:`compile_decode` has been here since the model's parameters changed."""
    known = _COMPILED.get(model)
    if known is None or known.version != _version(model):
        return False
    return any(key[1:] == (batch, weights) for key in known.decoders)


def compile_decode(
    model: LanguageModel, *, batch: int = 1, weights: str = "float32", huge_pages: bool = True
) -> Decoder:
    """Compile the step that generation runs, for ``batch`` rows; it is kept until the model's parameters change.

    ``weights``: what the matrices are read as. "float32" is the model's own arithmetic. "bfloat16" rounds them and
    halves what a token reads. "int8" rounds each row to 127 steps of its largest weight and, where rows are few, the
    vectors that it is multiplied by to int16. With random weights of the shapes of Mamba-130m and RWKV-7 191M, logits
    are off by 0.4 and 0.6 % of their norm in bfloat16, by 1.7 and 2.4 % in int8. All else is computed in float32, also
    in a model of half precision, and states are float32 inside.

    A float32 model's matrices are used where they lie in float32, a bfloat16 model's in bfloat16; the other formats are
    copies, and so are rows whose length the library can't read. ``huge_pages`` moves the matrices to huge pages, on
    Linux, which takes a moment once, and makes every token faster.

    Raises ValueError where the model can't be compiled: not on a CPU, float64, a cache that grows (softmax attention),
    an op that the library doesn't know (which is named), or no library.
    """
    one_of("weights", weights, WEIGHTS)
    if batch < 1:
        raise fail("batch", batch, "at least 1 row")
    embedding = model.embedding.weight
    if embedding.device.type != "cpu":
        raise fail("model", f"one on {embedding.device.type!r}", "one on a CPU")
    if embedding.dtype == torch.float64:
        raise fail("model", "float64", "float32, bfloat16 or float16: it is computed in float32")
    try:
        native = loaded()
    except LibraryError as error:
        raise fail("decode", "no CPU library", f"one: {error}") from error
    version = _version(model)
    known = _COMPILED.get(model)
    if known is None or known.version != version:
        known = _COMPILED[model] = _Compiled(version)
    key = (native, batch, weights)
    if key not in known.decoders:
        known.decoders[key] = _compile(model, batch, weights, known.packed.setdefault((native, weights), {}))
    found = known.decoders[key]
    if isinstance(found, Unsupported):
        raise fail("decode", found, "a model that compiles")
    if huge_pages and weights not in known.settled:
        known.settled.add(weights)
        for weight in found.program.weights:
            settle(weight)
    return found


def _compile(model: LanguageModel, batch: int, weights: str, packed: dict[Any, Packed]) -> Decoder | Unsupported:
    with torch.inference_mode(False), torch.no_grad():
        _, state = model.features(torch.zeros(batch, 1, dtype=torch.int64))
        try:
            step = lower(model, state, batch, weights, packed)
        except Unsupported as refusal:
            return refusal
    return Decoder(step, state, batch, weights, model.config.vocab_size)
