"""Embeddings, rerank and score over HTTP, by the official clients, through servers and a router."""

from __future__ import annotations

import base64
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import ollama
import openai
import pytest
from ollama._types import EmbeddingsRequest, EmbedRequest
from openai.types import embedding_create_params

from helpers.embedders import (
    QUERY,
    TEXTS,
    cosines,
    embeddings_of,
    older,
    pair_logits,
    save_embedder,
    save_encoder,
    save_reranker,
    scores_of,
)
from helpers.router_thread import RouterThread
from helpers.running_server import RunningServer
from helpers.scripted_server import ScriptedServer
from minisgl.core import Accepted, Finished
from minisgl.message import TokenizeMsg
from minisgl.message.frontend import UserReply
from minisgl_bench.replay_plans import replay_plans
from minisgl_gateway.ollama import embed
from minisgl_gateway.ollama.embed import OllamaEmbeddingsRequest, OllamaEmbedRequest
from minisgl_gateway.pooling import embeddings
from minisgl_gateway.pooling.door import as_json
from minisgl_gateway.pooling.embeddings import EmbeddingRequest
from minisgl_gateway.pooling.scores import RerankRequest, ScoreRequest

pytestmark = [pytest.mark.needs("minisgl_zoo"), pytest.mark.needs("minisgl_bench")]
MODEL = "an-embedder"
KEY = "a-key-of-this-test"
PAGES = ("--num-pages", "256")  # not of an encoder, which has no KV cache
PAGE = Path(__file__).parents[3] / "docs/embeddings.md"
FORMS = (
    EmbeddingRequest, RerankRequest, ScoreRequest, OllamaEmbedRequest, OllamaEmbeddingsRequest,
)  # fmt: skip


