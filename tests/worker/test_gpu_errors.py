"""What an exception says of the GPU, without a GPU: the synchronisation is a fake."""

from __future__ import annotations

import threading

import pytest
import torch

from nbelastic.protocol.exit_codes import GPU_LOST
from nbelastic.worker import gpu_errors, own_errors
from nbelastic.worker.error_text import text_of
from nbelastic.worker.hang_detector import may_be_collective
from nbelastic.worker.session import Session

ECC = RuntimeError("CUDA error: uncorrectable ECC error encountered")
# What torch adds to each error of CUDA.
ADVICE = """
Search for `cudaError' in https://docs.nvidia.com/cuda/ for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
ASSERT = RuntimeError(f"CUDA error: device-side assert triggered{ADVICE}")
LATER = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling cublasCreate")  # after a failed assertion
ADDRESS = RuntimeError(f"CUDA error: an illegal memory access was encountered{ADVICE}")


def caused_by(error):
    """What a program raises that adds something to an error, such as the step in which it came."""
    try:
        raise ValueError("step 7 failed") from error
    except ValueError as made:
        return made


def each_the_cause_of_the_other(one, other):
    """What a program raises that tries to recover, fails, and raises the first error again: `raise first from second`."""
    one.__cause__, other.__cause__ = other, one
    return one


class Unreadable(Exception):
    def __str__(self):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("error", "is_gpu_error"),
    [
        (ECC, True),
        (ASSERT, True),
        (RuntimeError("NCCL error: unhandled cuda error"), True),
        (RuntimeError("CUDA driver error: unknown error"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), True),
        (RuntimeError("radix_sort: failed on 1st step: cudaErrorIllegalAddress: an illegal memory access"), True),
        (RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"), True),
        (RuntimeError("cuFFT error: CUFFT_INTERNAL_ERROR"), True),
        (caused_by(ADDRESS), True),
        (each_the_cause_of_the_other(ValueError("step 7 failed"), ADDRESS), True),
        (each_the_cause_of_the_other(ValueError("step 7 failed"), KeyError("x")), False),
        (ExceptionGroup("two tasks failed", [ValueError("1"), ADDRESS]), True),
        (caused_by(RuntimeError("CUDA error: out of memory")), False),
        (RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: out of memory"), False),
        (RuntimeError("Triton Error [CUDA]: out of memory"), False),
        (RuntimeError("CUDA error: out of memory"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (RuntimeError("The size of tensor a must match"), False),
        (ValueError("CUDA error"), False),
        (Unreadable(), False),
    ],
)
def test_errors_of_the_gpu(error, is_gpu_error):
    """Errors of the program, and too little memory, are none."""
    assert gpu_errors.is_gpu_error(error) is is_gpu_error


def test_a_gpu_that_does_not_answer_is_lost(monkeypatch):
    monkeypatch.setattr(gpu_errors, "TIMEOUT", 0.01)
    assert gpu_errors.failure_of_gpu(threading.Event().wait) == "it did not answer within 0.01 s"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ADDRESS, "CUDA error: an illegal memory access was encountered"),
        (
            RuntimeError('Error(s) in loading state_dict:\n\tMissing key(s): "a".\n'),
            'Error(s) in loading state_dict: Missing key(s): "a".',
        ),
        (ValueError(), ""),
        (Unreadable(), "its text cannot be read: ZeroDivisionError"),
    ],
)
def test_an_error_is_told_in_one_line(error, text):
    """Without the advice that torch adds to each error of CUDA."""
    assert text_of(error) == text


class Ended(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "fails", "outcome"),
    [
        (ECC, True, GPU_LOST),
        (ECC, False, False),  # the GPU works: this was one call's error
        (ADDRESS, True, GPU_LOST),
        (ASSERT, True, True),
        (LATER, True, True),
        (RuntimeError("The size of tensor a must match"), True, False),
    ],
)
def test_a_worker_whose_gpu_fails_ends_itself(monkeypatch, error, fails, outcome):
    """It ends with an exit code of its own. After a failed assertion it lives, as that is the program's own error."""

    def synchronize():
        if fails:
            raise ASSERT if error is LATER else error

    def end(code):
        raise Ended(code)

    settings = {"worker": "a/0#1", "address": "127.0.0.1", "relay": "/tmp", "heartbeat": 1.0, "lease": 60.0}
    worker = Session(settings)
    monkeypatch.setattr(worker.groups, "synchronize", lambda **_: synchronize())
    monkeypatch.setattr(own_errors.os, "_exit", end)
    if outcome is GPU_LOST:
        with pytest.raises(Ended, match=str(GPU_LOST)):
            own_errors._gpu_is_lost(error, worker.groups)
    else:
        assert own_errors._gpu_is_lost(error, worker.groups) is outcome


@pytest.mark.parametrize(
    ("second", "maybe"), [(KeyError("x"), False), (RuntimeError("Connection closed by peer"), True)]
)
def test_a_lost_worker_may_be_behind_any_of_the_errors(second, maybe):
    """Also of those that are each other's cause, and of those in a group."""
    assert may_be_collective(each_the_cause_of_the_other(ValueError("step 7 failed"), second)) is maybe
    assert may_be_collective(ExceptionGroup("two tasks failed", [ValueError("1"), second])) is maybe
