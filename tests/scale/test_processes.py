"""Two processes of four devices each: the training of one process with eight."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.scale import process_worker

ROOT = pathlib.Path(__file__).parents[2]
FLAGS = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"


def free_port():
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return sock.getsockname()[1]


@pytest.fixture(scope="module")
def answers():
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": FLAGS,
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, process_worker.__file__, port, "2", str(number)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        results = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, results, strict=True):
        assert process.returncode == 0, errors[-2000:]
    return [json.loads(out.strip().splitlines()[-1]) for out, _ in results]


def test_each_process_has_half_of_the_devices(answers):
    assert [answer["devices"] for answer in answers] == [[4, 8]] * 2


def test_bases_are_the_same_on_every_process(answers):
    one, two = (answer["bases"] for answer in answers)
    assert one == two
    # They are refreshed at steps 0 and 2, and the digest sees it.
    assert one[0] == one[1] != one[2] == one[3]
    assert [answer["refreshes"] for answer in answers] == [[2, 2]] * 2


def test_losses_are_those_of_one_process(answers):
    assert answers[0]["losses"] == answers[1]["losses"]
    with jax.numpy_dtype_promotion("standard"):
        alone = process_worker.run()
    assert alone["devices"] == [8, 8]
    np.testing.assert_allclose(answers[0]["losses"], alone["losses"], rtol=1e-5)
    assert alone["losses"][-1] < alone["losses"][0]
