"""What every mechanism must satisfy: samplers that follow its argument table, and the laws as functions.

A third party holds its own mechanism to them with one call::

    linattn.testing.check(mechanism)

A :class:`Case` says what is drawn, a :class:`Form` how it is run, a law raises AssertionError with the errors measured.
No law has a tolerance of its own. The truth is the reference backend in float64 on the same (upcast) inputs; a result
may be off by 2 (e + eps) max|truth|, where e is the relative error of the reference backend run plainly in the case's
dtype, the worst of all results (gradients included) of three draws. The largest of many rounding errors is itself a
random number: a result beyond that is held to it on the average of three draws. float64 has nothing finer to be
compared with: there e is float32's, scaled by the ratio of the two machine epsilons.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError, gradcheck
from torch.utils import _pytree as pytree

from linattn import engine, registry
from linattn.backends._protocol import Request
from linattn.recurrence import (
    BETA,
    KEY,
    QUERY,
    UNIT_KEY,
    VALUE,
    Argument,
    Decay,
    Domain,
    Engine,
    Mode,
    Normalizer,
    Read,
    Recurrence,
    Write,
)
from linattn.registry import Mechanism

Tensors = dict[str, Tensor]
Run = Callable[[Tensors, Any], tuple[Tensor, Any]]
Tree = TypeVar("Tree")

DRAWS = 3


# Gates, from normal x: the ordinary, the constant, and mostly ordinary with a few tokens and channels that forget all.
def _mixed(x: Tensor, random: torch.Generator) -> Tensor:
    g = F.logsigmoid(x) / 16
    for strength in (-20.0, -1e4, float("-inf")):
        for shape in (x.shape, x.shape[:3]):  # single channels and, where the gate has channels, whole tokens
            hit = torch.rand(shape, generator=random) < 0.02
            hit.view(-1)[: int(hit.numel() > 1)] |= strength == -1e4  # at least one, also where there are few
            g = g.masked_fill(hit.unsqueeze(-1) if hit.dim() < x.dim() else hit, strength)
    return g


def _constant(value: float) -> Callable[[Tensor, torch.Generator], Tensor]:
    return lambda x, random: torch.full_like(x, value)


GATES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "ordinary": lambda x, random: F.logsigmoid(x) / 16,
    "strong": lambda x, random: F.logsigmoid(x),
    "steep": lambda x, random: 8 * F.logsigmoid(x),
    "mixed": _mixed,
    **{name: _constant(float(name)) for name in ("0", "-1e-6", "-20", "-1e4", "-inf")},
}


def draw(argument: Argument, sizes: Mapping[str, int], gates: str, random: torch.Generator) -> Tensor:
    """Values of ``argument``'s domain in float64; ``gates`` names the regime (a key of GATES) of the decays."""
    x = torch.randn([sizes[axis] for axis in argument.dims.split()], generator=random, dtype=torch.float64)
    match argument.domain:
        case Domain.UNIT:
            return F.normalize(x, dim=-1)
        case Domain.NONNEGATIVE:
            x = F.softplus(x - 1)
            return x * (torch.rand(x.shape, generator=random) > 0.1) if gates == "mixed" else x
        case Domain.POSITIVE:
            return F.softplus(x) + 1e-3
        case Domain.NEGATIVE:
            return GATES[gates](x, random).clamp(-1e4, -1e-6)
        case Domain.LOG_DECAY:
            return GATES[gates](x, random)
        case Domain.BETA:
            return 2 * x.sigmoid()
        case Domain.UNIT_INTERVAL:
            return x.sigmoid()
        case _:
            return x


