"""Stands in for NVRx: its modules are those of `trainer_sdk.nvrx`."""

from trainer_sdk.nvrx.aliases import stand_in

stand_in(__name__)
