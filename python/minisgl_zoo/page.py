"""docs/models.md, from the registry: `python -m minisgl_zoo.page > docs/models.md`."""

from __future__ import annotations

from minisgl import plugins
from minisgl_zoo.wrapper import OTHER_PARTS, TEXT_MODELS, WRAPPERS

HEAD = """# Models

The architectures (`architectures` in config.json) that are served.
`python -m minisgl_zoo.page` prints this page.

Each was compared with transformers on tiny random float32 checkpoints: logits within 1e-4, the same
greedy tokens. "The same tokens" is a statement about float32: in bfloat16 the two round in other
places, and answers differ from the first near tie on
([determinism](determinism.md#against-transformers)). Mistral 4 and the families that are not named
Llama, Mistral, Mixtral or Qwen were not tried on released checkpoints. For 38 checkpoints the tests
read config.json [as it was released](../tests/zoo/models/released/README.md).

Any of them embeds and ranks ([embeddings](embeddings.md)). Embedders name `LlamaModel`,
`MistralModel`, `Qwen2Model` or `Qwen3Model`, too. Encoders write nothing. These embed:
{embedders}.
These score pairs, with one label:
{rankers}.
Of their released checkpoints, all-MiniLM-L6-v2 was tried.

Not served, because they need more than data: other encoders (EmbeddingGemma, DeBERTa), Llama 4
(attention within chunks, which no cache group has), Ling 1 and Ring 1 (`BailingMoe`, whose LM head
is normed), and DeepSeek-V3.2 and GLM-5 (an indexer chooses the keys).

| architecture | what it is |
|---|---|
"""

WRAPPED = """
## Inside models of text and images

The text model is served. Where the last column says so, [images are read](api.md#images), too,
with the model's own vision tower and `pip install "minisgl[vision]"`; those of Gemma 3 and the
larger Gemma 4 on a CPU only. On a GPU, images of Mistral 3 and Qwen3.5 were compared with
transformers'; those of LFM2-VL have not run there, and those of the others have not since they
were last mended. A quantised vision tower is not used, nor one beside a GGUF file. The text model's
loader skips tensors of {parts}, which one log line says; with `--drafts mtp` it reads `mtp`.

| architecture | text model | images |
|---|---|---|
"""


def page() -> str:
    """Return the text of docs/models.md."""
    rows = []
    for row in sorted(plugins.rows("families"), key=lambda row: row.name):
        about = " ".join((row.about or row.module().__doc__ or "").split("\n\n")[0].split())
        rows.append(f"| `{row.name}` | {about} |\n")
    wrapped = [
        f"| `{name}` | {', '.join(dict.fromkeys(f'`{TEXT_MODELS[kind]}`' for kind in kinds))} "
        f"| {'read' if plugins.row_of('vision', name) else ''} |\n"
        for name, kinds in WRAPPERS.items()
    ]
    head = WRAPPED.format(parts=", ".join(f"`{part}`" for part in OTHER_PARTS))
    encoders = [row.name for row in plugins.rows("encoders")]
    embedders, rankers = (
        ", ".join(f"`{name}`" for name in encoders if name.endswith("Classification") == ranks)
        for ranks in (False, True)
    )
    start = HEAD.format(embedders=embedders, rankers=rankers)
    return start + "".join(rows) + head + "".join(wrapped)


if __name__ == "__main__":
    print(page(), end="")
