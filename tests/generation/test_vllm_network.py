"""A network that is cut between the trainer and a server: packets vanish, nothing is refused or closed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from groupwise.generation.vllm.base import Request
from groupwise.generation.vllm.client import VLLMServers

NAME = f"gw{os.getpid() % 100000}"
#: A network of this process: that of a killed one may still be there.
HERE, THERE = (f"10.213.{os.getpid() % 250}.{host}" for host in (1, 2))


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True).returncode == 0


def link(state):
    assert ip("link", "set", f"{NAME}a", state)


@pytest.fixture(scope="module")
def far_away():
    """A server behind a cable that can be unplugged; it takes two seconds for each answer."""
    if shutil.which("ip") is None or not ip("netns", "add", NAME):
        pytest.skip("network namespaces are not permitted here")
    process = None
    try:
        inside = ("netns", "exec", NAME, "ip")
        made = (
            ip("link", "add", f"{NAME}a", "type", "veth", "peer", "name", f"{NAME}b", "netns", NAME)
            and ip("addr", "add", f"{HERE}/24", "dev", f"{NAME}a")
            and ip(*inside, "addr", "add", f"{THERE}/24", "dev", f"{NAME}b")
            and ip(*inside, "link", "set", f"{NAME}b", "up")
            and ip("link", "set", f"{NAME}a", "up")
        )
        if not made:
            pytest.skip("virtual cables are not permitted here")
        script = Path(__file__).parents[1].joinpath("support", "fakes", "fake_vllm.py")
        command = ["ip", "netns", "exec", NAME, sys.executable, str(script), THERE, "run:3"]
        process = subprocess.Popen(command)
        url = f"http://{THERE}:8000"
        VLLMServers([url], timeout=60.0).wait_until_up("starting it")
        yield url
    finally:
        if process is not None:
            process.kill()
            process.wait()
        ip("link", "del", f"{NAME}a")
        ip("netns", "del", NAME)


def ask(client):
    request = Request([5], range(2), seed=1, max_tokens=8)
    return client.submit(request, request.params({}, 20))


@pytest.mark.slow
def test_a_short_network_outage_delays_the_answer(far_away):
    link("up")
    client = VLLMServers([far_away], timeout=20.0)
    client.wait_until_up("connecting")
    client.steps = [3]  # the step whose weights the server has
    future = ask(client)
    time.sleep(0.4)
    link("down")
    threading.Timer(3.0, link, ["up"]).start()  # the answer is sent during the outage
    assert [completion.versions[0] for completion in future.result(timeout=60)] == [3, 3]
    client.close()


@pytest.mark.slow
def test_a_long_network_outage_raises_a_connection_error(far_away, monkeypatch):
    monkeypatch.setattr(
        "groupwise.generation.vllm.client._MAX_POLL", 1.0
    )  # else its progress is read for 10 s
    link("up")
    client = VLLMServers([far_away], timeout=2.0)
    client.wait_until_up("connecting")
    client.steps = [3]  # the step whose weights the server has
    future = ask(client)
    time.sleep(0.4)
    link("down")
    with pytest.raises(ConnectionError, match=r"no progress for vllm_server_timeout=2 s while generating"):
        future.result(timeout=60)
    client.close()
