"""The kernels compiled for GPUs that are not here: what they take, and their instructions."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

from lesson_code import results

if sys.platform != "linux":
    pytest.skip("NVRTC is installed on Linux only", allow_module_level=True)

from lesson_code.cupy import _kernels, nvrtc

ARCHITECTURES = ["sm_75", "sm_80", "sm_90", "sm_100"]
WITH_BFLOAT16 = ARCHITECTURES[1:]


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


# --- What the compiler is asked, and what its report says ----------------------------------------


def test_a_report_is_read() -> None:
    source = """
    __device__ __noinline__ float chosen(const float* x, int n) {
        float all[40];
        for (int i = 0; i < 40; i++) all[i] = x[i] * x[n];
        for (int i = 0; i < n; i++) all[i % 40] += all[i * n % 40];
        return all[n % 40];
    }
    extern "C" __global__ void __launch_bounds__(SIZE) turned(float* x, int n) {
        __shared__ float row[SIZE];
        row[threadIdx.x] = x[threadIdx.x];
        __syncthreads();
        x[threadIdx.x] = row[SIZE - 1 - threadIdx.x];
    }
    extern "C" __global__ void stacked(float* x, int n) { x[threadIdx.x] = chosen(x, n); }
    """
    kernels, ptx, warnings, binary = nvrtc.compile_source("sm_80", source, {"SIZE": 64})
    assert list(sorted(kernels)) == ["stacked", "turned"]
    assert kernels["turned"].shared_bytes == 256 and kernels["stacked"].shared_bytes == 0
    assert kernels["turned"].stack_bytes == 0 and kernels["stacked"].stack_bytes >= 160
    assert all(2 < usage.registers < 255 for usage in kernels.values())
    assert all(usage.spill_bytes == 0 for usage in kernels.values())
    assert ".target sm_80" in ptx and ".visible .entry turned(" in ptx
    assert binary.startswith(b"\x7fELF") and b".text.turned" in binary
    assert warnings == ""


def test_spills_are_seen() -> None:
    source = """
    extern "C" __global__ void __launch_bounds__(1024) spills(float* x, int n) {
        float all[150];
    #pragma unroll
        for (int i = 0; i < 150; i++) all[i] = x[i * n];
        for (int j = 0; j < n; j++)
    #pragma unroll
            for (int i = 0; i < 150; i++) all[i] = all[i] * x[j] + all[(i + 7) % 150];
    #pragma unroll
        for (int i = 0; i < 150; i++) x[i * n] = all[i];
    }
    """
    usage = nvrtc.compile_source("sm_80", source).kernels["spills"]
    assert usage.registers == 64  # all that 1,024 threads leave to each
    assert usage.spill_bytes > 4 * (150 - 64) and usage.stack_bytes > 4 * (150 - 64)


def test_warnings_are_kept() -> None:
    source = 'extern "C" __global__ void k(float* x) { int unused; x[0] = 1; }'
    warnings = nvrtc.compile_source("sm_80", source, name="mine.cu").warnings
    assert warnings.startswith("mine.cu(1): warning") and '"unused"' in warnings
    assert "ptxas" not in warnings


def test_what_does_not_compile_says_where_and_why() -> None:
    with pytest.raises(
        RuntimeError, match=r'mine.cu does not compile for sm_90:\nmine.cu\(2\).*"y"'
    ):
        nvrtc.compile_source("sm_90", "__device__ int x;\n__device__ int z = y;", name="mine.cu")


@pytest.mark.parametrize("architecture", ["sm_74", "compute_80", ""])
def test_an_unknown_architecture(architecture: str) -> None:
    with pytest.raises(ValueError, match=r"must be one of .*sm_75, sm_80, .* got '" + architecture):
        nvrtc.compile_source(architecture, "")


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(ImportError, match=r"CuPy is missing.*linear-attention-book\[cuda12\]"):
        nvrtc.compile_source("sm_80", "")


def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> None:
        raise RuntimeError('Failure finding "libnvrtc.so.12"')

    monkeypatch.setattr("cupy.cuda.nvrtc.getVersion", nothing)
    with pytest.raises(ImportError, match=r"NVRTC is missing.*\[cuda12\].*libnvrtc\.so\.12"):
        nvrtc.version()


def test_the_version() -> None:
    assert re.fullmatch(r"\d+\.\d+", nvrtc.version())


# --- The instructions of gpu.h -------------------------------------------------------------------


def ptx_of(body: str, architecture: str) -> str:
    source = f'extern "C" __global__ void k(const float* x, unsigned* y) {{ {body} }}'
    return nvrtc.compile_source(architecture, source).ptx


TILES = """
    float c[4] = {}; unsigned a[4] = {threadIdx.x, 2, 3, 4};
    multiply_tiles<%s>(c, a, 5, 6);
    for (int i = 0; i < 4; i++) y[i] = __float_as_uint(c[i]);
