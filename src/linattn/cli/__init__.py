"""The `linattn` command: one module a verb."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import torch


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (None: the process's own) and return its exit code.

    0 is success; 2 a mistake of the user's or of the machine's, told in one line on stderr; 130 means interrupted.
    """
    try:
        return _main(sys.argv[1:] if argv is None else argv)
    except ModuleNotFoundError as error:
        if error.name is None:  # the library's own words
            return _fail(str(error))
        if error.name not in ("tyro", "rich"):
            raise
        return _fail(f"the command line needs the package {error.name!r}: pip install 'linattn[cli]'")
    except BrokenPipeError:  # the reader of our output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, FloatingPointError) as error:
        return _fail(str(error))
    except (MemoryError, torch.OutOfMemoryError) as error:
        return _fail(f"out of memory: {str(error).splitlines()[0] if str(error) else 'no details known'}")
    except KeyboardInterrupt:
        print("\nlinattn: interrupted", file=sys.stderr)
        return 130


def _main(argv: Sequence[str]) -> int:
    import tyro

    from linattn.cli import compare, demo, explain, generate, list_, train
    from linattn.cli.command import Command
    from linattn.cli.output import Output

    verbs: dict[str, Callable[..., Command]] = {
        "train": train.Train,
        "generate": generate.Generate,
        "compare": compare.Compare,
        "list": list_.List,
        "explain": explain.Explain,
        "demo": demo.Demo,
    }
    try:
        command: Command = tyro.extras.subcommand_cli_from_dict(
            verbs,
            prog="linattn",
            description="Linear attention: train, generate, compare.",
            args=list(argv),
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
        )
    except SystemExit as end:  # tyro has said what it had to say
        return end.code if isinstance(end.code, int) else 2
    if command.threads is not None:
        if command.threads < 1:
            raise ValueError(f"threads: got {command.threads}, wanted at least 1")
        torch.set_num_threads(command.threads)
    return command.run(Output(as_json=command.json))


def _fail(message: str) -> int:
    print(f"linattn: {' '.join(message.split())}", file=sys.stderr)
    return 2
