"""Small models of many architectures, and batches of theirs with prompts and completions of many lengths.

Vision models get images without a processor: random pixels, and as many image tokens as they become.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import transformers

from groupwise.policy.heads.capture import LogprobHead
from groupwise.records import ImageInputs, LogprobOutput, SamplerSettings
from groupwise.records.images import join_images
from support.batches import token_batch

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 4}
#: Empty with transformers 5.24, which refuses sdpa because it does not compute the softcap of the scores.
GEMMA2 = (
    {"gemma2": (transformers.Gemma2Config, {**WINDOW, "attn_implementation": "sdpa"})}
    if transformers.Gemma2PreTrainedModel._supports_sdpa
    else {}
)
RIGHT = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2_sliding": (
        transformers.Qwen2Config,
        {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen3": (transformers.Qwen3Config, {}),
    "mistral_sliding": (transformers.MistralConfig, WINDOW),
    **GEMMA2,
    "gemma3": (transformers.Gemma3TextConfig, WINDOW),
    "gpt_neox": (transformers.GPTNeoXConfig, {}),
    "gpt2": (transformers.GPT2Config, {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "phi3": (transformers.Phi3Config, {"sliding_window": None}),
    "olmo2": (transformers.Olmo2Config, {}),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}
#: Windows that are in the mask alone, and values that are narrower than keys.
UNUSUAL = {
    "qwen2_moe_sliding": (
        transformers.Qwen2MoeConfig,
        {
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            **{"shared_expert_intermediate_size": 16, **WINDOW},
            **{"use_sliding_window": True, "max_window_layers": 1},
        },
    ),
    "phimoe_sliding": (
        transformers.PhimoeConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2, **WINDOW},
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        {
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
            **{"moe_intermediate_size": 16, "first_k_dense_replace": 1},
            # Multi-head latent attention: queries and keys of 16, values of 8.
            **{"q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
            **{"v_head_dim": 8, "num_key_value_heads": 4},
        },
    ),
}

LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED_EXPERT = {**EXPERTS, "shared_expert_intermediate_size": 16}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
#: Layers with a state, or attention with sinks. Versions without such a state in their cache lack some.
STATES = {
    "qwen3_5": (transformers.Qwen3_5TextConfig, LINEAR),
    "qwen3_5_moe": (transformers.Qwen3_5MoeTextConfig, {**LINEAR, **SHARED_EXPERT}),
    "qwen3_next": (transformers.Qwen3NextConfig, {**LINEAR, **SHARED_EXPERT}),
    "olmo_hybrid": (transformers.OlmoHybridConfig, LINEAR),
    "lfm2": (transformers.Lfm2Config, {"layer_types": ["conv", "full_attention", "conv"]}),
    "lfm2_moe": (transformers.Lfm2MoeConfig, {"layer_types": ["conv", "full_attention", "conv"], **EXPERTS}),
    "bamba": (transformers.BambaConfig, {"attn_layer_indices": [1], **MAMBA2}),
    "falcon_h1": (transformers.FalconH1Config, {**MAMBA2, "mamba_d_ssm": 64}),
    "granite4": (
        transformers.GraniteMoeHybridConfig,
        {**MAMBA2, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0}
        | {"shared_intermediate_size": 32},
    ),
    "zamba2": (
        transformers.Zamba2Config,
        {"mamba_d_state": 8, "mamba_headdim": 8, "n_mamba_heads": 8, "chunk_size": 8, "num_mem_blocks": 1}
        | {"layers_block_type": ["mamba", "hybrid", "mamba"]},
    ),
    "nemotron_h": (
        transformers.NemotronHConfig,
        {"layers_block_type": ["mamba", "attention", "mamba"], "mamba_num_heads": 8, "mamba_head_dim": 8}
        | {"ssm_state_size": 8, "chunk_size": 8, "n_groups": 1},
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    ),
}
#: A Mamba whose scan begins at zero whatever its cache has, so that only single tokens continue a prompt.
JAMBA = (
    transformers.JambaConfig,
    {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1}
    | {"mamba_d_state": 4, "mamba_dt_rank": 4},
)
#: States alone: a cache without keys does not know its length.
MAMBA = (transformers.MambaConfig, {"state_size": 4})

IMAGE, START, END = 60, 61, 62  # tokens
PIXELS, PATCH = 28, 14
TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2} | {
    "image_size": PIXELS,
    "patch_size": PATCH,
}
BLOCKS = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
QWEN_2, QWEN_3 = (
    {**BLOCKS, "patch_size": PATCH, **changes}
    for changes in (
        {"window_size": 56, "fullatt_block_indexes": [1]},
        {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    )
)
QWEN_3_5 = {name: value for name, value in QWEN_3.items() if name != "deepstack_visual_indexes"}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4, "partial_rotary_factor": 1.0}
QWEN_2_VL = {
    "depth": 2,
    "embed_dim": 16,
    "hidden_size": 32,
    "num_heads": 2,
    "mlp_ratio": 2,
    "patch_size": PATCH,
}
TOKENS = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END} | {
    "image_start_token_id": START,
    "image_end_token_id": END,
    "video_token_id": 63,
}
#: Class of the config, changes of the language model, vision tower, other changes, tokens of an image; 0: by
#: the grid of its patches, with positions of three axes.
VISION = {
    "qwen2_vl": (transformers.Qwen2VLConfig, {}, {**QWEN_2_VL, "patch_size": PATCH}, TOKENS, 0),
    "qwen2_5_vl": (transformers.Qwen2_5_VLConfig, {}, QWEN_2, TOKENS, 0),
    "qwen3_vl": (transformers.Qwen3VLConfig, {}, QWEN_3, TOKENS, 0),
    "qwen3_5_vl": (transformers.Qwen3_5Config, LINEAR, QWEN_3_5, TOKENS, 0),
    "qwen3_5_moe_vl": (transformers.Qwen3_5MoeConfig, {**LINEAR, **SHARED_EXPERT}, QWEN_3_5, TOKENS, 0),
    "glm4v": (transformers.Glm4vConfig, {}, {**QWEN_3_5, "image_size": 2 * PIXELS}, TOKENS, 0),
    "gemma3_vl": (
        *(transformers.Gemma3Config, {"sliding_window": 8}, TOWER),
        {
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE,
            "boi_token_index": START,
            "eoi_token_index": END,
        },
        4,
    ),
    "idefics3": (
        *(transformers.Idefics3Config, {"model_type": "llama"}, TOWER),
        {"image_token_id": IMAGE, "scale_factor": 2, "pad_token_id": 0},
        1,
    ),
    "llava": (
        *(transformers.LlavaConfig, {"model_type": "llama"}),
        {"model_type": "clip_vision_model", "projection_dim": 16, **TOWER},
        *({"image_token_index": IMAGE, "image_seq_length": 4}, 4),
    ),
    "internvl": (
        *(transformers.InternVLConfig, {"model_type": "qwen2"}),
        {**TOWER, "image_size": [PIXELS, PIXELS], "patch_size": [PATCH, PATCH]},
        *({"image_token_id": IMAGE, "image_seq_length": 1, "downsample_ratio": 0.5}, 1),
    ),
    "mistral3": (
        *(transformers.Mistral3Config, {"model_type": "mistral"}),
        {"model_type": "pixtral", **TOWER, "head_dim": 8},
        *({"image_token_index": IMAGE, "spatial_merge_size": 1}, 4),
    ),
}


#: Sizes of any architecture by their names in configs, for ``build_any``; a config that has none of a name,
#: or None, keeps it.
ANY_SIZES = {
    **{name: value for name, value in SIZES.items() if not name.endswith("token_id")},
    **{"max_position_embeddings": 256, "n_positions": 256, "n_ctx": 256, "max_seq_len": 256},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "n_words": 67, "emb_dim": 32},
    **dict.fromkeys(("n_embd", "d_model", "embedding_size", "word_embed_proj_dim", "lru_width"), 32),
    **dict.fromkeys(("attention_hidden_size", "dim_model_base", "shared_intermediate_size"), 32),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 3),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "linear_num_value_heads", "mamba_dt_rank"), 4),
    **dict.fromkeys(("d_ff", "dff", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k"), 2),
    **dict.fromkeys(("top_k_experts", "n_group", "index_n_heads", "linear_num_key_heads", "num_hash"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "sliding_window"), 16),
    **dict.fromkeys(("expert_ffn_hidden_size", "attention_window_size", "local_window_size"), 16),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "n_groups"), 1),
    **dict.fromkeys(("topk_group", "first_k_dense_replace", "num_dense_layers", "zero_expert_num"), 1),
    **dict.fromkeys(("kv_lora_rank", "o_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("v_head_dim", "linear_key_head_dim", "linear_value_head_dim", "mamba_n_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_d_state", "mamba_chunk_size", "mamba_headdim"), 8),
    **dict.fromkeys(("n_mamba_heads", "mamba_num_heads", "mamba_head_dim", "ssm_state_size"), 8),
    **dict.fromkeys(("chunk_size", "hidden_size_per_layer_input", "index_head_dim", "dim_head"), 8),
    **{"mamba_d_ssm": 64, "index_topk": 64, "state_size": 4, "time_step_rank": 4, "num_mem_blocks": 1},
    **{"vocab_size_per_layer_input": 67, "linear_head_dim": 8, "head_dim": 8},
}
_LATENT = {"num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 8}
_SHARED_KEYS = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    **{"num_hidden_layers": 4, "num_kv_shared_layers": 2},
}
#: Further sizes by model type.
ANY_CHANGES = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32"), _LATENT),
    "deepseek_v2": {**_LATENT, "topk_group": 1, "num_experts_per_tok": 2},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
    },
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "longcat_flash", "minicpm3", "youtu"), _LATENT),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"), LINEAR),
    **{name: {**_SHARED_KEYS, "head_dim": 8} for name in ("gemma4_text", "gemma4_unified_text")},
    "gemma3n_text": {**_SHARED_KEYS, "intermediate_size": [48] * 4, "laurel_rank": 4}
    | {"activation_sparsity_pattern": [0.0] * 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 16},
    **{name: {"layer_types": ["conv", "full_attention", "conv"]} for name in ("lfm2", "lfm2_moe")},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "jamba": JAMBA[1],
    "mamba2": {"num_heads": 8, "head_dim": 8},
    **{name: STATES[name][1] for name in ("nemotron_h", "falcon_h1")},
    "zamba2": {**STATES["zamba2"][1], "attention_hidden_size": 64, "attention_head_dim": 16},
    **{name: {"rotary_dim": 4} for name in ("codegen", "gptj")},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 16]},
    "xmod": {"default_language": "en_XX"},
}


def any_changes(config_class):
    """Return the arguments of a small config of any class, of its parts too."""
    known = vars(config_class())
    numbers = {name for name, value in known.items() if isinstance(value, int | float)}
    changes = {name: value for name, value in ANY_SIZES.items() if name in numbers}
    changes |= {n: ANY_SIZES[n] for n in ("head_dim", "num_key_value_heads", "pad_token_id") if n in known}
    for name, value in known.items():
        if isinstance(value, transformers.PretrainedConfig):
            changes[name] = type(value)(**any_changes(type(value)))
    return {**changes, **ANY_CHANGES.get(config_class.model_type, {})}


def build_any(model_type, seed=0):
    """Return a small model of any type that ``AutoModelForCausalLM`` has, with its default settings."""
    config_class = transformers.CONFIG_MAPPING[model_type]
    config = config_class(**any_changes(config_class))
    if hasattr(config, "is_decoder"):  # of types that are encoders, too
        config.is_decoder = True
    return _build(transformers.AutoModelForCausalLM, config, seed)


def build(config_class, changes, seed=0):
    changes = dict(changes)
    attention = changes.pop("attn_implementation", None)
    known = vars(config_class())
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim" or "head_dim" in known}
    extra = {} if attention is None else {"attn_implementation": attention}
    return _build(transformers.AutoModelForCausalLM, config_class(**{**sizes, **changes}), seed, **extra)


def build_vision(name, seed=0):
    """Return the vision model ``name`` with random weights."""
    config_class, text, tower, others, num_tokens = VISION[name]
    text = {**SIZES, **text, **({} if num_tokens else {"rope_parameters": ROPE})}
    config = config_class(text_config=text, vision_config=tower, **others)
    return _build(transformers.AutoModelForImageTextToText, config, seed)


def _build(kind, config, seed, **extra):
    torch.manual_seed(seed)
    model = kind.from_config(config, **extra)
    with torch.no_grad():
        for parameter in model.parameters():  # attention far from uniform, so that a wrong key shows
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def completions(lengths=((3, (4, 1, 7)), (9, (2, 0)), (2, (3,))), pad=2, seed=1):
    """Groups of rows that share a prompt: (prompt length, completion lengths), all padded by ``pad`` more."""
    generator = torch.Generator().manual_seed(seed)
    rows = [(prompt, size) for prompt, sizes in lengths for size in sizes]
    texts = [torch.randint(3, 67, (prompt,), generator=generator) for prompt, sizes in lengths for _ in (1,)]
    of_row = [text for text, (_, sizes) in zip(texts, lengths, strict=True) for _ in sizes]
    width, prompt_width = max(c for _, c in rows) + pad, max(p for p, _ in rows) + pad
    prompts, completion = torch.zeros(len(rows), prompt_width).long(), torch.zeros(len(rows), width).long()
    prompt_mask, mask = torch.zeros_like(prompts), torch.zeros_like(completion)
    for row, (prompt, size) in enumerate(rows):
        prompts[row, prompt_width - prompt :] = of_row[row]
        prompt_mask[row, prompt_width - prompt :] = 1
        completion[row, :size] = torch.randint(3, 67, (size,), generator=generator)
        mask[row, :size] = 1
    return token_batch(prompts, prompt_mask, completion, mask)


def prompt_with_images(name, num_images, num_text, generator):
    """Return the token ids of ``num_images`` random images and a text after them, and the image inputs."""
    num_tokens = VISION[name][-1]
    types_name = {"gemma3_vl": "token_type_ids"}.get(name, "" if num_tokens else "mm_token_type_ids")
    ids, images = [], ImageInputs()
    for _ in range(num_images):
        pixels = torch.randn(1, 3, PIXELS, PIXELS, generator=generator)
        arrays = {"pixel_values": pixels[None] if name == "idefics3" else pixels}
        if name == "mistral3":
            arrays["image_sizes"] = torch.tensor([[PIXELS, PIXELS]])
        tokens = [IMAGE] * num_tokens
        if not num_tokens:  # patches of two frames, four of them to a token
            grid = torch.tensor([[1, 2 * int(torch.randint(2, 4, (), generator=generator)), 4]])
            size = int(grid.prod())
            arrays = {"pixel_values": torch.randn(size, 3 * 2 * PATCH**2, generator=generator)}
            arrays["image_grid_thw"], tokens = grid, [START, *[IMAGE] * (size // 4), END]
        types = {types_name: [int(token == IMAGE) for token in tokens]} if types_name else {}
        end = max(index for index, token in enumerate(tokens) if token == IMAGE) + 1
        images = images.followed_by(ImageInputs(arrays, types, end=end), len(ids))
        ids += tokens
    types = {types_name: [0] * num_text} if types_name else {}
    images = images.followed_by(ImageInputs({}, types), len(ids))
    return ids + torch.randint(3, 60, (num_text,), generator=generator).tolist(), images


def completions_of_images(name, sizes=((4, 1, 7), (2, 0), (3, 1), (40, 2)), seed=1):
    """Groups of rows after one image, two images, a text of the first prompt's length, and one image."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [prompt_with_images(name, num_images, 3, generator) for num_images in (1, 2, 0, 1)]
    prompts[2] = prompt_with_images(name, 0, len(prompts[0][0]), generator)
    batch = completions([(len(ids), each) for (ids, _), each in zip(prompts, sizes, strict=True)], seed=seed)
    of_row = [prompt for prompt, each in zip(prompts, sizes, strict=True) for _ in each]
    for row, (ids, _) in enumerate(of_row):
        batch.prompt_ids_BL[row, -len(ids) :] = torch.tensor(ids)
        batch.completion_ids_BT[row] %= START  # no token of an image
        batch.completion_ids_BT[row][batch.completion_ids_BT[row] == IMAGE] = 5
    return replace(batch, images=tuple(images for _, images in of_row))


