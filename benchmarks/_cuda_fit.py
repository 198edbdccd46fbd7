"""Fit the cost of each configuration to its measured times, and keep those configurations that are ever chosen."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from _cuda_forms import product_of

from qcore_cuda.costs import Cost, terms
from qcore_cuda.problem import GemmProblem
from qcore_cuda.runtime.device import Device

SIDES = (512, 768, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 8192, 10240, 14336, 18944, 28672, 32768)
"""N and K of the sizes for which a configuration has to be the best to be kept."""
OCCUPANCIES = (1, 2, 4, 0)
CLOSE = 1.02
"""A configuration is also kept if it is this close to the best one at a measured size, or the best portable one."""

PARTIAL = {"w4a8_units_hopper", "w4a8_units_hopper_64", "w4a8_units_hopper_192"}
"""Kernels that take only some of a form's weights."""

SHARING = PARTIAL | {"gemm_hopper", "gemm_hopper_64", "gemm_hopper_192"} | {
    "w4a8_groups_hopper", "w8a8_groups_hopper", "int8_groups_hopper",
}  # fmt: skip
"""Kernels whose programs can share tiles, as the field ``split`` of a configuration says."""

EVEN = 1.04
"""What the estimates of an even spread are multiplied by: that leads to the best choices for sizes left out."""

Config = tuple[str, tuple[tuple[str, Any], ...]]
"""A kernel's name and the fields of its configuration."""
Times = dict[tuple[int, int], float]
"""(n, k) -> microseconds."""


class Fitted(NamedTuple):
    """**Fields:** ``cost``; ``error``: root mean square of its relative error."""

    cost: Cost
    error: float


def kept(device: Device, problem: GemmProblem, times: dict[Config, Times]) -> dict[Config, Fitted]:
    """The configurations of a form and number of rows that are worth a line of the table."""
    narrow = {config for config in times if config[0] in PARTIAL}
    if narrow:  # what other weights of the form are computed by is chosen without these kernels
        others = kept(device, problem, {config: times[config] for config in times if config not in narrow})
        return others | _kept(device, problem, times)
    return _kept(device, problem, times)


def _kept(device: Device, problem: GemmProblem, times: dict[Config, Times]) -> dict[Config, Fitted]:
    fitted = fits(device, problem, times, 5)
    usable = {config: times[config] for config in fitted}
    chosen: set[Config] = set()
    for n, k in itertools.product(SIDES, SIDES):
        found = {config: _estimate(device, problem, config, made.cost, n, k) for config, made in fitted.items()}
        if found:
            chosen.add(min(found, key=lambda config: found[config]))
    for size in {size for measured in usable.values() for size in measured}:
        found = {config: measured[size] for config, measured in usable.items() if size in measured}
        best = min(found.values())
        chosen |= {config for config in found if found[config] <= CLOSE * best and fitted[config].error < 0.1}
        portable = {config: us for config, us in found.items() if _portable(config)}
        chosen |= {config for config in portable if portable[config] <= min(portable.values())}
    return {config: fitted[config] for config in fitted if config in chosen}


def fits(device: Device, problem: GemmProblem, times: dict[Config, Times], least: int) -> dict[Config, Fitted]:
    """The costs of configurations: of those measured at fewer than ``least`` sizes only if they share tiles.

    Few sizes have so few tiles that eight programs share one. All else of a tile of that size is known from whole ones.
    """
    found = {
        config: fit(device, problem, config, measured) for config, measured in times.items() if len(measured) >= least
    }
    for config, measured in times.items():
        whole = found.get((config[0], tuple((name, 1 if name == "split" else v) for name, v in config[1])))
        if config not in found and whole and config[0] in SHARING:
            found[config] = _fit_parts(device, problem, config, measured, whole.cost)
    return {config: _doubted(made) if _is_even(config) else made for config, made in found.items()}


def _is_even(config: Config) -> bool:
    """Whether tiles of the last wave are spread over all programs: the parts of a tile are not alike."""
    return config[0] in SHARING and dict(config[1])["split"] == 0


def _doubted(made: Fitted) -> Fitted:
    more = tuple(float(f"{coefficient * EVEN:.4g}") for coefficient in made.cost.coefficients)
    return made._replace(cost=made.cost._replace(coefficients=more))


