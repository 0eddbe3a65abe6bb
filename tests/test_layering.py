"""An import may only point down, and each layer may only know the libraries that are its own business."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the bottom up; the first entry that a module's name starts with is its layer.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("hf_cp.config",),
    ("hf_cp.kernels",),
    tuple(
        f"hf_cp.{name}"
        for name in [
            *("autocast", "class_swap", "collectives", "compilation", "context", "entry"),
            *("layout", "loss", "mesh", "regions", "startup", "state"),
        ]
    ),
    ("hf_cp.modes",),
    ("hf_cp.models",),
    ("hf_cp.patch", "hf_cp.plugin", "hf_cp.testing"),
    ("hf_cp.report",),
    ("hf_cp.planning", "hf_cp.doctor", "hf_cp.trace"),
    ("hf_cp.bench_ranks",),
    ("hf_cp.bench", "hf_cp.bench_layer", "hf_cp.bench_step", "hf_cp.bench_trajectory"),
    ("hf_cp.cli",),
    ("hf_cp",),
)
# Who may import a library, and who may do so only inside a function, so that `import hf_cp` does not need it.
LIBRARIES = {
    "torch": (("hf_cp",), ()),
    "triton": (("hf_cp.kernels",), ()),
    "fla": ((), ("hf_cp.kernels.gdn.bench",)),
    "flash_qla": ((), ("hf_cp.kernels.gdn.bench",)),
    "transformers": (
        ("hf_cp.models", "hf_cp.patch"),
        ("hf_cp.plugin", "hf_cp.testing", "hf_cp.bench_layer", "hf_cp.bench_step"),
    ),
    "accelerate": (("hf_cp.plugin",), ("hf_cp.testing",)),
    "matplotlib": ((), ("hf_cp.report",)),
    "tokenizers": ((), ("hf_cp.bench_trajectory",)),
    "liger_kernel": ((), ("hf_cp.bench_step",)),
    "peft": ((), ("hf_cp.bench_step",)),
}


@dataclass(frozen=True)
class Import:
    source: str
    target: str
    lazy: bool
    where: str


def is_inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def layer(module: str) -> int:
    return next(
        (level for level, packages in enumerate(LAYERS) if any(is_inside(module, package) for package in packages)), -1
    )


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in ("kernels", "models"):
        parts = ("hf_cp", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> list[Path]:
    """Every module of the package by its real path: the two links would only list them again."""
    return sorted(
        path
        for folder in ("hf_cp", "kernels", "models")
        for path in (ROOT / folder).rglob("*.py")
        if path.relative_to(ROOT).parts[:2] not in (("hf_cp", "kernels"), ("hf_cp", "models"))
    )


def known_modules() -> set[str]:
    names = {module_name(path) for path in sources()}
    return names | {name.rpartition(".")[0] for name in names}


def imports_of(path: Path, source: str, known: set[str]) -> Iterator[Import]:
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            targets: list[str] = []
            if isinstance(child, ast.Import):
                targets = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    parents = package.split(".")[: len(package.split(".")) - child.level + 1]
                    base = ".".join([*parents, base] if base else parents)
                # `from . import plugin` imports a module, `from .plugin import install` a name of one.
                targets = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in child.names]
            for target in dict.fromkeys(targets):
                yield Import(name, target, lazy, f"{path.relative_to(ROOT)}:{getattr(child, 'lineno', 0)}")
            yield from visit(child, lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    return visit(ast.parse(source), lazy=False)


def complaints(found: Import) -> Iterator[str]:
    library = found.target.partition(".")[0]
    if library == "hf_cp":
        if found.target != found.source and layer(found.target) > layer(found.source):
            yield f"{found.where}: {found.source} imports {found.target}, which lies above it"
    elif library not in sys.stdlib_module_names:
        anywhere, in_functions = LIBRARIES.get(library, ((), ()))
        if any(is_inside(found.source, package) for package in anywhere):
            return
        if not any(is_inside(found.source, package) for package in in_functions):
            yield f"{found.where}: {found.source} may not import {library}"
        elif not found.lazy:
            yield f"{found.where}: {found.source} may import {library} inside a function only"


def test_every_import_points_down() -> None:
    known = known_modules()
    broken = [
        complaint
        for path in sources()
        for found in imports_of(path, path.read_text(encoding="utf-8"), known)
        for complaint in complaints(found)
    ]
    assert not broken, "\n".join(broken)


def test_every_module_has_a_layer() -> None:
    at_the_top = [
        module for module in map(module_name, sources()) if layer(module) == len(LAYERS) - 1 and module != "hf_cp"
    ]
    assert not at_the_top, f"give these a layer in LAYERS and in the architecture: {at_the_top}"


@pytest.mark.parametrize(
    ("path", "source", "wrong"),
    [
        ("kernels/gdn/chunk.py", "import transformers", True),
        ("kernels/gdn/chunk.py", "def f():\n    from accelerate import Accelerator", True),
        ("kernels/gdn/chunk.py", "from hf_cp.mesh import CpMesh", True),
        ("kernels/gdn/chunk.py", "from ...mesh import CpMesh", True),
        ("kernels/gdn/chunk.py", "import triton\nfrom .reference import gate\nfrom ..gdn import arguments", False),
        ("hf_cp/mesh.py", "from .modes import p2p", True),
        ("hf_cp/mesh.py", "from . import patch", True),
        ("hf_cp/mesh.py", "import triton", True),
        ("hf_cp/mesh.py", "from .config import PatchConfig\nfrom .kernels.gdn import get_backend", False),
        ("hf_cp/modes/p2p.py", "from ..models.common import attention", True),
        ("hf_cp/modes/p2p.py", "from ..mesh import CpMesh", False),
        ("models/qwen3_5/__init__.py", "from hf_cp.patch import patch", True),
        ("models/qwen3_5/__init__.py", "from accelerate import Accelerator", True),
        ("models/qwen3_5/__init__.py", "from ..common.family import Family\nimport transformers", False),
        ("hf_cp/patch.py", "from accelerate import Accelerator", True),
        ("hf_cp/patch.py", "from transformers import PreTrainedModel\nfrom . import plugin", False),
        ("hf_cp/plugin.py", "from transformers import Trainer", True),
        ("hf_cp/plugin.py", "def f():\n    from transformers import Trainer", False),
        ("hf_cp/testing.py", "import hf_cp", True),
        ("hf_cp/patch.py", "from . import cli", True),
        ("hf_cp/planning/cost.py", "from ..bench import main", True),
        ("hf_cp/cli.py", "from . import bench, doctor", False),
        ("hf_cp/config.py", "from .mesh import CpMesh", True),
    ],
)
def test_rule(path: str, source: str, wrong: bool) -> None:
    found = [complaint for i in imports_of(ROOT / path, source, known_modules()) for complaint in complaints(i)]
    assert bool(found) == wrong, found
