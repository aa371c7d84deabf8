"""Says what to do about a checkpoint in a format that is not supported."""

from __future__ import annotations

from pathlib import Path

from minisgl.utils.hf import read_json


def other_format(folder: Path) -> str:
    """Return "; " and what to do about the weights in `folder`, if their format is known but not
    supported; else ""."""
    if (folder / "adapter_config.json").is_file():
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        return (
            f"; adapter_config.json says that this is an adapter (LoRA) of {base}: merge it into "
            "that model with the package peft, PeftModel.merge_and_unload, and serve the result"
        )
    if any(folder.glob("*.gguf")) or folder.name.lower().endswith("-gguf"):
        return "; to serve a GGUF file, name the file itself: minisgl serve FOLDER/NAME.gguf"
    if any(any(folder.glob(pattern)) for pattern in ("pytorch_model*.bin", "consolidated*.pth")):
        return (
            "; its weights are PyTorch pickles: take a copy of the model with safetensors, or make "
            "one with transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained("
            "NEW_FOLDER), and copy the tokenizer's files"
        )
    return ""
