"""Train a vision-language model: a tiny one with random weights learns to name colours.

With --model it trains a real one, whose processor is loaded with it.
"""

import transformers
from datasets import Dataset
from PIL import Image
from smollm2 import example_parser
from tokenizers import Tokenizer, models, pre_tokenizers

from groupwise import GRPOConfig, GRPOTrainer

COLORS = {"red": (230, 20, 20), "green": (20, 200, 40), "blue": (30, 40, 230), "gray": (120, 120, 120)}
WORDS = ["<pad>", "<end>", "<image>", "colour?", *COLORS]
CHAT = """{% for m in messages %}{% for b in m.content %}{{ '<image>' if b.type == 'image' else b.text }} \
{% endfor %}{% endfor %}"""


def tiny_model():
    """Create a LLaVA with a vocabulary of eight words, and its processor."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
    words.add_special_tokens({"additional_special_tokens": ["<image>"]})
    # CLIPImageProcessor of transformers 5.3 is that of PIL.
    kind = getattr(transformers, "CLIPImageProcessorPil", transformers.CLIPImageProcessor)
    images = kind(size={"shortest_edge": 16}, crop_size=16)
    parts = {"patch_size": 8, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    processor = transformers.LlavaProcessor(images, words, chat_template=CHAT, **parts)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    eyes = {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, "initializer_factor": 5.0}
    text = {"model_type": "llama", "vocab_size": len(WORDS), "initializer_range": 0.1, "bos_token_id": None}
    both = {"vision_config": {**eyes, **size}, "text_config": {**text, **size}}
    config = transformers.LlavaConfig(**both, image_token_index=WORDS.index("<image>"))
    return transformers.LlavaForConditionalGeneration(config), processor


def names_the_colour(completions, answer, **_):
    """Return 1 if the completion is exactly the right word."""
    return [float(c[0]["content"].strip() == right) for c, right in zip(completions, answer, strict=True)]


parser = example_parser(__doc__, "vlm-output", max_steps=100)
parser.set_defaults(model=None)
options = parser.parse_args()

transformers.set_seed(0)
model, processor = (options.model, None) if options.model else tiny_model()
squares = [Image.new("RGB", (20 + i % 7, 20), color) for i in range(16) for color in COLORS.values()]
rows = {"prompt": [[{"role": "user", "content": "colour?"}]] * 64, "image": squares, "answer": [*COLORS] * 16}
settings = {"learning_rate": 2e-3, "per_device_train_batch_size": 64, "max_completion_length": 2}
trainer = GRPOTrainer(
    model=model,
    reward_funcs=names_the_colour,
    args=GRPOConfig(
        options.output_dir,
        max_steps=options.max_steps,
        gradient_checkpointing=False,
        save_strategy="no",
        **settings,
    ),
    train_dataset=Dataset.from_dict(rows),
    processing_class=processor,
)
trainer.train()
