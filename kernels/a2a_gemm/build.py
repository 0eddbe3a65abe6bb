"""Builds the CUDA variants with nvcc, once per content of the sources, into plain shared libraries.

    python -m hf_cp.kernels.a2a_gemm.build [VARIANT ...]

builds ahead of time: those named, or all but those that only the bench compares. Otherwise the first use builds what it
needs. The libraries have a C interface and do not depend
on torch, so those built on one machine can be used on another: set `HF_CP_CACHE` to where they are.

| environment | meaning |
|---|---|
| `HF_CP_CACHE` | folder of built libraries; `$XDG_CACHE_HOME/hf_cp` or `~/.cache/hf_cp` by default |
| `HF_CP_NVCC` | the compiler; `$CUDA_HOME/bin/nvcc`, then the one on PATH, then `/usr/local/cuda/bin/nvcc` by default |
| `HF_CP_CUTLASS` | folder that holds `cutlass/cutlass.h`; that of the package nvidia-cutlass by default |
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
OLDEST_NVCC = (12, 5)
INSTALL_CUTLASS = 'pip install "hf_cp[fused]", or set HF_CP_CUTLASS to the folder that holds cutlass/cutlass.h'

# Source and macros of each library. A tile is 128 rows high; stages fill the shared memory that a block can have.
# Those named after a cluster are the same tiles with clusters of another size, for `bench --clusters` alone.
VARIANTS: dict[str, tuple[str, dict[str, int]]] = {
    name: (
        "variant.cu",
        {
            "HF_CP_FP8": fp8,
            "HF_CP_ROWS_ARE_K": rows,
            "HF_CP_TILE_N": n,
            "HF_CP_CLUSTER": cluster,
            "HF_CP_STAGES": stages,
        },
    )
    for name, fp8, rows, n, cluster, stages in [
        ("bf16", 0, 0, 256, 2, 4),
        ("bf16_wide", 0, 0, 320, 2, 3),
        ("bf16_narrow", 0, 0, 160, 2, 5),
        ("bf16_rows_k", 0, 1, 256, 2, 4),
        ("bf16_batched", 0, 1, 128, 1, 6),
        ("fp8", 1, 0, 256, 2, 4),
        ("fp8_wide", 1, 0, 320, 2, 3),
        ("bf16_cluster_1", 0, 0, 256, 1, 4),
        ("bf16_wide_cluster_1", 0, 0, 320, 1, 3),
        ("bf16_narrow_cluster_1", 0, 0, 160, 1, 5),
        ("bf16_batched_cluster_2", 0, 1, 128, 2, 6),
        ("fp8_cluster_1", 1, 0, 256, 1, 4),
        ("fp8_wide_cluster_1", 1, 0, 320, 1, 3),
    ]
}
VARIANTS["ranks"] = ("ranks.cu", {})
USED = tuple(name for name in VARIANTS if "_cluster_" not in name)

FLAGS = (
    *("-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "--expt-relaxed-constexpr", "-DNDEBUG"),
    *("-Xcompiler", "-fPIC", "-shared"),
)


def with_clusters(variant: str, ctas: int) -> str:
    """The variant of the same tile with clusters of so many CTAs.

    Raises:
        ValueError: there is none.
    """
    if VARIANTS[variant][1]["HF_CP_CLUSTER"] == ctas:
        return variant
    found = f"{variant}_cluster_{ctas}"
    if found not in VARIANTS:
        raise ValueError(f"variant {variant} has no clusters of {ctas} CTAs: choose 1 or 2")
    return found


class BuildError(RuntimeError):
    """What is missing, in one line, and how to get it."""


def cache_folder() -> Path:
    """Where libraries are kept, for this user and these sources."""
    chosen = os.environ.get("HF_CP_CACHE")
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_cp"
    return base / "a2a_gemm"


def source_hash(variant: str) -> str:
    """Of everything of this project that decides what the library does."""
    source, macros = VARIANTS[variant]
    digest = hashlib.sha256(repr((source, sorted(macros.items()), FLAGS)).encode())
    for path in sorted([*FOLDER.glob("*.cuh"), FOLDER / source]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def library_path(variant: str) -> Path:
    return cache_folder() / f"{variant}-{source_hash(variant)}.so"


def find_nvcc() -> Path:
    """The compiler.

    Raises:
        BuildError: there is none, or it is too old for the code.
    """
    home = os.environ.get("CUDA_HOME")
    candidates = [
        os.environ.get("HF_CP_NVCC"),
        f"{home}/bin/nvcc" if home else None,
        shutil.which("nvcc"),
        "/usr/local/cuda/bin/nvcc",
    ]
    found = next((Path(path) for path in candidates if path and os.access(path, os.X_OK)), None)
    if found is None:
        raise BuildError("nvcc not found: install the CUDA toolkit, or set HF_CP_NVCC to the compiler's path")
    said = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    version = re.search(r"release (\d+)\.(\d+)", said)
    if version is None or tuple(map(int, version.groups())) < OLDEST_NVCC:
        wanted = ".".join(map(str, OLDEST_NVCC))
        got = version.group(0) if version else "no release"
        raise BuildError(
            f"{found} reports {got}: the kernels need CUDA {wanted} or newer, set HF_CP_NVCC to such a one"
        )
    return found


def find_cutlass() -> Path:
    """The folder of CUTLASS's headers.

    Raises:
        BuildError: there is none.
    """
    chosen = os.environ.get("HF_CP_CUTLASS")
    if chosen:
        found = Path(chosen)
    else:
        package = importlib.util.find_spec("cutlass_library")
        places = package.submodule_search_locations if package is not None else None
        found = Path(next(iter(places or []), "")) / "source" / "include"
    if not (found / "cutlass" / "cutlass.h").is_file():
        where = f"not in HF_CP_CUTLASS={chosen}" if chosen else "not found"
        raise BuildError(f"CUTLASS headers {where}: {INSTALL_CUTLASS}")
    return found


def command(variant: str, output: Path, *extra: str) -> list[str]:
    """The compiler's command line for one variant."""
    source, macros = VARIANTS[variant]
    include = ["-I", str(find_cutlass())] if macros else []
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    return [str(find_nvcc()), *FLAGS, *include, *defines, *extra, str(FOLDER / source), "-o", str(output)]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time: ranks of a node share the cache."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(variant: str) -> Path:
    """The library of `variant`, built unless it is there.

    Raises:
        BuildError: no compiler, no headers, or the compiler's own error.
    """
    path = library_path(variant)
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock")):
        if path.exists():
            return path
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            output = Path(folder) / path.name
            arguments = command(variant, output)
            print(f"hf_cp: building {variant} for sm_90a, up to a minute, into {path}", file=sys.stderr, flush=True)
            start = time.monotonic()
            done = subprocess.run(arguments, capture_output=True, text=True)
            if done.returncode != 0:
                log = path.with_suffix(".log")
                log.write_text(" ".join(arguments) + "\n" + done.stdout + done.stderr)
                said = [line for line in (done.stdout + done.stderr).splitlines() if "error" in line]
                raise BuildError(
                    f"nvcc failed on {variant}: {said[0] if said else 'no message'}; its output is in {log}"
                )
            os.replace(output, path)
        print(f"hf_cp: built {variant} in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return path


def check_device(capability: tuple[int, int], name: str) -> None:
    """Raise BuildError unless a device of this compute capability runs the kernels."""
    if capability != (9, 0):
        version = ".".join(map(str, capability))
        raise BuildError(
            f"device {name} has compute capability {version}, the fused kernels need 9.0 (H100, H200): "
            f'use projection_backend="torch"'
        )


def check_available(variants: Sequence[str]) -> None:
    """Raise BuildError unless these variants are built, or can be."""
    if not all(library_path(variant).exists() for variant in variants):
        find_nvcc()
        find_cutlass()


@functools.cache
def load(variant: str) -> ctypes.CDLL:
    """The library of `variant`, built if need be and loaded once a process."""
    return ctypes.CDLL(str(build(variant)))


def main() -> None:
    names = sys.argv[1:] or USED
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        sys.exit(f"unknown variant {unknown[0]!r}: choose from {', '.join(VARIANTS)}")
    try:
        for name in names:
            print(build(name))
    except BuildError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
