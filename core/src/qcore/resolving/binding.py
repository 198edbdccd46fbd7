"""Binds a quantized weight to a kernel: resolves, packs once, and shares the result among tied layers."""

from __future__ import annotations

import contextlib
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from typing import Any, cast

import torch
from torch import Tensor

from ..contracts import Request
from ..contracts.refusals import AnyRequest
from ..discovery import answers
from ..discovery.answers import name_of, packing_of
from ..discovery.kernels import Kernel
from ..discovery.registry import BUILTIN, PluginStatus, State, registry
from ..errors import FormatError, PluginError, QcoreError, QcoreWarning
from ..formats.bits import raw
from ..formats.tracing import outside_transforms, without_base
from ..runtime import forks
from ..runtime.guard import FIRST_CALL_SECONDS, StepError, guarded, has_passed, preserved_state
from ..runtime.plain_text import plain
from ..runtime.settings import current
from ..weights.qtensor import QTensor
from . import verification
from .decision import Decision, Stage
from .handed import Watch
from .ordering import OrderedKernel
from .resolver import kernel_key, record_kernel_failure, report_failure, resolve, withdraw_failure

TensorFn = Callable[[Tensor], Tensor]


class WeightStore:
    """One weight, neutral or packed. Tied layers share a store, so that they share memory and move together.

    Once a kernel has packed the weight the neutral form is dropped; `neutral` unpacks it on demand. ``users`` are the
    layers that share the store: they bind again when the weight changes.
    """

    def __init__(self, weight: QTensor) -> None:
        self.lock = forks.Lock()
        """Held while the weight is packed, moved or bound; calling a bound kernel needs no lock."""
        self.watch = Watch()
        self.set(weight)
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()

    def set(self, weight: QTensor) -> None:
        """Replace the weight and discard everything packed before."""
        self.watch.forget()
        self._take(weight)

    def _take(self, weight: QTensor) -> None:
        """As `set`, and what was handed out stays watched."""
        self.shape, self.format, self.quantizer = weight.shape, weight.format, weight.quantizer
        self.device = weight.device
        self.has_order = weight.order is not None
        self._neutral: QTensor | None = weight
        self._packs: dict[str, tuple[Kernel, dict[str, Tensor]]] = {}
        self._recent: dict[str, weakref.ref[Tensor]] = {}

    def neutral(self) -> QTensor:
        """The weight in its neutral format. Returns the tensors of an earlier result while they are alive."""
        with self.lock:
            if self._neutral is not None:
                return self._neutral
            recent = self._recently_unpacked()
            return self._unpacked() if recent is None else recent

    def _recently_unpacked(self) -> QTensor | None:
        alive = {name: tensor for name, ref in self._recent.items() if (tensor := ref()) is not None}
        if not alive or len(alive) < len(self._recent):
            return None
        return QTensor.from_tensors(alive, self.shape, self.format, self.quantizer)

    def _unpacked(self) -> QTensor:
        kernel, packed = next(iter(self._packs.values()))
        # Kernels are shared by many weights and do not carry the name of the quantizer.
        with _plain_tensors():
            weight = _unpack(kernel, packed).derived(quantizer=self.quantizer)
        self._recent = {name: weakref.ref(tensor) for name, tensor in weight.tensors().items()}
        self.watch.add(weight, packed.values(), self._take)
        return weight

    def packed_for(self, kernel: Kernel, *, trusted: bool = True) -> dict[str, Tensor]:
        """The weight packed for ``kernel``; kernels of equal `Kernel.packing` share the tensors.

        A kernel that is not ``trusted`` gets a copy, since it may write to its input.
        """
        packing = packing_of(kernel)
        with self.lock:
            if packing not in self._packs:
                weight = self.neutral()
                with _plain_tensors():
                    weight = weight if trusted else weight.map(Tensor.clone)
                    self._packs[packing] = (kernel, answers.packed(kernel.pack(weight)))
                self._neutral = None
            return self._packs[packing][1]

    def keep_only(self, packings: AbstractSet[str]) -> None:
        """Drop the packed forms that no layer uses any more."""
        if packings & self._packs.keys():
            self._packs = {name: pack for name, pack in self._packs.items() if name in packings}

    def withdraw(self, kernel: Kernel, weight: QTensor) -> None:
        """Discard the packed form of ``kernel`` and keep ``weight``: a wrong kernel must not hold the only copy."""
        del self._packs[packing_of(kernel)]
        self._neutral = self._neutral if self._packs else weight

    def move(self, fn: TensorFn, device: torch.device) -> bool:
        """Move the weight to ``device`` through ``fn``, which `torch.nn.Module` applies to its tensors.

        Returns whether anything moved.
        """
        if device == self.device:
            return False
        weight = self.neutral()
        self.set(weight.map(lambda t: t.to(device)) if weight.device.type != "meta" else _emptied(weight, fn))
        return True

    def __getstate__(self) -> dict[str, Any]:
        weight = self.neutral().map(Tensor.detach)
        _keep_for_spawned(weight)
        return {"weight": weight}

    def __setstate__(self, state: dict[str, Any]) -> None:
        WeightStore.__init__(self, state["weight"])


