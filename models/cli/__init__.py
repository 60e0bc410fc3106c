"""The command line, `lin-attn`. Each command's module is imported when it is called: help comes at once."""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

# command → (its module, whose `main` takes the arguments after the command; its line of help)
COMMANDS = {
    "fit": ("training", "train a model"),
    "validate": ("training", "evaluate a checkpoint on the validation text"),
    "test": ("training", "evaluate a checkpoint on the test text"),
    "predict": ("training", "score each document of the test text with a checkpoint"),
    "generate": ("generate", "continue a prompt with a checkpoint"),
    "evaluate": ("evaluate", "loss and bits per byte of a model on a text, at several lengths"),
    "lm-eval": ("harness", "run tasks of lm-evaluation-harness on a model"),
    "zoo": ("zoo", "list the checkpoints that come with lin-attn"),
    "data": ("data", "prepare a corpus and tell what is in it"),
    "scale": ("scale", "measure time and memory against sequence length"),
    "convert": ("convert", "write a model in the format of lin-attn or of transformers"),
    "average": ("average", "average the weights of checkpoints"),
    "figures": ("figures", "draw the figures of the RoFormer paper that need no training"),
    "env": ("env", "print versions, devices, and which backends are usable"),
}

USAGE = """usage: lin-attn COMMAND [ARGUMENTS]

Train, evaluate and use linear-attention and softmax language models.

commands:
{commands}

`lin-attn COMMAND --help` tells its arguments. Ready configurations for fit lie in {configs}.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit status: 0, 2 after a mistake of the user's, told in one line, 130 on Ctrl-C.

    A run that SIGTERM or Ctrl-C ended after its checkpoint was saved has 143 or 130, in the first process.

    Set LIN_ATTN_TRACEBACK=1 to see where an error was raised.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(usage())
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        sys.stderr.write(f"lin-attn: {command!r} is no command; wanted one of {', '.join(COMMANDS)}\n")
        return 2
    run: Callable[[str, list[str]], None] = import_module(f"models.cli.{COMMANDS[command][0]}").main
    try:
        run(command, rest)
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if os.environ.get("LIN_ATTN_TRACEBACK") or not is_a_users_mistake(error):
            raise
        sys.stderr.write(f"lin-attn {command}: {innermost(str(error))}\n")
        return 2
    return 0


def is_a_users_mistake(error: Exception) -> bool:
    """Whether an error is told by its message alone: ours, the system's, and Lightning's for a misconfiguration."""
    kinds = ("ValueError", "FloatingPointError", "OSError", "MisconfigurationException")
    return any(kind.__name__ in kinds for kind in type(error).__mro__)


def innermost(message: str) -> str:
    """What a parser's message is about, which for a choice of types is the last of a list of complaints."""
    noise = ("Expected a <class 'NoneType'>", "Problem with given class_path", "Parser key", "Expected a path but",
             "Does not validate against any of the Union subtypes")  # fmt: skip
    lines = [line.strip() for line in message.splitlines()]
    told = [line[2:] for line in lines if line.startswith("- ") and not line[2:].startswith(noise)]
    unknown = [i for i, line in enumerate(lines[:-1]) if line.startswith("- Problem with given class_path")]
    if not told and unknown:  # of a class that is none the next line says why
        return " ".join(lines[unknown[-1] : unknown[-1] + 2])[2:]
    return told[-1] if told else message


def usage() -> str:
    """The text of `lin-attn --help`."""
    from models.cli.configs import config_folder

    commands = "\n".join(f"  {name:10}{line}" for name, (_, line) in COMMANDS.items())
    return USAGE.format(commands=commands, configs=config_folder())