def serve(folder: Path, *flags: str) -> RunningServer:
    sizes = ("--page-size", "4", "--max-prefill-length", "64")
    return RunningServer(
        "--model", str(folder), "--dtype", "float32", "--device", "cpu", *sizes, *flags
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_embedder(tmp_path_factory.mktemp("m") / "e", pooling=older("lasttoken"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with serve(folder, *PAGES, "--served-model-name", MODEL, "--api-key", KEY) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    return embeddings_of(folder, TEXTS, "lasttoken")


def test_openais_client_gets_the_embeddings_of_transformers(
    client: openai.OpenAI, expected: Any
) -> None:
    base64_by_default = client.embeddings.create(model=MODEL, input=TEXTS)
    floats = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    ours = np.array([each.embedding for each in base64_by_default.data])
    assert cosines(ours, expected).min() >= 0.99999
    assert [each.index for each in floats.data] == list(range(len(TEXTS)))
    assert np.allclose([each.embedding for each in floats.data], ours, atol=1e-6)
    assert floats.usage.prompt_tokens == floats.usage.total_tokens > len(TEXTS)
    assert floats.model_extra
    assert floats.model_extra["id"] == floats._request_id  # Mistral's client needs an id
    one = client.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=8)
    first = ours[0, :8] / np.linalg.norm(ours[0, :8])
    assert np.allclose(one.data[0].embedding, first, atol=1e-6)


def test_token_ids_and_extensions(http: httpx.Client, folder: Path, expected: Any) -> None:
    def embed(**fields: Any) -> Any:
        answer = http.post("/v1/embeddings", json=fields).raise_for_status().json()
        return np.array([each["embedding"] for each in answer["data"]])

    ids = [http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in TEXTS]
    assert cosines(embed(input=ids), expected).min() >= 0.99999
    assert cosines(embed(input=ids[0]), expected[:1]).min() >= 0.99999
    with_prompt = embeddings_of(folder, [QUERY + TEXTS[0]], "lasttoken")
    assert cosines(embed(input=TEXTS[0], prompt_name="query"), with_prompt) >= 0.99999
    mean = embeddings_of(folder, TEXTS, "mean")
    assert cosines(embed(input=TEXTS, pooling="mean"), mean).min() >= 0.99999
    cut = [[*ids[2][:4], ids[2][-1]]]  # the special token at the end stays
    assert cosines(embed(input=TEXTS[2], truncate_prompt_tokens=5), embed(input=cut)) >= 0.99999
    whole = http.post("/v1/embeddings", json={"input": TEXTS[0], "encoding_format": "base64"})
    vector = np.frombuffer(base64.b64decode(whole.json()["data"][0]["embedding"]), "<f4")
    assert cosines(vector[None], expected[:1]) >= 0.99999


def test_ollamas_client(server: RunningServer, expected: Any) -> None:
    llama = ollama.Client(server.url, headers={"authorization": f"Bearer {KEY}"})
    answer = llama.embed(f"{MODEL}:latest", TEXTS, options={"num_ctx": 512}, keep_alive=1)
    assert cosines(np.array(answer.embeddings), expected).min() >= 0.99999
    assert answer.prompt_eval_count > len(TEXTS)
    one = llama.embeddings(MODEL, TEXTS[0])
    assert cosines(np.array([one.embedding]), expected[:1]) >= 0.99999
    assert len(llama.embed(MODEL, TEXTS[0], dimensions=8).embeddings[0]) == 8
    assert llama.embed(MODEL, "").embeddings == []
    assert len(llama.embed(MODEL, "word " * 9000).embeddings[0]) == 48  # cut to the context
    with pytest.raises(ollama.ResponseError, match="the prompt"):
        llama.embed(MODEL, "word " * 9000, truncate=False)


def test_an_embedder_reranks_and_scores_by_cosine(http: httpx.Client, folder: Path) -> None:
    [query] = embeddings_of(folder, [QUERY + TEXTS[0]], "lasttoken")
    scores = embeddings_of(folder, TEXTS, "lasttoken") @ query
    documents = [TEXTS[0], *({"text": text} for text in TEXTS[1:])]
    asked = {"model": MODEL, "query": TEXTS[0], "documents": documents}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = http.post(path, json=asked).raise_for_status().json()
        found = [(each["index"], each["relevance_score"]) for each in answer["results"]]
        assert [index for index, _ in found] == np.argsort(-scores).tolist()
        assert [score for _, score in found] == pytest.approx(-np.sort(-scores), abs=1e-5)
    best = http.post("/rerank", json=asked | {"top_n": 2, "return_documents": True}).json()
    assert [each["document"]["text"] for each in best["results"]] == [
        TEXTS[index] for index in np.argsort(-scores)[:2]
    ]
    one = http.post("/v1/score", json={"text_1": TEXTS[0], "text_2": TEXTS}).json()
    assert [each["score"] for each in one["data"]] == pytest.approx(scores, abs=1e-5)
    pairs = http.post("/score", json={"text_1": [TEXTS[0], TEXTS[0]], "text_2": TEXTS[:2]}).json()
    assert [each["score"] for each in pairs["data"]] == pytest.approx(scores[:2], abs=1e-5)


def test_a_model_says_that_it_embeds(http: httpx.Client) -> None:
    [model] = http.get("/v1/models").json()["data"]
    assert "embedding" in model["capabilities"]
    assert "embedding" in http.post("/api/show", json={"model": MODEL}).json()["capabilities"]


@pytest.mark.parametrize(
    ("path", "fields", "status", "says"),
    [
        ("/v1/embeddings", {"input": []}, 400, "input must have 1 to 2048 items, got 0"),
        ("/v1/embeddings", {"input": ["a", [1]]}, 400, "not a mixture"),
        ("/v1/embeddings", {"input": ["a", ""]}, 400, r"input\[1\]: the prompt is empty"),
        ("/v1/embeddings", {"input": "word " * 900}, 400, "maximum context length is"),
        ("/v1/embeddings", {"input": "a", "dimensions": 49}, 400, "dimensions must be 1 to 48"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "x"}, 400, "has query, document"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, 404, "not served here"),
        ("/v1/embeddings", {"input": [[401]]}, 400, "between 0 and 400"),
        ("/v1/embeddings", {"input": "a", "nonsense": 1}, 400, "nonsense is not known"),
        ("/v1/embeddings", {"text": "a"}, 400, "text is not known here; did you mean input?"),
        ("/rerank", {"query": "a", "documents": []}, 400, "documents must have 1 to 2048"),
        ("/rerank", {"query": "a", "documents": ["b"], "instruction": "c"}, 400, "rerankers"),
        ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 9}, 400, "client"),
        ("/rerank", {"query": "a" * 2**20, "documents": ["b"] * 17}, 400, "fewer documents"),
        ("/score", {"text_1": "a" * 2**20, "text_2": ["b"] * 17}, 400, "the field text_1 stands"),
        (
            "/score",
            {"text_1": ["a", "b"], "text_2": ["c"]},
            400,
            "there must be one text_1, or one for",
        ),
        ("/rerank", {"query": "w " * 999, "documents": ["b"]}, 400, "^query: the prompt has"),
        ("/rerank", {"query": "a", "documents": ["b", "w " * 999]}, 400, r"^documents\[1\]: the p"),
        ("/score", {"text_1": "w " * 999, "text_2": "b"}, 400, "^text_1: the prompt has"),
        (
            "/score",
            {"text_1": ["a", "b"], "text_2": ["c", ""]},
            400,
            r"^text_2\[1\]: the prompt is",
        ),
    ],
)
def test_refusals(
    http: httpx.Client, path: str, fields: dict[str, Any], status: int, says: str
) -> None:
    answer = http.post(path, json=fields)
    assert answer.status_code == status
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(answer.json()["error"]["message"])


