"""From a mechanism's tensors to a backend: checks, choice of backend, normaliser, explanation.

Every mechanism calls :func:`matrix`, :func:`scan` or :func:`selective_scan`; nothing else calls a backend.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn import _checks, registry
from linattn.backends._protocol import (
    AverageInputs,
    Backend,
    Divisor,
    MatrixInputs,
    Request,
    SelectiveInputs,
    Stabilized,
    state_dtype,
)
from linattn.backends.chunked import Chunked
from linattn.backends.cpu import Cpu
from linattn.backends.reference import Reference
from linattn.backends.triton import Triton
from linattn.recurrence import Decay, Engine, Mode, Normalizer, Recurrence, Write

# In order of preference: "auto" takes the first that does not refuse.
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (Triton(), Cpu(), Chunked(), Reference())}
# What backend="auto" means: "auto", or the one backend that the environment names.
PREFERRED = os.environ.get("LINATTN_BACKEND") or "auto"
MODES = ("auto", *(mode.value for mode in Mode))
EPSILON = 1e-6  # smallest denominator of the sum normaliser


class NormalizedState(NamedTuple):
    """State of a recurrence with a sum normaliser: ``S`` [N, H, K, V] and ``z`` [N, H, K], the decayed sum of keys."""

    S: Tensor
    z: Tensor


@dataclass(frozen=True)
class Explanation:
    """Which backend serves a call, and why the others don't. ``str()`` gives the sentence."""

    backend: str | None
    refusals: dict[str, str]

    def __str__(self) -> str:
        chosen = f"backend {self.backend!r} serves this call" if self.backend else "no backend serves this call"
        return "; ".join([chosen, *(f"{name!r} does not: {why}" for name, why in self.refusals.items())])


def choose(backend: str, request: Request) -> Explanation:
    """The backend for a call. ``backend="auto"`` takes the first that can serve; a named one serves or is refused.

    The environment variable LINATTN_BACKEND, read at import, names the one that "auto" means.
    """
    _checks.one_of("backend", backend, ("auto", *BACKENDS))
    asked = f"backend={backend!r}"
    if backend == "auto" and PREFERRED != "auto":
        _checks.one_of("LINATTN_BACKEND", PREFERRED, ("auto", *BACKENDS))
        backend, asked = PREFERRED, f"LINATTN_BACKEND={PREFERRED}"
    refusals: dict[str, str] = {}
    for name, candidate in BACKENDS.items():
        if backend not in ("auto", name):
            refusals[name] = f"{asked} was asked for"
            continue
        why = candidate.refuses(request)
        if why is None:
            later = [other for other in BACKENDS if other not in refusals and other != name]
            return Explanation(name, refusals | dict.fromkeys(later, f"{name!r} comes first"))
        refusals[name] = why
    return Explanation(None, refusals)


def forms(recurrence: Recurrence) -> dict[str, list[Mode]]:
    """The backends that know ``recurrence``, where the machine has them, and in which modes; in order of preference."""
    cpu = torch.device("cpu")
    known = {
        name: [m for m in backend.modes if backend.unsuited(Request(cpu, torch.float32, m, recurrence)) is None]
        for name, backend in BACKENDS.items()
    }
    return {name: modes for name, modes in known.items() if modes}


def explain(
    mechanism: str,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    mode: str = "auto",
    backend: str = "auto",
    key_size: int | None = None,
    value_size: int | None = None,
) -> Explanation:
    """Which backend ``mechanism`` would run on (for heads of these sizes, where given), and why not the others.

    Raises ValueError for an unknown mechanism, backend or mode.
    """
    found = registry.get(mechanism)
    if found.composite:
        raise _checks.fail("mechanism", f"{found.name!r}, a layer of several mechanisms", "one of those")
    recurrence = found.recurrence
    if recurrence is None:
        _checks.one_of("backend", backend, ("auto",))
        return Explanation("torch", dict.fromkeys(BACKENDS, "softmax attention is no recurrence; torch's own runs it"))
    request = Request(torch.device(device), dtype, _form(mode), recurrence, key_size, value_size)
    return choose(backend, request)


def _form(mode: str) -> Mode | None:
    _checks.one_of("mode", mode, MODES)
    return None if mode == "auto" else Mode(mode)