def values_and_gradients(model, batch, compute):
    """Log-probs, entropies and the gradient of a function of both, which weighs every token differently."""
    batch = replace(batch, sampler=SamplerSettings(temperature=0.7))
    scores = compute(model, batch, LogprobHead("chunked"), with_entropy=True)
    mask = batch.completion_mask_BT
    logps, entropy = scores.logps_BT * mask, scores.entropy_BT * mask
    weights = torch.linspace(0.5, 2.0, logps.numel()).view_as(logps)
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(((logps + 0.3 * entropy) * weights).sum(), parameters, allow_unused=True)
    return logps.detach(), entropy.detach(), [g for g in gradients if g is not None]


def alone(model, batch, head, *, with_entropy):
    """Log-probs and entropies from the plain forward of each sequence alone, without padding."""
    width = batch.completion_ids_BT.shape[1]
    rows = []
    for row in range(len(batch)):
        prompt = batch.prompt_ids_BL[row][batch.prompt_mask_BL[row].bool()]
        completion = batch.completion_ids_BT[row][batch.completion_mask_BT[row].bool()]
        ids = torch.cat([prompt, completion])[None]
        images = join_images(batch.images[row : row + 1], [0], ids.shape[1], "cpu") if batch.images else {}
        logits = model(input_ids=ids, use_cache=False, **images).logits[0].float()
        logps = (logits[len(prompt) - 1 : -1] / batch.sampler.temperature).log_softmax(-1)
        values = torch.stack([logps.gather(1, completion[:, None])[:, 0], -(logps.exp() * logps).sum(-1)])
        rows.append(torch.nn.functional.pad(values, (0, width - len(completion))))
    both = torch.stack(rows)  # (B, 2, T)
    return LogprobOutput(both[:, 0], both[:, 1])
