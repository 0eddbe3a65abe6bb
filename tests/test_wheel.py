"""The wheel, built from what git holds and installed alone, has every source and imports without GPU and Triton."""

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".py", ".cu", ".cuh", ".md", ".svg"}


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def project_files() -> list[str]:
    """Files of the working tree that git knows or would add."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    return sorted({name for name in listed.split("\0") if name and (ROOT / name).exists()})


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy: in the tree itself, a build folder left by an earlier one would be packed too."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "project"
    for name in project_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    # Without --wheel the wheel is made from the source archive, so that this is held to be complete as well.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", copy, cwd=folder)
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of an environment with the wheel; its dependencies are found in the one that runs the tests."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    (site_packages,) = folder.glob("lib/python*/site-packages")
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet"),
        *("--no-deps", "--no-index", "--disable-pip-version-check", wheel),
        cwd=folder,
    )
    # Only the folder is added: the .pth files in it, the editable install of this project among them, are not read.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_wheel_holds_every_source_and_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = {
        name if name.startswith("hf_cp/") else f"hf_cp/{name}"
        for name in project_files()
        if name.startswith(("hf_cp/", "kernels/", "models/"))
        and (Path(name).suffix in SUFFIXES or name.startswith(("kernels/", "models/")))
        and not (ROOT / name).is_symlink()
    }
    assert any(name.startswith("hf_cp/kernels/gdn/") for name in expected)
    assert any(name.startswith("hf_cp/models/qwen3_5/") for name in expected)
    assert not expected - names, f"not in the wheel: {sorted(expected - names)}"
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names), sorted(names)
    packaged = {name for name in names if ".dist-info/" not in name}
    assert not packaged - expected, f"in the wheel but not in git: {sorted(packaged - expected)}"


def test_every_module_imports_from_the_wheel(installed_python: Path, tmp_path: Path) -> None:
    location = run(installed_python, "-c", "import hf_cp; print(hf_cp.__file__)", cwd=tmp_path).strip()
    assert Path(location).is_relative_to(installed_python.parents[1]), location
    # What needs Triton is left out where there is none.
    script = """
import hf_cp, importlib, importlib.util, pkgutil
has_triton = importlib.util.find_spec("triton") is not None
folders = list(hf_cp.__path__)
for name in ("hf_cp.kernels", "hf_cp.models"):
    folders += importlib.import_module(name).__path__
seen = 0
for folder, prefix in zip(folders, ("hf_cp.", "hf_cp.kernels.", "hf_cp.models."), strict=True):
    for module in pkgutil.walk_packages([folder], prefix):
        if ("triton" in module.name or "gluon" in module.name) and not has_triton:
            continue
        importlib.import_module(module.name)
        seen += 1
print(seen)
"""
    assert int(run(installed_python, "-c", script, cwd=tmp_path)) > 10


def test_import_leaves_triton_and_cuda_alone(installed_python: Path, tmp_path: Path) -> None:
    script = """
import sys
sys.modules["triton"] = None
import torch
import hf_cp
from hf_cp import ContextParallelConfig, average_gradients, patch, unpatch
loaded = [name for name in sys.modules if name.partition(".")[0] == "triton" and sys.modules[name] is not None]
assert not loaded, loaded
assert not torch.cuda.is_initialized()
print("fine")
"""
    assert run(installed_python, "-c", script, cwd=tmp_path).strip() == "fine"
    # With Triton at hand, too, none of the modules that need it are loaded; torch and transformers load it themselves.
    script = """
import sys
import hf_cp, hf_cp.kernels.gdn
print(*[name for name in sys.modules if name.startswith("hf_cp.kernels") and ("triton" in name or "gluon" in name)])
"""
    assert run(installed_python, "-c", script, cwd=tmp_path).strip() == ""