@contextlib.contextmanager
def _plain_tensors() -> Iterator[None]:
    """Make tensors that outlive the caller's inference mode, which autograd cannot save, and its transforms."""
    with outside_transforms(), torch.inference_mode(False), torch.no_grad():
        yield


def _keep_for_spawned(weight: QTensor) -> None:
    """Keep ``weight`` alive as long as the handle of the ``spawn``ed process that receives it.

    That process inherits the shared memory, which is freed with our tensors; these may be unpacked just for this.
    """
    starting = get_spawning_popen()
    if starting is not None:
        weakref.finalize(starting, id, weight).atexit = False


def _emptied(weight: QTensor, fn: TensorFn) -> QTensor:
    """A valid weight in place of one on ``meta``; ``fn``: of `torch.nn.Module.to_empty`, whose memory is not valid."""
    fresh = {name: torch.zeros_like(fn(t), dtype=t.dtype) for name, t in weight.tensors().items()}
    if "order" in fresh:
        k = weight.shape[-1]
        fresh["order"] += torch.arange(k, dtype=torch.int32, device=fresh["order"].device)
    if "global_scale" in fresh:
        fresh["global_scale"] += 1
    return weight.derived(**fresh)


_REQUIRED = ("data", "scale", "zero")


class WeightView(QTensor):
    """The `QTensor` behind ``module.weight``: shape, dtype and device are known, tensors are unpacked on demand."""

    def __init__(self, store: WeightStore, dtype: torch.dtype) -> None:
        known = {"shape": store.shape, "format": store.format, "quantizer": store.quantizer}
        for name, value in {**known, "_store": store, "_dtype": dtype}.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in _REQUIRED:
            remedy = self._exclusion() if hasattr(Tensor, name) else ""  # other names only probe for what may be there
            raise AttributeError(
                f"a quantized weight has no attribute {name!r}; dequantize() gives a dense tensor.{remedy}"
            )
        weight = self.__dict__["_store"].neutral()
        for field in _REQUIRED:
            object.__setattr__(self, field, getattr(weight, field))
        return self.__dict__[name]

    # Fields with a default are class attributes, which bypass __getattr__.

    @property
    def order(self) -> Tensor | None:
        """The order of the stored columns, if there is one."""
        return self._neutral().order if self.__dict__["_store"].has_order else None

    @property
    def global_scale(self) -> Tensor | None:
        """The global scale of two-level scales."""
        return self._neutral().global_scale if self.format.scale.has_global else None

    def _neutral(self) -> QTensor:
        weight: QTensor = self.__dict__["_store"].neutral()
        return weight

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the layer computes in."""
        return self.__dict__["_dtype"]  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        """The device of the weight."""
        return self.__dict__["_store"].device  # type: ignore[no-any-return]

    @property
    def requires_grad(self) -> bool:
        """False: a quantized weight is frozen. Code that resizes or freezes layers reads this."""
        return False

    @property
    def store(self) -> WeightStore:
        """The store of the weight, for layers that share it."""
        return self.__dict__["_store"]  # type: ignore[no-any-return]

    def _pattern(self) -> str:
        name, frame = super()._pattern(), None if torch.compiler.is_compiling() else inspect.currentframe()
        # A layer does not know its name: the outermost of the modules that are running now does.
        while frame is not None:
            outer, frame = frame.f_locals.get("self"), frame.f_back
            if isinstance(outer, torch.nn.Module) and outer not in self.store.users:
                name = next((found for found, module in outer.named_modules() if module in self.store.users), name)
        return ".".join("*" if part.isdigit() else part for part in name.split("."))  # of all such layers

    def __reduce__(self) -> Any:
        known = (self.shape, self.format, self.quantizer)
        return QTensor, (self.data, raw(self.scale), self.zero, *known, self.order, self.global_scale)


@dataclass
class Bound:
    """A kernel and its packed weight, ready to call. ``proven``: a first call has succeeded."""

    decision: Decision
    kernel: Kernel
    packed: dict[str, Tensor]
    proven: bool = False

    def __post_init__(self) -> None:
        # Copies: a kernel's properties may change between reads.
        self.name, self.packing = name_of(self.kernel), packing_of(self.kernel)
        self.x_dtype: torch.dtype | None = getattr(self.request, "x_dtype", None)

    @property
    def request(self) -> AnyRequest:
        """The request that the kernel was selected for."""
        return cast("AnyRequest", self.decision.request)

    def call(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Call the kernel; an exception from it names it."""
        try:
            return without_base(self.kernel(x, self.packed, bias))
        except Exception as error:
            self.blame(error)
            raise

    def blame(self, error: Exception) -> None:
        """Add the kernel's name to an exception from a call, unless it is qcore's own, which names the argument."""
        chosen = self.decision.selected
        if chosen is not None and not isinstance(error, QcoreError):
            note = f"raised by kernel {self.name!r} of plugin {chosen.plugin!r} ({chosen.dist} {chosen.version})"
            add_note(error, note)

    def nbytes(self, tensor: Tensor) -> int:
        """Bytes that one packed tensor represents; its own size if the kernel fails to report it."""
        try:
            with guarded(_plugin_of(self.decision), "nbytes", f"nbytes {self.name}"):
                return answers.size(self.kernel.nbytes(tensor))
        except StepError:
            return tensor.numel() * tensor.element_size()


