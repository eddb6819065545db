"""Episodes of ``verifiers`` environments (0.4), whose training client samples from the run's vLLM server.

harness of the environment --> interception of verifiers --> TrainClient --> vLLM server of the run
                                      |
                message graph of the episode --> a row per trainable branch of the rollout
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any

from datasets import Dataset

from groupwise.agents.libraries.capture import ConcurrentRollouts
from groupwise.errors import BackendError, ConfigError


def verifiers_dataset(environment: Any) -> Dataset:
    """Return a row per task of the environment; ``environment.taskset`` may be a view, as ``.take(100)``.

    Raises:
        ConfigError: ``environment`` is of another kind or of an older verifiers, or its taskset has no end.
    """
    rows = [
        {"prompt": [{"role": "user", "content": task.data.prompt_text, "task": index}]}
        for index, task in _tasks(environment).items()
    ]
    return Dataset.from_list(rows)


class VerifiersEnvironment(ConcurrentRollouts):
    """A ``rollout_func`` that plays episodes of a ``verifiers`` environment; :func:`rubric_reward` is the
    reward, and :func:`verifiers_dataset` has the prompts.

    The environment's harness calls the policy and its tools; its task computes rewards. Needs
    ``use_vllm=True`` with ``vllm_mode="server"``. Calls are sampled at the run's temperature from the whole
    vocabulary, with ``max_completion_length`` tokens at most.

    Args:
        environment: environment from ``verifiers.v1.load_environment``, with one agent to train.
        renderer: settings of the renderer, which converts messages to tokens, such as ``{"name": "qwen3"}``;
            None: chosen by the name of the tokenizer, without tools if verifiers does not know it.

    Raises:
        ConfigError: verifiers is missing or older than 0.4, or the environment has another number of agents
            to train, or an agent that samples with settings of its own.
        BackendError: an episode failed, with ``rollout_on_error="raise"``.
    """

    def __init__(self, environment: Any, renderer: dict[str, Any] | None = None) -> None:
        self.environment, self.renderer = environment, renderer
        self.tasks = _tasks(environment)
        self.__name__ = type(environment).__name__

    def run_rollouts(self, prompts: list[Any], trainer: Any) -> list[Any]:
        """Play an episode per prompt; return its rows, columns and number of model calls, or its error."""
        import verifiers.v1 as vf

        _name_tokens()
        (url, model), args = self.served_model(trainer), trainer.args
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        client = vf.TrainClientConfig(
            base_url=f"{url}/v1",
            api_key_var="VLLM_API_KEY",
            renderer=self.renderer,
            renderer_model_name=tokenizer.name_or_path or model,
        )
        sampling = vf.Sampling(temperature=args.temperature, max_tokens=args.max_completion_length)
        context = vf.ModelContext(model, client, sampling)

        async def play() -> list[Any]:
            tasks = [self.tasks[prompt[0]["task"]] for prompt in prompts]
            async with self.environment.serving():
                return await asyncio.gather(*(self.environment.run_episode(task, context) for task in tasks))

        future = trainer.event_loop.submit(play())
        try:
            return [_outcome(episode, context) for episode in future.result()]
        finally:
            future.cancel()  # of no effect unless the wait was interrupted


def _tasks(environment: Any) -> dict[int, Any]:
    """Return the tasks by their index."""
    if not hasattr(environment, "run_episode"):
        raise ConfigError(
            f"got a {type(environment).__name__}; allowed: an environment that "
            f"verifiers.v1.load_environment returns, of verifiers 0.4 or newer ({_installed()})"
        )
    if not environment.taskset.bounded:
        raise ConfigError("the taskset has no end; use environment.taskset = environment.taskset.take(1000)")
    return {task.data.idx: task for task in environment.taskset}


def _outcome(episode: Any, context: Any) -> Any:
    """Return rows, columns and number of model calls of an episode, or its error."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        return BackendError("; ".join(f"{error.type}: {error.message}" for error in errors))
    trained = [
        trace
        for trace in episode.traces
        if trace.agent.trainable
        and (trace.agent.config.model, trace.agent.config.client) == (context.model, context.client)
    ]
    if len(trained) != 1:
        raise ConfigError(
            f"an episode of {episode.env.id!r} has {len(trained)} traces of agents to train; allowed: one"
        )
    (trace,) = trained
    own = trace.agent.config.sampling
    if own.model_copy(update={"max_tokens": context.sampling.max_tokens}) != context.sampling:
        raise ConfigError(
            f"the agent {trace.agent.name!r} samples with settings of its own ({own}); leave out all but "
            "max_tokens, so that it samples from the policy at the run's temperature"
        )
    rows = [_row(branch) for branch in trace.branches if branch.trainable and any(branch.sampled_mask)]
    if not rows:
        return BackendError(f"the agent made no model call; its episode ended with {trace.stop_condition!r}")
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    metrics = {**trace.metrics, **rewards}
    return rows, {"verifiers_reward": trace.reward, "verifiers_metrics": metrics}, len(trace.calls)


def _row(branch: Any) -> dict[str, Any]:
    """Return a row with the branch's tokens; the completion begins with the first one that was sampled."""
    tokens, mask = branch.token_ids, branch.sampled_mask
    start = mask.index(True)
    return {
        "prompt_ids": tokens[:start],
        "completion_ids": tokens[start:],
        "logprobs": branch.logprobs[start:],
        "env_mask": [int(sampled) for sampled in mask[start:]],
    }


def rubric_reward(
    verifiers_reward: list[float | None],
    verifiers_metrics: list[dict[str, float] | None],
    log_metric: Callable[[str, float], None],
    **_: object,
) -> list[float | None]:
    """Return the task's reward; its single functions and metrics are logged as ``verifiers/<name>``."""
    for name in dict.fromkeys(name for metrics in verifiers_metrics for name in metrics or ()):
        values = [metrics[name] for metrics in verifiers_metrics if metrics and metrics.get(name) is not None]
        if values:
            log_metric(f"verifiers/{name}", sum(values) / len(values))
    return verifiers_reward


def _installed() -> str:
    try:
        return f"verifiers {importlib.metadata.version('verifiers')} is installed"
    except importlib.metadata.PackageNotFoundError:
        return "none is installed; run pip install 'groupwise[verifiers]'"


@functools.cache
def _name_tokens() -> None:
    """Add the name of each token to vLLM's log-probs.

    vLLM 0.32 answers ``"token_id": 5``, and renderers 0.1.12, which verifiers calls, checks that
    ``"token"`` is ``"token_id:5"``.
    """
    from renderers import client

    parse = client.parse_generate_response

    def parse_generate_response(raw: bytes) -> dict[str, Any]:
        response = parse(raw)
        for choice in response.get("choices") or ():
            for entry in (choice.get("logprobs") or {}).get("content") or ():
                if "token_id" in entry:
                    entry.setdefault("token", f"token_id:{entry['token_id']}")
        return response

    client.parse_generate_response = parse_generate_response
