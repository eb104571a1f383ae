"""Links: how they are stated, and how long copies take."""

import math

import pytest

from graphs.links import LINKS, Link, parse_link


@pytest.mark.parametrize(
    ("text", "rate"),
    [("25GB/s", 25e9), ("1.5 TB/s", 1.5e12), ("800MB/s", 8e8), ("2GiB/s", 2 * 2**30), (" 16GBps ", 16e9)],
)
def test_stated_bandwidth(text, rate):
    link = parse_link(text)
    assert link.to_host_bytes_per_s == link.to_device_bytes_per_s == rate


@pytest.mark.parametrize("text", ["25", "GB/s", "-1GB/s", "0GB/s", "nanGB/s", "1e400GB/s", "25GB", "pcie9-x16", ""])
def test_nonsense_is_refused(text):
    with pytest.raises(ValueError, match="link="):
        parse_link(text)


def test_a_near_miss_names_the_link_that_was_meant():
    with pytest.raises(ValueError, match="did you mean 'pcie4-x16'"):
        parse_link("pcie4x16")


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="link=25"):
        parse_link(25)


@pytest.mark.parametrize("name", LINKS)
def test_named_links(name):
    link = parse_link(name.upper())
    assert link is LINKS[name]
    assert link.name == name
    assert link.source
    assert link.to_host_bytes_per_s > 1e10


def test_a_copy_takes_the_latency_and_its_bytes_rounded_up():
    link = Link(3e9, 2e9, latency_ns=7)
    assert link.to_host_ns(10) == 7 + math.ceil(10 / 3)
    assert link.to_device_ns(10) == 7 + 5


def test_least_bytes_are_what_moves_during_one_latency():
    assert Link(3e9, 2e9, latency_ns=7).least_bytes == 14
    assert Link(3e9, 2e9, latency_ns=7, least_bytes=0).least_bytes == 0


def test_fields_survive_json():
    link = parse_link("pcie5-x16")
    assert Link(**link.as_dict()) == link


@pytest.mark.parametrize(
    "fields", [{"to_host_bytes_per_s": 0.0}, {"to_device_bytes_per_s": math.inf}, {"latency_ns": -1}]
)
def test_impossible_figures_are_refused(fields):
    with pytest.raises(ValueError, match="link's"):
        Link(**{"to_host_bytes_per_s": 1e9, "to_device_bytes_per_s": 1e9, **fields})
