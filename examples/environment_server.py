"""Train in an environment behind an OpenEnv server; this script starts a small one.

For a real server, change only the URL: ``openenv_factory("ws://localhost:8000")``. Needs
``pip install 'groupwise[openenv]'``.
"""

import socket
import threading

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field
from smollm2 import example_parser, tool_tokenizer

from groupwise import GRPOConfig, GRPOTrainer
from groupwise.agents.libraries import openenv_factory


class Name(Action):
    """Name an animal."""

    word: str = Field(description="An animal.")


class Noted(Observation):
    text: str


class Zoo(Environment):
    """Reward short names of animals."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, episode_id=None, **_):
        return Noted(text="Answer with name(cat) or the name of another animal.")

    def step(self, action, timeout_s=None, **_):
        return Noted(text="Noted.", reward=1.0 / (1 + len(action.word)), done=True)


options = example_parser(__doc__, "environment-server-output").parse_args()
limits = {"max_completion_length": 40, "max_tool_calling_iterations": 1, "learning_rate": 1e-5}
batches = {"per_device_train_batch_size": 8, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
args = GRPOConfig(options.output_dir, max_steps=options.max_steps, **limits, **batches)
listener = socket.create_server(("127.0.0.1", 0))
app = create_fastapi_app(Zoo, Name, Noted, max_concurrent_envs=8)
server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
environments = openenv_factory(f"ws://127.0.0.1:{listener.getsockname()[1]}", name="name")
tokenizer = tool_tokenizer(options.model, "word")
GRPOTrainer(options.model, None, args, processing_class=tokenizer, environment_factory=environments).train()
