"""A stand-in for a vLLM server: its routes, and the ways in which it can fail, in a few threads."""

from __future__ import annotations

import itertools
import json
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from safetensors.torch import load_file

from groupwise.generation.vllm.client import VLLMServers
from groupwise.generation.vllm.plugin import ADAPTERS, PLACE_ADAPTER, SAME, place_adapter, same_reports
from groupwise.generation.vllm.weight_places import DigestReport
from support.fakes.tiny_engine import TinyEngine, scaled_adapter

GENERATE = "/inference/v1/generate"


class FakeVLLM:
    """Answers like vLLM; completion i of a prompt is [last prompt token, seed % 28 + 4, i] and an end token.

    weights: tensors that it received, or has below its adapters.
    engine: holds the weights in its place, as vLLM does.
    copy: second data-parallel engine, whose answers are not returned.
    failures: answers to give instead, by path, used up one by one: a status, "drop" (closes the connection),
        "hang", a finish reason, or a function that returns one of them or None.
    """

    def __init__(self, port: int = 0, host: str = "127.0.0.1") -> None:
        self.failures: dict[str, list[Any]] = {}
        self.bodies: list[tuple[str, Any]] = []
        self.keys: set[str | None] = set()
        self.connections = 0
        self.version, self.paused, self.tokens = "default", False, 0.0
        self.release = "0.32.0"  # of vLLM
        self.adapters: dict[str, dict[str, Any]] = {}  # contents by name
        self.weights: dict[str, torch.Tensor] = {}
        self.engine: TinyEngine | None = None
        self.copy: TinyEngine | None = None
        self.is_elsewhere = False  # on a machine that cannot read the trainer's files
        self.info = {
            "model_config": {
                "model": "tiny",
                "dtype": "torch.float32",
                "logprobs_mode": "processed_logprobs",
                "max_model_len": 128,
            },
            "scheduler_config": {"max_num_seqs": 16},
            "parallel_config": {"data_parallel_size": 1},
            "weight_transfer_config": {"backend": "groupwise"},
        }
        self.logprob = lambda position: -0.5 * (position + 1)
        self.http = _Server((host, port), _Handler)
        self.http.fake = self
        self.url = f"http://{host}:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def seen(self) -> Counter[str]:
        """Number of requests per path."""
        return Counter(path for path, _ in list(self.bodies))  # counting among threads would miss some

    def answer(self, path: str, query: dict[str, list[str]], body: Any) -> Any:
        if path == GENERATE:
            if body.get("model") not in (None, *self.adapters):
                return 404, f"The model `{body['model']}` does not exist."
            return self._generate(body)
        if path == "/v1/load_lora_adapter":
            directory = Path(body["lora_path"])
            config = json.loads((directory / "adapter_config.json").read_text())
            tensors = load_file(directory / "adapter_model.safetensors")
            self.adapters[body["lora_name"]] = {"config": config, "tensors": tensors}
            for engine in self._engines():
                engine.add_adapter(tensors, config["lora_alpha"] / config["r"])
        if self.engine is not None and path in ("/start_weight_update", "/update_weights"):
            for engine in self._engines():
                getattr(engine, path[1:])(*filter(None, [body]))
        elif path == "/update_weights" and body["update_info"].get("path"):
            self.weights |= load_file(body["update_info"]["path"])
        if path in ("/list_workers", "/tokenize"):  # neither a router nor a tokenizer
            return 404, "Not Found"
        if path == "/collective_rpc" and body["method"] == PLACE_ADAPTER:
            given = body["kwargs"]
            if self.is_elsewhere:
                given = {**given, "path": f"/another/machine/{Path(given['path']).name}"}
            return {"results": [place_adapter(None, **given)]}
        if path == "/collective_rpc" and body["method"] == SAME:
            try:
                for engine in self._engines():
                    same_reports(engine, **body["kwargs"])
            except ValueError as error:
                return 500, f"Worker failed with error '{error}'"
            return {"results": [None]}
        if path == "/collective_rpc":
            return {"results": self._reports(body["method"], body["kwargs"])}
        if path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
        if path == "/finish_weight_update":
            for engine in self._engines():
                engine.finish_weight_update()
            self.version = body.get("weight_version", self.version)
        if path == "/pause":
            assert query == {"mode": ["keep"]}
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        answers = {
            "/server_info": {"vllm_config": self.info},
            "/weight_info": {"weight_version": self.version},
            "/version": {"version": self.release},
            "/get_world_size": {"world_size": 1},
            "/v1/models": {"data": [{"id": name} for name in ("tiny", *self.adapters)]},
            "/metrics": f'vllm:generation_tokens_total{{engine="0"}} {self.tokens}\n',
        }
        return answers.get(path, {})

    def _engines(self) -> list[TinyEngine]:
        return [engine for engine in (self.engine, self.copy) if engine is not None]

    def _reports(self, method: str, given: dict[str, Any]) -> list[Any]:
        if self.engine is not None:
            return next(iter([engine.collective_rpc(method, given) for engine in self._engines()]))
        reports = []
        for adapter in reversed(self.adapters.values()) if method == ADAPTERS else [None]:
            report = DigestReport(given["shapes"])
            scale = 1 if adapter is None else adapter["config"]["lora_alpha"] / adapter["config"]["r"]
            tensors = self.weights if adapter is None else scaled_adapter(adapter["tensors"], scale)
            for name in given["shapes"].keys() & tensors.keys():
                report.add_tensor(name, tensors[name])
            reports.append(report.result())
        return [reports]

    def _generate(self, body: Any) -> Any:
        sampling = body["sampling_params"]
        choices = []
        for index in range(sampling["n"]):
            tokens = [body["token_ids"][-1], sampling["seed"] % 28 + 4, index, 1][: sampling["max_tokens"]]
            content: list[dict[str, Any]] = [
                {"token_id": token, "logprob": self.logprob(i)} for i, token in enumerate(tokens)
            ]
            if sampling["logprobs"]:  # the sampled token, the one after it, and tokens that were not kept
                for entry in content:
                    token = entry["token_id"]
                    others = [{"token_id": token + 1, "logprob": -2.0}, {"token_id": 99, "logprob": -9999.0}]
                    entry["top_logprobs"] = [dict(entry), *others]
            mask = None
            if self.info["model_config"].get("return_sampling_mask"):
                assert sampling["temperature"] > 0 and sampling["top_k"] > 0  # vLLM refuses others
                mask = [[token, token + 2] for token in tokens]
            choices.append(
                {
                    "sampling_mask": mask,
                    "index": index,
                    "token_ids": tokens,
                    "logprobs": {"content": content},
                    "finish_reason": "stop" if tokens[-1] == 1 else "length",
                }
            )
            if self.release >= "0.32":
                versions = [{"version": self.version, "start": 0, "end": len(tokens)}]
                choices[-1]["weight_versions"] = versions
        return {"choices": choices[::-1]}

    def close(self) -> None:
        """Gone, as after a kill: open connections end, new ones are refused."""
        self.http.shutdown()
        self.http.server_close()
        for connection in list(self.http.open_connections):
            with suppress(OSError):  # it has ended; close() alone would end none that its handler reads
                connection.shutdown(socket.SHUT_RDWR)


