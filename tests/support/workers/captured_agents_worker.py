"""Rollouts of agents that behave in every way, against the server of the tests; prints them as JSON.

worker.py SERVER MODEL OUTPUT_DIR EXAMPLE FLAGS...

EXAMPLE, a script, runs with its flags afterwards in the same process: the imports take longer than both.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import runpy
import sys
from typing import Any

import torch
from datasets import Dataset
from openai import AsyncOpenAI, OpenAI
from transformers import AutoModelForCausalLM

from groupwise import GRPOConfig, GRPOTrainer
from groupwise.agents.libraries import CapturedAgent, Endpoint
from groupwise.errors import BackendError
from support.runs import tokenizer

#: One prompt per behaviour.
BEHAVIOURS = (
    "plain",
    "other model",
    "streams",
    "dies once",
    "always dies",
    "hangs",
    "calls nothing",
    "loops",
)
attempts = {name: itertools.count() for name in BEHAVIOURS}


async def behave(prompt: str, endpoint: Endpoint) -> dict[str, Any]:
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
    attempt = next(attempts[prompt])
    given: dict[str, Any] = {
        "model": endpoint.model,
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "w1"}],
    }
    if prompt == "calls nothing":
        return {}
    if prompt == "other model":
        given |= {"model": "gpt-99", "temperature": 0, "top_p": 0.1}
    if prompt == "streams":
        chunks = await client.chat.completions.create(**given, stream=True)
        return {
            "said": "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])
        }
    answer = (await client.chat.completions.create(**given)).choices[0].message.content
    if prompt == "always dies" or (prompt == "dies once" and attempt == 0):
        raise ValueError("the agent's own error")
    if prompt == "hangs":
        await asyncio.sleep(600)
    for _ in range(30 if prompt == "loops" else 1):
        given["messages"] += [{"role": "assistant", "content": answer}, {"role": "user", "content": "w2"}]
        answer = (await client.chat.completions.create(**given)).choices[0].message.content
    return {"said": answer}


def behave_in_a_thread(prompt: str, endpoint: Endpoint) -> dict[str, Any]:
    client = OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    answer = client.chat.completions.create(
        model="any", max_tokens=5, messages=[{"role": "user", "content": prompt}]
    )
    return {"said": answer.choices[0].message.content}


def lengths(said: list[str | None], rollout_rows: list[Any], **_: Any) -> list[float]:
    return [float(len(rows[0][1]) + i) for i, rows in enumerate(rollout_rows)]


def row_logps(model: Any, prompt: list[int], ids: list[int]) -> list[float]:
    """Log-probs of the policy over its whole vocabulary at temperature 1."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0].log_softmax(-1)
    return [logits[len(prompt) - 1 + t, token].item() for t, token in enumerate(ids)]


def make(server: str, model: str, directory: str, agent: CapturedAgent, **given: Any) -> GRPOTrainer:
    settings = {"max_steps": 2, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "bf16": False}
    settings |= {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 64,
        "use_cpu": True,
        "use_vllm": True,
    }
    args = GRPOConfig(directory, **settings, vllm_mode="server", vllm_server_base_url=server, **given)
    policy = AutoModelForCausalLM.from_pretrained(model)
    data = Dataset.from_dict({"prompt": ["w1 w2", "w3"] * 4})
    return GRPOTrainer(policy, lengths, args, data, processing_class=tokenizer(), rollout_func=agent)


def main(server: str, model: str, directory: str) -> None:
    agent = CapturedAgent(behave, timeout=6, max_calls=4)
    run = make(server, model, directory, agent, rollout_on_error="retry", rollout_retries=1)
    run.sync_sampler("train")
    output = agent(list(BEHAVIOURS), run)
    own = [
        row_logps(run.model, *pair)
        for pair in zip(output["prompt_ids"], output["completion_ids"], strict=True)
    ]
    run.args.rollout_on_error = "raise"
    try:
        agent(["always dies"], run)
        message = ""
    except BackendError as error:
        message = str(error)
    run.backend.close()
    trained = make(server, model, directory, CapturedAgent(behave_in_a_thread))
    trained.train()
    trained.backend.close()
    logs = [log for log in trained.state.log_history if "loss" in log]
    print("\n" + json.dumps({"output": output, "own": own, "message": message, "logs": logs}))


if __name__ == "__main__":
    main(*sys.argv[1:4])
    sys.argv = sys.argv[4:]
    runpy.run_path(sys.argv[0], run_name="__main__")
