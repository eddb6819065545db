"""Episodes of a verifiers environment with every outcome, against the server of the tests; prints JSON.

worker.py SERVER MODEL OUTPUT_DIR EXAMPLE FLAGS...

EXAMPLE, a script, runs with its flags afterwards in the same process, as after captured_agents_worker.py.
"""

from __future__ import annotations

import itertools
import json
import runpy
import sys
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupwise import GRPOConfig, GRPOTrainer
from groupwise.agents.libraries import VerifiersEnvironment, rubric_reward, verifiers_dataset
from groupwise.errors import BackendError, ConfigError
from support.workers.captured_agents_worker import row_logps

#: One task per behaviour of the harness.
BEHAVIOURS = ("one turn", "tools", "sub-agent", "dies once", "always dies", "calls nothing")
RENDERER = {"name": "default", "tool_parser": "qwen3"}
attempts = {name: itertools.count() for name in BEHAVIOURS}
PRICE = {"name": "price", "description": "Get a price.", "parameters": {"type": "object", "properties": {}}}


class Behaviour(vf.TaskData):
    weight: float = 1.0


class Play(vf.Task[Behaviour]):
    @vf.reward(weight=2.0)
    async def said_something(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) > 0)

    @vf.metric
    async def replies(self, trace: vf.Trace) -> float:
        return len(trace.assistant_messages)

    @vf.metric
    async def results(self, trace: vf.Trace) -> float:
        return sum(message.content == "3" for message in trace.tool_messages)


class Plays(vf.Taskset[Play]):
    def load(self):
        for name in BEHAVIOURS:
            yield Play(Behaviour(prompt=name), self.config.task)


class Player(vf.Harness[vf.HarnessConfig]):
    """Behaves as the task's prompt says."""

    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        attempt = next(attempts[data.prompt])
        tools = {"tools": [{"type": "function", "function": PRICE}]} if data.prompt == "tools" else {}
        messages: list[Any] = [{"role": "user", "content": data.prompt}]

        async def call(messages: list[Any]) -> Any:
            sampling = {"temperature": 0.0, "top_p": 0.1}  # of no effect
            answer = await client.chat.completions.create(model="any", messages=messages, **tools, **sampling)
            return answer.choices[0].message

        if data.prompt != "calls nothing":
            answer = await call(messages)
        if data.prompt == "always dies" or (data.prompt == "dies once" and attempt == 0):
            raise ValueError("the harness's own error")
        if data.prompt == "tools":
            for _ in range(30):  # half of the model's answers are calls
                if answer.tool_calls:
                    break
                answer = await call(messages)
            (made,) = answer.tool_calls
            messages += [answer.model_dump(exclude_none=True)]
            messages += [{"role": "tool", "tool_call_id": made.id, "content": "3"}]
            await call(messages)
        if data.prompt == "sub-agent":
            await call([{"role": "user", "content": "Say yes."}])
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Player", "Plays"]


def environment(**agent: Any) -> Any:
    sys.modules["plays"] = sys.modules[__name__]  # verifiers imports tasks and harnesses by name
    settings = {"taskset": {"id": "plays"}, "agent": {"runtime": {"type": "subprocess"}, **agent}}
    return vf.load_environment(vf.resolve_env_config(settings))


def make(server: str, model: str, directory: str, rollout: VerifiersEnvironment, **given: Any) -> GRPOTrainer:
    settings = {"max_steps": 2, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "bf16": False}
    settings |= {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 30,
        "use_cpu": True,
        "use_vllm": True,
    }
    args = GRPOConfig(directory, **settings, vllm_mode="server", vllm_server_base_url=server, **given)
    policy = AutoModelForCausalLM.from_pretrained(model)
    data = verifiers_dataset(rollout.environment).select(range(3))
    return GRPOTrainer(
        policy,
        [rubric_reward, lengths],
        args,
        data,
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        rollout_func=rollout,
    )


def lengths(completion_ids: list[Any], **_: Any) -> list[float]:
    return [float(len(ids) + i) for i, ids in enumerate(completion_ids)]


def main(server: str, model: str, directory: str) -> None:
    rollout = VerifiersEnvironment(environment(), renderer=RENDERER)
    run = make(server, model, directory, rollout, rollout_on_error="retry", rollout_retries=1)
    run.sync_sampler("train")
    prompts = verifiers_dataset(rollout.environment)["prompt"]
    output = rollout(list(prompts), run)
    own = [
        row_logps(run.model, *pair)
        for pair in zip(output["prompt_ids"], output["completion_ids"], strict=True)
    ]
    run.args.rollout_on_error = "raise"
    messages = []
    for env, prompt in (
        (environment(), prompts[4]),
        (environment(sampling={"temperature": 0.5}), prompts[0]),
    ):
        try:
            VerifiersEnvironment(env, renderer=RENDERER)([prompt], run)
        except (BackendError, ConfigError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    run.backend.close()
    trained = make(server, model, directory, rollout)
    trained.train()
    trained.backend.close()
    logs = [log for log in trained.state.log_history if "loss" in log]
    print("\n" + json.dumps({"output": output, "own": own, "messages": messages, "logs": logs}))


if __name__ == "__main__":
    main(*sys.argv[1:4])
    sys.argv = sys.argv[4:]
    runpy.run_path(sys.argv[0], run_name="__main__")
