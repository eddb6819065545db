"""Train in an environment of the ``verifiers`` library (0.4): ``pip install 'groupwise[verifiers]'``.

Its agent asks twice, so that a rollout has two turns. Needs a server:
groupwise vllm-serve --model MODEL --max_model_length 2048
"""

from pathlib import Path

import verifiers.v1 as vf
from openai import AsyncOpenAI
from smollm2 import example_parser

from groupwise import GRPOConfig, GRPOTrainer
from groupwise.agents.libraries import VerifiersEnvironment, rubric_reward, verifiers_dataset

CITIES = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo"}
__all__ = ["AskTwice", "Capitals"]


class Land(vf.TaskData):
    city: str


class Capital(vf.Task[Land]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return sum(self.data.city in (m.content or "") for m in trace.assistant_messages) / 2


class Capitals(vf.Taskset[Capital]):
    def load(self):
        for land, city in CITIES.items():
            yield Capital(Land(prompt=f"What is the capital of {land}?", city=city), self.config.task)


class AskTwice(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        client = AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages = [{"role": "user", "content": data.prompt}]
        for _ in range(2):
            answer = await client.chat.completions.create(model=ctx.model, messages=messages)
            said = {"role": "assistant", "content": answer.choices[0].message.content or ""}
            messages += [said, {"role": "user", "content": "Are you sure?"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


if __name__ == "__main__":
    parser = example_parser(__doc__, "environment-verifiers-output")
    parser.add_argument("--server", default="http://127.0.0.1:8000", help="address of the server")
    options = parser.parse_args()
    here = {"taskset": {"id": Path(__file__).stem}, "agent": {"runtime": {"type": "subprocess"}}}
    environment = vf.load_environment(vf.resolve_env_config(here))
    limits = {"max_completion_length": 24, "max_steps": options.max_steps, "learning_rate": 1e-5}
    vllm = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": options.server}
    logs = {"logging_steps": 1, "save_strategy": "no", "report_to": "none"}
    args = GRPOConfig(options.output_dir, per_device_train_batch_size=8, **limits, **vllm, **logs)
    data, play = verifiers_dataset(environment), VerifiersEnvironment(environment)
    GRPOTrainer(options.model, rubric_reward, args, data, rollout_func=play).train()
