"""The self-test of carriers between two processes, as `baton doctor` runs it on a GPU machine; here without one."""

from __future__ import annotations

import pytest
import torch
from baton.cluster.doctor_gpus import tried
from baton.kernels.process_group import link_environment
from baton.kv_transfer.loopback import LoopbackFailed, measure


def test_the_doctor_says_what_links_do() -> None:
    good, bad = tried("127.0.0.1", [("gloo", "on this machine", None), ("none", "nowhere", None)], 3, 10_000)
    assert (good.level, bad.level) == ("ok", "fail")
    assert "GB/s on this machine, every byte right" in good.text
    assert "none nowhere: " in bad.text


@pytest.mark.parametrize("name", ["inline", "shm"])
def test_frames_arrive_whole_and_are_timed(name: str) -> None:
    assert measure(name, "127.0.0.1", 20.0, 9, 50_000) > 1e5


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", ["nccl", "cuda_ipc"])
def test_what_cannot_be_built_is_said(name: str) -> None:
    with pytest.raises(LoopbackFailed, match=r"no NCCL|no CUDA device|NVIDIA|CUDA"):
        measure(name, "127.0.0.1", 5.0, 2, 100)


def test_a_late_operation_of_nccl_does_not_end_the_process() -> None:
    found = link_environment(2.4)
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    assert found["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "2"
