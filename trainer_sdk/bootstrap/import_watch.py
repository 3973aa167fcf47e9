"""Finds modules whose import depends on the process, so that each rank must import them itself.

The forge imports once for all ranks. A module that reads its rank at import, or that names a run
after the process id or the time, would give the forge's value to all ranks. Such a module, and all
modules that import it, are left to the ranks; the forge imports the rest.
"""

import os
import random
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from types import ModuleType
from typing import Any

from trainer_sdk.wire import Unfit

_Environ: Any = type(os.environb)
_HANDLED = frozenset(
    {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "PYTORCH_NVML_BASED_CUDA_CHECK"}
)
"""Libraries in C read the numbers of threads, too; `process_setup` sets the rank's own values. The
last one is the forge's own, and changes no answer, only how torch finds it.
"""
_LONGEST_NAME = 200
_MOMENT = re.compile(
    r"20\d\d[-_.]?[01]\d[-_.]?[0-3]\d[-_ T.]{0,2}[0-2]\d[-_:.h]?[0-5]\d|(?<!\d)1\d{9}(?!\d)"
)
"""A date with hour and minute, or seconds since 1970."""
_NAMED_MOST = 3


@dataclass(frozen=True, slots=True)
class ImportFinding:
    """Something that a module has done while it was imported."""

    modules: tuple[str, ...]
    """The module, then the modules that were importing it, the innermost first."""
    action: str


@dataclass(slots=True)
class ImportWatch:
    """Watches the imports within its `with` block; imported code cannot notice it.

    It does not see reads of the environment in C (`getenv`), nor values that a module keeps
    anywhere but in its own globals.
    """

    own: Collection[str]
    """The variables whose values differ between ranks."""
    environ: Any
    """`os.environ`, whose class is replaced within the block."""
    findings: list[ImportFinding] = field(default_factory=list)
    generators: list[random.Random] = field(default_factory=list)
    """The generators that the system has seeded: another process would draw other numbers."""
    _read: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)
    _iterated: set[str] = field(default_factory=set)
    """The modules that have iterated over the whole environment."""
    _asked_pid: set[str] = field(default_factory=set)
    _given: dict[int, str] = field(default_factory=dict)
    _seed: Any = random.Random.seed
    _getpid: Callable[[], int] = os.getpid
    _before: dict[str, str] = field(default_factory=dict)
    _after: dict[str, str] = field(default_factory=dict)
    _known: frozenset[str] = frozenset()

    def __enter__(self) -> "ImportWatch":
        self._before, self._known = dict(self.environ), frozenset(sys.modules)
        for environ in (self.environ, os.environb):
            environ.__class__ = _watched(self)
        random.Random.seed = self._seeding(random.Random.seed)  # type: ignore[method-assign]
        os.getpid = self._asking_pid
        return self

    def __exit__(self, *_: object) -> None:
        for environ in (self.environ, os.environb):
            environ.__class__ = _Environ
        random.Random.seed, os.getpid = self._seed, self._getpid  # type: ignore[method-assign]
        self._after = dict(self.environ)
        for module in self.new_modules():
            if vars(module).get("getpid") == self._asking_pid:
                module.getpid = self._getpid  # type: ignore[attr-defined]

    def look(self, since: Collection[str]) -> None:
        """Inspect the globals of modules that were imported after `since`."""
        for name, module in sys.modules.copy().items():  # `list` may run code that imports
            if name not in since and isinstance(module, ModuleType):
                self._look_at(module)

    def why_unfit(self, rank: Mapping[str, str]) -> Unfit | None:
        """Why a rank with this environment must import modules itself; None if not."""
        for name, readers in self._read.items():
            if name in _HANDLED or rank.get(name) == self._before.get(name):
                continue
            self.findings += [ImportFinding(modules, f"reads {name}") for modules in readers]
        return self.verdict()

    def verdict(self) -> Unfit | None:
        """The modules that must be left to the ranks, and the others; None if all are fit."""
        if not self.findings:
            return None
        tainted = self._tainted()
        named = sorted({_top(name, tainted) for name in tainted})
        return Unfit(
            reason=self._reason(),
            module=named[0],
            without=tuple(named),
            besides=tuple(self._rest(tainted)),
        )

    def changes(self, rank: Mapping[str, str]) -> dict[str, str | None]:
        """The variables that imports have changed, without those that the rank itself sets."""
        return {
            name: self._after.get(name)
            for name in self._before.keys() | self._after.keys()
            if self._after.get(name) != self._before.get(name) == rank.get(name)
        }

    def new_modules(self) -> Iterator[ModuleType]:
        """The modules that were imported since the block began."""
        for name, module in sys.modules.copy().items():  # `list` may run code that imports
            if name not in self._known and isinstance(module, ModuleType):
                yield module

    # What imports do.

    def reads(self, name: str) -> None:
        """Note that a variable is read or set by name."""
        if id(name) in self._given:
            return  # by code that iterates over all variables
        modules = _importing()
        readers = self._read.setdefault(name, [])
        if modules and len(readers) < _NAMED_MOST:
            readers.append(modules)
        if modules and name in self.own:
            self.findings.append(ImportFinding(modules, f"reads {name}"))

    def iterates(self, names: Iterable[str]) -> Iterator[str]:
        """Note that a module iterates over all variables."""
        self._iterated.update(_importing()[:1])
        for name in names:
            self._given[id(name)] = name
            yield name

    def _asking_pid(self) -> int:
        self._asked_pid.update(_importing()[:1])
        return self._getpid()

    def _seeding(self, seed: Any) -> Any:
        def seeded(generator: random.Random, a: Any = None, version: int = 2) -> None:
            seed(generator, a, version)
            if a is None:
                self.generators.append(generator)
            else:
                self.generators = [other for other in self.generators if other is not generator]

        return seeded

    def _look_at(self, module: ModuleType) -> None:
        asked_pid, pid = module.__name__ in self._asked_pid, str(self._getpid())
        for name, value in list(vars(module).items()):
            action = ""
            if isinstance(value, dict):
                is_copy = module.__name__ in self._iterated and self._before.keys() <= value.keys()
                action = f"keeps a copy of the environment ({name})" if is_copy else ""
            elif isinstance(value, str | PurePath) and len(str(value)) <= _LONGEST_NAME:
                if asked_pid and re.search(rf"(?<!\d){pid}(?!\d)", str(value)):
                    action = f"makes a name from the process id ({name})"
                elif _is_of_now(str(value)):
                    action = f"makes a name from the time ({name})"
            if action:
                self.findings.append(ImportFinding((module.__name__,), action))

    # What follows from it.

    def _tainted(self) -> set[str]:
        """The modules with findings, and all modules that hold an object of theirs."""
        tainted = {name for finding in self.findings for name in finding.modules}
        modules = list(self.new_modules())
        while True:
            more = {
                module.__name__
                for module in modules
                if module.__name__ not in tainted
                and (_is_below(module.__name__, tainted) or _holds_of(module, tainted))
            }
            if not more:
                return tainted
            tainted |= more

    def _rest(self, tainted: set[str]) -> Iterator[str]:
        for name in sys.modules.copy():
            if name in self._known or name in tainted or _is_below(name, tainted):
                continue
            if getattr(sys.modules[name], "__spec__", None) is not None:
                yield name

    def _reason(self) -> str:
        first = self.findings[0].modules
        actions = dict.fromkeys(
            finding.action for finding in self.findings if finding.modules[0] == first[0]
        )
        shown = ", ".join(list(actions)[:_NAMED_MOST]).replace(", reads ", ", ")
        more = len({finding.modules[0] for finding in self.findings}) - 1
        others = f"; so do {more} other modules" if more else ""
        outer = first[-1].partition(".")[0]
        by = f", which {outer} imports," if outer != first[0] else ""
        return f"{first[0]}{by} {shown} while it is imported{others}"


