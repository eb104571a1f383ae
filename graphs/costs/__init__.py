"""Time and workspace of each op: profiled on the device, or the roofline of a named one."""

from graphs.costs.devices import DEVICES, DeviceSpec, device_spec
from graphs.costs.profiled import profiled
from graphs.costs.roofline import roofline
from graphs.costs.signature import op_signature

__all__ = ["DEVICES", "DeviceSpec", "device_spec", "op_signature", "profiled", "roofline"]
