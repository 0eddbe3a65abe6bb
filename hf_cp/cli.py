"""The command `hf-cp`: doctor, plan, bench and trace. `hf-cp COMMAND --help` says what each takes.

An error is one line on standard error, with exit status 2.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

# Each is a module with `add_arguments(parser)` and `run(arguments, argv)`, imported when it is asked for.
COMMANDS = {
    "doctor": (".doctor", "what can run here, and what to install for the rest"),
    "plan": (".planning.command", "memory, messages and time of a training step on paper; the launch configuration"),
    "bench": (".bench", "time layers and training steps, patched and stock"),
    "trace": (".trace", "computing and communication by layer, from traces of torch.profiler"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(prog="hf-cp", description="Context parallelism for hybrid models in Hugging Face.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    name = next((word for word in argv if not word.startswith("-")), None)
    module = None
    for command, (where, said) in COMMANDS.items():
        subparser = commands.add_parser(command, help=said)
        if command == name:
            module = importlib.import_module(where, __package__)
            subparser.description = (module.__doc__ or said).strip()
            subparser.formatter_class = argparse.RawDescriptionHelpFormatter
            module.add_arguments(subparser)
    arguments = parser.parse_args(argv)
    assert module is not None
    try:
        return module.run(arguments, argv[1:])
    except ValueError as error:
        print(f"hf-cp {name}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
