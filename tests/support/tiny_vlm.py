"""Tiny random vision-language models of several families, with their real processors, and images."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from groupwise import GRPOConfig, GRPOTrainer

WORDS = [f"w{i}" for i in range(24)]
SPECIAL = [
    *(
        "<pad>",
        "<eos>",
        "<user>",
        "<assistant>",
        "<image>",
        "<boi>",
        "<eoi>",
        "<video>",
        "<end_of_utterance>",
    ),
    *("<fake_token_around_image>", "<global-img>", *(f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2))),
]
VOCABULARY = [*SPECIAL, *WORDS]
COLORS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 50, 230), "white": (250, 250, 250)}
IMAGE_TOKEN = SPECIAL.index("<image>")


def template(image: str) -> str:
    """A chat template that renders image blocks as ``image``."""
    return (
        "{% for m in messages %}<{{ m['role'] }}> {% for b in m['content'] %}"
        "{% if b['type'] == 'image' %}" + image + " {% else %}{{ b['text'] }} {% endif %}{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
    )


def tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of 39 words; ids 0 and 1 are padding and end, id 4 is the image token."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoders.Sequence([decoders.Replace("w", " w")])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
        additional_special_tokens=SPECIAL[2:],
        extra_special_tokens=special or {},
        chat_template=template("<image>"),
    )


FEATURES = Features(
    {
        "prompt": List({"role": Value("string"), "content": Value("string")}),
        "images": List(ImageFeature()),
        "row": Value("int64"),
    }
)
TEXT = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


class QwenImageProcessor(transformers.Qwen2_5_VLProcessor):
    """A processor without video processor, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        if argument_name != "video_processor":
            return super().check_argument_for_proper_class(argument_name, argument)


def pil(name: str) -> Any:
    """Return an image processor without torchvision; older versions of transformers have no suffix."""
    return getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)


def idefics3() -> tuple[Any, Any]:
    config = transformers.Idefics3Config(
        text_config={"model_type": "llama", **TEXT},
        vision_config=VISION,
        image_token_id=IMAGE_TOKEN,
        scale_factor=2,
        pad_token_id=0,
    )
    images = pil("Idefics3ImageProcessor")(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    processor = transformers.Idefics3Processor(
        images, tokenizer(), image_seq_len=1, chat_template=template("<image>")
    )
    return transformers.Idefics3ForConditionalGeneration(config), processor


def gemma3() -> tuple[Any, Any]:
    config = transformers.Gemma3Config(
        text_config={**TEXT, "head_dim": 8, "sliding_window": 8},
        vision_config=VISION,
        mm_tokens_per_image=4,
        boi_token_index=SPECIAL.index("<boi>"),
        eoi_token_index=SPECIAL.index("<eoi>"),
        image_token_index=IMAGE_TOKEN,
        pad_token_id=0,
        eos_token_id=1,
    )
    words = tokenizer(image_token="<image>", boi_token="<boi>", eoi_token="<eoi>")
    images = pil("Gemma3ImageProcessor")(size={"height": 28, "width": 28})
    processor = transformers.Gemma3Processor(
        images, words, image_seq_length=4, chat_template=template("<boi>")
    )
    return transformers.Gemma3ForConditionalGeneration(config), processor


def llava_next() -> tuple[Any, Any]:
    return llava_next_of(tokenizer(image_token="<image>"), TEXT, chat_template=template("<image>"))


def llava_next_of(words: Any, text: dict[str, Any], chat_template: str) -> tuple[Any, Any]:
    """LLaVA-NeXT with a language model of this shape and this tokenizer."""
    pinpoints = [[28, 56], [56, 28], [56, 56]]
    config = transformers.LlavaNextConfig(
        text_config={"model_type": "llama", **text},
        vision_config={"model_type": "clip_vision_model", "projection_dim": 16, **VISION},
        image_token_index=words.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=pinpoints,
        image_seq_length=4,
        pad_token_id=0,
    )
    images = pil("LlavaNextImageProcessor")(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=pinpoints
    )
    processor = transformers.LlavaNextProcessor(
        images,
        words,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat_template,
    )
    return transformers.LlavaNextForConditionalGeneration(config), processor


def qwen2_5_vl() -> tuple[Any, Any]:
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            **TEXT,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 16,
            "patch_size": 14,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        image_token_id=IMAGE_TOKEN,
        video_token_id=SPECIAL.index("<video>"),
        vision_start_token_id=SPECIAL.index("<boi>"),
        vision_end_token_id=SPECIAL.index("<eoi>"),
    )
    images = pil("Qwen2VLImageProcessor")(min_pixels=28 * 28, max_pixels=56 * 56)
    processor = QwenImageProcessor(
        images,
        tokenizer(image_token="<image>", video_token="<video>"),
        chat_template=template("<boi> <image> <eoi>"),
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config), processor


