"""The stores by which wrapped ranks meet: NVRx's names for torch's stores."""

import datetime

from torch.distributed import FileStore as TorchFileStore  # type: ignore[attr-defined]
from torch.distributed import TCPStore as TorchTCPStore  # type: ignore[attr-defined]

from trainer_sdk.environment import environ
from trainer_sdk.nvrx.inprocess.iteration_store import BarrierTimeout
from trainer_sdk.nvrx.inprocess.state import RestartError

_WITHIN = datetime.timedelta(seconds=300)
_HOST_RANK = 0


class BarrierError(RestartError):
    """A barrier of the ranks has failed."""


class StoreMixin:
    """The base of the stores that `Wrapper` accepts."""


class TCPStore(TorchTCPStore, StoreMixin):
    """A store that the first rank hosts, by default where the function's ranks meet as well."""

    def __init__(  # noqa: PLR0913 - NVRx's parameters
        self,
        host_name: str | None = None,
        port: int | None = None,
        world_size: int | None = None,
        timeout: datetime.timedelta = _WITHIN,
        wait_for_workers: bool = True,
        multi_tenant: bool = True,
        use_libuv: bool = True,
    ) -> None:
        host = _variable("MASTER_ADDR") if host_name is None else host_name
        number = int(_variable("MASTER_PORT")) if port is None else port
        size = int(environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        self.serves_function = (host_name, port) == (None, None)
        """Whether `init_process_group()` of the function reaches this store by its defaults."""

        def connect(is_master: bool) -> None:
            super(TCPStore, self).__init__(
                host_name=host,
                port=number,
                world_size=size,
                is_master=is_master,
                timeout=timeout,
                wait_for_workers=wait_for_workers,
                multi_tenant=multi_tenant,
                use_libuv=use_libuv,
            )

        if int(environ.get("RANK", "0")) == _HOST_RANK:
            try:
                connect(is_master=True)
            except (RuntimeError, OSError):  # the launcher hosts a store there already
                connect(is_master=False)
        else:
            connect(is_master=False)


class FileStore(TorchFileStore, StoreMixin):
    """A store in a file that all ranks share."""


def _variable(name: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise ValueError(
            f"{name} is not set: a launcher sets it; without one, give store_kwargs=dict(host_name="
            "…, port=…)"
        )
    return value


__all__ = ["BarrierError", "BarrierTimeout", "FileStore", "StoreMixin", "TCPStore"]
