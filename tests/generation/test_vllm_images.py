"""Images in requests to vLLM, with its engine and its server replaced at their multimodal inputs."""

from __future__ import annotations

import base64
import io
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from datasets import Dataset
from PIL import Image
from support import tiny_vlm
from support.fakes.fake_vllm import GENERATE, with_tokenizer
from test_vllm_server import backend_for

from groupwise import ConfigError, GRPOConfig, GRPOTrainer
from groupwise.errors import BackendError
from groupwise.generation.vllm import colocate
from groupwise.generation.vllm.base import group_requests
from groupwise.generation.vllm.colocate import ColocatedBackend
from groupwise.policy.weight_iterator import LoRAWeights
from groupwise.records import SamplingOptions
from groupwise.tokenization.images import as_rgb, encode_prompt


@pytest.fixture(scope="module")
def processor() -> Any:
    return tiny_vlm.build("qwen2_5_vl")[1]


def prompt(processor: Any, *colors: str, text: str = "w1 w2", **options: Any) -> tuple[list[int], Any]:
    blocks = [{"type": "image", "image": tiny_vlm.image(color, (56, 28))} for color in colors]
    messages = [{"role": "user", "content": [*blocks, {"type": "text", "text": text}]}]
    return encode_prompt(processor, messages, **options)


def expand(short: list[int], counts: list[int]) -> list[int]:
    """Each image token in as many as the engine's processor makes of it."""
    left = iter(counts)
    return [token for one in short for token in [one] * (next(left) if one == tiny_vlm.IMAGE_TOKEN else 1)]


def test_the_unexpanded_prompt_has_one_token_per_image(processor):
    ids, inputs = prompt(processor, "red", "blue")
    short = inputs.unexpanded(ids)
    # two merged patches of 28 x 28 pixels in an image of 56 x 28
    assert short.count(tiny_vlm.IMAGE_TOKEN) == 2 and ids.count(tiny_vlm.IMAGE_TOKEN) == 4
    assert expand(short, [2, 2]) == ids
    assert [as_rgb(image).getpixel((0, 0)) for image in inputs.images] == [
        tiny_vlm.COLORS["red"],
        tiny_vlm.COLORS["blue"],
    ]
    text_ids, text = prompt(processor)
    assert text.unexpanded(text_ids) == text_ids and text.digest == "" and not text.images


def test_truncated_prompts_and_later_images_keep_their_places(processor):
    whole, _ = prompt(processor, "red")
    ids, inputs = prompt(processor, "red", max_length=len(whole) - 1)
    assert ids == whole[1:] and expand(inputs.unexpanded(ids), [2]) == ids
    answer = [20, 21, 1]
    start = len(ids) + len(answer)
    more, other = prompt(processor, "green", "white")
    both = inputs.followed_by(other, start)
    assert expand(both.unexpanded(ids + answer + more), [2, 2, 2]) == ids + answer + more
    assert [as_rgb(image).getpixel((0, 0))[2] for image in both.images] == [30, 40, 250]


def test_rows_with_other_images_are_other_requests_with_other_seeds(processor):
    pairs = [prompt(processor, color) for color in ("red", "red", "blue")]
    ids, inputs = [ids for ids, _ in pairs], [inputs for _, inputs in pairs]
    assert ids[0] == ids[2]
    requests = group_requests(ids, [8] * 3, 0, 0, 0, images=inputs)
    assert [list(request.rows) for request in requests] == [[0, 1], [2]]
    assert requests[0].seed != requests[1].seed
    text = group_requests([[5, 6]], [8], 0, 0, 0)
    assert group_requests([[5, 6]], [8], 0, 0, 0, images=[prompt(processor)[1]])[0].seed == text[0].seed


def test_images_are_converted_to_rgb_as_processors_do():
    gray = Image.new("L", (2, 3), 7)
    assert as_rgb(gray).mode == "RGB" and as_rgb(gray).getpixel((1, 2)) == (7, 7, 7)
    pixels = numpy.arange(18, dtype=numpy.uint8).reshape(2, 3, 3)
    assert as_rgb(pixels).getpixel((2, 1)) == (15, 16, 17)
    assert as_rgb(torch.tensor(pixels).movedim(2, 0)).getpixel((2, 1)) == (15, 16, 17)
    with pytest.raises(ConfigError, match="array of float32, and vLLM gets images of 8-bit pixels"):
        as_rgb(numpy.zeros((4, 4, 3), numpy.float32))


class StubEngine:
    """Expands image tokens like vLLM, and samples token 20."""

    def __init__(self, tokens_per_image: int = 2) -> None:
        self.model_config = SimpleNamespace(max_model_len=64, max_logprobs=20, dtype=torch.float32)
        self.tokens_per_image, self.prompts, self.resets = tokens_per_image, [], 0
        self.llm_engine = SimpleNamespace(reset_encoder_cache=self.reset)

    def reset(self) -> None:
        self.resets += 1

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def generate(self, prompts: list[Any], params: list[Any], **_: Any) -> list[Any]:
        self.prompts += prompts
        logprobs = [{20: SimpleNamespace(logprob=-0.5)}]
        sample = SimpleNamespace(token_ids=[20], logprobs=logprobs, finish_reason="length")
        return [
            SimpleNamespace(
                prompt_token_ids=expand(one["prompt_token_ids"], [self.tokens_per_image] * 9),
                outputs=[sample] * param.n,
            )
            for one, param in zip(prompts, params, strict=True)
        ]