class _Plan(NamedTuple):
    """What the forms of a call's tensors decide: the request, and the backends that serve it where the machine can."""

    request: Request
    backend: str
    suited: tuple[Backend, ...]

    @property
    def engine(self) -> Backend:
        """The first of them that the machine has now. Raises ValueError where there is none."""
        for backend in self.suited:
            if backend.unavailable(self.request.device) is None:
                return backend
        raise ValueError(f"backend: {choose(self.backend, self.request)}")


def _plan(backend: str, known: tuple[Backend, ...], request: Request) -> _Plan:
    return _Plan(request, backend, tuple(engine for engine in known if engine.unsuited(request) is None))


def _named(backend: str) -> tuple[Backend, ...]:
    """Those to choose from; none for an unknown name, as :func:`choose` will say."""
    name = PREFERRED if backend == "auto" else backend
    if name == "auto":
        return tuple(BACKENDS.values())
    return (BACKENDS[name],) if name in BACKENDS else ()


def _check_gate(g: Tensor | None, decay: Decay, sizes: dict[str, int]) -> None:
    if (g is None) != (decay is Decay.NONE):
        raise _checks.fail("g", "none" if g is None else "a gate", f"decay {decay.name}: [{decay.value}]")
    if g is not None:
        _checks.tensor("g", g, decay.value, sizes)


def matrix(
    recurrence: Recurrence,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    u: Tensor | None = None,
    weight: Tensor | None = None,
    skip: Tensor | None = None,
    m: Tensor | None = None,
    eps: float = EPSILON,
    scale: float | None = None,
    state: Tensor | NormalizedState | None = None,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, Tensor | NormalizedState]:
    """Run a matrix recurrence (equations: :mod:`linattn.recurrence`).

    q, k: [B, T, G, K]; v: [B, T, H, V], G divides H; all of one dtype. g: as ``recurrence.decay`` says, any float.
    beta: [B, T, H] with Write.DELTA; a, b: [B, T, H, K] with Write.LOW_RANK; u: [H, K] with a bonus.
    weight [B, T, H], skip [H] (any float, on v's device), with additive writes: each token's k v^T is multiplied by
    weight, None being 1; skip * v is added to the output. With a sum normaliser, no skip, and k in z is multiplied by
    weight, too; the output is divided by max(|scale * z^T q|, e^{-m}) + eps, m [B, T, H], or by
    max(|scale * z^T q|, eps) where m is None.
    The gradient of m is eps's alone (:class:`linattn.backends._protocol.Divisor`).
    scale None is K^-0.5. state: [N, H, K, V] (a NormalizedState with a sum normaliser); N is B, or the number of
    sequences that ``cu_seqlens`` [N+1] packs into one row.

    Returns o [B, T, H, V] in v's dtype and the state, float32 (float64 for float64 inputs).
    Raises ValueError on a shape, dtype, device, gate, boundary, mode or backend that doesn't fit.
    """
    S: Any = state
    z: Tensor | None = None
    if recurrence.normalizer is not Normalizer.NONE and state is not None:
        S, z = _normalized_parts(state)
    given = (recurrence, mode, backend, _named(backend))
    plan = _checks.remembered(_matrix_plan, given, q, k, v, g, beta, a, b, u, weight, skip, m, S, z, cu_seqlens)
    engine, form = plan.engine, plan.request.mode
    scale = k.shape[-1] ** -0.5 if scale is None else float(scale)
    inputs = MatrixInputs(q, k, v, g, beta, a, b, u, S, cu_seqlens, scale, recurrence.write, recurrence.read)
    if recurrence.normalizer is Normalizer.NONE:
        if weight is None and skip is None:
            return engine.matrix(inputs, form)
        if engine.weighs(recurrence) and scale:
            return engine.matrix(inputs._replace(beta=weight, u=skip), form)
        if weight is not None:
            inputs = inputs._replace(v=weighed(weight, v))
        o, S = engine.matrix(inputs, form)
        return o if skip is None else o + weighed(skip, v), S
    o, S, z = engine.normalized(inputs, Divisor(weight, z, m, eps), form)
    return o, NormalizedState(S, z)


def weighed(weight: Tensor, v: Tensor) -> Tensor:
    """weight v in v's dtype, multiplied in float32 at least: v [B, T, H, V], weight [B, T, H] or [H]."""
    wide = weight.to(torch.promote_types(weight.dtype, state_dtype(v.dtype)))
    return (wide.unsqueeze(-1) * v).to(v.dtype)


def _normalized_parts(state: Tensor | NormalizedState) -> NormalizedState:
    if isinstance(state, Tensor) or len(state) != 2:
        raise _checks.fail("state", type(state).__name__, "a NormalizedState(S, z)")
    return NormalizedState(*state)


