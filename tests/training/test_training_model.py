"""The shipped folder: small, complete, and its tokenizer loses nothing."""

import itertools
import json
import random
import re
import struct

from minisgl import LLM
from minisgl.builtin import model_path
from training.corpus import training_stream
from training.families import families
from training.source import common_words, is_reserved_word
from training.tokenizer import SPECIAL, Encoder, load

MAX_BYTES = 13_000_000
MAX_PARAMETERS = 6_200_000


def test_size() -> None:
    assert sum(f.stat().st_size for f in model_path().iterdir() if f.is_file()) <= MAX_BYTES
    with (model_path() / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    sizes = [(t["data_offsets"][1] - t["data_offsets"][0]) // 2 for t in header.values()]
    assert {t["dtype"] for t in header.values()} == {"BF16"}
    assert 4_000_000 < sum(sizes) <= MAX_PARAMETERS


def test_config() -> None:
    config = json.loads((model_path() / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["max_position_embeddings"] == 2048
    tokenizer = load(model_path())
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    assert config["eos_token_id"] == tokenizer.token_to_id("<|im_end|>")
    generation = json.loads((model_path() / "generation_config.json").read_text())
    assert generation["eos_token_id"] == config["eos_token_id"]
    assert generation["do_sample"] is False


def test_any_text_comes_back() -> None:
    tokenizer = load(model_path())
    rng = random.Random(3)
    ranges = [(0x20, 0x7E), (0xA0, 0x24F), (0x370, 0x52F), (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF)]
    texts = ["", " ", "\n\t \r\n", "a\u0301", "\u200d\ufeff", "<|im_end", "1234567890", "  two  "]
    for _ in range(300):
        low, high = rng.choice(ranges)
        texts.append("".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 30))))
    for text in texts:
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_digits_stand_alone() -> None:
    tokenizer = load(model_path())
    assert tokenizer.encode("1024").tokens == ["1", "0", "2", "4"]


def test_held_out_words_are_bytes() -> None:
    tokenizer = load(model_path())
    held = [w for w in common_words() if is_reserved_word(w)]
    assert len(held) > 100
    for word in held:
        assert len(tokenizer.encode(" " + word).ids) == len(word) + 1


def test_the_encoder_is_the_tokenizer() -> None:
    tokenizer = load(model_path())
    encoder = Encoder(tokenizer)
    for c in itertools.islice(training_stream(5, 0), 500):
        if c.raw:
            continue
        text = "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in c.messages)
        ids, learned = encoder.conversation(c)
        assert ids == tokenizer.encode(text).ids
        answers = [i for i, use in zip(ids, learned, strict=True) if use]
        ends = tokenizer.token_to_id(SPECIAL[2])
        assert answers.count(ends) == sum(m.role == "assistant" for m in c.messages)


def test_it_names_the_families_that_are_served() -> None:
    """A family that is added later may be missing until the model is trained again."""
    with LLM(progress=False) as llm:
        questions = ("Which models are supported?", "Can I run Qwen3-8B?", "Is Llama 4 supported?")
        chats = [[{"role": "user", "content": text}] for text in questions]
        listed, known, unknown = (output.text for output in llm.chat(chats))
    (names,) = re.findall("families: (.*)[.] Name", listed)
    named = set(re.split(", | and ", names))
    assert named <= set(families())
    assert len(named) >= 25
    assert known.startswith("Yes, Qwen3 is supported.")
    assert unknown.startswith("That model is not on my list")
