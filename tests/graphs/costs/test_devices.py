import pytest

from graphs.costs import DEVICES, DeviceSpec, device_spec
from graphs.costs.devices import BANDWIDTH_EFFICIENCY, COMPUTE_EFFICIENCY, spec_of_reported_name


@pytest.mark.parametrize("spec", DEVICES.values(), ids=lambda s: s.name)
def test_rows_are_sane(spec):
    assert device_spec(spec.name) is spec
    assert spec.source
    assert spec.launch_ns > 0
    assert 10**9 <= spec.memory_bytes <= 10**12
    assert 1e10 < spec.bandwidth_bytes_per_s < 1e13
    assert spec.flops["float32"] > 1e11
    # Wider numbers are never faster, and no rate is a sparse one in disguise (dense 8-bit is at most twice 16-bit).
    half = spec.flops_per_s("float16")
    assert half >= spec.flops_per_s("tfloat32") >= spec.flops["float32"] >= spec.flops.get("float64", 0)
    assert spec.flops.get("float8_e4m3fn", half) <= 2.05 * half


def test_h100_reaches_what_large_steps_sustain():
    h100 = device_spec("h100-sxm")
    assert h100.flops_per_s("bfloat16") * h100.compute_efficiency == pytest.approx(450e12, rel=2e-3)
    assert h100.bandwidth_bytes_per_s * h100.bandwidth_efficiency == pytest.approx(2.6e12, rel=2e-3)
    assert (h100.compute_efficiency, h100.bandwidth_efficiency) == (COMPUTE_EFFICIENCY, BANDWIDTH_EFFICIENCY)


def test_names_are_forgiving():
    assert device_spec("H100 SXM").name == "h100-sxm"
    assert device_spec("a100").name == "a100-sxm-80gb"


def test_unknown_name_is_answered_with_the_names_and_the_nearest():
    with pytest.raises(ValueError, match="unknown device 'rtx-4080'") as caught:
        device_spec("rtx-4080")
    message = str(caught.value)
    assert "Did you mean 'rtx-4090'?" in message
    assert all(name in message for name in DEVICES)


def test_own_figures_pass_through_and_stay_frozen():
    rates = {"float32": 1e12}
    own = DeviceSpec("own", rates, 1e11, 10**9, 1000, "measured")
    rates["float32"] = 5.0
    assert device_spec(own) is own
    assert own.flops_per_s("bfloat16") == 1e12
    with pytest.raises(TypeError):
        own.flops["float32"] = 2.0


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_reported_names(reported, name):
    assert spec_of_reported_name(reported).name == name


@pytest.mark.parametrize("reported", ["NVIDIA L40", "NVIDIA T400 4GB", "Quadro P2000"])
def test_reported_names_that_are_not_in_the_table(reported):
    assert spec_of_reported_name(reported) is None