def _fit_parts(device: Device, problem: GemmProblem, config: Config, measured: Times, whole: Cost) -> Fitted:
    """The cost of a configuration that differs from ``whole`` in what the parts of a tile cost."""
    occupancy, known = whole.occupancy, whole.coefficients[:4]
    rows = np.array([_terms(device, problem, config, occupancy, n, k) for n, k in measured])
    us, without = np.array(list(measured.values())), rows[:, :4] @ np.array(known)
    part = max(0.0, float(np.mean((us - without) / np.maximum(1.0, rows[:, 4]))))
    error = float(np.sqrt(np.mean(((without + rows[:, 4] * part) / us - 1) ** 2)))
    return Fitted(Cost(occupancy, (*known, float(f"{part:.4g}"))), error)


def _portable(config: Config) -> bool:
    """Whether a kernel computes any size with any version of Triton."""
    return "hopper" not in config[0]


def fit(device: Device, problem: GemmProblem, config: Config, measured: Times) -> Fitted:
    """The cost with the least squares of relative errors; no coefficient is negative."""
    best: Fitted | None = None
    for occupancy in OCCUPANCIES:
        rows = np.array([_terms(device, problem, config, occupancy, n, k) for n, k in measured])
        if np.ptp(rows[:, 4]) == 0:  # the time of parts that all sizes have in common is part of the constant
            rows = rows[:, :4]
        us = np.array(list(measured.values()))
        coefficients = _nonnegative(rows / us[:, None], np.ones(len(us)))
        error = float(np.sqrt(np.mean((rows @ coefficients / us - 1) ** 2)))
        if best is None or error < best.error:
            best = Fitted(Cost(occupancy, tuple(float(f"{c:.4g}") for c in coefficients)), error)
    assert best is not None
    return best


def regrets(device: Device, problem: GemmProblem, times: dict[Config, Times]) -> list[float]:
    """For each measured size: the time of the choice made without that size, over the best one's."""
    found = []
    for size in sorted({size for measured in times.values() for size in measured}):
        others = {
            config: {other: us for other, us in measured.items() if other != size} for config, measured in times.items()
        }
        made = fits(device, problem, {config: left for config, left in others.items() if left}, 4)
        truth = {config: measured[size] for config, measured in times.items() if size in measured and config in made}
        estimates = {config: _estimate(device, problem, config, made[config].cost, *size) for config in truth}
        if truth:
            found.append(truth[min(estimates, key=lambda config: estimates[config])] / min(truth.values()))
    return found


def _estimate(device: Device, problem: GemmProblem, config: Config, cost: Cost, n: int, k: int) -> float:
    found = _terms(device, problem, config, cost.occupancy, n, k)
    product = product_of(problem.codes, config[0])
    if not product.apart(device, problem, product.config(**dict(config[1]))):
        return math.inf
    return math.fsum(c * t for c, t in zip(cost.coefficients, found, strict=False))


def _terms(device: Device, problem: GemmProblem, config: Config, occupancy: int, n: int, k: int) -> Any:
    name, fields = config
    product = product_of(problem.codes, name)
    vars(problem).update(n=n, k=k)  # frozen for others; a copy for each term would take most of the time
    return terms(product.work(device, problem, product.config(**dict(fields))), n, k, occupancy, device.sms)


def _nonnegative(a: Any, b: Any) -> Any:
    """Least squares with no negative coefficient: the best of all sets of columns, which are few."""
    count = a.shape[1]
    best, least = np.zeros(count), math.inf
    for columns in _subsets(count):
        part = np.linalg.lstsq(a[:, columns], b, rcond=None)[0]
        error = float(np.sum((a[:, columns] @ part - b) ** 2))
        if (part >= 0).all() and error < least - 1e-12:
            best, least = np.zeros(count), error
            best[list(columns)] = part
    return best


def _subsets(count: int) -> Iterable[tuple[int, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(range(count), size) for size in range(1, count + 1))


def grouped(raw: Iterable[Any]) -> dict[tuple[str, str, int], dict[Config, Times]]:
    """Lines ``[activations, form, rows, k, n, bf16, [[kernel, config, us], ...]]`` by what a table is asked for."""
    found: dict[tuple[str, str, int], dict[Config, Times]] = defaultdict(lambda: defaultdict(dict))
    for activations, form, rows, k, n, _, times in raw:
        for name, config, us in times:
            found[activations, form, rows][name, tuple(config.items())][n, k] = us
    return found
