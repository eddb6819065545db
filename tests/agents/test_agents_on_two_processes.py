"""Two ranks with tools and different numbers of turns: equal generate calls, equal weights."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

TIMEOUT = 240  # seconds


def main(directory: str) -> None:
    """Run one rank: the maximum number of turns depends on the rank, generate calls must not."""
    import torch
    from support.agent_runs import measure, trainer

    run = trainer(directory, tools=[measure], per_device_train_batch_size=2, max_steps=2)
    assert run.accelerator.num_processes == 2
    rank = run.accelerator.process_index
    # As with an engine that all ranks share: every generate call is a collective.
    agents, backend = run.agents, run.backend
    agents.any_rank = lambda here: _any(run.accelerator, here)
    agents.settings = type(agents.settings)(
        **{**vars(agents.settings), "max_tool_calling_iterations": 1 + 3 * rank}
    )
    counts, generate = [], backend.generate

    def counting_generate(prompts, sampling):
        assert _any(run.accelerator, True)
        counts.append(len(prompts))
        return generate(prompts, sampling)

    backend.generate = counting_generate
    run.train()
    calls = run.accelerator.gather(torch.tensor([len(counts)])).tolist()
    total = sum(tensor.double().sum() for tensor in run.model.state_dict().values())
    sums = run.accelerator.gather(total.reshape(1)).tolist()
    if rank == 0:
        logs = [log for log in run.state.log_history if "tools/call_frequency" in log]
        result = {"calls": calls, "sums": sums, "frequency": [log["tools/call_frequency"] for log in logs]}
        Path(directory, "result.json").write_text(json.dumps(result))


def _any(accelerator, here: bool) -> bool:
    import torch

    return accelerator.reduce(torch.tensor(int(here)), "sum").item() > 0


def test_ranks_make_the_same_number_of_generate_calls(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_addr", "127.0.0.1"]
    process = subprocess.Popen(
        [sys.executable, *launch, "--master_port", port, __file__, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"no end within {TIMEOUT} s:\n{output}")
    assert process.returncode == 0, output
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["calls"][0] == result["calls"][1] > 2
    assert result["sums"][0] == result["sums"][1]
    assert all(frequency > 0 for frequency in result["frequency"])


if __name__ == "__main__":
    main(sys.argv[1])
