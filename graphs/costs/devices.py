"""What devices can do, from their datasheets, and how much of it kernels reach.

Peak rates are dense (without the factor of two for structured sparsity). Memory is what the datasheet sells, in 10^9
bytes: a little less than what the driver reports on most devices, so that a plan made from it also fits.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
from collections.abc import Mapping
from typing import Final

COMPUTE_EFFICIENCY: Final = 0.455
"""Share of the peak rate that matrix products reach: 450 of 989.4 TFLOP/s in bf16 on an H100 SXM. This is what large
training steps sustain there, under power limits and with imperfect tiles; used for every device, since only ratios
between ops of one step decide a plan."""

BANDWIDTH_EFFICIENCY: Final = 0.776
"""Share of the peak bandwidth that memory-bound kernels reach: 2.6 of 3.35 TB/s on an H100 SXM."""

GPU_LAUNCH_NS: Final = 4_000
"""Fixed time per kernel of a GPU: launch and drain, when kernels follow each other on one stream."""

CPU_DISPATCH_NS: Final = 3_000
"""Fixed time per op on a CPU: torch's dispatcher, allocation and loop set-up."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Datasheet figures of one device.

    Attributes:
        name: key in the table, for example ``h100-sxm``.
        flops: dense floating-point operations per second by dtype name (``bfloat16``, ``float32``, …; ``tfloat32`` is
            float32 on tensor cores).
        bandwidth_bytes_per_s: peak bandwidth of the device's own memory.
        memory_bytes: size of that memory.
        launch_ns: fixed time per op in nanoseconds.
        source: title of the document that the figures are from.
        compute_efficiency: share of ``flops`` that kernels reach.
        bandwidth_efficiency: share of ``bandwidth_bytes_per_s`` that kernels reach.
        is_gpu: whether kernels are those of a GPU (decides which rules for workspaces apply).

    """

    name: str
    flops: Mapping[str, float]
    bandwidth_bytes_per_s: float
    memory_bytes: int
    launch_ns: int
    source: str
    compute_efficiency: float = COMPUTE_EFFICIENCY
    bandwidth_efficiency: float = BANDWIDTH_EFFICIENCY
    is_gpu: bool = True

    def __post_init__(self) -> None:
        """Freeze the mapping."""
        object.__setattr__(self, "flops", types.MappingProxyType(dict(self.flops)))

    def flops_per_s(self, dtype: str) -> float:
        """Peak rate for a dtype; one that the table lacks runs at the rate of float32."""
        return self.flops.get(dtype, self.flops["float32"])


def _gpu(name: str, teraflops: Mapping[str, float], gigabytes_per_s: float, gigabytes: int, source: str) -> DeviceSpec:
    """Make a row of the table from figures in the units of datasheets. ``half`` stands for both 16-bit formats."""
    rates = dict(teraflops)
    if "half" in rates:
        rates["float16"] = rates["bfloat16"] = rates.pop("half")
    if "float8" in rates:
        rates["float8_e4m3fn"] = rates["float8_e5m2"] = rates.pop("float8")
    flops = {dtype: rate * 1e12 for dtype, rate in rates.items()}
    return DeviceSpec(name, flops, gigabytes_per_s * 1e9, gigabytes * 10**9, GPU_LAUNCH_NS, source)


_HOPPER_SXM = {"half": 989.4, "tfloat32": 494.7, "float32": 66.9, "float64": 33.5, "float8": 1978.9}
_AMPERE_A100 = {"half": 312.0, "tfloat32": 156.0, "float32": 19.5, "float64": 9.7}

_SPECS = (
    _gpu("h100-sxm", _HOPPER_SXM, 3350, 80, "NVIDIA H100 Tensor Core GPU Architecture, whitepaper"),
    _gpu(
        "h100-pcie",
        {"half": 756.0, "tfloat32": 378.0, "float32": 51.2, "float64": 25.6, "float8": 1513.0},
        2000,
        80,
        "NVIDIA H100 Tensor Core GPU Architecture, whitepaper",
    ),
    _gpu("h200", _HOPPER_SXM, 4800, 141, "NVIDIA H200 Tensor Core GPU, datasheet"),
    _gpu("gh200", _HOPPER_SXM, 4000, 96, "NVIDIA GH200 Grace Hopper Superchip, datasheet (96 GB HBM3)"),
    _gpu(
        "b200",
        {"half": 2250.0, "tfloat32": 1100.0, "float32": 75.0, "float64": 37.0, "float8": 4500.0},
        8000,
        180,
        "NVIDIA DGX B200, datasheet (one of eight GPUs)",
    ),
    _gpu("a100-sxm-80gb", _AMPERE_A100, 2039, 80, "NVIDIA A100 Tensor Core GPU, datasheet"),
    _gpu("a100-40gb", _AMPERE_A100, 1555, 40, "NVIDIA A100 Tensor Core GPU Architecture, whitepaper"),
    _gpu("a100-pcie", _AMPERE_A100, 1935, 80, "NVIDIA A100 Tensor Core GPU, datasheet (80 GB PCIe)"),
    _gpu(
        "l40s",
        {"half": 362.05, "tfloat32": 183.0, "float32": 91.6, "float8": 733.0},
        864,
        48,
        "NVIDIA L40S GPU, datasheet",
    ),
    _gpu(
        "l4",
        {"half": 121.0, "tfloat32": 60.0, "float32": 30.3, "float8": 242.5},
        300,
        24,
        "NVIDIA L4 Tensor Core GPU, datasheet",
    ),
    _gpu(
        "v100-sxm2-32gb",
        {"float16": 125.0, "float32": 15.7, "float64": 7.8},
        900,
        32,
        "NVIDIA V100 Tensor Core GPU, datasheet",
    ),
    _gpu("t4", {"float16": 65.0, "float32": 8.1}, 320, 16, "NVIDIA Turing GPU Architecture, whitepaper (Tesla T4)"),
    _gpu(
        "rtx-4090",
        {"half": 165.2, "tfloat32": 82.6, "float32": 82.6, "float8": 330.3},
        1008,
        24,
        "NVIDIA Ada GPU Architecture, whitepaper (rates with FP32 accumulation)",
    ),
    _gpu(
        "rtx-3090",
        {"half": 71.0, "tfloat32": 35.6, "float32": 35.6},
        936,
        24,
        "NVIDIA Ampere GA102 GPU Architecture, whitepaper (rates with FP32 accumulation)",
    ),
    _gpu(
        "mi300x",
        {"half": 1307.4, "tfloat32": 653.7, "float32": 163.4, "float64": 81.7, "float8": 2614.9},
        5300,
        192,
        "AMD Instinct MI300X Accelerator, data sheet",
    ),
    DeviceSpec(
        name="cpu",
        flops={"float32": 768e9, "float64": 384e9},
        bandwidth_bytes_per_s=51.2e9,
        memory_bytes=64 * 10**9,
        launch_ns=CPU_DISPATCH_NS,
        source="rough generic CPU, not a product: 8 cores x 3 GHz x 32 float32 operations, two channels of DDR4-3200",
        is_gpu=False,
    ),
)

DEVICES: Final[Mapping[str, DeviceSpec]] = types.MappingProxyType({spec.name: spec for spec in _SPECS})
"""Every known device by name."""

_ALIASES: Final[Mapping[str, str]] = types.MappingProxyType(
    {"h100": "h100-sxm", "a100": "a100-sxm-80gb", "a100-80gb": "a100-sxm-80gb", "v100": "v100-sxm2-32gb"}
)

# Words of the name that the driver reports, most telling first. PCIe cards are told apart before their SXM sisters.
_REPORTED_NAMES: Final = (
    ("gh200", "gh200"),
    ("h200", "h200"),
    ("h100 pcie", "h100-pcie"),
    ("h100", "h100-sxm"),
    ("gb200", "b200"),
    ("b200", "b200"),
    ("a100-sxm4-40gb", "a100-40gb"),
    ("a100-pcie-40gb", "a100-40gb"),
    ("a100 80gb pcie", "a100-pcie"),
    ("a100", "a100-sxm-80gb"),
    ("l40s", "l40s"),
    ("l4", "l4"),
    ("v100", "v100-sxm2-32gb"),
    ("t4", "t4"),
    ("rtx 4090", "rtx-4090"),
    ("rtx 3090", "rtx-3090"),
    ("mi300x", "mi300x"),
)


def device_spec(name: str | DeviceSpec) -> DeviceSpec:
    """Figures of a named device; a :class:`DeviceSpec` of one's own is returned as it is.

    Args:
        name: a key of :data:`DEVICES` in any case, with spaces or underscores for hyphens if one likes, or a short
            form (``h100``, ``a100``, ``v100``: the SXM model with the most memory).

    Raises:
        ValueError: no such device. The message lists the names and suggests the nearest.

    """
    if isinstance(name, DeviceSpec):
        return name
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    key = _ALIASES.get(key, key)
    if key in DEVICES:
        return DEVICES[key]
    near = difflib.get_close_matches(key, [*DEVICES, *_ALIASES], n=1)
    suggestion = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"unknown device {name!r}.{suggestion} Known devices: {', '.join(sorted(DEVICES))}. "
        "For another one, pass a DeviceSpec with its datasheet figures."
    )


def spec_of_reported_name(reported: str) -> DeviceSpec | None:
    """Figures of a device by the name its driver reports (``NVIDIA H100 80GB HBM3``), or ``None`` where unknown."""
    lowered = reported.lower()
    for words, name in _REPORTED_NAMES:
        if re.search(rf"\b{words}\b", lowered):
            return DEVICES[name]
    return None