@dataclass(frozen=True)
class Subject:
    """A function to hold to the laws: ``function(**tensors, state=, cu_seqlens=, mode=, backend=) -> (o, state)``.

    ``finish`` completes a draw whose arguments depend on one another. Without a ``recurrence`` it runs on no backend,
    and its own float64 run is the truth.
    """

    name: str
    function: Callable[..., tuple[Tensor, Any]]
    arguments: tuple[Argument, ...]
    recurrence: Recurrence | None
    finish: Callable[[Tensors], Tensors] = lambda tensors: tensors

    def __str__(self) -> str:
        return self.name

    @property
    def recurrent(self) -> bool:
        """Whether backends run it."""
        return self.recurrence is not None

    @property
    def gated(self) -> bool:
        """Whether an argument sets the decay."""
        return any(argument.domain in (Domain.LOG_DECAY, Domain.NEGATIVE) for argument in self.arguments)

    @property
    def channels(self) -> bool:
        """Whether its axes are those of a selective scan."""
        return self.recurrence is not None and self.recurrence.engine is Engine.SELECTIVE

    @staticmethod
    def of(mechanism: str | Mechanism, **options: object) -> Subject:
        """A mechanism, with options of its function fixed."""
        found = registry.get(mechanism) if isinstance(mechanism, str) else mechanism
        name = "-".join([found.name, *(f"{key}={value}" for key, value in options.items())])
        function = functools.partial(found.function, **options)
        return Subject(name, function, found.arguments, found.recurrence)


def _low_rank(tensors: Tensors) -> Tensors:
    """b = -beta a, as in RWKV-7: the transition 1 - beta a a^T neither grows nor is symmetric to nothing."""
    return tensors | {"b": -2 * tensors["b"][..., :1].sigmoid() * tensors["a"]}


def _engine_subject(recurrence: Recurrence) -> Subject:
    arguments = [QUERY, UNIT_KEY if recurrence.write is Write.DELTA else KEY, VALUE]
    if recurrence.normalizer is Normalizer.SUM:  # features ≥ 0, or a denominator could come near 0
        arguments = [dataclasses.replace(x, domain=Domain.NONNEGATIVE) for x in arguments[:2]] + [VALUE]
    if recurrence.decay is not Decay.NONE:
        arguments.append(Argument("g", recurrence.decay.value, Domain.LOG_DECAY))
    if recurrence.write is Write.DELTA:
        arguments.append(BETA)
    if recurrence.write is Write.LOW_RANK:
        arguments += [Argument("a", "B T H K", Domain.UNIT), Argument("b", "B T H K")]
    if recurrence.bonus:
        arguments.append(Argument("u", "H K"))
    parts = [recurrence.decay.name, recurrence.write.name, recurrence.read.name, "BONUS" * recurrence.bonus]
    name = "+".join([*filter(None, parts), *["SUM"] * (recurrence.normalizer is Normalizer.SUM)]).lower()
    function: Any = functools.partial(engine.matrix, recurrence)
    subject = Subject(name, function, tuple(arguments), recurrence)
    return dataclasses.replace(subject, finish=_low_rank) if recurrence.write is Write.LOW_RANK else subject


@functools.cache
def mechanisms() -> tuple[Subject, ...]:
    """Every registered mechanism."""
    return tuple(Subject.of(name) for name in registry.names())


@functools.cache
def recurrences() -> tuple[Subject, ...]:
    """Every point of the vocabulary, for the engine itself: decay x write x read, the normaliser, and the scans."""
    reads = [(Read.AFTER, False), (Read.BEFORE, False), (Read.BEFORE, True)]
    points = [
        Recurrence(decay=decay, write=write, read=read, bonus=bonus)
        for write, decay, (read, bonus) in itertools.product(Write, Decay, reads)
    ]
    points += [Recurrence(decay=decay, normalizer=Normalizer.SUM) for decay in Decay]
    scans = [
        Subject(
            f"scan+{name}",
            engine.scan,
            (Argument("x", "B T V"), Argument("g", dims, Domain.LOG_DECAY)),
            Recurrence(Engine.SCAN, Decay.TOKEN_CHANNEL),
        )
        for name, dims in (("fixed", "V"), ("token", "B T V"))
    ]
    selective = Subject(
        "selective",
        engine.selective_scan,
        (
            Argument("x", "B T D"),
            Argument("dt", "B T D", Domain.NONNEGATIVE),
            Argument("A", "D N", Domain.NEGATIVE),
            Argument("B", "B T G N"),
            Argument("C", "B T G N"),
        ),
        Recurrence(Engine.SELECTIVE, Decay.TOKEN_CHANNEL),
    )
    return (*map(_engine_subject, points), *scans, selective)


