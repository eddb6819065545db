"""Adapters: an OpenEnv server in this process, reasoning-gym and verifiers (real if installed).

Files: ``agents/libraries/openenv.py``, ``agents/libraries/reasoning_gym.py``,
``agents/libraries/verifiers.py``.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.configs import config_of, oldest_version, set_installed
from support.fakes.scripted import ScriptedBackend, agents, byte_tokenizer, call, question

from groupwise.agents import EnvironmentLoop, EnvironmentPool, MultiTurnRollouts
from groupwise.agents.libraries import (
    VerifiersEnvironment,
    openenv_factory,
    reasoning_gym_factory,
    verifiers_dataset,
)
from groupwise.agents.libraries.openenv import OpenEnvSession, observation_text
from groupwise.errors import ConfigError

SCHEMA = {
    "action": {
        "title": "AddAction",
        "description": "Add to the number.",
        "type": "object",
        "properties": {
            "by": {"type": "integer", "description": "How much.", "title": "By"},
            "metadata": {"type": "object"},
        },
        "required": ["by"],
    }
}


class Handler(BaseHTTPRequestHandler):
    """Counts up to ten per episode; responds slowly to 99, with an error to negative numbers."""

    episodes: dict[str, int]

    def do_GET(self) -> None:
        self._answer(SCHEMA if self.path == "/schema" else {}, 200 if self.path == "/schema" else 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        episodes = self.server.episodes  # type: ignore[attr-defined]
        if self.path == "/reset":
            episodes[body["episode_id"]] = body.get("seed", 0)
            self._answer({"observation": {"text": f"at {episodes[body['episode_id']]}", "metadata": {}}})
            return
        by = body["action"]["by"]
        if by == 99:
            time.sleep(1.0)
        if by < 0:
            self._answer({"detail": "by must be positive"}, 422)
            return
        episodes[body["episode_id"]] += by
        number = episodes[body["episode_id"]]
        self._answer({"observation": {"text": f"at {number}"}, "reward": by / 10, "done": number >= 10})

    def _answer(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.episodes = {}  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_rollouts_with_a_server(url: str) -> None:
    environments = EnvironmentPool(openenv_factory(url, name="add"))
    tokenizer = byte_tokenizer()
    scripts = [
        [call("add", by=3) + call("add", by=4), "Seven."],
        [call("add", by=9), call("add", by=1), "Ten."],
        [call("add", by=-1), call("add"), "No."],
    ]
    rows = [{**question("Count. "), "seed": seed} for seed in (0, 1, 2)]
    rollout = agents(tokenizer, (), environments).generate_rollouts(rows, ScriptedBackend(tokenizer, scripts))
    assert [prompt[0]["content"] for prompt in rollout.prompts] == [
        "Count. at 0",
        "Count. at 1",
        "Count. at 2",
    ]
    results = [[m["content"] for m in text if m["role"] == "tool"] for text in rollout.texts]
    assert results[0] == ["at 3", "at 7"]
    assert (
        results[1][0] == "at 10\n(the episode has ended)"
        and "the episode has ended; no further" in results[1][1]
    )
    assert "answered 422" in results[2][0] and "by must be positive" in results[2][0]
    (reward,) = environments.reward_funcs()
    assert reward(**rollout.extra) == pytest.approx([0.7, 0.9, 0.0])
    schema = environments.tools_by_type()[0][0].schema["function"]
    assert schema["description"] == "Add to the number."
    assert schema["parameters"]["properties"] == {"by": {"type": "integer", "description": "How much."}}


def test_a_request_times_out(url: str) -> None:
    session = openenv_factory(url)()
    session.reset()
    session._client.timeout = 0.2  # not earlier: on a busy machine every response takes longer
    with pytest.raises(TimeoutError, match=r"did not answer within 0.2 seconds"):
        session._step({"by": 99})


def test_instances_use_the_urls_in_turn(url: str) -> None:
    factory = openenv_factory([url, url + "/second"])
    assert [factory()._client.url for _ in range(3)] == [url, url + "/second", url]


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "127.0.0.1:80", "ftp://x"])
def test_an_invalid_url_or_missing_server_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"no schema of actions from|openenv_factory got"):
        openenv_factory(address, timeout=1.0)


def test_observations_are_converted_to_text() -> None:
    assert observation_text({"text": "a", "metadata": {"b": 1}, "reward": None}) == "a"
    assert json.loads(observation_text({"grid": [1, 2], "moves": 3})) == {"grid": [1, 2], "moves": 3}
    assert observation_text("plain") == "plain"


def test_sessions_over_a_websocket() -> None:
    server_module = pytest.importorskip("websockets.sync.server")

    def serve(connection: Any) -> None:
        number = 0
        for text in connection:
            message = json.loads(text)
            if message["type"] == "reset":
                number = message["data"].get("seed", 0)
            elif message["data"]["by"] < 0:
                connection.send(json.dumps({"type": "error", "data": {"message": "by must be positive"}}))
                continue
            else:
                number += message["data"]["by"]
            data = {"observation": {"text": f"at {number}"}, "reward": float(number), "done": False}
            connection.send(json.dumps({"type": "observation", "data": data}))

    from groupwise.agents.libraries.openenv import _WebSocketClient

    with server_module.serve(serve, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        clients = [
            _WebSocketClient(f"ws://127.0.0.1:{server.socket.getsockname()[1]}", 5.0) for _ in range(2)
        ]
        assert [client.reset({"seed": i})["observation"]["text"] for i, client in enumerate(clients)] == [
            "at 0",
            "at 1",
        ]
        assert clients[1].step({"by": 2})["observation"]["text"] == "at 3"
        assert clients[0].step({"by": 5})["reward"] == 5.0
        with pytest.raises(RuntimeError, match="by must be positive"):
            clients[0].step({"by": -1})
        server.shutdown()


class Tasks(list):
    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        return 1.0 if answer == entry["answer"] else 0.25


def test_reasoning_gym_tasks() -> None:
    tasks = Tasks([{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": "4"}])
    environments = EnvironmentPool(reasoning_gym_factory(tasks))
    tokenizer = byte_tokenizer()
    scripts = [
        [call("submit", answer="3"), call("submit", answer="2"), "ok"],
        [call("submit", answer="5"), "hm"],
    ]
    rows = [{**question(""), "seed": seed} for seed in (2, 3)]
    rollout = agents(tokenizer, (), environments).generate_rollouts(rows, ScriptedBackend(tokenizer, scripts))
    assert rollout.prompts[1][0]["content"].startswith("2+2?")
    assert environments.reward_funcs()[0](**rollout.extra) == [1.0, 0.25]
    with pytest.raises(ConfigError, match="list has no score_answer"):
        reasoning_gym_factory([])


def test_real_reasoning_gym_tasks() -> None:
    pytest.importorskip("reasoning_gym")
    from groupwise.rewards import create_reasoning_gym

    tasks = create_reasoning_gym("basic_arithmetic", size=3, seed=1)
    environment = reasoning_gym_factory(tasks)()
    assert tasks[1]["question"] in environment.reset(seed=1)
    assert environment.submit(tasks[1]["answer"]) == "correct" and environment.get_reward() == 1.0


def run_verifiers(environment: Any, scripts: list[list[str]], rows: list[dict[str, Any]]) -> Any:
    wrapped, tokenizer = VerifiersEnvironment(environment), byte_tokenizer()
    config = config_of(max_completion_length=1000)
    loop = MultiTurnRollouts(EnvironmentLoop(wrapped), tokenizer, config, frozenset([tokenizer.eos_token_id]))
    rollout = loop.generate_rollouts(rows, ScriptedBackend(tokenizer, scripts))
    logged: dict[str, float] = {}
    rewards = wrapped.reward_funcs()[0](**rollout.extra, log_metric=logged.__setitem__)
    return rollout, rewards, logged


def test_real_verifiers_environments() -> None:
    pytest.importorskip("verifiers.clients")
    import verifiers as vf
    from datasets import Dataset

    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the one.
            b: the other.
        """
        return a + b

    def right(completion: Any, answer: str, **_: Any) -> float:
        return float(answer in completion[-1].content)

    rows = Dataset.from_list([{"question": "2+3?", "answer": "5"}, {"question": "4+4?", "answer": "8"}])
    environment = vf.ToolEnv(dataset=rows, tools=[add], rubric=vf.Rubric(funcs=[right]), max_turns=3)
    given = [dict(row) for row in verifiers_dataset(environment)]
    scripts = [[call("add", a=2, b=3), "It is 5."], [call("add", a=4)] * 3]
    rollout, rewards, logged = run_verifiers(environment, scripts, given)
    assert rewards == [1.0, 0.0] and logged["verifiers/num_turns"] == 2.5
    assert [m["role"] for m in rollout.texts[0]] == ["assistant", "tool", "assistant"]
    assert rollout.metrics["tools/fork_frequency"].value() == 0