class FakeRouter(FakeVLLM):
    """Answers like vllm-router: each request goes to the next worker in turn."""

    def __init__(self, workers: list[FakeVLLM]) -> None:
        super().__init__()
        self.workers, self.turns = workers, itertools.count(1)

    def answer(self, path: str, query: dict[str, list[str]], body: Any) -> Any:
        if path == "/list_workers":
            return {"urls": [worker.url for worker in self.workers]}
        if path in ("/health", "/readiness"):
            return {}
        assert path == GENERATE, path  # vllm-router would send an update to one of the workers
        worker = self.workers[next(self.turns) % len(self.workers)]
        worker.bodies.append((path, body))
        return worker.answer(path, query, body)


def with_tokenizer(fake: FakeVLLM, tokenizer: Any) -> FakeVLLM:
    """The stand-in with a tokenizer."""
    answer = fake.answer

    def tokenizing(path: str, query: dict[str, list[str]], body: Any) -> Any:
        if path == "/tokenize":
            return {"tokens": tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]}
        return answer(path, query, body)

    fake.answer = tokenizing  # type: ignore[method-assign]
    return fake


@contextmanager
def begun_together(servers: VLLMServers) -> Iterator[None]:
    """Let the requests that are submitted meanwhile begin at the end: none is answered before all have begun.

    Otherwise a server may have answered the first one before the second one chooses among the servers.
    """
    submitted = threading.Event()

    async def block() -> None:
        submitted.wait()

    servers._background.submit(block())
    try:
        yield
    finally:
        submitted.set()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # a connection beyond it is refused, and the next attempt comes after 1 s
    fake: FakeVLLM

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.open_connections: set[Any] = set()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Headers and body are two writes: the second would wait 40 ms for the client to acknowledge the first.
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.server.open_connections.add(self.connection)
        self.server.fake.connections += 1

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        fake = self.server.fake
        url = urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        fake.bodies.append((url.path, body))
        fake.keys.add(self.headers.get("Authorization"))
        planned = fake.failures.get(url.path, [])
        failure = planned.pop(0) if planned else None
        if callable(failure):
            failure = failure()
        if failure == "drop":
            self.close_connection = True
            self.connection.close()
            return
        while failure == "hang":
            time.sleep(0.05)
        status = failure if isinstance(failure, int) else 200
        answer = {"error": {"message": "as planned"}} if status != 200 else None
        if answer is None:
            answer = fake.answer(url.path, parse_qs(url.query), body)
            if isinstance(answer, tuple):
                status, answer = answer[0], {"error": {"message": answer[1]}}
            if isinstance(failure, str):
                answer["choices"][0]["finish_reason"] = failure
        text = answer if isinstance(answer, str) else json.dumps(answer, separators=(",", ":"))  # as vLLM
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    do_POST = do_GET


if __name__ == "__main__":  # host and version, for a server in a network of its own
    served = FakeVLLM(8000, sys.argv[1])
    served.version = sys.argv[2]
    served.failures[GENERATE] = [lambda: time.sleep(2.0)] * 9
    time.sleep(120)
