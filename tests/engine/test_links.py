"""What nvidia-smi says of links, and which pairs of a tensor-parallel group are slow."""

import logging
import subprocess

import pytest

from jaxpaged.config.settings import ParallelSettings
from jaxpaged.engine import devices, links
from jaxpaged.errors import ConfigError

BRIDGED = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tSYS\tSYS\tPIX\t0-31\t0\t\tN/A
GPU1\tNV12\t X \tSYS\tSYS\tPXB\t0-31\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNV4\tSYS\t32-63\t1\t\tN/A
GPU3\tSYS\tSYS\tNV4\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPIX\tPXB\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = a connection over PCIe and between NUMA nodes
  NV#  = a connection of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""
ONE = "\t\x1b[4mGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\nGPU0\t X \t0-15\t0\t\tN/A\n"


@pytest.fixture
def driver(monkeypatch):
    """A driver with four GPUs, two and two bridged."""
    monkeypatch.setattr(links, "ask_driver", lambda *_: BRIDGED)
    monkeypatch.setattr(devices, "count_gpus", lambda: 4)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_every_pair_of_gpus_is_read_and_nothing_else():
    found = links.parse_topology(BRIDGED)
    assert len(found) == 12
    assert (found[0, 1], found[3, 2], found[1, 2]) == ("NV12", "NV4", "SYS")


@pytest.mark.parametrize("text", ["", "no devices were found\n", ONE])
def test_without_a_second_gpu_there_are_no_links(text):
    assert links.parse_topology(text) == {}


def test_a_group_across_bridges_is_warned_of_and_others_are_not(driver, caplog, monkeypatch):
    devices.use_devices(ParallelSettings(tensor_parallel_size=2, pipeline_parallel_size=2))
    devices.use_devices(ParallelSettings())
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        devices.use_devices(ParallelSettings(tensor_parallel_size=4))
    assert "0 and 2 (SYS), 0 and 3 (SYS), 1 and 2 (SYS), 1 and 3 (SYS)" in caplog.text
    caplog.clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    devices.use_devices(ParallelSettings(tensor_parallel_size=2))
    assert "1 and 2 (SYS)" in caplog.text


def test_a_gpu_that_is_not_there_is_refused_with_what_to_do(driver):
    with pytest.raises(ConfigError, match=r"GPU 4 is wanted and 4 are here.*--device-ids"):
        devices.use_devices(ParallelSettings(data_parallel_size=5).replica(4))
    with pytest.raises(ConfigError, match="holds one replica"):
        devices.use_devices(ParallelSettings(data_parallel_size=2))


def test_a_machine_without_a_driver_says_nothing(monkeypatch):
    def run(*_arguments, **_options):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", run)
    assert links.ask_driver("topo", "-m") == ""
