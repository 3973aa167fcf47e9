"""The analysis of a script's source: its imports, and whether it needs dynamo."""

import warnings
from pathlib import Path

import pytest

from trainer_sdk.bootstrap.script_analysis import read_script
from trainer_sdk.wire import RankCommand

SCRIPT = RankCommand(kind="script", target="train.py")


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)


def imports(folder: Path, command: RankCommand = SCRIPT) -> tuple[str, ...]:
    return read_script(command, str(folder)).imports()


def needs_dynamo(folder: Path, command: RankCommand = SCRIPT) -> bool:
    return read_script(command, str(folder)).needs_dynamo()


def test_only_installed_modules_of_the_top_level_are_imported(tmp_path: Path) -> None:
    write(
        tmp_path,
        hypothesis="",  # the user's own hides the installed one
        train="import os, msgspec.json as j, hypothesis, nowhere\n"
        "try:\n    import numpy\nexcept ImportError:\n    pass\n"
        "from . import beside\n"
        "if __name__ == '__main__':\n    import torch\n"
        "def late():\n    import nats\n",
    )
    assert imports(tmp_path) == ("msgspec.json", "numpy")


@pytest.mark.parametrize(
    "text",
    [
        "import numpy, torch.optim; x = (",
        "import torch.optim\0",
        "import torch.optim; " + "(" * 10_000,
    ],
)
def test_an_unreadable_script_imports_nothing(tmp_path: Path, text: str) -> None:
    write(tmp_path, train=text)
    assert imports(tmp_path) == ()
    assert not needs_dynamo(tmp_path)


@pytest.mark.parametrize("kind", ["script", "module"])
def test_a_missing_script_imports_nothing(tmp_path: Path, kind: str) -> None:
    command = RankCommand(kind="script" if kind == "script" else "module", target="nowhere")
    assert imports(tmp_path, command) == ()
    assert not needs_dynamo(tmp_path, command)


def test_a_script_that_python_warns_about_is_read_without_warnings(tmp_path: Path) -> None:
    write(tmp_path, train="import numpy\npattern = '\\d'\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert imports(tmp_path) == ("numpy",)


def test_the_imports_of_a_module_are_found_without_running_its_package(tmp_path: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    write(
        package, __init__="raise SystemExit\n", train="import msgspec\n", __main__="import numpy\n"
    )
    for target, found in (("mine.train", ("msgspec",)), ("mine", ("numpy",))):
        assert imports(tmp_path, RankCommand(kind="module", target=target)) == found


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nmade = torch.optim.SGD([])",
        "import torch as t\ndef main():\n    return t.optim.AdamW([])",
        "import torch.nn\nkind = getattr(torch.optim, 'SGD')",
        "import torch.optim as o",
        "import torch.optim.lr_scheduler",
        "from torch import nn, optim",
        "from torch.optim import AdamW",
        "from torch.optim.adam import Adam",
        "if fast:\n    try:\n        from torch.optim import SGD\n    finally:\n        pass",
        "import torch\nclass Own(torch.optim.Optimizer): ...\ntorch.optim.SGD",
        "from torch.optim import Optimizer, SGD",
        "from torch.optim import *",
        "from torch.utils.checkpoint import checkpoint",
        "from torch.utils import checkpoint",
        "import torch.utils.checkpoint as c",
        "from torch.distributed.fsdp import fully_shard",
        "from torch.distributed.tensor import DTensor",
        "from torch.optim.optimizer import _use_grad_for_differentiable",
        "from torch import nn\nnn.parallel.DistributedDataParallel(nn.Linear(1, 1))",
        "from torch.nn.parallel import DistributedDataParallel as DDP",
    ],
)
def test_a_script_that_uses_torch_optim_needs_dynamo(tmp_path: Path, text: str) -> None:
    write(tmp_path, train=text)
    assert needs_dynamo(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "import torch  # no torch.optim here",
        "import torch\n'''The optim of torch: torch.optim.SGD'''",
        "import torch\nclass Model:\n    def make(self):\n        self.optim = self.torch.optim",
        "import torch\nimport mine\nmine.optim.SGD()",
        "import torch.nn as nn\nnn.optim",
        "from mine import optim",
        "from mine import DistributedDataParallel",
        "from torch.nn.parallel import DataParallel",
        "from mine.torch.optim import SGD",
        "import torch\nclass Own(torch.optim.Optimizer): ...",
        "from torch.optim import Optimizer as Base",
        "from torch.utils.data import DataLoader",
        "from torch.utils import checkpoints",
        "from torch.optim.optimizer import Optimizer",
        "from .torch.optim import SGD",
        "import torch\ndef save(one: torch.optim.Optimizer) -> torch.optim.SGD: ...",
        "import torch\none: torch.optim.Optimizer",
        "import typing\nif typing.TYPE_CHECKING:\n    from torch.optim import SGD",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch.optim import SGD",
        "optim = torch = 1",
    ],
)
def test_a_script_that_only_mentions_an_optimizer_does_not_need_dynamo(
    tmp_path: Path, text: str
) -> None:
    write(tmp_path, train=text)
    assert not needs_dynamo(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "import making",
        "def main():\n    from making import make",
        "import tools.making",
        "from tools import making",
        "from tools.making import make",
    ],
)
def test_own_modules_of_a_script_are_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "tools").mkdir()
    for folder in (tmp_path, tmp_path / "tools"):
        write(folder, making="import torch\ndef make(of): return torch.optim.SGD(of)")
    write(tmp_path, train=text)
    assert needs_dynamo(tmp_path)


