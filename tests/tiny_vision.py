"""An Idefics3 with random weights that transformers and vLLM load without torchvision, and small pictures for it."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

from rollout_worker.backends.tiny import END, EOS, PAD, make_tokenizer

IMAGE = "<image>"
MARKS = ["<fake_token_around_image>", IMAGE, "<end_of_utterance>", "<global-img>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_vision(directory: Path) -> None:
    """Pictures of 28 pixels, four tokens each."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, LlamaConfig

    directory.mkdir()
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(MARKS)
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
    vision: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
        "initializer_range": 0.2,
    }
    make_config: Any = Idefics3Config  # its types lack the keys of its base
    config = make_config(vision_config=vision, text_config=text, image_token_id=image, scale_factor=2, pad_token_id=pad)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = Idefics3ForConditionalGeneration(config)
    model.generation_config.eos_token_id = [eos, end]
    model.generation_config.pad_token_id = pad
    model.save_pretrained(str(directory))
    size = {"longest_edge": 28}
    files: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS,
            "pad_token": PAD,
            "chat_template": TEMPLATE,
        },
        "preprocessor_config.json": {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": size,
            "max_image_size": size,
            "do_image_splitting": False,
        },
        "processor_config.json": {"processor_class": "Idefics3Processor", "image_seq_len": 4},
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
