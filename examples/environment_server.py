"""Train in an environment behind an OpenEnv server; this script starts a small one.

For a real server, change only the URL: ``openenv_factory("ws://localhost:8000")``.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from smollm2 import example_parser, tool_tokenizer

from groupwise import GRPOConfig, GRPOTrainer
from groupwise.agents.libraries import openenv_factory

FIELD = {"word": {"type": "string", "description": "An animal."}}
ACTION = {"description": "Name an animal.", "type": "object", "properties": FIELD, "required": ["word"]}


class Zoo(BaseHTTPRequestHandler):
    """Reward short names of animals."""

    def do_GET(self):
        self.answer({"action": ACTION})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/reset":
            self.answer({"observation": {"text": "Answer with name(cat) or the name of another animal."}})
        else:
            reward = 1.0 / (1 + len(body["action"]["word"]))
            self.answer({"observation": {"text": "Noted."}, "reward": reward, "done": True})

    def answer(self, value):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *_): ...


options = example_parser(__doc__, "environment-server-output").parse_args()
limits = {"max_completion_length": 40, "max_tool_calling_iterations": 1, "learning_rate": 1e-5}
batches = {"per_device_train_batch_size": 8, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
args = GRPOConfig(options.output_dir, max_steps=options.max_steps, **limits, **batches)
server = ThreadingHTTPServer(("127.0.0.1", 0), Zoo)
threading.Thread(target=server.serve_forever, daemon=True).start()
environments = openenv_factory(f"http://127.0.0.1:{server.server_port}", name="name")
tokenizer = tool_tokenizer(options.model, "word")
GRPOTrainer(options.model, None, args, processing_class=tokenizer, environment_factory=environments).train()
