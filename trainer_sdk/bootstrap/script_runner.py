"""Runs the user's script as the interpreter itself would, and reports how it ends."""

import os
import sys

from trainer_sdk.bootstrap.agent_link import AgentLink

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Any, NoReturn

_Module = type(sys)

_OURS = os.path.dirname(os.path.abspath(__file__))
_FileLoader: "Any" = type(
    __spec__.loader
)  # the loader of this module: to import importlib would cost more
_FAILED = 1
_NICENESS = 10
"""Gives a tenth of the turns of other processes."""
_INTERRUPTED = 130


def run(
    kind: str, target: str, arguments: list[str], link: AgentLink, environ: "Mapping[str, str]"
) -> None:
    """Run the script to its end.

    Returns if the script returns; otherwise it raises SystemExit with the exit code that Python
    would use. The caller lets the error pass, so that threads are joined and exit handlers run.
    """
    link.up()
    sys.orig_argv = [sys.executable, *["-m"] * (kind == "module"), target, *arguments]
    if kind != "module" and not os.path.exists(target):
        _end_without(target, link, environ)
    try:
        if kind == "module":
            _run_module(target, arguments)
        elif os.path.isfile(target) and not _is_zip(target):
            _run_file(target, arguments)
        else:
            _run_container(target, arguments)
    except SystemExit as leaving:
        code = _code(leaving)
        _await_saves(code, link, environ)
        _report_end(leaving if code else None, code, link, environ)
        raise
    except BaseException as error:  # Python would print any of them and exit
        error.__traceback__ = _without_ours(error.__traceback__)
        interrupted = isinstance(error, KeyboardInterrupt)
        _print(error)
        # After the error was printed: the agent may read the last lines of the log.
        _report_end(error, _INTERRUPTED if interrupted else _FAILED, link, environ)
        if interrupted:  # Python ends by the signal, after its exit handlers
            sys.excepthook = _print_nothing
            raise
        raise SystemExit(_FAILED) from None
    else:
        _await_saves(0, link, environ)
        link.ended(0)


def _end_without(target: str, link: AgentLink, environ: "Mapping[str, str]") -> "NoReturn":
    """Exit with 2, as Python does, and have it recorded what is missing."""
    missing = FileNotFoundError(2, "No such file or directory", os.path.abspath(target))
    sys.stderr.write(f"{sys.executable}: can't open file: {missing}\n")
    _report_end(missing, 2, link, environ)
    raise SystemExit(2)


def _run_file(path: str, arguments: list[str]) -> None:
    whole = os.path.abspath(path)
    sys.argv = [path, *arguments]
    _first_on_path(os.path.dirname(os.path.realpath(whole)))
    with open(whole, "rb") as file:
        source = file.read()
    main = _Module("__main__")
    sys.modules["__main__"] = main
    vars(main).update(
        __file__=whole,
        __builtins__=sys.modules["builtins"],
        __annotations__={},
        __cached__=None,
        __loader__=_FileLoader("__main__", whole),
    )
    exec(compile(source, whole, "exec", dont_inherit=True), vars(main))  # noqa: S102


def _run_module(name: str, arguments: list[str]) -> None:
    sys.argv = [name, *arguments]
    _first_on_path(os.getcwd())
    _run_by_name(name, alter_argv=True)


def _run_container(path: str, arguments: list[str]) -> None:
    """A folder or a zip file with a `__main__.py`."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, path)
    _run_by_name("__main__", alter_argv=False)


def _run_by_name(name: str, *, alter_argv: bool) -> None:
    import runpy  # a plain script does not need it

    sys.modules["__main__"] = _Module("__main__")
    # `python -m` itself calls this; the public functions give the module another name.
    runpy._run_module_as_main(name, alter_argv=alter_argv)  # type: ignore[attr-defined]  # noqa: SLF001


def _first_on_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def _is_zip(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _code(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    return leaving.code & 0xFF if isinstance(leaving.code, int) else _FAILED


def _report_end(
    error: BaseException | None, code: int, link: AgentLink, environ: "Mapping[str, str]"
) -> None:
    if not link.attached:
        return
    written = False
    if error is not None and link.folder:
        from trainer_sdk.bootstrap import exception_record  # only failing ranks need it

        try:
            exception_record.write(error, environ, link.folder)
            written = True
            exception_record.write_flight_recorder(environ, link.folder, error)
        except OSError as failed:
            sys.stderr.write(f"everstep: the exception could not be recorded: {failed}\n")
    link.ended(code, error=written)
    if written:
        _step_back()


def _step_back() -> None:
    """Leave the processors to those who start the next ranks: an exit takes 0.1 s of processor."""
    try:  # noqa: SIM105  contextlib would cost every rank
        os.nice(_NICENESS)
    except OSError:  # a sandbox may forbid it
        pass


def _await_saves(code: int, link: AgentLink, environ: "Mapping[str, str]") -> None:
    """Wait for the saves of a script that has succeeded; SystemExit if one of them must fail it."""
    leaving = sys.modules.get("trainer_sdk.checkpoint.script_end")
    if leaving is None:
        return
    failure = leaving.script_ended(code)
    if failure is not None:
        _report_end(failure, _FAILED, link, environ)
        raise SystemExit(_FAILED) from None


def _print(error: BaseException) -> None:
    sys.last_type, sys.last_value = type(error), error
    sys.last_traceback = error.__traceback__
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception as broken:  # noqa: BLE001 - the user's hook; Python prints both errors, too
        sys.stderr.write("Error in sys.excepthook:\n")
        sys.__excepthook__(type(broken), broken, broken.__traceback__)
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, error.__traceback__)


def _print_nothing(*_: object) -> None:
    pass


def _without_ours(trace: "TracebackType | None") -> "TracebackType | None":
    """The traceback from the user's first frame on, without our frames that called it."""
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _is_ours(path: str) -> bool:
    return path.startswith((_OURS, "<frozen runpy>", "<frozen importlib"))