def _matrix_plan(
    recurrence: Recurrence, mode: str, backend: str, known: tuple[Backend, ...], q: Tensor, k: Tensor, v: Tensor,
    g: Tensor | None, beta: Tensor | None, a: Tensor | None, b: Tensor | None, u: Tensor | None,
    weight: Tensor | None, skip: Tensor | None, m: Tensor | None, S: Tensor | None, z: Tensor | None,
    cu_seqlens: Tensor | None,
) -> _Plan:  # fmt: skip
    """The checks of :func:`matrix`."""
    if recurrence.engine is not Engine.MATRIX:
        raise _checks.fail("recurrence", f"engine {recurrence.engine.value!r}", "'matrix'")
    sizes: dict[str, int] = {}
    _checks.tensor("v", v, "B T H V", sizes)
    _checks.tensor("q", q, "B T G K", sizes, v.dtype)
    _checks.tensor("k", k, "B T G K", sizes, v.dtype)
    B, _, H, V = v.shape
    K = sizes["K"]
    _checks.grouped("k", sizes["G"], H)
    _check_gate(g, recurrence.decay, sizes)
    low_rank, normalized = recurrence.write is Write.LOW_RANK, recurrence.normalizer is Normalizer.SUM
    table = (
        ("beta", beta, "B T H", recurrence.write is Write.DELTA),
        ("a", a, "B T H K", low_rank),
        ("b", b, "B T H K", low_rank),
        ("u", u, "H K", recurrence.bonus),
        ("weight", weight, "B T H", recurrence.write is Write.ADDITIVE and weight is not None),
        ("skip", skip, "H", recurrence.write is Write.ADDITIVE and not normalized and skip is not None),
        ("m", m, "B T H", normalized and m is not None),
    )
    for name, value, dims, wanted in table:
        if (value is not None) != wanted:
            came = "none" if value is None else "a tensor"
            raise _checks.fail(name, came, f"a tensor [{', '.join(dims.split())}]" if wanted else "none")
        if value is not None:
            _checks.tensor(name, value, dims, sizes)
    if cu_seqlens is not None:
        _checks.cu_seqlens_form(cu_seqlens, B)
    sizes["N"] = B if cu_seqlens is None else cu_seqlens.numel() - 1

    if S is not None:
        _checks.tensor("state.S" if normalized else "state", S, "N H K V", sizes, state_dtype(v.dtype))
    if z is not None:
        _checks.tensor("state.z", z, "N H K", sizes, state_dtype(v.dtype))
    tensors = {"v": v, "q": q, "k": k, "g": g, "beta": beta, "a": a, "b": b, "u": u, "state": S, "state.z": z}
    _checks.same_device(tensors | {"weight": weight, "skip": skip, "cu_seqlens": cu_seqlens})
    return _plan(backend, known, Request(v.device, v.dtype, _form(mode), recurrence, K, V))


