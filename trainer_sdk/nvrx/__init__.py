"""NVRx's calls for a training that makes them already, over the parts of Everstep.

    from trainer_sdk.nvrx import RankMonitorClient

replaces `from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient`. A training that
stays as it is runs under `everstep run --as-nvrx`, or imports `trainer_sdk.nvrx.stand_in` first:
then `import nvidia_resiliency_ext` finds these modules. `docs/guides/from-nvrx.md` lists every
name.
"""

from trainer_sdk.nvrx.fault_tolerance import (
    FaultToleranceConfig,
    RankMonitorClient,
    RankMonitorClientError,
    WorkloadAction,
    WorkloadControlRequest,
)
from trainer_sdk.nvrx.timeouts import HeartbeatTimeouts, SectionTimeouts

__all__ = [
    "FaultToleranceConfig",
    "HeartbeatTimeouts",
    "RankMonitorClient",
    "RankMonitorClientError",
    "SectionTimeouts",
    "WorkloadAction",
    "WorkloadControlRequest",
]
VERSION = "0.7.0"
"""The release of NVRx that has the names in this package."""