def qwen2_5_vl_for_engine() -> tuple[Any, Any]:
    """Qwen2.5-VL with the least head size of vLLM's kernels for CPUs, and its processor with torchvision."""
    vision = {"depth": 2, "num_heads": 2, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4}  # half a head in all
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "hidden_size": 64, "rope_parameters": rope},
        vision_config={**vision, "hidden_size": 64, "intermediate_size": 64, "out_hidden_size": 64},
        image_token_id=IMAGE_TOKEN,
        video_token_id=SPECIAL.index("<video>"),
        vision_start_token_id=SPECIAL.index("<boi>"),
        vision_end_token_id=SPECIAL.index("<eoi>"),
    )
    processor = transformers.Qwen2_5_VLProcessor(
        transformers.Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=56 * 56),
        tokenizer(image_token="<image>", video_token="<video>"),
        transformers.Qwen2VLVideoProcessor(),
        chat_template=template("<boi> <image> <eoi>"),
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config), processor


FAMILIES = {"idefics3": idefics3, "gemma3": gemma3, "llava_next": llava_next, "qwen2_5_vl": qwen2_5_vl}
FOR_ENGINE = {"qwen2_5_vl_for_engine": qwen2_5_vl_for_engine}


def build(family: str, seed: int = 0) -> tuple[Any, Any]:
    """Return a model with random weights and its processor."""
    torch.manual_seed(seed)
    model, processor = {**FAMILIES, **FOR_ENGINE}[family]()
    model.generation_config.eos_token_id = 1
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:  # with the default initialization an image hardly changes a log-prob
                weight.normal_(std=0.1)
    return model, processor


def image(color: str, size: tuple[int, int] = (40, 30)) -> Image.Image:
    return Image.new("RGB", size, COLORS[color])


def rows(count: int = 4) -> list[dict[str, Any]]:
    """Rows with one image, two images of other shapes, none, and one image, in turn."""
    kinds = [
        [image("red")],
        [image("blue", (30, 60)), image("green", (28, 28))],
        [],
        [image("white", (56, 28))],
    ]
    return [
        {
            "prompt": [{"role": "user", "content": " ".join(WORDS[i : i + 1 + i % 3])}],
            "images": kinds[i % len(kinds)],
            "row": i,
        }
        for i in range(count)
    ]


SETTINGS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": 2,
    "max_completion_length": 5,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "save_strategy": "no",
    "report_to": "none",
    "bf16": False,
    "use_cpu": True,
    "disable_tqdm": True,
}


def even_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Number of tokens with an even id: varies within groups."""
    return [float(sum(token % 2 == 0 for token in ids)) for ids in completion_ids]


def trainer(directory: Any, family: str = "gemma3", rewards: Any = even_reward, **given: Any) -> GRPOTrainer:
    """Create a trainer of a tiny model; ``given`` has configuration fields and trainer arguments."""
    model, processor = build(family)
    model, processor = given.pop("model", model), given.pop("processing_class", processor)
    names = ("rollout_func", "peft_config", "eval_dataset")
    arguments = {name: given.pop(name) for name in names if name in given}
    dataset = given.pop("train_dataset", None)
    return GRPOTrainer(
        model,
        rewards,
        GRPOConfig(str(directory), **{**SETTINGS, "max_steps": 2, **given}),
        dataset or Dataset.from_list(rows(), features=FEATURES),
        processing_class=processor,
        **arguments,
    )