@pytest.mark.parametrize(
    "text", ["from . import making", "from .making import make", "from mine.making import make"]
)
def test_own_modules_of_a_module_are_read(tmp_path: Path, text: str) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    write(package, __init__="", making="from torch import optim", train=text)
    assert needs_dynamo(tmp_path, RankCommand(kind="module", target="mine.train"))
    script = RankCommand(kind="script", target="mine/train.py")
    assert not needs_dynamo(tmp_path, script), "it has no package, and another folder"


def test_imports_of_own_modules_are_not_followed(tmp_path: Path) -> None:
    write(tmp_path, train="import middle", middle="import making", making="import torch.optim")
    assert not needs_dynamo(tmp_path)


def test_installed_modules_are_not_read(tmp_path: Path) -> None:
    write(tmp_path, train="import torch\nimport torch.nn")  # torch's own code names torch.optim
    assert not needs_dynamo(tmp_path)


def test_the_source_that_is_read_is_limited(tmp_path: Path) -> None:
    write(tmp_path, making="import torch.optim", big="#" * 2**20)
    many = [f"m{number}" for number in range(20)]
    write(tmp_path, train=f"import {','.join(many)}, making", **dict.fromkeys(many, ""))
    assert not needs_dynamo(tmp_path), "the twenty-first file was read"
    write(tmp_path, train="import big, making")
    assert not needs_dynamo(tmp_path), "more than a MiB was read"
    write(tmp_path, train="import making" + " " * 2**20)
    assert not needs_dynamo(tmp_path), "a script of more than a MiB was read"
    write(tmp_path, train="import making, big")
    assert needs_dynamo(tmp_path)


@pytest.mark.parametrize(
    ("text", "survives"),
    [
        ("@run.survive(build)\ndef train(state, step): ...\n", True),
        ("def main():\n    trainer_sdk.session().survive(build)(train)()\n", True),
        ("# run.survive(build)\nsurvive = 'run.survive'\n", False),
    ],
)
def test_a_script_that_survives_is_recognized(tmp_path: Path, text: str, survives: bool) -> None:
    (tmp_path / "train.py").write_text(text)
    assert read_script(SCRIPT, str(tmp_path)).survives() == survives