def test_a_key_is_needed_and_its_tokens_count(server: RunningServer, http: httpx.Client) -> None:
    assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}).status_code == 401

    def counted() -> float:
        page = http.get("/metrics").text
        [value] = re.findall(r'minisgl_key_tokens_total\{[^}]*kind="prompt"[^}]*\} (\S+)', page)
        return float(value)

    before = counted()
    used = http.post("/v1/embeddings", json={"input": TEXTS}).json()["usage"]["prompt_tokens"]
    assert counted() == before + used


def test_a_router_passes_embeddings_and_ranks_on(server: RunningServer, expected: Any) -> None:
    with RouterThread([server.url], KEY) as router:
        headers = {"authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=router.url, headers=headers, timeout=60) as http:
            answer = http.post("/v1/embeddings", json={"input": TEXTS}).raise_for_status().json()
            ours = np.array([each["embedding"] for each in answer["data"]])
            assert cosines(ours, expected).min() >= 0.99999
            ranked = http.post("/rerank", json={"query": TEXTS[0], "documents": TEXTS})
            assert len(ranked.raise_for_status().json()["results"]) == len(TEXTS)
            embedded = http.post("/api/embed", json={"model": MODEL, "input": "a"})
            assert len(embedded.raise_for_status().json()["embeddings"]) == 1


def wait_for_frame(file: Path) -> None:
    """Wait until the engine has reported its steps, which it does a few times a second."""
    for _ in range(200):
        if b'{"frame":' in file.read_bytes().rpartition(b'{"end":')[2]:
            return
        time.sleep(0.05)


def test_a_reranker_embeds_as_its_recording_says_and_ranks_beside_chats(tmp_path: Path) -> None:
    folder, task = save_reranker(tmp_path / "m"), "Find the capital"
    file = tmp_path / "recording.jsonl"
    with (
        serve(folder, *PAGES, "--record", str(file)) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        for fields in ({"pooling": "mean"}, {}, {"pooling": "cls"}):
            embedded = http.post("/v1/embeddings", json={"input": TEXTS, **fields})
            vector = embedded.raise_for_status().json()["data"][0]["embedding"]
            assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
        asked = {"query": TEXTS[0], "documents": TEXTS[1:], "instruction": task}
        answer = http.post("/rerank", json=asked).raise_for_status().json()
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        http.post("/v1/chat/completions", json=chat).raise_for_status()
        wait_for_frame(file)
    scores = scores_of(folder, TEXTS[0], TEXTS[1:], task)
    found = [(each["index"], each["relevance_score"]) for each in answer["results"]]
    assert [index for index, _ in found] == np.argsort(-np.array(scores)).tolist()
    assert [score for _, score in found] == pytest.approx(sorted(scores)[::-1], abs=1e-5)
    assert "24 requests, all as recorded" in replay_plans(file)


def test_an_encoder_embeds_and_refuses_all_else(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "bert", pooling=older("mean"))
    short = [text[:40] for text in TEXTS]
    with serve(folder) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        server.wait_for("is an (encoder): it embeds texts")
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with client:
            answer = client.embeddings.create(model="bert", input=short)
        ours = [each.embedding for each in answer.data]
        expected = embeddings_of(folder, short, "mean")
        assert cosines(np.array(ours), expected).min() >= 0.99999
        cut = http.post("/api/embed", json={"model": "bert", "input": "word " * 90}).json()
        assert cut["prompt_eval_count"] == 32
        chat = {"model": "bert", "messages": [{"role": "user", "content": "a"}]}
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/completions", {"prompt": "a", "stream": True}),
            ("/generate", {"prompt": "a"}),
            ("/v1/messages", chat | {"max_tokens": 2}),
            ("/api/chat", chat),
        ):
            refused = http.post(path, json=body)
            assert (refused.status_code, "is an encoder" in refused.text) == (400, True), path
        [model] = http.get("/v1/models").json()["data"]
        shown = http.post("/api/show", json={"model": "bert"}).json()
        assert model["capabilities"] == shown["capabilities"] == ["embedding"]


def test_a_cross_encoder_ranks_and_refuses_embeddings(tmp_path: Path) -> None:
    folder, documents = save_encoder(tmp_path / "m", labels=1), [text[:20] for text in TEXTS[:5]]
    with serve(folder) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        server.wait_for("is an (encoder): it scores pairs")
        server.wait_for("v1/(rerank)")
        assert "KV" not in server.output["err"]
        logits = pair_logits(folder, [(TEXTS[0], document) for document in documents])
        scores = logits.sigmoid().numpy()
        asked = {"query": TEXTS[0], "documents": documents}
        answer = http.post("/v1/rerank", json=asked).raise_for_status().json()
        found = [(each["index"], each["relevance_score"]) for each in answer["results"]]
        assert [index for index, _ in found] == np.argsort(-scores).tolist()
        assert [score for _, score in found] == pytest.approx(-np.sort(-scores), abs=1e-5)
        one = http.post("/v1/score", json={"text_1": TEXTS[0], "text_2": documents}).json()
        assert [each["score"] for each in one["data"]] == pytest.approx(scores, abs=1e-5)
        long = {"query": "a", "documents": ["b", "word " * 90]}
        refused = http.post("/rerank", json=long).json()["error"]
        assert (refused["param"], "364 tokens" in refused["message"]) == ("documents[1]", True)
        whole: dict[str, Any] = {"query": "word " * 90, "documents": ["b", "word " * 20]}
        for documents in (whole["documents"], ["b"]):
            refused = http.post("/rerank", json=whole | {"documents": documents}).json()["error"]
            assert (refused["param"], refused["message"][:20]) == ("query", "query: the prompt ha")
        pairs = {"text_1": ["a", "word " * 90], "text_2": ["b", "c"]}
        assert http.post("/score", json=pairs).json()["error"]["param"] == "text_1[1]"
        cut = http.post("/rerank", json=long | {"truncate_prompt_tokens": -1})
        assert cut.raise_for_status().json()["usage"]["prompt_tokens"] == 5 + 32
        for path, body in (
            ("/v1/embeddings", {"input": "a"}),
            ("/v1/completions", {"prompt": "a"}),
        ):
            refused = http.post(path, json=body)
            assert refused.status_code == 400
            assert "scores pairs" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed"])
def test_others_are_served_while_an_answer_is_written(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, others = [], threading.Event()

    def slowly(x_D: Any) -> Any:
        assert others.wait(60), "nobody else is served"
        rows.append(x_D)
        return as_json(x_D)

    def pooled(message: TokenizeMsg, _: threading.Event) -> Iterator[UserReply]:
        uid, row = message.uid, np.arange(256, dtype="<f4").tobytes()
        yield Accepted(uid=uid, num_prompt_tokens=1, sampling=message.sampling)
        yield Finished(
            uid=uid, reason="length", num_prompt_tokens=1, num_output_tokens=0, pooled=row
        )

    for module in (embeddings, embed):
        monkeypatch.setattr(module, "as_json", slowly)
    with ScriptedServer(answer=pooled) as server, ThreadPoolExecutor(1) as pool:
        asked = {"model": "scripted", "input": ["a", "b"]}
        answer = pool.submit(httpx.post, f"{server.url}{path}", json=asked, timeout=90)
        for _ in range(200):
            if server.received:
                break
            time.sleep(0.01)
        time.sleep(0.2)
        assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
        assert not answer.done()
        others.set()
        whole = answer.result().raise_for_status().json()
    found = (
        whole["embeddings"] if "embeddings" in whole else [x["embedding"] for x in whole["data"]]
    )
    assert np.allclose(found, rows)
    assert len(rows) == 2


def test_no_field_of_the_vendors_schemas_is_unknown() -> None:
    pairs: Any = (
        (embedding_create_params.EmbeddingCreateParams.__annotations__, EmbeddingRequest),
        (EmbedRequest.model_fields, OllamaEmbedRequest),
        (EmbeddingsRequest.model_fields, OllamaEmbeddingsRequest),
    )
    for theirs, ours in pairs:
        assert set(theirs) <= set(ours.__struct_fields__)


def test_the_page_names_each_field() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for form in FORMS:
        for field in msgspec.structs.fields(form):
            assert f"`{field.name}`" in page, (form, field.name)
