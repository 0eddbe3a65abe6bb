"""Triton without a GPU, for scripts in a process of their own: kernels interpreted on the CPU, or compiled for sm_90.

Whether Triton interprets is fixed when it is imported, so neither can run beside other tests.
"""

# Triton is optional.
# pyright: reportMissingImports=false, reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from forked_scripts import run_script


def in_process(script: str, mode: str, **environment: str) -> Any:
    """The JSON that a script prints last, started with `mode` and with these variables beside the inherited ones.

    Without variables of its own the process is forked from one that has imported torch, and Triton without interpreter.
    """
    if not environment and "TRITON_INTERPRET" not in os.environ:
        return json.loads(run_script(Path(script), mode, timeout=300.0).splitlines()[-1])
    # The interpreter must not be asked for by the environment of the tests themselves.
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script, mode], env=inherited | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def prepare_interpreter() -> None:
    """Mends the interpreter of Triton 3.6: it converts an array of one element by int(), which numpy 2.4 refuses."""
    import triton
    import triton.runtime.interpreter as interpreter

    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7):
        return
    patch_tensor = interpreter._patch_lang_tensor

    def patch_and_squeeze(tensor: Any, *args: Any) -> None:
        patch_tensor(tensor, *args)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_squeeze


_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
}


def _kind_of(value: Any, parameter: Any) -> tuple[str, bool]:
    """The type of an argument as a launch would specialise it, and whether it is a multiple of 16."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
    from triton.tools.tensor_descriptor import TensorDescriptor

    free = parameter.do_not_specialize
    if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and not free):
        return "constexpr", False
    if isinstance(value, TensorDescriptor | GluonDescriptor):
        layout = f",{value.layout!r}" if isinstance(value, GluonDescriptor) else ""
        return f"tensordesc<{_NAMES[value.base.dtype]}[{','.join(map(str, value.block_shape))}]{layout}>", False
    if isinstance(value, torch.Tensor):
        return "*" + _NAMES[value.dtype], not free
    if isinstance(value, float):
        return "fp32", False
    return "i32", value % 16 == 0 and not free


@contextmanager
def compiled_launches() -> Iterator[list[dict[str, Any]]]:
    """In its body launches compile for sm_90 instead of running; each adds registers, spills and PTX to the list."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
    from triton.runtime.jit import JITFunction

    reports: list[dict[str, Any]] = []

    def compile_one(self: Any, *args: Any, grid: Any = None, warmup: bool = False, **keywords: Any) -> None:
        bound: dict[str, Any] = dict(zip(self.arg_names, args, strict=False)) | keywords
        options = {name: value for name, value in keywords.items() if name not in self.arg_names}
        signature, constants, attributes = {}, {}, {}
        for index, (name, parameter) in enumerate(zip(self.arg_names, self.params, strict=True)):
            kind, aligned = _kind_of(bound[name], parameter)
            signature[name] = kind
            if kind == "constexpr":
                constants[(index,)] = bound[name]
            if aligned:
                attributes[(index,)] = [["tt.divisibility", 16]]
        kind_of_source = GluonASTSource if isinstance(self, GluonJITFunction) else ASTSource
        source = kind_of_source(self, signature, constants, attributes)
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        log = _assemble(ptx, knobs)
        registers, spilled = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
        assert registers is not None, log
        assert spilled is not None, log
        report = {"kernel": self.__name__, "registers": int(registers.group(1)), "spilled": int(spilled.group(1))}
        reports.append(report | {"ptx": ptx})

    run, JITFunction.run = JITFunction.run, compile_one
    try:
        yield reports
    finally:
        JITFunction.run = run


def _assemble(ptx: str, knobs: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        log = ""
        # Triton writes PTX for the newest assembler that it carries.
        for tool in (knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell):
            command = [tool.path, "-v", "-arch=sm_90a", str(path), "-o", str(path.with_suffix(".cubin"))]
            log = subprocess.run(command, capture_output=True, text=True).stderr
            if "Used" in log:
                break
    return log
