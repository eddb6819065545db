"""Compare the layouts `forked` and `padded` on a hybrid model: one forward and backward pass of a group.

A Qwen3.5 of 8 layers (6 with a recurrent state, 2 with attention; hidden size 512, random float32 weights),
gradient checkpointing, 8 completions of 64 tokens after one prompt. With ``--images`` a Qwen2.5-VL of the
same size with a tower of 4 layers; its prompt has so many images of 1,024 tokens before the text. Every
measurement is a fresh process, alternating; time is that of the processor, memory what the pass adds to the
process's peak. The group is decoded afterwards, greedily: by the own loop beside `forked`, by ``generate``
beside `padded`.

    python benchmarks/forked.py --prompt_tokens 480 --rounds 3
    python benchmarks/forked.py --prompt_tokens 32 --images 1 --rounds 3
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

from common import measure_in_process, print_result, ratio_of_sums, write_results

LAYOUTS = ("forked", "padded")
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "pad_token_id": 0,
}

IMAGE, START, END = 4093, 4094, 4095  # tokens
SIDE = 64  # patches of an image; four of them become a token
TOWER = {"depth": 4, "hidden_size": 320, "intermediate_size": 1024, "num_heads": 5, "out_hidden_size": 512}


def make_model(images: int) -> Any:
    """Return a model for text alone, or one for images."""
    import transformers

    if not images:
        return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SHAPE))
    text = {name: value for name, value in SHAPE.items() if "linear" not in name}
    rope = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope, "max_position_embeddings": 8192},
        vision_config={**TOWER, "fullatt_block_indexes": [3]},
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def make_processor() -> Any:
    """Return a processor of the model for images, with a word for each token: "w0", "w1", and so on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2_5_VLProcessor, Qwen2VLImageProcessorPil

    class ImageProcessor(Qwen2_5_VLProcessor):
        """A processor without video processor, which needs torchvision."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name != "video_processor":
                return super().check_argument_for_proper_class(argument_name, argument)

    special = {IMAGE - 1: "<video>", IMAGE: "<image>", START: "<start>", END: "<end>"}
    words = {special.get(token, f"w{token}"): token for token in range(SHAPE["vocab_size"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="w1"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="w0",
        eos_token="w2",
        padding_side="left",
        extra_special_tokens={"image_token": "<image>", "video_token": "<video>"},
    )
    template = (
        "{% for message in messages %}{% for part in message['content'] %}"
        "{{ '<start> <image> <end> ' if part['type'] == 'image' else part['text'] + ' ' }}"
        "{% endfor %}{% endfor %}"
    )
    pixels = (SIDE * 14) ** 2
    images = Qwen2VLImageProcessorPil(min_pixels=pixels, max_pixels=pixels)
    return ImageProcessor(images, tokenizer, chat_template=template)


def make_prompt(prompt_tokens: int, num_images: int) -> tuple[list[int], Any]:
    """Return token ids and image inputs of a prompt: images of SIDE · SIDE random patches, then text."""
    import torch

    from groupwise.records import ImageInputs

    ids, images = [], ImageInputs()
    size = SIDE * SIDE // 4
    for _ in range(num_images):
        arrays = {
            "pixel_values": torch.randn(SIDE * SIDE, 3 * 2 * 14 * 14),
            "image_grid_thw": torch.tensor([[1, SIDE, SIDE]]),
        }
        types = {"mm_token_type_ids": [0, *[1] * size, 0]}
        images = images.followed_by(ImageInputs(arrays, types, end=size + 1), len(ids))
        ids += [START, *[IMAGE] * size, END]
    text = torch.randint(1, IMAGE, (prompt_tokens,)).tolist()
    return ids + text, images


def run_worker(layout: str, prompt_tokens: int, num_images: int) -> None:
    """Run the pass in this process; print its processor time and the memory it added."""
    import torch
    from transformers import GenerationConfig

    from groupwise.generation.transformers_backend import TransformersBackend
    from groupwise.policy.heads.capture import LogprobHead
    from groupwise.policy.logprobs import LogprobComputer
    from groupwise.records import SamplingOptions, TokenBatch

    torch.manual_seed(0)
    model = make_model(num_images).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids, images = make_prompt(prompt_tokens, num_images)
    prompt_BL = torch.tensor([ids]).repeat(8, 1)
    completion_BT = torch.randint(1, IMAGE, (8, 64))
    batch = TokenBatch(
        prompt_ids_BL=prompt_BL,
        prompt_mask_BL=torch.ones_like(prompt_BL),
        completion_ids_BT=completion_BT,
        completion_mask_BT=torch.ones_like(completion_BT),
        loss_mask_BT=torch.ones_like(completion_BT),
        group_ids_B=torch.zeros(8, dtype=torch.long),
        old_logps_BT=torch.zeros(8, 64),
        images=(images,) * 8 if num_images else None,
    )
    computer = LogprobComputer(layout, LogprobHead("chunked"))
    computer.checked = computer.checked_images = True  # the check is made once per run
    peak, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    computer(model, batch, with_entropy=False).logps_BT.sum().backward()
    seconds = time.process_time() - start
    added = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    config = GenerationConfig(max_new_tokens=64, do_sample=False, pad_token_id=0, use_cache=True)
    backend = TransformersBackend(lambda: model, config)
    backend.stock_decoding = layout == "padded"
    start = time.process_time()
    backend.generate([ids] * 8, SamplingOptions(images=[images] * 8 if num_images else None))
    decoding = time.process_time() - start
    print_result({"cpu_seconds": [seconds], "added_mib": [added / 1024], "decoding_seconds": [decoding]})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt_tokens", type=int, default=480)
    parser.add_argument("--images", type=int, default=0, help="images in the prompt, 1,024 tokens each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", choices=LAYOUTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run_worker(options.worker, options.prompt_tokens, options.images)
        return
    runs: dict[str, list[dict]] = {layout: [] for layout in LAYOUTS}
    for index in range(options.rounds):
        for layout in LAYOUTS[index % 2 :] + LAYOUTS[: index % 2]:
            given = (f"--prompt_tokens={options.prompt_tokens}", f"--images={options.images}")
            runs[layout].append(measure_in_process(__file__, layout, *given))
            print(f"round {index + 1} {layout}: {runs[layout][-1]}", flush=True)
    ratios = {
        name: ratio_of_sums(*([run[key] for run in runs[layout]] for layout in LAYOUTS))
        for name, key in (
            ("processor_time", "cpu_seconds"),
            ("memory", "added_mib"),
            ("decoding", "decoding_seconds"),
        )
    }
    settings = {name: getattr(options, name) for name in ("prompt_tokens", "images", "rounds")} | SHAPE
    name = f"forked_images_{options.images}" if options.images else f"forked_{options.prompt_tokens}"
    write_results(name, {"settings": settings, "runs": runs, "forked_over_padded": ratios})
    print(ratios)


if __name__ == "__main__":
    main()