def colocated(engine: Any, directory: Any) -> ColocatedBackend:
    off = {"vllm_weight_check": "off", "use_cpu": True, "bf16": False}
    config = GRPOConfig(str(directory), max_completion_length=8, **off)
    backend = ColocatedBackend(engine, config, frozenset([1]), only_adapter=True, with_images=True)
    backend.adapters = SimpleNamespace(push=lambda *_: None, remove=lambda: None)
    return backend


def test_the_engine_gets_images_and_the_prompt_before_expansion(processor, tmp_path):
    pytest.importorskip("vllm")
    engine = StubEngine()
    backend = colocated(engine, tmp_path)
    backend.sync_weights(SimpleNamespace(adapter=lambda: LoRAWeights({}, {}, {})), step=0)
    assert engine.resets == 1  # what the vision tower computed with other weights
    pairs = [prompt(processor, "red", "blue"), prompt(processor)]
    ids, inputs = [ids for ids, _ in pairs], [inputs for _, inputs in pairs]
    completions = backend.generate(ids, SamplingOptions(images=inputs))
    assert [completion.token_ids for completion in completions] == [[20], [20]]
    with_images, text = engine.prompts
    assert with_images["prompt_token_ids"].count(tiny_vlm.IMAGE_TOKEN) == 2
    assert [image.mode for image in with_images["multi_modal_data"]["image"]] == ["RGB", "RGB"]
    assert text == {"prompt_token_ids": ids[1]}
    engine.tokens_per_image = 3  # another processor
    message = rf"engine expanded a prompt with 2 image\(s\) to {len(ids[0]) + 2} tokens, which are not"
    with pytest.raises(BackendError, match=message):
        backend.generate(ids[:1], SamplingOptions(images=inputs[:1]))


def test_a_server_gets_images_and_the_prompt_before_expansion(processor, fake, tmp_path):
    answer, counts = with_tokenizer(fake, processor.tokenizer).answer, [2]

    def expanding(path: str, query: Any, body: Any) -> Any:
        response = answer(path, query, body)
        if path == GENERATE and body.get("return_token_ids"):
            response["prompt_token_ids"] = expand(body["token_ids"], counts * 9)
        return response

    fake.answer = expanding
    backend = backend_for(fake, tmp_path)
    backend.processing_class = processor
    fake.info["model_config"]["model"] = str(tmp_path / "unknown")
    backend.sync_weights(SimpleNamespace(full=lambda: iter([("w", torch.ones(2))])), step=0)
    assert fake.seen["/reset_encoder_cache"] == 1
    pairs = [prompt(processor, "red", "blue"), prompt(processor)]
    ids, inputs = [ids for ids, _ in pairs], [inputs for _, inputs in pairs]
    assert len(backend.generate(ids, SamplingOptions(images=inputs))) == 2
    bodies = sorted((dict(body) for path, body in fake.bodies if path == GENERATE), key=len)
    assert bodies[0]["token_ids"] == ids[1] and "content_parts" not in bodies[0]
    assert bodies[1]["token_ids"].count(tiny_vlm.IMAGE_TOKEN) == 2
    urls = [part["url"] for part in bodies[1]["content_parts"]]
    for url, color in zip(urls, ("red", "blue"), strict=True):
        decoded = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"))))
        assert numpy.array_equal(decoded, tiny_vlm.image(color, (56, 28)))  # every pixel
    counts[0] = 1
    with pytest.raises(BackendError, match=r"server at http\S+ expanded a prompt with 2 image"):
        backend.generate(ids[:1], SamplingOptions(images=inputs[:1]))
    backend.close()


def rows(**columns: Any) -> Dataset:
    return Dataset.from_dict({"prompt": ["w1"] * 8, **columns})


def test_a_column_of_images_needs_an_engine_that_processes_them(tmp_path, monkeypatch):
    pytest.importorskip("vllm")

    def refused(**given: Any) -> str:
        config = GRPOConfig(str(tmp_path), use_vllm=True, bf16=False, use_cpu=True, **given)
        with pytest.raises(ConfigError) as error:
            GRPOTrainer("no/such/model", lambda **_: [], config, rows(image=[None] * 8))
        return str(error.value)

    monkeypatch.setattr(colocate, "is_torchvision_available", lambda: False)
    assert "vLLM's vision-language models need torchvision" in refused()
    monkeypatch.setattr(colocate, "is_torchvision_available", lambda: True)
    text_only = {"language_model_only": True}
    assert "['language_model_only'] starts an engine for text" in refused(vllm_engine_kwargs=text_only)


@pytest.mark.parametrize("has_classes", [False, True])
def test_an_engine_is_for_text_where_it_cannot_process_images(tmp_path, monkeypatch, has_classes):
    vllm = pytest.importorskip("vllm")
    given: list[dict[str, Any]] = []

    def start(**arguments: Any) -> Any:
        given.append(arguments)
        return StubEngine()

    monkeypatch.setattr(vllm, "LLM", start)
    monkeypatch.setattr(colocate, "is_torchvision_available", lambda: has_classes)
    config = GRPOConfig(str(tmp_path), use_vllm=True, max_completion_length=8, bf16=False, use_cpu=True)
    model, processor = tiny_vlm.build("gemma3")
    run = GRPOTrainer(model, lambda **_: [], config, rows(), processing_class=processor)
    assert given[0]["language_model_only"] is not has_classes
    assert run.backend.supports_images is has_classes