def _watched(imports: ImportWatch) -> Any:
    """A class for `os.environ` that reports each read and write."""

    class Watched(_Environ):  # type: ignore[misc]
        def __getitem__(self, key: Any) -> Any:
            imports.reads(os.fsdecode(key) if isinstance(key, bytes) else key)
            return super().__getitem__(key)

        def __setitem__(self, key: Any, value: Any) -> None:
            imports.reads(os.fsdecode(key) if isinstance(key, bytes) else key)
            super().__setitem__(key, value)

        def __delitem__(self, key: Any) -> None:
            imports.reads(os.fsdecode(key) if isinstance(key, bytes) else key)
            super().__delitem__(key)

        def __iter__(self) -> Any:
            return imports.iterates(super().__iter__())

    return Watched


def _importing() -> tuple[str, ...]:
    """The modules that are being imported, the innermost first."""
    modules: list[str] = []
    frame = sys._getframe(2)  # noqa: SLF001
    while frame.f_back is not None:
        if frame.f_code.co_name == "<module>":
            name = str(frame.f_globals.get("__name__", ""))
            if name == "__main__":
                break  # the frames below are the forge's
            if name in sys.modules:
                modules.append(name)
        frame = frame.f_back
    return tuple(modules)


def _is_of_now(text: str) -> bool:
    """Whether the text has the present minute in it, or the present second since 1970."""
    match = _MOMENT.search(text)
    if match is None:
        return False
    digits = re.sub(r"\D", "", match[0])
    now = time.time()  # noqa: TID251 - the clock that the module has read
    moments = {str(int(now) - back) for back in range(120)}
    for local in (time.localtime, time.gmtime):
        moments |= {time.strftime("%Y%m%d%H%M", local(now - back)) for back in (0, 60, 120)}
    return digits in moments


def _is_below(name: str, packages: Collection[str]) -> bool:
    while name:
        name = name.rpartition(".")[0]
        if name in packages:
            return True
    return False


def _top(name: str, tainted: Collection[str]) -> str:
    """The outermost tainted package of a module."""
    parts = name.split(".")
    prefixes = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return next(prefix for prefix in prefixes if prefix in tainted)


def _holds_of(module: ModuleType, tainted: Collection[str]) -> bool:
    for value in list(vars(module).values()):
        named = value.__name__ if isinstance(value, ModuleType) else None
        if named is None and isinstance(value, type | type(_is_below)):
            named = value.__module__
        if named in tainted:
            return True
    return False
