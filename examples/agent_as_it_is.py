"""Train an agent as it is: two agents of the OpenAI Agents SDK and a critic of the Anthropic SDK.

OpenEnv's proxy captures their model calls; each call is a row of the rollout. Needs openenv, openai-agents
and anthropic, and a server: groupwise vllm-serve --model MODEL --max_model_length 2048
"""

import anthropic
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from datasets import Dataset
from openai import AsyncOpenAI
from smollm2 import example_parser

from groupwise import GRPOConfig, GRPOTrainer
from groupwise.agents.libraries import CapturedAgent

set_tracing_disabled(True)


async def write_and_shorten(prompt, endpoint):
    """One rollout: a writer, an editor with a history of its own, and a critic."""
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    model = OpenAIChatCompletionsModel(endpoint.model, client)
    settings = ModelSettings(max_tokens=16)
    writer = Agent("writer", instructions="Answer in one line.", model=model, model_settings=settings)
    editor = Agent("editor", instructions="Say it shorter.", model=model, model_settings=settings)
    draft = (await Runner.run(writer, prompt)).final_output
    final = (await Runner.run(editor, draft or "Nothing.")).final_output
    critic = anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=endpoint.api_key)
    question = [{"role": "user", "content": f"Is this a good line? {final}"}]
    await critic.messages.create(model="any", max_tokens=8, messages=question)
    return {"draft": draft, "final": final}


def shorter(draft, final, **_):
    """Return 1 if the editor's line is shorter than the writer's."""
    return [float(0 < len(short) < len(long)) for long, short in zip(draft, final, strict=True)]


def main():
    parser = example_parser(__doc__, "agent-as-it-is-output")
    parser.add_argument("--server", default="http://127.0.0.1:8000", help="address of the server")
    options = parser.parse_args()
    args = GRPOConfig(
        options.output_dir,
        max_steps=options.max_steps,
        learning_rate=1e-5,
        per_device_train_batch_size=8,
        max_completion_length=64,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=options.server,
        rollout_on_error="retry",  # an agent that fails is run again, and then dropped from its group
        **{"logging_steps": 1, "save_strategy": "no", "report_to": "none"},
    )
    rows = [{"prompt": f"What is {topic} like?"} for topic in ("rain", "bread", "snow", "tea")] * 8
    rollout = CapturedAgent(write_and_shorten, timeout=120)
    GRPOTrainer(options.model, shorter, args, Dataset.from_list(rows), rollout_func=rollout).train()


main()