def add_note(error: BaseException, note: str) -> None:
    """Append a note to an exception, once; before Python 3.11 to its first argument."""
    if sys.version_info >= (3, 11):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    elif error.args and isinstance(error.args[0], str) and note not in error.args[0]:
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])


def _plugin_of(decision: Decision) -> PluginStatus:
    chosen = decision.selected
    assert chosen is not None
    return PluginStatus(chosen.plugin, chosen.dist, chosen.version, State.AVAILABLE)


def _unpack(kernel: Kernel, packed: dict[str, Tensor]) -> QTensor:
    try:
        with preserved_state():
            return answers.unpacked(kernel.unpack(packed))
    except StepError as error:
        raise PluginError(f"kernel {name_of(kernel)!r}: {error.reason}.") from error
    except Exception as error:
        add_note(error, f"raised by kernel {name_of(kernel)!r} while it unpacked a weight")
        raise


def bind(store: WeightStore, request: Request) -> Bound:
    """Resolve ``request`` and pack the weight.

    A kernel that fails to pack, or returns wrong results with this weight, is disabled and the next one is tried.
    """
    with store.lock:
        while True:
            decision = resolve(request)
            kernel = _with_order(store, decision)
            try:
                return Bound(decision, kernel, _packed(store, decision, kernel))
            except _WrongResultError as wrong:
                report_failure(request, kernel, wrong.reason, Stage.FAILED_VERIFICATION)
                _warn_disabled(decision, f"failed verification {wrong.reason}")
            except StepError as error:
                if _is_last_candidate(decision):
                    raise _cause_of(error) from None
                _fail_if_named(decision, error)
                reason = error.describe("pack")
                report_failure(request, kernel, reason)
                _warn_disabled(decision, reason)


def _with_order(store: WeightStore, decision: Decision) -> Kernel:
    """The selected kernel; wrapped in an `OrderedKernel`, which permutes x, if the weight has an order.

    Raises `FormatError` if the request cannot be combined with an order.
    """
    kernel = decision.kernel
    assert kernel is not None
    if not store.has_order:
        return kernel
    if decision.request.contract not in ("linear", "grouped_linear"):
        raise FormatError(
            f"{decision.request.contract} does not support a weight with an order; linear and grouped_linear do.\n"
            f"Reorder its columns with QTensor.from_codes(codes[:, inverse], ...) if the groups allow it."
        )
    if getattr(getattr(decision.request, "activation", None), "group", None) is not None:
        raise FormatError("activations quantized in groups cannot be combined with a weight that has an order.")
    return OrderedKernel(kernel, name_of(kernel), packing_of(kernel))


