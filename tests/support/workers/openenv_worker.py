"""Rollouts and sessions with an OpenEnv server of this process; prints JSON.

worker.py EXAMPLE FLAGS...

EXAMPLE, a script, runs with its flags afterwards in the same process, as after captured_agents_worker.py.
"""

from __future__ import annotations

import asyncio
import json
import runpy
import socket
import sys
import threading
import time
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field

from groupwise.agents.environments import EnvironmentPool
from groupwise.agents.libraries import openenv_factory
from support.fakes.scripted import ScriptedBackend, agents, byte_tokenizer, call, question


class Add(Action):
    """Add to the number."""

    by: int = Field(description="How much.", ge=0)


class Number(Observation):
    text: str


class Counter(Environment):
    """Counts up to ten; responds slowly to 99."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Number:
        self.number = seed or 0
        return Number(text=f"at {self.number}")

    def step(self, action: Add, timeout_s: float | None = None, **_: Any) -> Number:
        if action.by == 99:
            time.sleep(3.0)
        self.number += action.by
        return Number(text=f"at {self.number}", reward=action.by / 10, done=self.number >= 10)

    @property
    def state(self) -> State:
        return State()


def serve() -> str:
    """Start a server in a thread; return its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_fastapi_app(Counter, Add, Number, max_concurrent_envs=16)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


async def act_after_a_timeout(url: str) -> list[str]:
    """Return the texts of a session whose second action takes longer than the time limit."""
    session = openenv_factory(url, timeout=10.0)()
    texts = [await session.reset(seed=3), await session._step({"by": 1})]
    session._client._message_timeout = 0.5  # later: on a busy machine every response takes long
    for action in (99, 2):
        try:
            texts.append(await session._step({"by": action}))
        except (TimeoutError, RuntimeError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    session._client._message_timeout = 10.0
    return [*texts, await session.reset(seed=5), await session._step({"by": 2})]


def main() -> None:
    address = serve()
    environments = EnvironmentPool(openenv_factory(f"ws://{address}", name="add"))
    tokenizer = byte_tokenizer()
    scripts = [
        [call("add", by=3) + call("add", by=4), "Seven."],
        [call("add", by=9), call("add", by=1), "Ten."],
        [call("add", by=-1), call("add"), "No."],
    ]
    rows = [{**question("Count. "), "seed": seed} for seed in (0, 1, 2)]
    rollout = agents(tokenizer, (), environments).generate_rollouts(rows, ScriptedBackend(tokenizer, scripts))
    (reward,) = environments.reward_funcs()
    by_turn = EnvironmentPool(openenv_factory(f"ws://{address}", name="add", turn_rewards=True))
    again = agents(tokenizer, (), by_turn).generate_rollouts(rows, ScriptedBackend(tokenizer, scripts))
    (turn_reward,) = by_turn.reward_funcs()
    factory = openenv_factory([f"http://{address}", f"http://{address}/second"])
    found = {
        "prompts": [prompt[0]["content"] for prompt in rollout.prompts],
        "results": [[m["content"] for m in text if m["role"] == "tool"] for text in rollout.texts],
        "rewards": reward(**rollout.extra, completions=rollout.texts),
        "turn_rewards": turn_reward(completions=again.texts, **again.extra),
        "schema": environments.types[None].schemas["add"]["function"],
        "urls": [factory()._client.base_url for _ in range(3)],
        "session": asyncio.run(act_after_a_timeout(f"http://{address}")),
    }
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