class Form(NamedTuple):
    """How a case is run."""

    backend: str
    mode: str

    def __str__(self) -> str:
        return f"{self.backend}-{self.mode}"


AUTO = Form("auto", "auto")
REFERENCE = Form("reference", "recurrent")


def forms(subject: Subject, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Form]:
    """Every backend and mode that serves ``subject``."""
    if subject.recurrence is None:
        return [AUTO]
    place = torch.device(device)
    return [
        Form(name, mode.value)
        for (name, backend), mode in itertools.product(engine.BACKENDS.items(), Mode)
        if mode in backend.modes and backend.refuses(Request(place, dtype, mode, subject.recurrence)) is None
    ]


@dataclass(frozen=True)
class Sizes:
    """The axes of the argument tables; a selective scan has D = H V channels and N = K numbers a channel."""

    B: int = 2
    T: int = 67
    G: int = 2
    H: int = 2
    K: int = 16
    V: int = 8

    def __str__(self) -> str:
        return "x".join(map(str, dataclasses.astuple(self)))

    def axes(self) -> dict[str, int]:
        """The size of every axis by its name."""
        return dataclasses.asdict(self) | {"D": self.H * self.V, "N": self.K, "P": self.K // 2, "R": 2, "L": 5}


@dataclass(frozen=True, repr=False)
class Case:
    """What is drawn.

    lengths: of sequences packed into one row (B is then 1 and T their sum). continued: from an initial state.
    gate_dtype: of the gates, steps and rates, which need not share the dtype of the values.
    """

    subject: Subject
    sizes: Sizes = Sizes()
    dtype: torch.dtype = torch.float32
    gates: str = "ordinary"
    lengths: tuple[int, ...] = ()
    continued: bool = True
    gate_dtype: torch.dtype | None = None
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.lengths:
            object.__setattr__(self, "sizes", dataclasses.replace(self.sizes, B=1, T=sum(self.lengths)))

    def __repr__(self) -> str:
        parts: list[object] = [self.subject, self.sizes, str(self.dtype).removeprefix("torch."), f"gates={self.gates}"]
        parts += [f"lengths={self.lengths}"] * bool(self.lengths)
        parts += [f"gate_dtype={self.gate_dtype}"] * bool(self.gate_dtype)
        return " ".join(map(str, [*parts, "continued" if self.continued else "fresh", self.device]))

    def draws(self) -> list[Case]:
        """A few cases like this, itself the first."""
        return [dataclasses.replace(self, seed=seed) for seed in range(self.seed, self.seed + DRAWS)]

    @property
    def cu_seqlens(self) -> Tensor | None:
        """The boundaries of the packed sequences."""
        ends = [0, *itertools.accumulate(self.lengths)]
        return torch.tensor(ends, device=self.device) if self.lengths else None

    def tensors(self) -> Tensors:
        """The arguments: the same values at every call, in memory of their own."""
        random = torch.Generator().manual_seed(self.seed)
        sizes = self.sizes.axes()
        tensors = {x.name: draw(x, sizes, self.gates, random) for x in self.subject.arguments}
        tensors = self.subject.finish(tensors)
        gates = (Domain.LOG_DECAY, Domain.NEGATIVE) + (Domain.NONNEGATIVE,) * self.subject.channels  # rates and steps
        gate_like = {x.name for x in self.subject.arguments if x.domain in gates or x.dims[-1] == "H"}
        dtypes = {name: (self.gate_dtype if name in gate_like else None) or self.dtype for name in tensors}
        return {name: x.to(self.device, dtypes[name], copy=True) for name, x in tensors.items()}

    def state(self) -> Any:
        """A state that three other tokens leave behind, or None."""
        if not self.continued:
            return None
        before = dataclasses.replace(
            self, sizes=dataclasses.replace(self.sizes, B=len(self.lengths) or self.sizes.B, T=3),
            lengths=(), gates="ordinary", continued=False, seed=self.seed + 1000,
        )  # fmt: skip
        return call(before, REFERENCE)(before.tensors(), None)[1]

    def cut(self, tensors: Tensors, axis: str, start: int, end: int) -> Tensors:
        """The part from ``start`` to ``end`` of an axis, where a tensor has it."""
        at = {x.name: x.dims.split().index(axis) for x in self.subject.arguments if axis in x.dims.split()}
        return {name: x.narrow(at[name], start, end - start) if name in at else x for name, x in tensors.items()}


def call(case: Case, form: Form, cu_seqlens: Tensor | None = None) -> Run:
    """The function in that form."""
    backend, mode = AUTO if case.subject.recurrence is None else form

    def run(tensors: Tensors, state: Any) -> tuple[Tensor, Any]:
        return case.subject.function(**tensors, state=state, cu_seqlens=cu_seqlens, mode=mode, backend=backend)

    return run


def separately(case: Case, form: Form) -> Run:
    """Each of the packed sequences by a call of its own."""
    one = call(case, form)
    ends = list(itertools.accumulate(case.lengths, initial=0))

    def run(tensors: Tensors, state: Any) -> tuple[Tensor, Any]:
        rows = [
            one(
                case.cut(tensors, "T", start, end),
                pytree.tree_map_only(Tensor, lambda x, n=n: x[n : n + 1], state),  # type: ignore[misc]
            )
            for n, (start, end) in enumerate(itertools.pairwise(ends))
        ]
        finals = pytree.tree_map(lambda *parts: torch.cat(parts), rows[0][1], *(final for _, final in rows[1:]))
        return torch.cat([o for o, _ in rows], 1), finals

    return run


def in_pieces(case: Case, cuts: tuple[int, ...], *pieces: Form) -> Run:
    """One row cut at those tokens, the state carried from piece to piece; the last form serves all further pieces."""
    ends = [0, *cuts, case.sizes.T]

    def run(tensors: Tensors, state: Any) -> tuple[Tensor, Any]:
        outputs = []
        for n, (start, end) in enumerate(itertools.pairwise(ends)):
            form = pieces[min(n, len(pieces) - 1)]
            o, state = call(case, form)(case.cut(tensors, "T", start, end), state)
            outputs.append(o)
        return torch.cat(outputs, 1), state

    return run


def named(tree: Any, prefix: str) -> Tensors:
    """The floating tensors of a tree by their place in it."""
    leaves, _ = pytree.tree_flatten_with_path(tree)
    return {
        prefix + pytree.keystr(path): leaf
        for path, leaf in leaves
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    }


def evaluate(case: Case, run: Run, tensors: Tensors, state: Any, *, gradients: bool = True) -> Tensors:
    """Output, final state and, for random gradients on both, the gradients of every tensor and of the initial state."""
    if gradients:
        tensors = {name: x.detach().requires_grad_() for name, x in tensors.items()}
        state = pytree.tree_map_only(
            Tensor, lambda x: x.detach().requires_grad_(x.is_floating_point()), state
        )  # a state's mask has no gradient
    o, final = run(tensors, state)
    results = {"output": o, **named(final, "final state")}
    if gradients:
        random = torch.Generator().manual_seed(case.seed)
        wanted = {**tensors, **named(state, "initial state")}
        moving = {name: x for name, x in results.items() if x.requires_grad}
        weights = [
            torch.randn(x.shape, generator=random).to(case.device, case.dtype).to(x.dtype) for x in moving.values()
        ]
        grads = torch.autograd.grad(
            list(moving.values()), list(wanted.values()), weights, allow_unused=True, materialize_grads=True
        )
        results |= {f"gradient of {name}": grad for name, grad in zip(wanted, grads, strict=True)}
    return {name: x.detach() for name, x in results.items()}


def _cast(tree: Tree, dtype: torch.dtype) -> Tree:
    return pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


def _error(result: Tensor, truth: Tensor) -> float:
    return float((result.double() - truth.double()).abs().max()) if truth.numel() else 0.0


def _size(x: Tensor) -> float:
    return _error(x, torch.zeros_like(x))


class Standard(NamedTuple):
    """What is right, and by how much a result may differ from it."""

    truth: Tensors
    allowed: dict[str, float]


@functools.lru_cache(maxsize=64)
def plain_error(case: Case, *, gradients: bool = True) -> float:
    """What rounding costs: the reference's largest error in the case's dtype, relative to a result's largest number."""
    if case.dtype == torch.float64:
        coarse = dataclasses.replace(case, dtype=torch.float32)
        ratio = torch.finfo(case.dtype).eps / torch.finfo(coarse.dtype).eps
        return ratio * plain_error(coarse, gradients=gradients)
    worst = 0.0
    for other in case.draws():
        plain = evaluate(other, _right(other), other.tensors(), other.state(), gradients=gradients)
        for name, truth in _truth(other, gradients=gradients).items():
            if size := _size(truth):
                worst = max(worst, _error(plain[name], truth) / size)
    return worst


def _right(case: Case) -> Run:
    return separately(case, REFERENCE) if case.lengths else call(case, REFERENCE)


@functools.lru_cache(maxsize=64)
def _truth(case: Case, *, gradients: bool = True) -> Tensors:
    double = (_cast(tree, torch.float64) for tree in (case.tensors(), case.state()))
    return evaluate(case, _right(case), *double, gradients=gradients)


def standard_of(case: Case, truth: Tensors, *, gradients: bool = True) -> Standard:
    """The truth with the errors that a case like this is allowed."""
    allowed = 2 * (plain_error(case, gradients=gradients) + torch.finfo(case.dtype).eps)
    return Standard(truth, {name: allowed * _size(x) for name, x in truth.items()})


@functools.lru_cache(maxsize=64)
def standard(case: Case, *, gradients: bool = True) -> Standard:
    """What is right for what the case draws."""
    return standard_of(case, _truth(case, gradients=gradients), gradients=gradients)


def _errors(results: Tensors, wanted: Standard) -> dict[str, float]:
    """Every error as a fraction of what is allowed; infinite where a result is not finite or of another shape."""
    errors = {}
    for name, result in results.items():
        truth, allowed = wanted.truth[name], wanted.allowed[name]
        if result.shape != truth.shape or not result.isfinite().all():
            errors[name] = math.inf
        elif error := _error(result, truth):
            errors[name] = error / allowed if allowed else math.inf
    return errors


def _raise(errors: dict[str, float], *what: object) -> None:
    faults = [
        f"{name}: " + ("not finite, or of another shape" if error == math.inf else f"{error:.3g} of the error allowed")
        for name, error in errors.items()
        if not error <= 1
    ]
    if faults:
        raise AssertionError("\n  ".join([" ".join(map(str, what)), *faults]))


def accurate(results: Tensors, wanted: Standard, *what: object) -> None:
    """Every result is finite and as near the truth as it must be. Raises AssertionError listing those that aren't."""
    _raise(_errors(results, wanted), *what)


def judge(case: Case, measure: Callable[[Case], tuple[Tensors, Standard]], *what: object) -> None:
    """Every result is :func:`accurate`; where those of one draw aren't, they are so on the average of the draws.

    Raises AssertionError listing the results that aren't.
    """
    errors = _errors(*measure(case))
    if any(1 < error < math.inf for error in errors.values()):
        every = [_errors(*measure(other)) for other in case.draws()]
        errors = {name: sum(draw.get(name, 0.0) for draw in every) / DRAWS for name in errors}
    _raise(errors, case, *what)


def law_run(case: Case, make: Callable[[Case], Run], *what: object, gradients: bool = True) -> None:
    """Outputs, final state and all gradients of a way to run the case equal the reference's."""

    def measure(case: Case) -> tuple[Tensors, Standard]:
        results = evaluate(case, make(case), case.tensors(), case.state(), gradients=gradients)
        dtype = results["output"].dtype
        assert dtype == case.dtype, f"{case}: output: got {dtype}, wanted {case.dtype}"
        return results, standard(case, gradients=gradients)

    judge(case, measure, *what)


def law_accuracy(case: Case, form: Form, *, gradients: bool = True) -> None:
    """A form equals the reference; packed sequences equal separate ones."""
    law_run(case, lambda case: call(case, form, case.cu_seqlens), form, gradients=gradients)


def law_pieces(case: Case, cuts: tuple[int, ...], *pieces: Form) -> None:
    """The pieces of a sequence, the state carried between them, equal the whole; gradients flow through the states."""
    law_run(case, lambda case: in_pieces(case, cuts, *pieces), cuts, *pieces)


def law_rows(case: Case, form: Form) -> None:
    """A row of the batch doesn't depend on its neighbours: not on their gates, nor on values that are NaN."""
    with_rows = {x.name: x.domain for x in case.subject.arguments if x.dims.startswith("B")}
    gates = "mixed" if case.subject.gated else case.gates

    def measure(case: Case) -> tuple[Tensors, Standard]:
        other = dataclasses.replace(case, seed=case.seed + 1, gates=gates).tensors()
        results: Tensors = {}
        truth: Tensors = {}
        wanted = standard(case)
        for row in range(case.sizes.B):
            tensors = case.tensors()
            for name, domain in with_rows.items():
                free = domain in (Domain.REAL, Domain.UNIT)
                foreign = torch.full_like(other[name], torch.nan) if free else other[name]
                tensors[name] = torch.cat([foreign[:row], tensors[name][row : row + 1], foreign[row + 1 :]])
            for name, result in evaluate(case, call(case, form), tensors, case.state()).items():
                if not name.startswith("gradient of") or name.split()[-1] in (*with_rows, "state"):
                    results[f"{name}, row {row}"], truth[f"{name}, row {row}"] = result[row], wanted.truth[name][row]
        return results, Standard(truth, {name: wanted.allowed[name.split(",")[0]] for name in truth})

    judge(case, measure, form)


def law_causality(case: Case, form: Form, t: int) -> None:
    """Tokens from ``t`` on move no output before ``t``, and get no gradient from it."""
    in_time = {x.name for x in case.subject.arguments if "T" in x.dims.split()}

    def measure(case: Case) -> tuple[Tensors, Standard]:
        tensors, other = case.tensors(), dataclasses.replace(case, seed=case.seed + 1).tensors()
        past, future = case.cut(tensors, "T", 0, t), case.cut(other, "T", t, case.sizes.T)
        tensors |= {name: torch.cat([past[name], future[name]], 1).requires_grad_() for name in in_time}
        o = call(case, form)(tensors, case.state())[0][:, :t]
        grads = torch.autograd.grad(o.sum(), [tensors[name] for name in in_time])
        leaks = [name for name, grad in zip(in_time, grads, strict=True) if grad[:, t:].count_nonzero()]
        assert not leaks, f"{case} {form}: tokens before {t} have a gradient in later {', '.join(leaks)}"
        wanted = standard(case, gradients=False)
        return {"output": o.detach()}, Standard({"output": wanted.truth["output"][:, :t]}, wanted.allowed)

    judge(case, measure, form, f"changed from {t} on")


def _moves(leaf: object) -> bool:
    """Whether a part of a state has a gradient: positions and masks have none."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def law_gradients(case: Case, form: Form) -> None:
    """Analytic gradients equal finite differences (for small cases in float64)."""
    tensors, state = case.tensors(), case.state()
    leaves, tree = pytree.tree_flatten(state)
    names = list(tensors)

    def function(*flat: Tensor) -> tuple[Tensor, ...]:
        rest = iter(flat[len(names) :])
        inner = pytree.tree_unflatten([next(rest) if _moves(x) else x for x in leaves], tree)
        given = dict(zip(names, flat, strict=False))
        o, final = call(case, form, case.cu_seqlens)(given, inner)
        return o, *named(final, "").values()

    flat = [*tensors.values(), *filter(_moves, leaves)]
    try:
        gradcheck(function, [x.requires_grad_() for x in flat])
    except GradcheckError as error:
        raise AssertionError(f"{case} {form}: {error}") from error


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() > 2 else x,
    "sliced": lambda x: torch.stack([torch.full_like(x, torch.nan), x], -1).flatten(-2)[..., 1::2],
    "offset": lambda x: F.pad(x, (3, 2), value=torch.nan)[..., 3:-2],
}


def law_layout(case: Case, form: Form, layout: str) -> None:
    """Where the numbers lie in memory (a key of LAYOUTS) changes nothing."""
    lay = LAYOUTS[layout]

    def make(case: Case) -> Run:
        run = call(case, form, case.cu_seqlens)
        return lambda tensors, state: run(
            {name: lay(x) for name, x in tensors.items()},
            pytree.tree_map_only(Tensor, lambda x: lay(x) if x.is_floating_point() else x, state),
        )

    law_run(case, make, form, layout)


def law_expanded(case: Case, form: Form) -> None:
    """One number may stand for many: arguments expanded along their batch and head (or channel) axes, with stride 0."""

    def measure(case: Case) -> tuple[Tensors, Standard]:
        single = dataclasses.replace(case.sizes, B=1, G=1, H=1, V=1 if case.subject.channels else case.sizes.V)
        one = dataclasses.replace(case, sizes=single, continued=False)
        shapes = {name: x.shape for name, x in case.tensors().items()}
        expanded = {name: x.expand(shapes[name]) for name, x in one.tensors().items()}
        double = ({name: x.double().contiguous() for name, x in expanded.items()}, _cast(case.state(), torch.float64))
        wanted = standard_of(case, evaluate(case, call(case, REFERENCE), *double))
        return evaluate(case, call(case, form), expanded, case.state()), wanted

    judge(case, measure, form, "expanded")


def law_purity(case: Case, form: Form) -> None:
    """The same result twice, bit for bit; neither the inputs nor the state given are modified."""
    tensors, state = case.tensors(), case.state()
    run = call(case, form, case.cu_seqlens)
    first, second = (evaluate(case, run, tensors, state) for _ in range(2))
    moved = [name for name, x in first.items() if not torch.equal(x, second[name])]
    assert not moved, f"{case} {form}: other bits the second time: {', '.join(moved)}"
    given, drawn = ({**t, **named(s, "state")} for t, s in ((tensors, state), (case.tensors(), case.state())))
    changed = [name for name, x in given.items() if not torch.equal(x, drawn[name])]
    assert not changed, f"{case} {form}: modified {', '.join(changed)}"


def law_nothing(case: Case, form: Form) -> None:
    """No tokens: an empty output and the state unchanged, zero where there was none; the same for no rows."""
    for sizes in (dataclasses.replace(case.sizes, T=0), dataclasses.replace(case.sizes, B=0)):
        for continued in (True, False):
            empty = dataclasses.replace(case, sizes=sizes, continued=continued)
            law_accuracy(empty, form)


def check(mechanism: str | Mechanism, device: str = "cpu") -> None:
    """Hold a mechanism to the laws, on every backend and mode that serves it there, in a few cases of each.

    Raises AssertionError with the first law broken.
    """
    subject = Subject.of(mechanism)
    case = Case(subject, Sizes(T=33, G=1), device=device)
    for form, dtype in itertools.product(forms(subject, device), (torch.float64, torch.bfloat16, torch.float16)):
        if form in forms(subject, device, dtype):
            law_accuracy(dataclasses.replace(case, dtype=dtype), form)
    for form in forms(subject, device):
        for gates in GATES if subject.gated else ["ordinary"]:
            law_accuracy(dataclasses.replace(case, gates=gates), form)
        if subject.recurrence is not None:
            law_accuracy(dataclasses.replace(case, lengths=(3, 0, 1, 29)), form)
        law_pieces(case, (1, 16, 17), form)
        law_rows(case, form)
        law_causality(case, form, 17)
        for layout in LAYOUTS:
            law_layout(case, form, layout)
        law_expanded(case, form)
        law_purity(case, form)
        law_nothing(case, form)
        if form in forms(subject, device, torch.float64):
            tiny = dataclasses.replace(case, sizes=Sizes(B=1, T=3, G=1, H=2, K=2, V=2), dtype=torch.float64)
            law_gradients(tiny, form)