def _cause_of(error: StepError) -> BaseException:
    """The exception that a step raised, to be raised again."""
    return PluginError(error.reason) if error.cause is None else error.cause


class _WrongResultError(Exception):
    """A kernel returns wrong results with a layer's own weight."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def _packed(store: WeightStore, decision: Decision, kernel: Kernel) -> dict[str, Tensor]:
    """The weight packed for the kernel of a decision; raises `_WrongResultError` if its results are wrong."""
    step = _step("pack", decision, kernel)
    with guarded(_plugin_of(decision), f"the pack of {name_of(kernel)}", **step):
        mode = current().verify
        key = verification.size_key(registry.status(decision.plugin), kernel, decision.request, mode)
        if not key:
            return store.packed_for(kernel, trusted=has_passed(**step))
        weight = store.neutral()
        packed = store.packed_for(kernel, trusted=False)
        result = verification.check_weight(key, kernel, decision.request, weight, packed, mode)
    if not result.ok:
        store.withdraw(kernel, weight)
        raise _WrongResultError(plain(result.reason))
    return packed


def _step(stage: str, decision: Decision, kernel: Kernel) -> dict[str, Any]:
    """The arguments of `guarded` for a step of a kernel; within a process each size counts as a step of its own."""
    request = decision.request
    key = kernel_key(stage, _plugin_of(decision), kernel, request)
    return {"key": key, "size": f"{request.n}x{request.k}", "seconds": FIRST_CALL_SECONDS}


def call_first(store: WeightStore, bound: Bound, call: Callable[[Bound], Tensor]) -> tuple[Bound, Tensor]:
    """The first call of a kernel, guarded: if it raises, the next kernel is bound and called instead.

    If that one fails, too, the input is at fault: the first error is raised and the kernel stays in use.
    """
    try:
        step = _step("call", bound.decision, bound.kernel)
        with guarded(_plugin_of(bound.decision), f"the first call of {bound.name}", **step):
            result = answers.result(call(bound))
    except StepError as error:
        if _is_last_candidate(bound.decision):
            raise _cause_of(error) from None
        return _call_next(store, bound, call, error)
    bound.proven = True
    return bound, result


def _call_next(
    store: WeightStore, bound: Bound, call: Callable[[Bound], Tensor], error: StepError
) -> tuple[Bound, Tensor]:
    reason = error.describe("its first call")
    report_failure(bound.request, bound.kernel, reason)
    try:
        fresh, result = call_first(store, bind(store, bound.request), call)
    except Exception:  # noqa: BLE001 - the first error is the informative one
        withdraw_failure(bound.request, bound.kernel)
        raise _cause_of(error) from None
    try:
        _fail_if_named(bound.decision, error)
    except PluginError:
        withdraw_failure(bound.request, bound.kernel)
        raise
    _warn_disabled(bound.decision, reason)
    return fresh, result


def _is_last_candidate(decision: Decision) -> bool:
    """Whether no other candidate is left, so that the selected kernel's own error is raised."""
    return all(c.stage != Stage.OUTRANKED.value for c in decision.candidates)


def _fail_if_named(decision: Decision, error: StepError) -> None:
    """Raise `PluginError` if the user named the plugin, instead of moving on to the next one."""
    chosen = decision.selected
    assert chosen is not None
    if chosen.plugin != BUILTIN and chosen.plugin in current().order(decision.request.contract):
        raise PluginError(
            f"kernel {chosen.kernel!r} of plugin {chosen.plugin!r}, which you asked for, failed.\n"
            f"{error.reason}\nRemove it from the order of backends to use the next kernel."
        ) from error.cause


def _warn_disabled(decision: Decision, reason: str) -> None:
    chosen = decision.selected
    assert chosen is not None
    assert decision.kernel is not None
    record_kernel_failure(_plugin_of(decision), decision.kernel, decision.request, reason)
    warnings.warn(
        f"kernel {chosen.kernel!r} of {chosen.dist} {chosen.version} is disabled for {decision.request.weight}: "
        f"{reason}\n"
        f"The next kernel is used instead; run 'qcore doctor' for details.",
        QcoreWarning,
        stacklevel=3,
    )
