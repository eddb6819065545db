"""A vision-language model with real vLLM engines, in the process and as a server. Needs torchvision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import tiny_vlm
from support.workers.vllm_process import ServerProcess

from groupwise.policy.weight_iterator import PolicyWeights
from groupwise.records import SamplingOptions
from groupwise.records.images import join_images
from groupwise.tokenization.images import encode_prompt

pytest.importorskip("torchvision", reason="vLLM's vision-language models need torchvision")
pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

FAMILY = "qwen2_5_vl_for_engine"
ENGINE = {"kv_cache_memory_bytes": 2**24, "max_num_seqs": 16}
SETTINGS = {"use_vllm": True, "learning_rate": 0.05, "vllm_max_model_length": 128}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Any:
    directory = tmp_path_factory.mktemp("server")
    model, processor = tiny_vlm.build(FAMILY, seed=7)
    model.save_pretrained(directory / "model")
    processor.save_pretrained(directory / "model")
    process = ServerProcess(directory, ("--max-model-len", "128")).start().wait()
    yield process
    process.kill()


def prompts(processor: Any) -> tuple[list[list[int]], list[Any]]:
    """Prompts with one image, two images, none, and the first with another image."""
    contents = [["red"], ["blue", "green"], [], ["white"]]
    rows = [
        [{"role": "user", "content": [*map(block, colors), {"type": "text", "text": "w1 w2"}]}]
        for colors in contents
    ]
    ids, images = zip(*(encode_prompt(processor, row) for row in rows), strict=True)
    assert ids[0] == ids[3]
    return list(ids), list(images)


def block(color: str) -> dict[str, Any]:
    return {"type": "image", "image": tiny_vlm.image(color, (30, 60) if color == "blue" else (40, 30))}


def trainer_logps(model: Any, ids: list[int], images: Any, tokens: list[int]) -> torch.Tensor:
    """Log-probs without the image token, which the engine does not sample."""
    row = ids + tokens
    extra = join_images([images], [0], len(row), "cpu")
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([row]), **extra).logits[0, len(ids) - 1 : -1].double()
    logits[:, tiny_vlm.IMAGE_TOKEN] = -torch.inf
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def assert_follows(run: Any) -> list[list[int]]:
    """The engine samples from the policy with the images, and reports its log-probs."""
    run.backend.sync_weights(PolicyWeights(run.model), step=run.state.global_step)
    run.model.eval()
    ids, images = prompts(run.processing_class)
    completions = run.backend.generate(ids, SamplingOptions(images=images))
    for row, inputs, completion in zip(ids, images, completions, strict=True):
        expected = trainer_logps(run.model, row, inputs, completion.token_ids)
        got = torch.tensor(completion.logps, dtype=torch.float64)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    return [completion.token_ids for completion in completions]


def assert_trains(run: Any) -> None:
    first = assert_follows(run)
    vision = run.model.model.visual.blocks[0].attn.qkv.weight.detach().clone()
    run.train()
    assert not torch.equal(vision, run.model.model.visual.blocks[0].attn.qkv.weight)
    # The vision tower has changed, and the engine has processed the same images with the one before.
    assert assert_follows(run) != first
    run.backend.close()


def test_the_engine_in_the_process_sees_the_images_of_every_step(tmp_path):
    assert_trains(tiny_vlm.trainer(tmp_path, FAMILY, **SETTINGS, vllm_engine_kwargs=ENGINE))


def test_a_server_sees_the_images_of_every_step(server, tmp_path):
    settings = {**SETTINGS, "vllm_mode": "server", "vllm_server_base_url": server.url}
    assert_trains(tiny_vlm.trainer(tmp_path, FAMILY, **settings))


def test_a_server_generates_ahead_with_images(server, tmp_path):
    """Suspended requests continue with new weights, after the cache of vision-tower outputs was cleared."""
    settings = {**SETTINGS, "vllm_mode": "server", "vllm_server_base_url": server.url}
    run = tiny_vlm.trainer(tmp_path, FAMILY, **settings, rollout_staleness=1, max_steps=4)
    run.train()
    assert [line["staleness/max"] for line in run.state.log_history[:4]] == [0, 1, 1, 1]
    assert_follows(run)
    run.backend.close()