"""
MATRICES = """
    __shared__ uint4 rows[32]; unsigned r[4];
    rows[threadIdx.x].x = y[0]; __syncwarp();
    %s(r, rows + threadIdx.x);
    for (int i = 0; i < 4; i++) y[i] = r[i];
"""


def test_every_primitive_compiles_without_a_warning(architecture: str) -> None:
    for body in (
        TILES % "float16",
        MATRICES % "load_matrices",
        MATRICES % "load_matrices_transposed",
        "y[0] = pack<float16>(x[0], x[1]);",
        "y[0] = pack<bfloat16>(x[0], x[1]);",
        "y[0] = __float_as_uint(to_float(from_float<float>(x[0])));",
        "y[0] = __float_as_uint(to_float(from_float<float16>(x[0])));",
        "y[0] = __float_as_uint(to_float(from_float<bfloat16>(x[0])));",
        COPIES,
        "dynamic_shared_memory(z); z[threadIdx.x].x = 1; __syncthreads(); y[0] = z[1].x;",
    ):
        source = f'extern "C" __global__ void k(const float* x, unsigned* y) {{ {body} }}'
        kernels, _, warnings, _ = nvrtc.compile_source(architecture, source)
        assert kernels["k"].spill_bytes == kernels["k"].stack_bytes == 0, body
        assert warnings == "", body


@pytest.mark.parametrize(
    ("architecture", "dtype", "expected"),
    [("sm_75", "float16", ["m16n8k8.row.col.f32.f16.f16.f32"] * 2)]
    + [(name, "float16", ["m16n8k16.row.col.f32.f16.f16.f32"]) for name in WITH_BFLOAT16]
    + [(name, "bfloat16", ["m16n8k16.row.col.f32.bf16.bf16.f32"]) for name in WITH_BFLOAT16],
)
def test_tiles_are_multiplied_by_tensor_cores(architecture, dtype, expected) -> None:
    ptx = ptx_of(TILES % dtype, architecture)
    assert re.findall(r"mma\.sync\.aligned\.(\S+)", ptx) == expected


def test_turing_has_no_tiles_of_bfloat16() -> None:
    with pytest.raises(RuntimeError, match=r"multiply_tiles.*T=bfloat16.*not defined"):
        ptx_of(TILES % "bfloat16", "sm_75")


@pytest.mark.parametrize("transposed", ["", ".trans"])
def test_matrices_are_loaded_four_at_a_time(architecture: str, transposed: str) -> None:
    name = "load_matrices_transposed" if transposed else "load_matrices"
    found = re.findall(r"ldmatrix\.\S+", ptx_of(MATRICES % name, architecture))
    assert found == [f"ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16"]


COPIES = """
    __shared__ uint4 rows[32];
    copy_async(rows + threadIdx.x, x + 4 * threadIdx.x);
    end_group();
    wait_for_groups<1>();
    y[0] = scale_pair<float16>(rows[threadIdx.x].x, x[1]);
