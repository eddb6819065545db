"""One of two processes of a run in which a fault hits one rank at a stage of a step.

    start_ranks(fault_worker.py, OUTPUT_DIR, environment={"FAULT": "hang", "STAGE": "reward", …})

VICTIM is the rank, STEP the optimizer step, PLACE chooses among the methods of a stage, and SERVER is the
address of a vLLM server. Without FAULT the run is undisturbed; it resumes if OUTPUT_DIR has a checkpoint.
Every rank leaves its weights and its log in RANK.pt.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import faulthandler
import io
import json
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from groupwise import GRPOTrainer
from groupwise.generation.vllm import transfer
from support import engine_runs, runs

#: Multiplies all time limits, for a busy machine.
SCALE = float(os.environ.get("TIME_LIMIT_SCALE", 1))
#: Seconds after which a process that hangs prints its stack and ends: the harness takes that for a hang.
PATIENCE = 90 * SCALE
#: Time limits of a collective, of a server without progress, and of a reward function, seconds.
DDP_TIMEOUT, SERVER_TIMEOUT, REWARD_TIMEOUT = round(8 * SCALE), 4.0 * SCALE, 4.0 * SCALE
#: An undisturbed stage of the tiny model takes about 30 ms.
SLOW = 3.0
#: A SIGTERM in the save of step 3 acts at the end of step 4.
LAST_STEP = 5

#: Methods of the trainer, or events of a callback, in which the fault of a stage acts.
PLACES: dict[str, tuple[str, ...]] = {
    "generate": ("generate_rollouts", "backend.generate", "generate_rollouts"),
    "sync": ("backend.sync_weights", "send_file", "backend.sync_weights"),
    "reward": ("reward", "compute_rewards", "reward"),
    "update": ("compute_loss", "collate", "on_optimizer_step"),
    "save": ("save_rollout_state", "_save_rng_state", "_save_optimizer_and_scheduler"),
    "evaluate": ("prediction_step", "reward", "generate_rollouts"),
}


#: Stages that send requests to a vLLM server.
AT_SERVER = ("generate", "sync", "evaluate")


class Fault:
    """Acts once: at a place, in a step, on a rank.

    directory: of the run; a network fault is planted there, for the proxy between this rank and the server.
    """

    def __init__(self, directory: Path) -> None:
        given = os.environ
        self.directory, self.name = directory, given.get("FAULT", "")
        self.stage, self.step = given.get("STAGE", ""), int(given.get("STEP", 0))
        self.place = PLACES[self.stage][int(given.get("PLACE", 0)) % 3] if self.stage else ""
        of_network = FAULTS.get(self.name) in (plant_in_network, lose_connection)
        sends_files = self.place == "send_file" and "SERVER" in given
        if (of_network and self.stage in AT_SERVER) or (self.stage == "sync" and not sends_files):
            self.place = PLACES[self.stage][0]  # before the requests of the stage
        self.is_due = bool(self.name) and given["RANK"] == given.get("VICTIM")
        self.end: Callable[[], Any] = lambda: None  # ends one that lasts, before a save
        self.rank_name = f"rank {given['RANK']}"

    @contextlib.contextmanager
    def at(self, place: str, trainer: Any, *, step: int | None = None) -> Iterator[None]:
        """Run a block in which the fault acts, if this is its place and step."""
        step = trainer.state.global_step + (trainer._mode == "train") if step is None else step
        in_stage = (trainer._mode == "eval") == (self.stage == "evaluate")
        if not (self.is_due and place == self.place and step == self.step and in_stage):
            yield
            return
        self.is_due = False
        print(f"{self.rank_name}: {self.name} in {place}", file=sys.stderr, flush=True)
        FAULTS[self.name](self, trainer)
        yield


def end_connections(*_: Any) -> None:
    """Shut down the connections to other ranks, as a network that fails does."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        connection.shutdown(socket.SHUT_RDWR)


def fill_disk(fault: Fault, trainer: Any) -> None:
    """Let every file that is written fail, as each library reports it, until the next save begins.

    In a save, until the run ends.
    """

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full_of_torch(values: Any, file: Any, **given: Any) -> None:
        if not isinstance(file, (str, os.PathLike)):  # in memory, as for an exchange of ranks
            return save(values, file, **given)
        raise RuntimeError(
            "[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0: no space left"
        )

    def read_only(file: Any, mode: str = "r", *rest: Any, **given: Any) -> Any:
        return full() if set(mode) & set("wax+") else opened(file, mode, *rest, **given)

    opened, save = builtins.open, torch.save
    changes = [(builtins, "open", read_only), (io, "open", read_only), (os, "replace", full)]
    changes += [(torch, "save", full_of_torch), (transfer, "save_file", full)]
    before = [(holder, name, getattr(holder, name)) for holder, name, _ in changes]
    for holder, name, new in changes:
        setattr(holder, name, new)
    fault.end = lambda: [setattr(*of_library) for of_library in before]


