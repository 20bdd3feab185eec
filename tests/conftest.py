"""One thread for all tests: tensors are small, and threads that spin on a shared machine cost more than they save.

Without a GPU Triton's kernels run in its interpreter, which has to be asked for before they are imported.
"""

import gc
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import build_passes
import pytest
import torch
from processor_times import ProcessorTimes

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def patch_language_once() -> None:
    """A sixth of the interpreter's time: a launch replaces the functions of Triton's language by NumPy's, and every
    function that the kernel calls does it again.
    """
    try:
        from triton import language
        from triton.runtime import interpreter

        patch, nothing = interpreter._patch_lang, interpreter._LangPatchScope
        is_builtin = language.core.is_builtin
    except (ImportError, AttributeError):  # no Triton, or one that is built differently
        return

    def patch_if_not_yet(fn: Callable) -> object:
        used = [module for module in (language, language.core) if module in fn.__globals__.values()]
        return patch(fn) if any(is_builtin(module.load) for module in used) else nothing()

    interpreter._patch_lang = patch_if_not_yet


def remember_types() -> None:
    """A third of what is left: every operator makes a table of NumPy's types, and unwraps and wraps shapes."""
    try:
        from triton.language import core
        from triton.runtime import interpreter

        find_dtype, constexpr = interpreter._get_np_dtype, core.constexpr
        make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    except (ImportError, AttributeError):
        return
    dtypes: dict[str, object] = {}
    blocks: dict[tuple, dict[str, object]] = {}
    shapes: dict[tuple, tuple] = {}

    def find_dtype_once(dtype: object) -> object:
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = find_dtype(dtype)
        return dtypes[name]

    def make_block_as_before(self: object, element_ty: object, shape: list) -> None:
        key = element_ty.name, *[x.value if isinstance(x, constexpr) else x for x in shape]
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
        vars(self).update(blocks[key], element_ty=element_ty)

    def make_tensor_as_before(self: object, handle: object, type: object) -> None:
        key = (*type.shape,) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    interpreter._get_np_dtype = find_dtype_once
    core.block_type.__init__, core.tensor.__init__ = make_block_as_before, make_tensor_as_before


if build_passes.find_compiler() and (stale := build_passes.find_stale()):
    names = ", ".join(stale)
    pytest.exit(f"The C passes for {names} are missing or older than their sources: make kernels", returncode=4)

if os.environ.get("TRITON_INTERPRET") == "1":
    patch_language_once()
    remember_types()


def shares(item: pytest.Item) -> bool:
    """Return True if it takes what was made once for all tests of its file: mostly a run of real ranks."""
    known = item._fixtureinfo.name2fixturedefs.values() if isinstance(item, pytest.Function) else ()
    return any(definitions[-1].scope == "module" for definitions in known)


def pytest_collection(session: pytest.Session) -> None:
    """A third of its time the collector would look through modules and tests, all of which stay."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and tests stay: collections that tests ask for need not look through them."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()


def pytest_configure(config: pytest.Config) -> None:
    if path := os.environ.get("COMPOPT_PROCESSOR_TIMES"):
        worker = os.environ.get("PYTEST_XDIST_WORKER")
        config.pluginmanager.register(ProcessorTimes(Path(path).absolute(), worker))
    config.addinivalue_line("markers", "long: of several workers each begins with some of these tests")


def begin_with_long_tests(items: list[pytest.Item], workers: int) -> None:
    """Put tests that are marked so at the beginnings of the parts that ``--dist worksteal`` gives to the workers.

    A long test that begins late keeps one worker busy when the others have nothing left to take.
    """
    long: dict[object, list[pytest.Item]] = {}  # those of one file that share stay together
    for item in items:
        if item.get_closest_marker("long"):
            long.setdefault(item.path if shares(item) else item, []).append(item)
    others = iter([item for item in items if not item.get_closest_marker("long")])
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        first = [*itertools.chain(*list(long.values())[worker::workers])]
        size = (len(items) - len(ordered)) // (workers - worker)
        ordered += [*first, *itertools.islice(others, max(0, size - len(first)))]
    items[:] = [*ordered, *others]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share come first: workers are given parts of the list and take from each other's end, and what
    two of them have tests of is made twice."""
    items.sort(key=lambda item: not shares(item))
    if (workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
        begin_with_long_tests(items, workers)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    """Device of Triton's kernels: the interpreter's, or a GPU; never both in one process."""
    pytest.importorskip("triton")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if (request.param == "cpu") != (os.environ.get("TRITON_INTERPRET") == "1"):
        pytest.skip("kernels run either on the GPU or, with TRITON_INTERPRET=1, in the interpreter")
    return torch.device(request.param)


@pytest.fixture(params=[pytest.param("torch", marks=pytest.mark.slow), "native", "triton"])
def backend(request, monkeypatch) -> str:
    """Each backend that float32 parameters on the CPU can have here; Triton's kernels in the interpreter."""
    from compopt._backends.choice import explain_missing_backend

    if request.param == "triton" and torch.cuda.is_available():
        pytest.skip("kernels run either on the GPU or, with TRITON_INTERPRET=1, in the interpreter")
    if reason := explain_missing_backend(request.param, {"cpu"}):
        pytest.skip(f"{request.param} cannot run here: {reason}")
    monkeypatch.setenv("COMPOPT_BACKEND", request.param)
    return request.param


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A process group of one, which torch's checkpoint functions need."""
    file = tmp_path_factory.mktemp("group") / "rendezvous"
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