"""


def test_copies_go_on_by_themselves_from_ampere_on(architecture: str) -> None:
    found = re.findall(r"cp\.async\.[\w.]+", ptx_of(COPIES, architecture))
    parts = ["cp.async.cg.shared.global", "cp.async.commit_group", "cp.async.wait_group"]
    assert found == ([] if architecture == "sm_75" else parts)


def test_conversions_are_one_instruction_where_the_gpu_has_it(architecture: str) -> None:
    ptx = ptx_of("y[0] = pack<float16>(x[0], x[1]);", architecture)
    assert ptx.count("cvt.rn.f16.f32") == 2
    ptx = ptx_of("y[0] = pack<bfloat16>(x[0], x[1]);", architecture)
    assert ptx.count("cvt.rn.bf16.f32") == (0 if architecture == "sm_75" else 2)


# --- The package's kernels -----------------------------------------------------------------------

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "registers.py"
RUN_IT = "run: python benchmarks/registers.py"
SHARED_BYTES = {"sm_75": 64 * 1024, "sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
NUMBERS = ["threads", "registers", "shared_bytes", "dynamic_bytes", "stack_bytes", "spill_bytes"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_registers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def committed() -> list[dict]:
    return results.load("registers")["rows"]


def name_of(row: dict) -> str:
    return " ".join(str(value) for name, value in row.items() if name not in NUMBERS)


FLOATS = {f"{place}_TYPE": "float" for place in ("Q", "K", "V", "OUT", "BOTH")}
TILED = {"TYPE": "float16", "CHUNK": 64, "SLAB": 64, "ALIGNED": 1}
MACROS = {
    "recurrent": {"RECURRENT": 1, "PARTS": 1, "COLUMNS": 64, **FLOATS},
    "chunked": {"CHUNKED": 1, "STATE_COLUMNS": 64, **FLOATS},
    "tensor_core": {"TENSOR_CORE": 1, **TILED},
    "gradient": {"GRADIENT": 1, **FLOATS},
    "wkv": {"SCALAR": "float", "KEEP": 1},
}


@functools.cache
def entries(kernel: str) -> dict[str, str]:
    """The PTX of each CUDA function, for an A100."""
    file = "wkv.cu" if kernel == "wkv" else "linear.cu"
    macros = {"FEATURES": 64, "ONES": 1, "NORMALIZE": 1, **MACROS[kernel]}
    ptx = nvrtc.compile_source("sm_80", _kernels.source(file), macros).ptx
    return dict(re.findall(r"\.entry (\w+)\((.*?)\n}", ptx, re.DOTALL))


@pytest.mark.parametrize("kernel", MACROS)
def test_no_loop_looks_for_the_head_again(kernel: str) -> None:
    # A GPU takes dozens of instructions for a quotient: one an array, and for the block's place.
    for name, ptx in entries(kernel).items():
        arrays = ptx.split(")", 1)[0].count(".align 8 .b8")  # structs Rows
        assert len(re.findall(r"\bdiv\.[su]", ptx)) <= arrays + 2, name


MEMORY = re.compile(r"(ld\.global|st\.shared|bar\.sync)[.\w]*")
LETTERS = {"ld.global": "L", "st.shared": "S", "bar.sync": "B"}


@pytest.mark.parametrize(
    ("kernel", "name", "step"),
    [
        # The barrier between loads and stores is one that the compiler's last step respects.
        ("recurrent", "recurrent", "L" * 24 + "B" + "S" * 16 + "B"),
        ("chunked", "chunk_states", "L" * 8 + "B" + "S" * 8 + "B"),
        ("chunked", "chunk_outputs", "L" * 13 + "B" + "S" * 13 + "B"),
        ("chunked", "chunk_outputs", "L" * 4 + "B" + "S" * 4 + "B"),
    ],
)
def test_a_step_asks_for_all_before_it_stores_any(kernel: str, name: str, step: str) -> None:
    order = "".join(LETTERS[one] for one in MEMORY.findall(entries(kernel)[name]))
    assert step in order, order


def test_tiles_are_asked_for_before_any_is_stored() -> None:
    ptx = entries("tensor_core")
    for name, tiles in {"segment_sums": 2, "segment_outputs": 3}.items():
        loads = re.findall(r"(ld\.global|st\.shared)\.v4\.(?:b32|u32)", ptx[name])
        assert loads == ["ld.global"] * 4 * tiles + ["st.shared"] * 4 * tiles, name


def test_nothing_is_spilled(committed: list[dict]) -> None:
    spilled = [name_of(row) for row in committed if row["spill_bytes"] or row["stack_bytes"]]
    assert spilled == []


def test_every_block_fits(committed: list[dict]) -> None:
    for row in committed:
        shared = row["shared_bytes"] + row["dynamic_bytes"]
        assert shared <= SHARED_BYTES[row["architecture"]], name_of(row)
        assert row["shared_bytes"] <= 48 * 1024, name_of(row)
        assert row["threads"] * row["registers"] <= 65_536, name_of(row)


def test_every_gpu_has_every_kernel(committed: list[dict], architecture: str) -> None:
    found = {(r["kernel"], r["dtype"]) for r in committed if r["architecture"] == architecture}
    kernels = {"recurrent", "chunked", "tensor_core", "pipelined", "tiled"}
    kernels |= {"wkv", "decay", "delta"}
    if architecture in WITH_BFLOAT16:
        kernels |= {"decay_pipelined", "decay_channels"}
    assert {kernel for kernel, _ in found} == kernels
    assert ("tensor_core", "float16") in found
    assert (("tensor_core", "bfloat16") in found) == (architecture in WITH_BFLOAT16)
    assert ("pipelined", "float16") in found
    assert (("pipelined", "bfloat16") in found) == (architecture in WITH_BFLOAT16)


# That of wkv for sm_80 is compared where its script is tried, in test_benchmarks.py.
@pytest.mark.parametrize(
    ("architecture", "kernel"),
    [("sm_75", "tensor_core"), ("sm_90", "chunked"), ("sm_100", "recurrent")],
)
def test_compiled_again_the_numbers_are_the_same(
    script: ModuleType, committed: list[dict], architecture: str, kernel: str
) -> None:
    if nvrtc.version() != results.load("registers")["nvrtc"]:
        pytest.skip("this is another version of NVRTC than that of requirements.txt")
    rows = script.measure([architecture], [kernel], [64])
    same = {"architecture": architecture, "kernel": kernel, "D": 64}
    assert rows == [row for row in committed if row.items() >= same.items()], RUN_IT


def test_only_one_kernel_uses_the_tensor_cores(script: ModuleType) -> None:
    dtypes = {"recurrent": "float32", "chunked": "float32", "tensor_core": "bfloat16"}
    for kernel, dtype in dtypes.items():
        launches = script.all_launches(["sm_80"], [kernel], [64])["sm_80", kernel, dtype, 64]
        launch = next(one for one in launches if one.function != "split_gradient")
        text = _kernels.source(launch.file)
        ptx = nvrtc.compile_source("sm_80", text, dict(launch.macros)).ptx
        uses = kernel == "tensor_core"
        assert ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in ptx) == uses, kernel
        assert ("ldmatrix.sync.aligned.m8n8.x4" in ptx) == uses, kernel


@pytest.mark.parametrize(("architecture", "which"), [("sm_75", 0), ("sm_90", -1)])
def test_the_kernels_compile_without_a_warning(
    script: ModuleType, architecture: str, which: int
) -> None:
    """Each kernel for an old GPU with the first of its dtypes, for a newer one with the last."""
    seen = set()
    for kernel, dtypes in script.DTYPES.items():
        with mock.patch.dict(script.DTYPES, {kernel: [dtypes[which]]}):
            found = script.all_launches([architecture], [kernel], [64])
        if kernel in ("decay_pipelined", "decay_channels") and architecture not in WITH_BFLOAT16:
            assert not found
            continue
        [launches] = found.values()
        text = _kernels.source(launches[0].file)
        assert nvrtc.compile_source(architecture, text, dict(launches[0].macros)).warnings == ""
        seen.add(launches[0].function)
    assert {"recurrent", "chunk_states", "forward"} <= seen