def set_clock(fault: Fault, trainer: Any) -> None:
    """Let the wall clock jump for the rest of the run, by a day; ``time.monotonic`` does not, as on Linux."""
    jump, now = 86_400.0 * (1 if fault.step % 2 else -1), time.time
    time.time = lambda: now() + jump


def run_out_of_memory(fault: Fault, trainer: Any) -> None:
    if fault.place == "compute_loss" or fault.step % 2:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    raise MemoryError("Unable to allocate 20.0 GiB for an array")


def raise_error(fault: Fault, trainer: Any) -> None:
    raise KeyError("planted")


def plant_in_network(fault: Fault, trainer: Any) -> None:
    planted = fault.directory / "planted.json"
    planted.with_suffix(".tmp").write_text(json.dumps([fault.name, fault.stage]))
    planted.with_suffix(".tmp").replace(planted)


def lose_connection(fault: Fault, trainer: Any) -> None:
    at_server = "SERVER" in os.environ and fault.stage in AT_SERVER
    plant_in_network(fault, trainer) if at_server else end_connections()


FAULTS: dict[str, Callable[[Fault, Any], Any]] = {
    "SIGKILL": lambda *_: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda *_: os.kill(os.getpid(), signal.SIGSTOP),
    "SIGTERM": lambda *_: os.kill(os.getpid(), signal.SIGTERM),
    "exception": raise_error,
    "hang": lambda *_: time.sleep(10_000),
    "slow": lambda *_: time.sleep(SLOW),
    "out of memory": run_out_of_memory,
    "full disk": fill_disk,
    "lost connection": lose_connection,
    "clock jump": set_clock,
    **dict.fromkeys(("HTTP 500", "dropped request", "repeated request"), plant_in_network),
}


class FaultyTrainer(GRPOTrainer):
    """Every stage passes the place of a fault."""

    fault: Fault

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.fault.end()
        super()._save_checkpoint(model, trial)


def _pass(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **given: Any) -> Any:
        saves = name in PLACES["save"]
        with self.fault.at(name, self, step=self.state.global_step if saves else None):
            return getattr(GRPOTrainer, name)(self, *args, **given)

    return call


for _name in {name for places in PLACES.values() for name in places} & set(dir(GRPOTrainer)):
    setattr(FaultyTrainer, _name, _pass(_name))


class AtEvent(TrainerCallback):
    """Pass the place of a fault in the optimizer step."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.trainer = fault, None

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        with self.fault.at("on_optimizer_step", self.trainer):
            pass


def _within(fault: Fault, place: str, trainer: Any) -> Callable[..., Any]:
    """Return the backend's method with a place of the fault around it."""
    call = getattr(trainer.backend, place.removeprefix("backend."))

    def planted(*args: Any, **given: Any) -> Any:
        with fault.at(place, trainer):
            return call(*args, **given)

    return planted


def make(directory: Path) -> Any:
    fault, server = Fault(directory), os.environ.get("SERVER")

    def reward(completion_ids: Any, **given: Any) -> list[float]:
        with fault.at("reward", trainer):
            return runs.count_reward(completion_ids)

    at_event = AtEvent(fault)
    settings: dict[str, Any] = {
        **{"kind": FaultyTrainer, "eval_dataset": runs.prompts(2), "train_dataset": runs.prompts(16)},
        **{"per_device_train_batch_size": 4, "num_generations": 4, "per_device_eval_batch_size": 4},
        **{"max_steps": LAST_STEP, "lr_scheduler_type": "constant", "adam_epsilon": 1e-3, "beta": 0.1},
        **{"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 2},
        **{"log_completions": True, "save_rollouts": True},  # files beside those of checkpoints
        **{"ddp_timeout": DDP_TIMEOUT, "reward_timeout": REWARD_TIMEOUT},
        **{"enable_jit_checkpoint": os.environ.get("FAULT") == "SIGTERM", "callbacks": [at_event]},
    }
    if server:
        settings |= {"vllm_mode": "server", "vllm_server_base_url": server, "vllm_engine_kwargs": None}
        settings["vllm_server_timeout"] = SERVER_TIMEOUT
        send = transfer.BucketSender._send_file

        def send_file(*given: Any) -> None:
            with fault.at("send_file", trainer):
                send(*given)

        transfer.BucketSender._send_file = send_file
    trainer = (engine_runs if server else runs).trainer(directory, rewards=reward, **settings)
    trainer.fault, at_event.trainer = fault, trainer
    for name in ("generate", "sync_weights"):
        setattr(trainer.backend, name, _within(fault, f"backend.{name}", trainer))
    return trainer


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    trainer = make(directory)
    trainer.train(resume_from_checkpoint=any(directory.glob("checkpoint-*")) or None)
    state = {"step": trainer.state.global_step, "log": trainer.state.log_history}
    torch.save(
        {"weights": trainer.model.state_dict(), **state}, directory / f"{trainer.args.process_index}.pt"
    )
    trainer.backend.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
