"""A Llava with random weights that transformers and vLLM load, and small pictures for it."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

from rollout_worker.backends.tiny import END, EOS, PAD, make_tokenizer

IMAGE = "<image>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_vision(directory: Path) -> None:
    """Pictures of 28 pixels, four tokens each."""
    import torch
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    directory.mkdir()
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens([IMAGE])
    tokenizer.save(str(directory / "tokenizer.json"))
    pad, eos, end, image = (int(tokenizer.token_to_id(name)) for name in (PAD, EOS, END, IMAGE))
    text = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        initializer_range=0.2,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=image,
        image_seq_length=4,
        vision_feature_layer=-1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlavaForConditionalGeneration(config)
    model.generation_config.eos_token_id = [eos, end]
    model.generation_config.pad_token_id = pad
    model.save_pretrained(str(directory))
    size = {"height": 28, "width": 28}
    files: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS,
            "pad_token": PAD,
            "extra_special_tokens": {"image_token": IMAGE},
            "chat_template": TEMPLATE,
        },
        "preprocessor_config.json": {"image_processor_type": "CLIPImageProcessor", "size": size, "crop_size": size},
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "image_token": IMAGE,
            "num_additional_image_tokens": 1,
        },
    }
    for name, fields in files.items():
        (directory / name).write_text(json.dumps(fields))


def png(red: int, green: int, blue: int) -> bytes:
    """A picture of 8 pixels in one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    lines = (b"\0" + bytes((red, green, blue)) * 8) * 8
    head = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
