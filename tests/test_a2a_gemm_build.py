"""Building the CUDA sources: once for all ranks, with errors that say what to install, without spilled registers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_cp.kernels.a2a_gemm import bench, build, fused


def has_nvcc() -> bool:
    try:
        build.find_nvcc()
    except build.BuildError:
        return False
    return True


needs_nvcc = pytest.mark.skipif(not has_nvcc(), reason="needs nvcc")
compiles_all = pytest.mark.skipif(
    not os.environ.get("HF_CP_TEST_COMPILE"), reason="takes minutes: set HF_CP_TEST_COMPILE=1, with nvcc and CUTLASS"
)


@needs_nvcc
def test_two_processes_build_once(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_CP_CACHE": str(tmp_path)}
    # By its file, so that the two do not spend their time importing torch.
    command = [sys.executable, build.__file__, "ranks"]
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert "".join(err for _, err in said).count("building ranks") == 1, said
    assert said[0][0] == said[1][0]
    assert Path(said[0][0].strip()).is_relative_to(tmp_path)
    left = sorted(path.suffix for path in (tmp_path / "a2a_gemm").iterdir())
    assert left == [".lock", ".so"]


@needs_nvcc
def test_a_compiler_error_is_one_line_and_its_output_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_CP_CACHE", str(tmp_path))
    monkeypatch.setitem(build.VARIANTS, "broken", ("ranks.cu", {"int32_t": 1}))
    monkeypatch.setattr(build, "find_cutlass", lambda: build.FOLDER)
    with pytest.raises(
        build.BuildError, match=r"nvcc failed on broken: .*error.*; its output is in (.*\.log)"
    ) as caught:
        build.build("broken")
    assert "\n" not in str(caught.value)
    assert "nvcc" in Path(str(caught.value).rpartition(" ")[2]).read_text()
    assert not list(tmp_path.rglob("*.so"))


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.os, "access", lambda path, mode: False)
    with pytest.raises(build.BuildError, match="nvcc not found: install the CUDA toolkit, or set HF_CP_NVCC"):
        build.find_nvcc()


def test_an_old_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "nvcc"
    old.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.131'\n")
    old.chmod(0o755)
    monkeypatch.setenv("HF_CP_NVCC", str(old))
    with pytest.raises(build.BuildError, match=r"reports release 12.4: the kernels need CUDA 12.5 or newer"):
        build.find_nvcc()


def test_missing_headers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HF_CP_CUTLASS", raising=False)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(build.BuildError, match=r'CUTLASS headers not found: pip install "hf_cp\[fused\]"'):
        build.find_cutlass()
    monkeypatch.setenv("HF_CP_CUTLASS", str(tmp_path))
    with pytest.raises(build.BuildError, match=rf"CUTLASS headers not in HF_CP_CUTLASS={tmp_path}: pip install"):
        build.find_cutlass()


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_another_gpu_is_refused(capability: tuple[int, int]) -> None:
    version = ".".join(map(str, capability))
    with pytest.raises(
        build.BuildError, match=rf"compute capability {version}, .* 9.0 .* projection_backend=\"torch\""
    ):
        build.check_device(capability, "X")
    build.check_device((9, 0), "NVIDIA H200")


def test_the_hash_follows_sources_and_macros(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = {name: build.source_hash(name) for name in build.VARIANTS}
    assert len(set(before.values())) == len(before)
    for path in [*build.FOLDER.glob("*.cu"), *build.FOLDER.glob("*.cuh")]:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    assert {name: build.source_hash(name) for name in build.VARIANTS} == before
    header = tmp_path / "order.cuh"
    header.write_text(header.read_text() + "\n")
    assert all(build.source_hash(name) != before[name] for name in before)


def test_other_clusters_are_the_same_tiles_and_built_for_the_bench_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in {variant for row in bench.ROWS.values() for variant in row.variants}:
        found = {ctas: build.with_clusters(name, ctas) for ctas in (1, 2)}
        assert name in found.values()
        macros = {ctas: build.VARIANTS[variant][1] for ctas, variant in found.items()}
        assert macros[1] == {**macros[2], "HF_CP_CLUSTER": 1}
        assert {ctas: one["HF_CP_CLUSTER"] for ctas, one in macros.items()} == {1: 1, 2: 2}
    assert {*fused.VARIANTS, "bf16_batched", "fp8", "fp8_wide"} == set(build.USED)
    assert bench.row_of("large", []).variants == bench.ROWS["large"].variants
    assert bench.row_of("pv", [2, 1]).variants == ("bf16_batched_cluster_2", "bf16_batched")
    built: list[str] = []
    monkeypatch.setattr(build, "build", built.append)
    monkeypatch.setattr(sys, "argv", ["build"])
    build.main()
    assert built == list(build.USED)
    monkeypatch.setattr(sys, "argv", ["bench", "medium", "--clusters", "1,3"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "error: variant bf16 has no clusters of 3 CTAs: choose 1 or 2" in capsys.readouterr().err


def test_the_bench_puts_clusters_side_by_side() -> None:
    times = {"one": 2.0, "two": 1.5, "alone": 1.0}
    lines = bench.side_by_side(times, {"one": ("tile", 1), "alone": ("other", 2), "two": ("tile", 2)})
    assert [line.split() for line in lines] == [
        ["tile", "1", "CTAs", "2.0000", "ms", "100.0", "%", "2", "CTAs", "1.5000", "ms", "75.0", "%"],
        ["other", "2", "CTAs", "1.0000", "ms", "100.0", "%"],
    ]


@compiles_all
@pytest.mark.parametrize("variant", list(build.VARIANTS))
def test_no_variant_spills(variant: str, tmp_path: Path) -> None:
    done = subprocess.run(
        build.command(variant, tmp_path / "library.so", "-Xptxas", "-v"), capture_output=True, text=True, check=True
    )
    said = done.stdout + done.stderr
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert spills, said
    assert all(numbers == ("0", "0", "0") for numbers in spills), said
    # The compiler says so where it ignores the split of registers or runs tensor instructions one by one.
    assert not re.search(r"C75\d\d|wgmma.*serialized", said), said