def scan(
    x: Tensor,
    g: Tensor,
    *,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Run the elementwise recurrence h_t = e^{g_t} * h_{t-1} + x_t.

    x: [B, T, D]; g: [B, T, D] or [D], natural log, ≤ 0; state: [N, D] in float32 (float64 for float64).
    Returns every h [B, T, D] in x's dtype and the final state [N, D]. Raises ValueError as :func:`matrix` does.
    """
    plan = _checks.remembered(_scan_plan, (mode, backend, _named(backend)), x, g, state, cu_seqlens)
    return plan.engine.scan(x, g, state, cu_seqlens, plan.request.mode)


def average(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    u: Tensor,
    *,
    state: tuple[Tensor, Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]] | None:
    """Run RWKV-4's average (:func:`linattn.mechanisms.rwkv4.rwkv4`, which checks its tensors) if the backend of a scan
    has a kernel for it; None if it has not. Raises ValueError on a gate, boundary, mode or backend that doesn't fit.
    """
    plan = _checks.remembered(_scan_plan, (mode, backend, _named(backend)), v, g, None, cu_seqlens)
    return plan.engine.average(AverageInputs(k, v, g, u, state, cu_seqlens), plan.request.mode)


def stabilized(
    f: Tensor, i: Tensor, m: Tensor | None, cu_seqlens: Tensor | None, backend: str = "auto"
) -> Stabilized | None:
    """The running maximum of exponential gates (:func:`linattn.layers.exponential_gate.stabilize`, which checks its
    tensors) by the first backend here that has a kernel for it; None if none has.
    """
    for engine in _named(backend):
        if engine.unavailable(i.device) is None and (found := engine.stabilized(f, i, m, cu_seqlens)) is not None:
            return found
    return None


def _scan_plan(
    mode: str, backend: str, known: tuple[Backend, ...], x: Tensor, g: Tensor, state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> _Plan:  # fmt: skip
    """The checks of :func:`scan`."""
    sizes: dict[str, int] = {}
    _checks.tensor("x", x, "B T D", sizes)
    _checks.tensor("g", g, "D" if isinstance(g, Tensor) and g.dim() == 1 else "B T D", sizes)
    if cu_seqlens is not None:
        _checks.cu_seqlens_form(cu_seqlens, x.shape[0])
    sizes["N"] = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    if state is not None:
        _checks.tensor("state", state, "N D", sizes, state_dtype(x.dtype))
    _checks.same_device({"x": x, "g": g, "state": state, "cu_seqlens": cu_seqlens})
    recurrence = Recurrence(Engine.SCAN, Decay.TOKEN_CHANNEL)
    return _plan(backend, known, Request(x.device, x.dtype, _form(mode), recurrence))


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Run the selective scan h_t = e^{dt_t A} * h_{t-1} + (dt_t x_t) B_t^T, y_t = h_t C_t (each channel on its own).

    x: [B, T, D]; B, C: [B, T, G, N] of x's dtype, G divides D: neighbouring D/G channels share a map. dt: [B, T, D] ≥ 0
    (0 keeps the state) and A: [D, N] ≤ 0, any float. state: [S, D, N] in float32 (float64 for float64); S is B, or the
    number of sequences that ``cu_seqlens`` [S+1] packs into one row.

    Returns y [B, T, D] in x's dtype and the final state [S, D, N]. Raises ValueError as :func:`matrix` does.
    """
    given = (mode, backend, _named(backend))
    plan = _checks.remembered(_selective_plan, given, x, dt, A, B, C, state, cu_seqlens)
    return plan.engine.selective_scan(SelectiveInputs(x, dt, A, B, C, state, cu_seqlens), plan.request.mode)


def _selective_plan(
    mode: str, backend: str, known: tuple[Backend, ...], x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    state: Tensor | None, cu_seqlens: Tensor | None,
) -> _Plan:  # fmt: skip
    """The checks of :func:`selective_scan`."""
    sizes: dict[str, int] = {}
    _checks.tensor("x", x, "B T D", sizes)
    _checks.tensor("dt", dt, "B T D", sizes)
    _checks.tensor("A", A, "D N", sizes)
    _checks.tensor("B", B, "B T G N", sizes, x.dtype)
    _checks.tensor("C", C, "B T G N", sizes, x.dtype)
    _checks.grouped("B", sizes["G"], sizes["D"], "groups", "channels")
    if cu_seqlens is not None:
        _checks.cu_seqlens_form(cu_seqlens, x.shape[0])
    sizes["S"] = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    if state is not None:
        _checks.tensor("state", state, "S D N", sizes, state_dtype(x.dtype))
    _checks.same_device({"x": x, "dt": dt, "A": A, "B": B, "C": C, "state": state, "cu_seqlens": cu_seqlens})
    recurrence = Recurrence(Engine.SELECTIVE, Decay.TOKEN_CHANNEL)
    return _plan(backend, known, Request(x.device, x.dtype, _form(mode), recurrence))


def summary(
    recurrence: Recurrence,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """A segment as an affine map of the state, S_out = M S_in + S_ext (M [B, H, K, K], S_ext [B, H, K, V]).

    Arguments as in :func:`matrix`. :func:`linattn.state.combine` joins neighbouring segments.
    """
    plain = Recurrence(Engine.MATRIX, recurrence.decay, recurrence.write)
    B, H, K = v.shape[0], v.shape[2], k.shape[-1]
    rest = {"g": g, "beta": beta, "a": a, "b": b, "backend": backend}
    _, S_ext = matrix(plain, k, k, v, **rest)  # type: ignore[arg-type]
    eye = torch.eye(K, dtype=state_dtype(v.dtype), device=v.device).expand(B, H, K, K)
    silent = v.new_zeros(*v.shape[:-1], K)  # values of zero, as many as keys: only the identity moves
    _, M = matrix(plain, k, k, silent, state=eye, **rest)  # type: ignore[arg-type]
    assert isinstance(M, Tensor) and isinstance(S_ext, Tensor)
    return M, S_ext