class FakeState(dict):
    """Rollout state of the fake library below."""


@pytest.fixture
def fake_verifiers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A fake verifiers with the names that the adapter uses, as defined in verifiers 0.1."""
    from groupwise.agents.libraries import verifiers as adapter

    class Client:
        def __init__(self, client: Any) -> None:
            self.client = client

        async def get_response(self, prompt: Any, tools: Any) -> Any:
            native, _ = await self.to_native_prompt(prompt)
            described = [await self.to_native_tool(tool) for tool in tools]
            return await self.from_native_response(
                await self.get_native_response(native, "policy", {}, described)
            )

    class OverlongPromptError(Exception):
        pass

    modules = {
        "verifiers": ModuleType("verifiers"),
        "verifiers.clients": SimpleNamespace(Client=Client),
        "verifiers.types": SimpleNamespace(
            ToolCall=SimpleNamespace, Response=SimpleNamespace, ResponseMessage=SimpleNamespace
        ),
        "verifiers.errors": SimpleNamespace(OverlongPromptError=OverlongPromptError),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    adapter._client_class.cache_clear()
    yield modules
    adapter._client_class.cache_clear()


class Message(SimpleNamespace):
    def model_dump(self, exclude_none: bool = True) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if value is not None}


class FakeEnvironment:
    """One tool call, then an answer."""

    tool_defs = (
        SimpleNamespace(name="add", description="Add.", parameters={"type": "object", "properties": {}}),
    )

    async def rollout(self, row: dict[str, Any], client: Any, model: str, sampling: Any) -> FakeState:
        prompt = [Message(**message) for message in row["prompt"]]
        first = (await client.get_response(prompt, self.tool_defs)).message
        if not first.tool_calls:
            return FakeState(reward=None, answer=first.content, row=row)
        (made,) = first.tool_calls
        calls = [{"id": made.id, "name": made.name, "arguments": made.arguments}]
        history = [*prompt, Message(role="assistant", content=first.content, tool_calls=calls)]
        result = str(sum(json.loads(made.arguments).values()))
        history.append(Message(role="tool", content=[{"type": "text", "text": result}], tool_call_id=made.id))
        second = (await client.get_response(history, self.tool_defs)).message
        return FakeState(answer=second.content, row=row)

    class rubric:
        @staticmethod
        async def score_rollout(state: FakeState) -> None:
            state["reward"] = float(state["answer"] == state["row"]["answer"])
            state["metrics"] = {"right": state["reward"]}


def test_verifiers_environments(fake_verifiers: Any) -> None:
    rows = [{**question("2+3?"), "answer": "5"}, {**question("1+1?"), "answer": "2"}]
    rollout, rewards, logged = run_verifiers(FakeEnvironment(), [[call("add", a=2, b=3), "5"], ["3"]], rows)
    assert rewards == [1.0, 0.0] and logged == {"verifiers/right": 0.5}
    assert rollout.texts[0][1] == {"role": "tool", "name": "add", "content": "5"}
    assert rollout.metrics["tools/fork_frequency"].value() == 0
    sampled = [
        t
        for t, mask in zip(rollout.completions[0].token_ids, rollout.completions[0].loss_mask, strict=True)
        if mask
    ]
    assert byte_tokenizer().decode(sampled) == call("add", a=2, b=3) + "<|im_end|>5<|im_end|>"


def test_other_versions_of_verifiers_and_other_objects_are_refused(
    fake_verifiers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from groupwise.agents.libraries import verifiers as adapter

    with pytest.raises(ConfigError, match="VerifiersEnvironment got a dict"):
        VerifiersEnvironment({})
    monkeypatch.setitem(sys.modules, "verifiers.clients", None)
    adapter._client_class.cache_clear()
    monkeypatch.setattr(adapter.importlib.metadata, "version", lambda name: "0.4.0")
    with pytest.raises(ConfigError, match=r"0\.1\.12 to 0\.3\.x, and verifiers 0\.4\.0 is installed"):
        VerifiersEnvironment(FakeEnvironment())


def test_an_old_package_for_websockets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("websockets.sync.client")
    set_installed(monkeypatch, "websockets", "14.2")
    oldest = oldest_version("websockets")
    with pytest.raises(ConfigError, match=f"ws://127.0.0.1:1 needs websockets>={oldest}, and 14.2 is"):
        OpenEnvSession("ws://127.0.0.1:1", 1.0)
